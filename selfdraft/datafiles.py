"""Rows of data files: parquet or JSONL here, or a data set on the hub. Needs the package `datasets`, which only the
`train` extra installs, so that it is imported when rows are asked for."""

import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


def open_rows(source: str | list[str], split: str = "train", option: str = "--data.train") -> "datasets.Dataset":
    """The rows of a file, glob, folder, list of these, or data set on the hub; `split` is that of the hub.

    Raises ValueError, with the path that was asked for, when there is no such thing; `option` is what sets the path.
    """
    import datasets

    names = [source] if isinstance(source, str) else list(source)
    if not names or not all(names):
        raise ValueError(f"{option} is empty; give a parquet or JSONL file, a glob, a folder or a hub id")
    if len(names) == 1 and not _is_path(names[0]):
        try:
            return datasets.load_dataset(names[0], split=split)
        except Exception as problem:
            raise ValueError(
                f"'{names[0]}' is neither a file or folder here ({Path.cwd()}) nor a data set "
                f"that could be loaded from the hub: {problem}"
            ) from problem
    files = [file for name in names for file in _files(name, option)]
    kinds = {_FORMATS.get(Path(file).suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"{source}: expected .parquet files only, or .json/.jsonl files only")
    try:
        return datasets.load_dataset(kinds.pop(), data_files=files, split="train")
    except Exception as problem:  # of datasets, pyarrow and pandas; StopIteration for an empty file
        reason = problem.__cause__ or problem
        raise ValueError(f"{source} cannot be read as rows: {str(reason) or 'it is empty'}") from problem


def tools_of(row: dict[str, Any], where: str) -> list[Any] | None:
    """The tools of a row, which may be written as JSON; None without. ValueError, with `where`, for other text."""
    tools = without_gaps(row.get("tools"))
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} has tools that are not JSON: {error}") from None
    return tools or None


def without_gaps(value: Any) -> Any:
    """Data sets give every dictionary of a column the keys of all others, with None for what is not there."""
    if isinstance(value, dict):
        return {key: without_gaps(each) for key, each in value.items() if each is not None}
    return [without_gaps(each) for each in value] if isinstance(value, list) else value


def _is_path(name: str) -> bool:
    return glob.has_magic(name) or Path(name).suffix in _FORMATS or Path(name).exists() or name[0] in "./~"


def _files(name: str, option: str) -> list[str]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(str(file) for file in path.iterdir() if file.suffix in _FORMATS)
    else:
        files = sorted(glob.glob(str(path)))
    if not files:
        raise ValueError(
            f"no data file at '{name}' (looked in {Path.cwd()}); set the path with {option}, or make data "
            "of the target's own answers: selfdraft distill --help"
        )
    return files

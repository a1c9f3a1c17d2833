"""What stands behind `selfdraft distill`: a corpus of the target's own answers, to train a drafter on.

It comes in shards of a fixed size, each of which appears whole or not at all. A shard is a function of the settings
and of the shards before it, so a run that was stopped goes on where its last shard ends, with the same rows.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import selfdraft
from selfdraft.compare import drafter_source, load_drafters, load_target, refuse_too_long
from selfdraft.interview import SELF_WRITTEN, USER_TOKENS, Interviewer, Row, Script, Seen, Show, read_scripts
from selfdraft.report import LINE_SECONDS, device_name, git_commit, print_lines
from selfdraft.server import Server, connect
from selfdraft.target import Target

MANIFEST = "distill.json"
SERVER = "http://localhost:8000/v1"  # where `vllm serve` is by itself
CHECK_TEXT = "The capital of France is"  # any text: whether the server goes on with it as the model does
BATCHES_PER_SHARD = 2  # of every temperature; a kill loses the work of one shard at most


@dataclass(frozen=True)
class Settings:
    """What the user asked for: the options of `selfdraft distill` that decide the rows. `cli.py` explains them."""

    model: str
    dtype: str
    prompts: str | None
    split: str
    system: str | None
    turns: int
    temperatures: tuple[float, ...]
    max_new_tokens: int
    max_prompt_tokens: int
    batch_size: int
    count: int | None
    seed: int
    drafter: str | None
    engine: str = "transformers"
    server: str | None = None

    @property
    def shard_size(self) -> int:
        """Conversations of a shard: full batches at every temperature."""
        return BATCHES_PER_SHARD * self.batch_size * len(self.temperatures)


def distill(settings: Settings, output: Path, console: Console) -> dict[str, int]:
    """Writes the shards that `output` lacks, and distill.json beside them; returns the counts of the whole corpus.

    Raises ValueError before the first answer when prompts or model do not serve, or the folder holds another corpus.
    """
    missing = [package for package in ("datasets", "pyarrow") if find_spec(package) is None]
    if missing:
        raise ValueError(f"distill writes parquet files with {' and '.join(missing)}: pip install 'selfdraft[train]'")
    if settings.prompts is None and settings.count is None:
        raise ValueError("without --prompts the target would write for ever: say how many conversations, by --count")
    scripts = None if settings.prompts is None else read_scripts(settings.prompts, settings.split)
    count = min(wanted for wanted in (settings.count, None if scripts is None else len(scripts)) if wanted is not None)
    sources = {} if settings.drafter is None else {settings.drafter: drafter_source(settings.drafter)}
    server = find_server(settings)
    # Beside a server the model is asked for its identity and a few tokens only, and the GPU may be the server's.
    model, tokenizer = load_target(settings.model, settings.dtype, "cpu" if server else None)
    refuse_too_long("the longest prompt", settings.max_prompt_tokens, model, settings.max_new_tokens)
    if server:
        server.check(model, tokenizer(CHECK_TEXT)["input_ids"])
    interviewer = Interviewer(
        model,
        tokenizer,
        next(iter(load_drafters(sources, model).values()), None),
        scripts,
        settings.system,
        settings.turns,
        settings.temperatures,
        source_name(settings.prompts),
        settings.max_prompt_tokens,
        settings.max_new_tokens,
        settings.batch_size,
        settings.seed,
        server,
    )
    manifest = describe(settings, scripts, count, model, tokenizer)
    if server:
        manifest["versions"]["vllm"] = server.version
    claim(output, manifest)

    shards = math.ceil(count / settings.shard_size)
    where = f"by vLLM {server.version} at {server.url}" if server else f"on {device_name(model.device)}"
    print_lines([f"{count:,} conversations in {shards} shards of {output}, {where}"], console)
    counts: Counter[str] = Counter()
    seen, written, began = Seen(), 0, time.perf_counter()
    with progress(count, settings.shard_size, console) as show:
        for shard in range(shards):
            file = output / f"train-{shard:05d}.parquet"
            if not file.exists():
                indices = range(count)[shard * settings.shard_size :][: settings.shard_size]
                rows, of_shard = interviewer.conversations(indices, seen, show(shard))
                save_shard(file, rows, of_shard, Target(model).vocab_size)
                written += of_shard["answer_tokens"]
            counts += read_shard(file, seen)
            save_json(output / MANIFEST, manifest | {"shards": [shard + 1, shards], "counts": counts})
            show(shard)(1.0, 0)
    print_lines(summary(counts, written, time.perf_counter() - began), console)
    if not counts["answers"]:
        raise ValueError(f"{output} holds no answer: all {count} conversations were left out, for the reasons above")
    return counts


def find_server(settings: Settings) -> Server | None:
    """The server that is to write, if one is. ValueError when it does not answer, or cannot do what is asked for."""
    if settings.engine == "transformers":
        if settings.server is not None:
            raise ValueError(f"--server {settings.server} is for --engine vllm, which was not given")
        return None
    if settings.drafter is not None:
        raise ValueError("a vLLM server decodes in its own way: leave out --drafter, or --engine vllm")
    server = connect(settings.server or SERVER)
    needed = settings.max_prompt_tokens + settings.max_new_tokens + (USER_TOKENS if settings.turns > 1 else 0)
    if needed > server.longest:
        raise ValueError(
            f"the prompts, answers and turns that are asked for may become {needed} tokens long, and the server at "
            f"{server.url} has room for {server.longest}; lower --max-prompt-tokens or --max-new-tokens, or start it "
            "with a larger --max-model-len"
        )
    return server


def source_name(prompts: str | None) -> str:
    """What the column `source` says: a file's name without its ending, or the hub id."""
    if prompts is None:
        return SELF_WRITTEN
    return Path(prompts).stem if Path(prompts).exists() else prompts


# --- What the corpus is -----------------------------------------------------------------------------------------------


def describe(
    settings: Settings,
    scripts: Sequence[Script] | None,
    count: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Everything that decides about the rows, and the versions that made them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    asked = asdict(settings) | {"count": count, "shard_size": settings.shard_size}
    return {
        "settings": asked | {"temperatures": list(settings.temperatures)},
        "prompts": None if scripts is None else digest([asdict(script) for script in scripts[:count]]),
        "target": Target(model).identity(),
        "tokenizer": digest(words),
        "chat_template": digest(tokenizer.chat_template),
        "versions": {
            "selfdraft": selfdraft.__version__,
            "commit": git_commit(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def claim(output: Path, manifest: dict[str, Any]) -> None:
    """Makes the folder, or finds the same corpus begun there. ValueError, with what differs, when it is another one."""
    file = output / MANIFEST
    if file.exists():
        before, now = deciding(json.loads(file.read_text(encoding="utf-8"))), deciding(manifest)
        keys = [key for key in before | now if before.get(key) != now.get(key)]
        if keys:
            changes = "; ".join(f"{key} was {before.get(key)!r} and is now {now.get(key)!r}" for key in keys)
            raise ValueError(
                f"{output} holds another corpus ({changes}); give the old settings to go on with it, or another "
                "--output_dir"
            )
        return
    if any(output.glob("train-*.parquet")):
        raise ValueError(f"{output} holds parquet files and no {MANIFEST}, so they are not ours: give another folder")
    output.mkdir(parents=True, exist_ok=True)
    save_json(file, manifest | {"shards": [0, None], "counts": {}})


def deciding(manifest: dict[str, Any]) -> dict[str, Any]:
    """What must not differ between two halves of a corpus. Model, prompts and server may have moved: their
    content counts."""
    moved = ("model", "prompts", "split", "server")
    settings = {"engine": "transformers"}  # of corpora that do not say it
    settings |= {key: value for key, value in manifest["settings"].items() if key not in moved}
    target = {f"target {key}": value for key, value in manifest["target"].items() if key != "name"}
    return settings | target | {key: manifest[key] for key in ("prompts", "tokenizer", "chat_template")}


# --- Shards -----------------------------------------------------------------------------------------------------------


def save_shard(file: Path, rows: list[Row], counts: dict[str, int], vocab_size: int) -> None:
    """Writes the rows, and the counts as metadata, under another name, and renames the file when it is whole."""
    import pyarrow
    from pyarrow import parquet

    ids = pyarrow.list_(pyarrow.uint16() if vocab_size <= 2**16 else pyarrow.uint32())
    text = pyarrow.string()
    schema = pyarrow.schema(
        {
            "messages": pyarrow.list_(pyarrow.struct({"role": text, "content": text})),
            "prompt_ids": ids,
            "response_ids": ids,
            "temperature": pyarrow.float32(),
            "source": text,
            "finish": text,
        },
        metadata={"selfdraft": json.dumps(counts)},
    )
    with replaced_by(file) as partial:
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), partial)


def read_shard(file: Path, seen: Seen) -> Counter[str]:
    """The counts of a shard; adds its rows to `seen`, so that what follows depends on what is in the files alone."""
    from pyarrow import parquet

    table = parquet.read_table(file)
    for row in table.to_pylist():
        seen.add(row)
    return Counter(json.loads(table.schema.metadata[b"selfdraft"]))


def save_json(file: Path, value: dict[str, Any]) -> None:
    with replaced_by(file) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def replaced_by(file: Path) -> Iterator[Path]:
    """Another name to write to, which becomes `file` when everything has reached the disk."""
    partial = file.with_name(f".{file.name}.partial")
    yield partial
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.rename(file)


# --- What is said meanwhile and at the end ----------------------------------------------------------------------------


@contextmanager
def progress(count: int, shard_size: int, console: Console) -> Iterator:
    """A function from the number of a shard to what shows its progress: a bar on a terminal, elsewhere a line now and
    then, with the rate of all tokens that were written and the time left."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    began = last_line = time.perf_counter()
    tokens, work = 0, 0.0  # work: conversations that this run has come to, fractions of them included
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("distilling", total=count)

        def of_shard(shard: int) -> Show:
            first, last = shard * shard_size, min(count, (shard + 1) * shard_size)
            before = 0.0

            def show(share: float, new_tokens: int) -> None:
                nonlocal before, last_line, tokens, work
                share = max(before, share)
                tokens, work, before = tokens + new_tokens, work + (share - before) * (last - first), share
                done = first + share * (last - first)
                now = time.perf_counter()
                rate = tokens / (now - began)
                bars.update(bar, completed=int(done), description=f"distilling, {rate:,.0f} tokens/s")
                if not console.is_terminal and tokens and (now - last_line > LINE_SECONDS):
                    last_line = now
                    left = f", {(now - began) / work * (count - done) / 60:.1f} minutes left" if work else ""
                    line = f"{int(done):,} of {count:,} conversations, {rate:,.0f} tokens/s{left}"
                    print_lines([line], console)

            return show

        yield of_shard


def summary(counts: Counter[str], written: int, seconds: float) -> list[str]:
    """What came of it: the whole corpus, what was left out, and the speed of this run."""
    left_out = {
        "unfinished_user_turns": "user's turns that did not end",
        "same_prompts": "prompts that were there before",
        "too_long_prompts": "prompts that were too long",
        "same_answers": "answers that were there before, to the same words",
        "empty_answers": "answers without a word",
    }
    lines = [
        f"{counts['answers']:,} answers in {counts['conversations']:,} conversations: "
        f"{counts['answer_tokens']:,} tokens, {counts['cut_answers']:,} answers cut at the limit; "
        f"{counts['prompt_tokens']:,} tokens of prompts",
        "left out: "
        + (", ".join(f"{counts[key]:,} {what}" for key, what in left_out.items() if counts[key]) or "none"),
    ]
    if written:
        lines.append(f"{written:,} tokens of answers in {seconds:,.0f} s, {written / seconds:,.1f} tokens/s")
    return lines

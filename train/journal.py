"""What a training tells: a line of metrics.jsonl per step and evaluation, trackers, and progress on the screen."""

import contextlib
import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from checkpoints import as_lists, saving
from recipe import Recipe, leaves
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10  # between two lines of progress where the output is not a terminal

console = Console(highlight=False, soft_wrap=True)


def start_logging(accelerator: Accelerator, recipe: Recipe, model_config: Any, output: Path, done: int) -> None:
    """Makes the folder, notes this start, drops the lines of steps that are done again, and opens the trackers.

    Runs of one target lie in one group of the project `selfdraft`, whatever they train, and log the same names: a
    drafter on the target's own features and a separate draft model can be laid on top of each other.
    """
    whole = as_lists(asdict(recipe) | {"model": asdict(model_config)})
    if accelerator.is_main_process:
        metrics = output / "metrics.jsonl"
        with saving(metrics):
            output.mkdir(parents=True, exist_ok=True)
            (output / "recipe.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
            with (output / "starts.jsonl").open("a") as file:
                file.write(json.dumps({"step": done} | circumstances(accelerator)) + "\n")
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
            metrics.write_text("".join(kept))
    if recipe.log_with == "wandb":
        name = output / "wandb_run"
        if accelerator.is_main_process and not name.exists():
            name.write_text(hashlib.sha256(f"{output.resolve()} {time.time()}".encode()).hexdigest()[:12])
        accelerator.wait_for_everyone()
        options: dict[str, Any] = {"dir": str(output), "name": output.name, "id": name.read_text(), "resume": "allow"}
        options |= {"group": recipe.target, "tags": [recipe.drafter]}
        accelerator.init_trackers("selfdraft", config=whole, init_kwargs={"wandb": options})
    elif recipe.log_with == "tensorboard":
        flat = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in leaves(whole)}
        accelerator.init_trackers("tensorboard", config=flat)


def circumstances(accelerator: Accelerator) -> dict[str, Any]:
    """When, how and with what a training is started; what a resume does under other circumstances may differ."""
    packages = ("torch", "transformers", "accelerate", "selfdraft")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None  # not a checkout
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": commit,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "distributed": str(accelerator.distributed_type.value),
    }


def best_so_far(output: Path) -> float:
    """The most tokens per round of an evaluation of this training; 0 before the first one."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return max((json.loads(line).get("tokens_per_round", 0.0) for line in lines), default=0.0)


def log(accelerator: Accelerator, output: Path, step: int, values: dict[str, float]) -> None:
    if accelerator.is_main_process:
        with saving(output / "metrics.jsonl"), (output / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step} | values) + "\n")
    accelerator.log(values, step=step)


@contextlib.contextmanager
def progress_bar(steps: int, done: int, enabled: bool) -> Iterator:
    """A function that shows a step: a bar on a terminal, elsewhere a line now and then."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress("{task.description}", *columns, console=console, disable=not (enabled and console.is_terminal))
    task = bar.add_task("training", total=steps, completed=done)
    smooth: dict[str, float] = {}
    began, last_line = time.perf_counter(), 0.0

    def show(step: int, record: dict[str, float]) -> None:
        nonlocal last_line
        record = record | {"tokens/s": record["tokens"] / record["seconds"]}
        shown = [name for name in record if name == "loss" or "accuracy" in name or name == "tokens/s"]
        for name in shown:
            smooth[name] = 0.95 * smooth.get(name, record[name]) + 0.05 * record[name]
        text = describe({name: smooth[name] for name in shown})
        bar.update(task, completed=step, description=text)
        now = time.perf_counter()
        if enabled and not console.is_terminal and now - last_line > LINE_SECONDS:
            last_line = now
            left = (now - began) / (step - done) * (steps - step)
            console.print(f"step {step}/{steps}: {text}, {left / 60:.1f} minutes left")

    with bar:
        yield show


def describe(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())

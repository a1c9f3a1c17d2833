"""All that a training needs to continue where it stopped, written whole or not at all."""

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zero
from accelerate import Accelerator
from accelerate.utils import DistributedType
from data import Conversations
from recipe import Recipe, leaves
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from selfdraft.target import Target

KEPT_CHECKPOINTS = 2
SAMPLED = 256
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
# What may differ when a training is resumed.
FREE_SETTINGS = {
    "output_dir",
    "features",
    "eval",
    "save_every",
    "log_with",
    "probe",
    "compile",
    "activation_checkpointing",
    "threads",
}


def fixed_settings(recipe: Recipe, model_config: Any, conversations: Conversations, target: Target) -> dict[str, Any]:
    """What must not differ between the two halves of a resumed training."""
    settings = {key: value for key, value in asdict(recipe).items() if key not in FREE_SETTINGS}
    settings |= {"model": asdict(model_config)}
    settings["features"] = recipe.features.dtype  # where they lie does not matter
    data = hashlib.sha256()
    for tokens, trained in zip(conversations.tokens, conversations.trained, strict=True):
        data.update(tokens.tobytes())
        data.update(trained.tobytes())
    # Target and data may lie elsewhere the next time: their content counts.
    settings["target"] = {key: value for key, value in target.identity().items() if key != "name"}
    settings["target"]["weights"] = sample_of(target.model)
    settings["data"] = {
        key: settings["data"][key] for key in ("max_length", "step_tokens", "forward_tokens", "packing")
    }
    settings["data"]["content"] = data.hexdigest()[:16]
    return as_lists(settings)


def sample_of(model: nn.Module) -> str:
    """A hash of some values of every weight: another one for a model that was tuned, in no time for a large one."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        values = weight.detach().flatten()
        few = values[:: max(1, len(values) // SAMPLED)].cpu().contiguous()
        digest.update(few.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def newest_checkpoint(folder: Path) -> Path | None:
    """A checkpoint gets its name when it is whole, so every `step-N` is whole."""
    return next(reversed(checkpoints_in(folder)), None)


def checkpoints_in(folder: Path) -> list[Path]:
    """In the order of their steps; a copy that somebody has made under another name is none."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_state(checkpoint: Path, settings: dict, processes: int) -> dict:
    """Where the training stands. ValueError when this command would not continue it, but start another one."""
    with reading(checkpoint):
        state = json.loads((checkpoint / "state.json").read_text())
    before, now = dict(leaves(state["settings"])), dict(leaves(settings))
    # A setting that only one version of this script knows has its old meaning by default.
    differing = [key for key in before if key in now and before[key] != now[key]]
    if state["processes"] != processes:
        differing.append("processes")
        before["processes"], now["processes"] = state["processes"], processes
    if differing:
        changes = "; ".join(f"{key} was {before[key]} and is now {now[key]}" for key in differing)
        raise ValueError(
            f"{checkpoint} belongs to another training ({changes}); "
            "give the old settings to continue it, or another --output_dir to train anew"
        )
    return state


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    state: dict,
    weights: dict[str, Tensor],
    drafter: nn.Module,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """Writes all that a resume needs beside the older checkpoints, then gives it its name, then drops the oldest.

    Weights and optimizers are written whole, whatever share of them each process holds; the random states of every
    process are its own.
    """
    partial, final = folder / f".partial-{state['step']}", folder / f"step-{state['step']}"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        moments = zero.whole_moments(drafter, optimizers[0])
    else:
        moments = get_optimizer_state_dict(drafter, optimizers, options=WHOLE)
    with saving(final):
        if accelerator.is_main_process:
            for stale in folder.glob(".partial-*"):
                shutil.rmtree(stale)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        try:
            torch.save(random_states(), partial / f"random_{accelerator.process_index}.pt")
            if accelerator.is_main_process:
                save_file(weights, partial / "model.safetensors")
                torch.save(moments, partial / "optimizers.pt")
                (partial / "state.json").write_text(json.dumps(state, indent=2))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            flush_to_disk(partial)
            partial.rename(final)
            for old in checkpoints_in(folder)[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()


def load_weights(checkpoint: Path, drafter: nn.Module) -> None:
    """Before the drafter is given to accelerate, which may share it out."""
    with reading(checkpoint):
        drafter.load_state_dict(load_file(checkpoint / "model.safetensors"))


def load_optimizers(
    checkpoint: Path, accelerator: Accelerator, drafter: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """After the drafter was given to accelerate. Random states come last: nothing is drawn between here and the next
    step."""
    with reading(checkpoint):
        moments = torch.load(checkpoint / "optimizers.pt", map_location="cpu")
        states = torch.load(checkpoint / f"random_{accelerator.process_index}.pt", weights_only=False)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero.load_moments(accelerator.deepspeed_engine_wrapped.engine, drafter, optimizers[0], moments)
    else:
        set_optimizer_state_dict(drafter, optimizers, moments, options=WHOLE)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def flush_to_disk(folder: Path) -> None:
    """So that a power cut after the renaming does not leave a named but empty checkpoint."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turns whatever a damaged checkpoint raises into one clear ValueError."""
    try:
        yield
    except Exception as problem:
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise ValueError(
            f"{checkpoint} cannot be read ({reason}); delete it, and the same command continues from the checkpoint "
            "before it, or begins anew without one"
        ) from problem


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turns whatever a failing save raises into one clear ValueError."""
    try:
        yield
    except Exception as problem:
        whole = newest_checkpoint(path.parent) or newest_checkpoint(path.parent / "checkpoints")
        kept = f"{whole} is whole: the same command continues from it" if whole else "there is no earlier checkpoint"
        free = shutil.disk_usage(next(parent for parent in path.resolve().parents if parent.exists())).free
        raise ValueError(f"could not write {path} ({problem}; {free / 1e9:.2f} GB are free); {kept}") from problem


def as_lists(value: Any) -> Any:
    """The same values as JSON and YAML would give them back."""
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return [as_lists(each) for each in value] if isinstance(value, (tuple, list)) else value

"""Train a drafter for a target model.

    accelerate launch train/heads.py --config configs/eagle3_smollm2.yaml --output_dir runs/eagle3 --optim.lr 1e-3

`output_dir/drafter` is what `selfdraft.load_drafter` takes; `output_dir/checkpoints` is all that a resume needs, and
the same command resumes by itself; `output_dir/metrics.jsonl` has one line per step and one per evaluation.
Read from `main` downwards.
"""

import contextlib
import ctypes
import difflib
import hashlib
import importlib.util
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import set_seed
from data import Conversations, collate, plan_epoch, read_conversations, share_step
from features import live_features
from jsonargparse import ArgumentParser, set_parsing_settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import selfdraft
from selfdraft.checkpoint import config_from_json, drafter_class, drafter_classes, misfits
from selfdraft.drafters.base import LossSum
from selfdraft.embedded import resolve
from selfdraft.metrics import Stats
from selfdraft.target import Target

set_parsing_settings(docstring_parse_attribute_docstrings=True)
console = Console(highlight=False, soft_wrap=True)

KEPT_CHECKPOINTS = 2
BAD_STEPS = 10  # so many steps in a row without a finite gradient end the training
TRIM_EVERY = 4  # steps between two returns of freed memory
LINE_SECONDS = 10  # between two lines of progress where the output is not a terminal


@dataclass(frozen=True)
class Data:
    """What is trained on."""

    train: str | list[str] = ""
    """Parquet or JSONL files, a glob, a folder, a list of these, or a hub id; rows hold `messages`, or `prompt_ids` and
    `response_ids`."""
    validation: str | list[str] = ""
    """The same, for evaluations; nothing is evaluated without it."""
    max_length: int = 2048
    """Tokens of a conversation; what is longer is cut."""
    step_tokens: int = 4096
    """Tokens of one optimizer step, prompts included, over all processes; the gradient depends on this alone."""
    forward_tokens: int = 4096
    """Tokens of one forward pass of one process, padding included; smaller saves memory and accumulates gradients."""


@dataclass(frozen=True)
class Optim:
    """How the weights move."""

    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    matrix_lr: float = 0.0
    """Peak learning rate of Muon for the 2-D matrices; 0 leaves them to AdamW. Vectors, embeddings and vocabulary
    projections always go to AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup_ratio: float = 0.03
    """Share of the steps in which the learning rate rises from 0 to its peak; then it falls along a cosine to 10 %."""
    clip: float = 1.0
    """Largest norm of the gradient."""


@dataclass(frozen=True)
class Eval:
    """What is measured on the way, on the validation data."""

    every: int = 500
    """Steps between two evaluations; one more is made at the end."""
    prompts: int = 16
    """Held-out prompts that are answered by `selfdraft.generate`; the loss is taken on four times as many."""
    max_new_tokens: int = 128
    """Tokens of each answer."""


@dataclass(frozen=True)
class Recipe:
    """A training."""

    drafter: str
    """Kind of drafter: the name of a module in selfdraft.drafters that trains; its own settings are under `model`."""
    target: str = "smollm2-135m"
    """Folder or hub id of the target model, "smollm2-135m" for the embedded one, or the .json file of a Hugging Face
    config: then the target has random weights (for tests)."""
    start_from: str = ""
    """Folder or hub id of a drafter of the same shape, whose weights and draft vocabulary the training starts from;
    empty trains from scratch."""
    output_dir: str = "runs/drafter"
    """Folder of the results and checkpoints."""
    data: Data = field(default_factory=Data)
    """What is trained on."""
    optim: Optim = field(default_factory=Optim)
    """How the weights move."""
    eval: Eval = field(default_factory=Eval)
    """What is measured on the way."""
    epochs: int = 1
    """Passes over the data."""
    max_steps: int = 0
    """Optimizer steps; 0 means whole epochs."""
    save_every: int = 500
    """Steps between two checkpoints; one more is made at the end."""
    seed: int = 0
    """Fixes the starting weights, the order of the data and every other random choice."""
    mixed_precision: Literal["bf16", "no"] = "bf16"
    """Precision of the drafter's forward pass; its weights are float32 in any case."""
    log_with: Literal["none", "wandb"] = "none"
    """Where to report besides metrics.jsonl."""
    compile: bool = False
    """Compile the target's layers first (`torch.compile`; needs a C++ compiler on a CPU): features come faster."""
    threads: int = 0
    """CPU threads per process; 0 shares all cores among the processes."""


# What may differ when a training is resumed.
FREE_SETTINGS = {"output_dir", "eval", "save_every", "log_with", "compile", "threads"}


def main(arguments: list[str]) -> None:
    recipe, model_config = parse_recipe(arguments)
    if recipe.log_with == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ValueError("--log_with wandb needs the package: pip install wandb")
    output = Path(recipe.output_dir)
    accelerator = Accelerator(
        mixed_precision=recipe.mixed_precision,
        log_with=None if recipe.log_with == "none" else recipe.log_with,
        project_dir=output,
    )
    use_cores(recipe.threads, accelerator)
    say = console.print if accelerator.is_main_process else lambda *_: None
    set_seed(recipe.seed, device_specific=True)

    # The target is only read: no gradients, its own dtype.
    model, tokenizer = load_target(recipe.target)
    model.requires_grad_(False).eval().to(accelerator.device)
    target = Target(model)
    if recipe.compile:
        for layer in target.layers:
            layer.compile(dynamic=True)

    # Data.
    with accelerator.main_process_first():
        read: dict[str, Any] = {"max_length": recipe.data.max_length, "vocab_size": target.vocab_size}
        read |= {"tokenizer": tokenizer, "end_ids": end_ids(model, tokenizer)}
        conversations = read_conversations(recipe.data.train, **read)
        held_out = None
        if recipe.data.validation:
            held_out = read_conversations(recipe.data.validation, split="validation", **read)
    lengths = conversations.lengths
    say(f"training data: {conversations.summary()}")
    plan = plan_steps(recipe, lengths)

    # The drafter, fresh or from the newest checkpoint.
    settings = fixed_settings(recipe, model_config, conversations)
    checkpoint = newest_checkpoint(output / "checkpoints")
    state = read_state(checkpoint, settings, accelerator.num_processes) if checkpoint else None
    done = state["step"] if state else 0
    if done == len(plan):
        say(f"this training is finished ({done} steps): {output / 'drafter'}; use another --output_dir to train anew")
        return
    kind = drafter_class(recipe.drafter)
    if state:  # `start` may have settled what the recipe left open
        model_config = config_from_json(kind, state["drafter_config"])
    drafter = kind(model_config, target).to(accelerator.device, torch.float32)
    if state is None and recipe.start_from:
        copy_weights(drafter, recipe.start_from, model)
    elif state is None:
        drafter.start(conversations.answer_counts(target.vocab_size).to(accelerator.device))
    trainable = sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)
    say(f"drafter: {recipe.drafter} with {trainable:,} weights; {len(plan):,} steps; {torch.get_num_threads()} threads")

    optimizers = make_optimizers(drafter, recipe.optim, target.vocab_size)
    model_to_train, *optimizers = accelerator.prepare(drafter, *optimizers)
    if checkpoint:
        accelerator.load_state(str(checkpoint))
        say(f"resuming after step {done} from {checkpoint}")
    start_logging(accelerator, recipe, model_config, output, done)

    # The training itself.
    drafter.train()
    bad_steps, newest, step = 0, done, done
    try:
        with progress_bar(len(plan), done, enabled=accelerator.is_main_process) as show:
            for step in range(done, len(plan)):
                started = time.perf_counter()
                scale = learning_rate_scale(step, len(plan), recipe.optim.warmup_ratio)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = group["peak_lr"] * scale

                shares = share_step(plan[step], lengths, recipe.data.forward_tokens, accelerator.num_processes)
                batches = (collate(conversations, indices) for indices in shares[accelerator.process_index])
                values = accumulate_gradients(accelerator, model_to_train, target, list(batches))
                norm = float(nn.utils.clip_grad_norm_(drafter.parameters(), recipe.optim.clip))

                # A step that has nothing to learn from, or no finite gradient, leaves the weights as they are.
                usable = values["count"] > 0 and math.isfinite(norm)
                bad_steps = 0 if usable else bad_steps + 1
                if bad_steps == BAD_STEPS:
                    raise ValueError(
                        f"{BAD_STEPS} steps in a row had no finite gradient (the last loss sum: {values['total']}); "
                        f"lower --optim.lr, or look at the data; the newest checkpoint is of step {newest}"
                    )
                for optimizer in optimizers:
                    if usable:
                        optimizer.step()
                    optimizer.zero_grad()

                tokens = int(lengths[plan[step]].sum())
                record = means_of(values) | {"lr": optimizers[0].param_groups[0]["lr"], "gradient_norm": norm}
                record |= {"trained": values["count"], "tokens": tokens, "seconds": time.perf_counter() - started}
                log(accelerator, output, step + 1, record)
                show(step + 1, record)
                at_end = step + 1 == len(plan)
                if (step + 1) % TRIM_EVERY == 0:
                    release_memory()
                if (step + 1) % recipe.eval.every == 0 or at_end:
                    if accelerator.is_main_process:
                        save_for_use(drafter, target, tokenizer, output / "drafter")
                        if held_out is not None:
                            measured = evaluate(drafter, target, held_out, recipe, output / "drafter")
                            log(accelerator, output, step + 1, measured)
                            say(f"step {step + 1}: " + describe(measured))
                    accelerator.wait_for_everyone()
                if (step + 1) % recipe.save_every == 0 or at_end:
                    state = {"step": step + 1, "settings": settings, "processes": accelerator.num_processes}
                    state["drafter_config"] = asdict(drafter.config)
                    save_checkpoint(accelerator, output / "checkpoints", state)
                    newest = step + 1
    except KeyboardInterrupt:
        say(
            f"\nstopped in step {step + 1}; the newest checkpoint is of step {newest}; "
            "give the same command again to continue from there"
        )
        raise SystemExit(130) from None
    accelerator.end_training()
    say(f"done: {output / 'drafter'}")


# ---------------------------------------------------------------------------------------------- reading the recipe


def parse_recipe(arguments: list[str]) -> tuple[Recipe, Any]:
    """The recipe, and the config of its drafter, from YAML and command line.

    The fields under `model` are those of the drafter's own config class, so that they are checked, and explained by
    `--help`, like all others. Raises ValueError for an unknown key, naming the nearest right one.
    """
    arguments = files_first(arguments)
    given = given_values(arguments)
    kind = given.get("drafter", (None, ""))[0]
    config_class = drafter_class(kind).config_class if kind in trainable_kinds() else None
    if kind is not None and config_class is None:
        raise ValueError(f"drafter is '{kind}'; {nearest(kind, trainable_kinds())}")
    known = [*keys_of(Recipe), "config", "help", "print_config"]
    known += [f"model.{key}" for key in keys_of(config_class)] if config_class else []
    groups = {key.rsplit(".", 1)[0] for key in known}
    for key, (_, origin) in given.items():
        inside = any(key.startswith(f"{each}.") for each in known)  # a field that is a dictionary of its own
        if key not in known and key not in groups and not inside:
            raise ValueError(f"unknown key '{key}' {origin}; {nearest(key, known)}")

    parser = ArgumentParser(
        prog="train/heads.py",
        description="Trains a drafter. The same command resumes a training that was stopped."
        + ("" if config_class else " With --config or --drafter, --help also explains the settings under `model`."),
    )
    parser.add_argument("--config", action="config", help="YAML file of a recipe; other arguments win over it.")
    parser.add_class_arguments(Recipe)
    if config_class:
        parser.add_class_arguments(config_class, "model")
    values = parser.instantiate(parser.parse_args(arguments))
    return Recipe(**{each.name: values[each.name] for each in fields(Recipe)}), values["model"]


def files_first(arguments: list[str]) -> list[str]:
    """The same with `--config FILE` in front: what is typed wins over a file, wherever it is typed."""
    files: list[str] = []
    others: list[str] = []
    for argument in arguments:
        follows = files and files[-1] == "--config"
        (files if follows or argument.partition("=")[0] == "--config" else others).append(argument)
    return files + others


def given_values(arguments: list[str]) -> dict[str, tuple[Any, str]]:
    """Every key that the YAML files and the command line set: its value, and where it stands."""
    given: dict[str, tuple[Any, str]] = {}
    for number, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        key, equals, value = argument[2:].partition("=")
        if not equals:
            value = arguments[number + 1] if number + 1 < len(arguments) else ""
        if key == "config":
            if not Path(value).is_file():
                raise ValueError(f"there is no recipe '{value}' (looked in {Path.cwd()})")
            content = yaml.safe_load(Path(value).read_text()) or {}
            given |= {name: (leaf, f"in {value}") for name, leaf in leaves(content)}
        given[key.removesuffix("+")] = (value, "on the command line")
    return given


def leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def keys_of(config_class: Any) -> list[str]:
    """The dotted names of all plain fields of a dataclass."""
    keys = []
    for each in fields(config_class):
        inner = keys_of(each.type) if is_dataclass(each.type) else []
        keys += [f"{each.name}.{key}" for key in inner] or [each.name]
    return keys


def nearest(wrong: str, known: list[str]) -> str:
    """The nearest key, by its whole name or by its last part, and all keys of the group that was meant."""
    last = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.75)
    close = close or [last[name] for name in difflib.get_close_matches(wrong.rsplit(".", 1)[-1], last, n=1)]
    close = close or difflib.get_close_matches(wrong, known, n=1)
    group = wrong.rpartition(".")[0]
    others = [key for key in known if key.rpartition(".")[0] == group]
    question = f"did you mean '{close[0]}'? " if close else ""
    return f"{question}known {f'under {group}' if group else 'here'}: {', '.join(others or known)}"


def trainable_kinds() -> list[str]:
    return [kind for kind, each in drafter_classes().items() if hasattr(each, "loss")]


# ---------------------------------------------------------------------------------------------- target and machine


def release_memory() -> None:
    """Gives freed memory back. Batches differ in shape, and glibc keeps the holes: 10 GB after 160 steps of the EAGLE
    recipe, 2.3 GB once trimmed."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def use_cores(threads: int, accelerator: Accelerator) -> None:
    """Sets the CPU threads of this process.

    `accelerate launch` and torchrun give every process one thread unless OMP_NUM_THREADS says otherwise, and a child
    cannot tell that 1 from a wish; so a 1 under a launcher counts as nobody's wish, and `--threads 1` is one.
    """
    launched = not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ)
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if threads == 0 and (not wished or (launched and wished == "1")):
        threads = max(1, len(os.sched_getaffinity(0)) // accelerator.num_processes)
    if threads:
        torch.set_num_threads(threads)


def load_target(name: str) -> tuple[PreTrainedModel, Any]:
    """The model, in the dtype of its weights, and its tokenizer (None where it has none)."""
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise ValueError(f"there is no target config '{name}' (looked in {Path.cwd()})")
        values = json.loads(Path(name).read_text())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)), None
    try:
        folder = resolve(name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as problem:
        raise ValueError(f"the target '{name}' could not be loaded: {problem}") from problem
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return model, None


def end_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The ids at which the target stops."""
    found: set[Any] = set()
    for owner in (model.generation_config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list) else {ids}
    return found - {None}


# ---------------------------------------------------------------------------------------------- the pieces of a step


def plan_steps(recipe: Recipe, lengths: np.ndarray) -> list[np.ndarray]:
    """The conversations of every optimizer step of the training: whole epochs, or exactly `max_steps` of them."""
    steps: list[np.ndarray] = []
    for epoch in itertools.count():
        if len(steps) >= recipe.max_steps if recipe.max_steps else epoch == recipe.epochs:
            return steps[: recipe.max_steps or None]
        steps += plan_epoch(lengths, recipe.data.step_tokens, recipe.seed, epoch)
    raise AssertionError("unreachable")


def copy_weights(drafter: Any, source: str, model: PreTrainedModel) -> None:
    """Makes the fresh `drafter` equal to the one at `source`. ValueError when that is of another kind or shape."""
    loaded: Any = selfdraft.load_drafter(source, model)
    if type(loaded) is not type(drafter):
        raise ValueError(
            f"start_from '{source}' is a drafter of class {type(loaded).__name__}, and the recipe trains a "
            f"{type(drafter).__name__}; train it from scratch, or give a drafter of the same kind"
        )
    faults = misfits(loaded.state_dict(), drafter.state_dict())
    if faults:
        raise ValueError(f"start_from '{source}' does not fit the settings under `model`: {faults}")
    drafter.load_state_dict(loaded.state_dict())


def make_optimizers(drafter: Any, optim: Optim, vocab_size: int) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices when `matrix_lr` is set. Every group remembers its peak learning rate.

    Muon makes all directions of an update equally large, which suits a map between hidden states, and not a table with
    a row per token, most of which have no gradient in a step.
    """
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    vocabularies = {vocab_size, getattr(drafter.config, "draft_vocab_size", vocab_size)}
    matrices = [
        weight for weight in weights if optim.matrix_lr and weight.ndim == 2 and weight.shape[0] not in vocabularies
    ]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in weights if id(weight) not in chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay))
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=optim.matrix_lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def learning_rate_scale(step: int, steps: int, warmup_ratio: float) -> float:
    """The share of the peak learning rate in step `step` (from 0): up in a line, then down a cosine to 10 %.

    A pure function, so there is no scheduler whose state could be lost.
    """
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def accumulate_gradients(
    accelerator: Accelerator, model_to_train: nn.Module, target: Target, batches: list[tuple[Tensor, Tensor, Tensor]]
) -> dict[str, float]:
    """Leaves in every weight the gradient of the mean loss per trained position of this step; returns what was summed.

    The *sum* over the positions of each forward pass is differentiated, and divided once by the count over all passes
    of all processes. So the gradient depends on the conversations of the step alone, and not on how they are padded
    and shared out. Raises ValueError when a weight got no gradient: it would never learn, and DDP would wait for it.
    """
    drafter = accelerator.unwrap_model(model_to_train)
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        seen = live_features(target, drafter.feature_layers, *batch)
        with contextlib.nullcontext() if number == len(batches) else accelerator.no_sync(model_to_train):
            loss = model_to_train(seen)
            accelerator.backward(loss.total)
        add_loss(sums, loss)
    sums = dict(zip(sums, accelerator.reduce(torch.stack([*sums.values()]), "sum"), strict=True))
    dead = [name for name, weight in drafter.named_parameters() if weight.requires_grad and weight.grad is None]
    if dead:
        raise ValueError(f"the loss does not depend on these weights of the drafter: {', '.join(dead)}")
    for weight in drafter.parameters():
        if weight.grad is not None:  # DDP has averaged over the processes
            weight.grad.mul_(accelerator.num_processes / sums["count"].clamp(min=1))
    return {name: value.item() for name, value in sums.items()}


def add_loss(sums: dict[str, Tensor], loss: LossSum) -> None:
    """Adds total, count, and the sum and count of every metric."""
    parts = {"total": loss.total, "count": loss.count}
    for name, (total, count) in loss.metrics.items():
        parts |= {f"{name}/total": total, f"{name}/count": count}
    for name, part in parts.items():
        sums[name] = sums.get(name, torch.zeros_like(part, dtype=torch.float64)) + part.detach()


def means_of(values: dict[str, float]) -> dict[str, float]:
    """Loss and metrics per trained position."""
    names = [name.removesuffix("/total") for name in values if name.endswith("/total")]
    means = {"loss": values["total"] / max(1, values["count"])}
    return means | {name: values[f"{name}/total"] / max(1, values[f"{name}/count"]) for name in names}


# ---------------------------------------------------------------------------------------------- measuring


def save_for_use(drafter: Any, target: Target, tokenizer: Any, folder: Path) -> None:
    """Writes the drafter as it will be used: in the target's dtype. Leaves all random states as they were."""
    with torch.random.fork_rng():
        twin = type(drafter)(drafter.config, target).to(target.device, target.dtype)
    twin.load_state_dict(drafter.state_dict())
    with saving(folder):
        selfdraft.save_drafter(twin, folder, tokenizer)


def evaluate(drafter: Any, target: Target, held_out: Conversations, recipe: Recipe, folder: Path) -> dict[str, float]:
    """Validation loss of the drafter in training, and tokens per round of its saved form by the shipping `generate`.

    Leaves all random states as they were.
    """
    prompts = recipe.eval.prompts
    few = list(range(min(4 * prompts, len(held_out))))
    sums: dict[str, Tensor] = {}
    drafter.eval()
    # Compiled layers would be compiled anew for the many shapes of decoding.
    with torch.random.fork_rng(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for indices in share_step(np.array(few), held_out.lengths, recipe.data.forward_tokens, 1)[0]:
            add_loss(sums, drafter(live_features(target, drafter.feature_layers, *collate(held_out, indices))))
        loaded = selfdraft.load_drafter(folder, target.model)
        total = Stats()
        for index in few[:prompts]:
            output: Any = selfdraft.generate(
                target.model,
                held_out.prompt(index).unsqueeze(0).to(target.device),
                drafter=loaded,
                max_new_tokens=recipe.eval.max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                seed=0,
            )
            total.add(output.stats)
    drafter.train()
    values = {name: value.item() for name, value in sums.items()}
    measured = {f"validation_{name}": value for name, value in means_of(values).items()}
    measured |= {f"acceptance_{depth}": rate for depth, rate in enumerate(total.acceptance_by_depth, start=1)}
    return {"tokens_per_round": total.tokens_per_round} | measured


def describe(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


# ---------------------------------------------------------------------------------------------- logging


def start_logging(accelerator: Accelerator, recipe: Recipe, model_config: Any, output: Path, done: int) -> None:
    """Makes the folder, drops the lines of steps that are done again, and opens wandb when it is asked for."""
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        whole = asdict(recipe) | {"model": asdict(model_config)}
        (output / "recipe.yaml").write_text(yaml.safe_dump(as_lists(whole), sort_keys=False))
        file = output / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
        file.write_text("".join(kept))
    if recipe.log_with == "wandb":
        name = output / "wandb_run"
        if accelerator.is_main_process and not name.exists():
            name.write_text(hashlib.sha256(f"{output.resolve()} {time.time()}".encode()).hexdigest()[:12])
        accelerator.wait_for_everyone()
        options = {"dir": str(output), "name": output.name, "id": name.read_text(), "resume": "allow"}
        accelerator.init_trackers("selfdraft", config=asdict(recipe), init_kwargs={"wandb": options})


def log(accelerator: Accelerator, output: Path, step: int, values: dict[str, float]) -> None:
    if accelerator.is_main_process:
        with (output / "metrics.jsonl").open("a") as file:
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


# ---------------------------------------------------------------------------------------------- checkpoints


def fixed_settings(recipe: Recipe, model_config: Any, conversations: Conversations) -> dict[str, Any]:
    """What must not differ between the two halves of a resumed training."""
    settings = {key: value for key, value in asdict(recipe).items() if key not in FREE_SETTINGS}
    settings |= {"model": asdict(model_config)}
    data = hashlib.sha256()
    for tokens, trained in zip(conversations.tokens, conversations.trained, strict=True):
        data.update(tokens.tobytes())
        data.update(trained.tobytes())
    # The same data may lie elsewhere the next time: its content counts.
    settings["data"] = {key: settings["data"][key] for key in ("max_length", "step_tokens", "forward_tokens")}
    settings["data"]["content"] = data.hexdigest()[:16]
    return as_lists(settings)


def newest_checkpoint(folder: Path) -> Path | None:
    """A checkpoint gets its name when it is whole, so every `step-N` is whole."""
    found = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    return found[-1] if found else None


def read_state(checkpoint: Path, settings: dict, processes: int) -> dict:
    """Where the training stands. ValueError when this command would not continue it, but start another one."""
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


def save_checkpoint(accelerator: Accelerator, folder: Path, state: dict) -> None:
    """Writes all that a resume needs beside the older checkpoints, then gives it its name, then drops the oldest."""
    partial, final = folder / f".partial-{state['step']}", folder / f"step-{state['step']}"
    with saving(final):
        if accelerator.is_main_process:
            for stale in folder.glob(".partial-*"):
                shutil.rmtree(stale)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        try:
            accelerator.save_state(str(partial))
            if accelerator.is_main_process:
                (partial / "state.json").write_text(json.dumps(state, indent=2))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            flush_to_disk(partial)
            partial.rename(final)
            for old in sorted(folder.glob("step-*"), key=lambda path: int(path.name[5:]))[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()


def flush_to_disk(folder: Path) -> None:
    """So that a power cut after the renaming does not leave a named but empty checkpoint."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


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


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from problem

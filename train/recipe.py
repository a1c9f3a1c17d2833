"""A training as a YAML file and a command line describe it: every setting with its meaning, checked and explained.

The fields under `model` are those of the drafter's own config class.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from selfdraft.checkpoint import drafter_class, drafter_classes

set_parsing_settings(docstring_parse_attribute_docstrings=True)

# The least value of what counts something. (A conversation, and an answer with a draft in it, have two tokens or more.)
LEAST = {
    "data.max_length": 2,
    "data.step_tokens": 1,
    "data.forward_tokens": 1,
    "eval.every": 1,
    "eval.prompts": 1,
    "eval.max_new_tokens": 2,
    "epochs": 1,
    "max_steps": 0,
    "save_every": 1,
    "threads": 0,
}


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
    packing: bool = False
    """Have the target read the conversations of a forward pass in one row, none seeing another, without padding.
    Batches are of similar lengths in any case, so there is seldom much to win."""


@dataclass(frozen=True)
class Features:
    """Where the target's hidden states come from."""

    cache: str = ""
    """Folder where they are kept, so that they are computed once for all epochs and trainings; empty computes them for
    every batch."""
    dtype: Literal["target", "bfloat16", "float8"] = "target"
    """How they are kept: as the target computes them (exact), or smaller and not quite the same."""


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
class Tune:
    """Medusa-2: a LoRA adapter of the target, trained along with the heads."""

    rank: int = 0
    """Rank of the adapter; 0 leaves the target as it is. Above, the drafter serves the tuned target only, whose adapter
    is saved beside it."""
    alpha: int = 16
    """What the adapter adds is multiplied by alpha / rank."""
    modules: str | list[str] = "all-linear"
    """Names of the layers that are adapted; "all-linear" means all linear ones but the vocabulary projection."""
    lr: float = 2.5e-4
    """Peak learning rate of the adapter (AdamW); about a quarter of the heads'."""
    heads_weight: float = 0.2
    """Lambda in L = L_lm + lambda * L_heads, once it has risen."""
    warmup_ratio: float = 0.3
    """Share of the steps, the first ones, in which only the heads are trained, on the target as it is (Medusa-1)."""
    ramp_ratio: float = 0.2
    """Share of the steps, those after them, in which lambda rises from 0 in a line."""

    def __post_init__(self) -> None:
        if self.rank < 0 or self.alpha <= 0:
            raise ValueError(f"tune.rank {self.rank}, tune.alpha {self.alpha}: the rank is 0 or more, alpha above 0")
        if not 0 <= self.warmup_ratio < 1 or not 0 <= self.ramp_ratio <= 1:
            raise ValueError(
                f"tune.warmup_ratio {self.warmup_ratio} and tune.ramp_ratio {self.ramp_ratio} are shares of the steps: "
                "from 0 to 1, and the warm-up less than all of them"
            )
        if self.heads_weight <= 0:
            raise ValueError(f"tune.heads_weight {self.heads_weight}: heads without a weight learn nothing; try 0.2")


@dataclass(frozen=True)
class Eval:
    """What is measured on the way, on the validation data."""

    every: int = 500
    """Steps between two evaluations; one more is made at the end."""
    prompts: int = 16
    """Held-out prompts that are answered by `selfdraft.generate`, greedy and at temperature 1; the loss is taken on
    four times as many. The drafter with the most tokens per round (greedy) is kept."""
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
    empty trains from scratch. An EAGLE-3 drafter may have fewer layers or draft tokens: it grows."""
    output_dir: str = "runs/drafter"
    """Folder of the results and checkpoints."""
    data: Data = field(default_factory=Data)
    """What is trained on."""
    features: Features = field(default_factory=Features)
    """Where the target's hidden states come from."""
    optim: Optim = field(default_factory=Optim)
    """How the weights move."""
    tune: Tune = field(default_factory=Tune)
    """Whether the target learns too."""
    eval: Eval = field(default_factory=Eval)
    """What is measured on the way."""
    epochs: int = 1
    """Passes over the data."""
    max_steps: int = 0
    """Optimizer steps, whatever `epochs` says; 0 means `epochs` passes over the data."""
    save_every: int = 500
    """Steps between two checkpoints; one more is made at the end."""
    seed: int = 0
    """Fixes the starting weights, the order of the data and every other random choice."""
    mixed_precision: Literal["bf16", "no"] = "bf16"
    """Precision of the drafter's forward pass; its weights are float32 in any case."""
    log_with: Literal["none", "wandb", "tensorboard"] = "none"
    """Where to report besides metrics.jsonl."""
    probe: bool = False
    """Before the training, train a copy of the drafter on a single conversation, and stop if even that is not learnt
    by heart and accepted: then something is wrong with target, features or drafter, and no data will mend it."""
    compile: bool = False
    """Compile the target's layers and the loss first (`torch.compile`; needs a C++ compiler on a CPU): steps take less
    time, after a minute of compiling."""
    activation_checkpointing: bool = False
    """Compute what the drafter's layers keep for the backward pass a second time instead: less memory, more time."""
    threads: int = 0
    """CPU threads per process; 0 shares all cores among the processes."""

    def __post_init__(self) -> None:
        """ValueError for a number with which nothing, or the opposite, would be learnt or measured."""
        for name, least in LEAST.items():
            value = attrgetter(name)(self)
            if value < least:
                raise ValueError(f"{name} is {value}, and has to be {least} or more")
        if self.features.dtype != "target" and not self.features.cache:
            raise ValueError(
                f"--features.dtype {self.features.dtype} is how features are kept; set --features.cache too"
            )
        if self.data.packing and self.features.cache:
            raise ValueError(
                "--data.packing is about reading the target, which --features.cache spares; leave one of them out"
            )
        if not self.optim.clip > 0:
            raise ValueError(f"optim.clip is {self.optim.clip}, and the largest norm of a gradient has to be above 0")
        if not 0 <= self.optim.warmup_ratio <= 1:
            raise ValueError(
                f"optim.warmup_ratio is {self.optim.warmup_ratio}; a share of the steps is between 0 and 1"
            )


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

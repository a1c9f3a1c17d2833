"""Save and load a drafter: its weights, its config, and the identity of the target it was trained for."""

import difflib
import hashlib
import importlib
import json
import pkgutil
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfdraft.drafters
from selfdraft.drafters.base import Drafter
from selfdraft.target import Target

ADAPTER = "adapter"  # in the folder of a drafter: the adapter of peft that its target was given along with it
IDENTITY = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "fingerprint")


def choose_drafter(wanted: Drafter | PreTrainedModel | str | Path | Sequence | None, target: Target) -> Drafter | None:
    """The drafter that `generate(drafter=...)` means: the first of a list that loads and fits the target.

    Warns once for each one passed over; ValueError when a single one, or all of a list, cannot be used.
    """
    if not isinstance(wanted, (list, tuple)):
        return one_drafter(wanted, target)
    reasons = []
    for each in wanted:
        try:
            chosen = one_drafter(each, target)
        except (ValueError, OSError) as error:
            reasons.append(f"{describe(each)}: {error}")
            continue
        for reason in reasons:
            warnings.warn(f"passed over drafter {reason}", stacklevel=3)
        return chosen
    raise ValueError("none of the drafters can be used. " + "; ".join(reasons))


def one_drafter(wanted: Any, target: Target) -> Drafter | None:
    if wanted is None:
        return None
    if isinstance(wanted, (str, Path)):
        wanted = load_drafter(wanted, target.model)
    elif isinstance(wanted, PreTrainedModel):
        wanted = drafter_class("draft_model").from_model(wanted, target)
    elif not isinstance(wanted, Drafter):
        raise ValueError(f"drafter={wanted!r} is no drafter: give one, a folder, a hub id or the name of one")
    wanted.check(target)
    if isinstance(wanted, torch.nn.Module) and not any(hasattr(each, "_hf_hook") for each in wanted.modules()):
        wanted.to(target.device)  # unless accelerate has placed it, it follows its target
    warn_of_other_weights(getattr(wanted, "target", target).adapter, target.adapter)
    return wanted


def warn_of_other_weights(made_for: str | None, active: str | None) -> None:
    """Says it when a drafter meets its target with another adapter of peft than it was made for."""
    if made_for != active:
        had, has = ("no adapter" if each is None else f"adapter {each}" for each in (made_for, active))
        warnings.warn(
            f"this drafter was made for the target with {had}, and {has} is active now: the text is the target's own "
            "all the same, but less of what is drafted may be accepted",
            stacklevel=4,
        )


def warn_of_other_text(drafter: Drafter | None, ids: Int[Tensor, "batch time"], mask: Tensor | None) -> None:
    """Says it when a text (the first row's) begins unlike all that the drafter was trained on: mostly raw text, or a
    second BOS, where that was a chat."""
    opening = getattr(drafter, "opening", ())
    if not opening:
        return
    text = ids[0] if mask is None else ids[0][mask[0].to(ids.device).bool()]
    begins = text[: len(opening)].tolist()
    if begins != list(opening):
        warnings.warn(
            f"all texts that this drafter was trained on begin with the ids {list(opening)}, and this one begins with "
            f"{begins}: the text is the target's own all the same, but less of what is drafted may be accepted. It is "
            "raw text, has a second BOS, or a system message where the training had none, or the reverse: "
            "tokenizer.apply_chat_template gives the ids of a chat",
            stacklevel=3,
        )


def warn_of_guesses(folder: Path, config: Any, given: dict[str, Any]) -> None:
    """Says it when the config in a folder leaves open what another target, or version, would fill in otherwise."""
    fresh = type(config)()
    guesses = {
        each.name: value
        for each in fields(config)
        if each.name not in given and (value := getattr(config, each.name)) != getattr(fresh, each.name)
    }
    if guesses:
        taken = ", ".join(f"{name} {value}" for name, value in guesses.items())
        warnings.warn(
            f"{folder / 'config.json'} does not say what the drafter was trained with, so the target's default is "
            f"taken: {taken}; if that is not it, little of what is drafted will be accepted: write it down there",
            stacklevel=3,
        )


def describe(wanted: Any) -> str:
    return f"'{wanted}'" if isinstance(wanted, (str, Path)) else type(wanted).__name__


def load_drafter(source: str | Path, model: torch.nn.Module, strict: bool = True) -> Drafter:
    """The drafter in a folder or hub repository, or the one of that name if it needs no training ("ngram").

    A folder holds `config.json` and `model.safetensors`. The folder of an ordinary causal LM is a separate draft
    model. The drafter is put on the target's device, in the dtype it was saved in.

    Args:
        source: folder, hub id, or name.
        model: the target that it drafts for.
        strict: refuse a drafter whose target differs from `model` in identity, not only in shape; and one that was
            trained along with an adapter of its target, when `model` has not just that one active. (False serves a
            target that the adapter was merged into.)

    Raises:
        ValueError: unknown name, another target, missing or unexpected weights.
    """
    target = Target(model)
    if str(source) in untrained_kinds():
        return drafter_class(str(source)).for_target(target)
    folder = find_folder(source)
    document = read_document(folder / "config.json")
    ours = document.get("selfdraft")
    if ours is None and "model_type" in document:
        drafter = drafter_class("draft_model").from_model(AutoModelForCausalLM.from_pretrained(folder), target)
        drafter.check(target)
        return drafter
    if ours is None:
        raise ValueError(f"{folder / 'config.json'} describes neither a selfdraft drafter nor a Hugging Face model")
    check_identity(ours["target"], target.identity(), strict)
    if strict and (folder / ADAPTER).is_dir():
        check_adapter(ours["target"].get("adapter"), target.adapter, folder / ADAPTER)
    kind = drafter_class(ours["drafter"])
    unknown = set(ours["config"]) - {each.name for each in fields(kind.config_class)}
    if unknown:
        raise ValueError(f"{folder} has config fields that this version does not know: {sorted(unknown)}")
    drafter = kind(config_from_json(kind, ours["config"]), target)
    warn_of_guesses(folder, drafter.config, ours["config"])
    load_weights(drafter, folder / "model.safetensors")
    drafter.check(target)
    target.adapter = ours["target"].get("adapter")  # the one that it was trained for, whatever is active now
    drafter.opening = tuple(ours.get("opening", ()))
    return drafter.to(target.device).eval()


def save_drafter(drafter: Any, folder: str | Path, tokenizer: Any = None, tuned: Any = None) -> None:
    """Writes `config.json` and `model.safetensors`; a folder is either the old one or the new one, never half.

    With the `tokenizer` that the training text came through, the config remembers its chat template, and
    `selfdraft doctor` can tell whether the drafter meets the same one in use. `drafter.opening`, if there is one, are
    the ids that all its training texts began with; `generate` warns of other texts. `tuned` is the target as a
    PeftModel that was trained along with the drafter: its adapter "default" goes to `adapter/`, and the tokenizer with
    it, so that transformers loads the tuned target from there.
    """
    document: dict[str, Any] = {
        **getattr(drafter, "model_config", {}),
        "selfdraft": {
            "drafter": type(drafter).__module__.rsplit(".", 1)[-1],
            "config": asdict(drafter.config),
            "target": drafter.target.identity(),
            "opening": list(getattr(drafter, "opening", ())),
        },
    }
    if tokenizer is not None:
        document["selfdraft"]["tokenizer"] = tokenizer_identity(tokenizer)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    with replacing(Path(folder)) as temporary:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(document, indent=2) + "\n")
        if tuned is not None:  # without embeddings, for which peft would ask the hub
            beside: dict[str, Any] = {"selected_adapters": ["default"], "save_embedding_layers": False}
            tuned.save_pretrained(temporary / ADAPTER, **beside)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary / ADAPTER)


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """What a drafter remembers of the text it was trained on: a digest of the chat template (None without one), and
    how many beginning-of-text tokens a chat, or a plain text, begins with."""
    template, hello = tokenizer.chat_template, "Hello"
    if not template:
        ids, digest = tokenizer(hello)["input_ids"], None
    else:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": hello}], return_dict=False)
        digest = hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16]
    bos = tokenizer.bos_token_id
    return {"chat_template": digest, "bos": next((place for place, token in enumerate(ids) if token != bos), len(ids))}


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and vanishes otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        # Temporary folders, and the files of safetensors, are for their owner only.
        for each in [temporary, *temporary.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)
        old = folder.parent / f"{temporary.name}.old"
        if folder.exists():
            folder.rename(old)
        try:
            temporary.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def drafter_classes() -> dict[str, Any]:
    """The drafters by name: a module of `selfdraft.drafters` that sets `drafter_class` registers it by its own name."""
    names = [module.name for module in pkgutil.iter_modules(selfdraft.drafters.__path__)]
    modules = {name: importlib.import_module(f"selfdraft.drafters.{name}") for name in names}
    return {name: module.drafter_class for name, module in modules.items() if hasattr(module, "drafter_class")}


def drafter_class(kind: str) -> Any:
    """The class of the drafters of that name; ValueError, with the nearest name, when there is none."""
    classes = drafter_classes()
    if kind not in classes:
        raise ValueError(f"there is no drafter '{kind}'; {suggest(kind, list(classes))}")
    return classes[kind]


def untrained_kinds() -> list[str]:
    """The drafters that can be made for a target by name alone."""
    return [kind for kind, each in drafter_classes().items() if hasattr(each, "for_target")]


def suggest(wrong: str, known: Sequence[str]) -> str:
    """The nearest right name, and all of them."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return (f"did you mean '{close[0]}'? " if close else "") + f"known: {', '.join(sorted(known))}"


def find_folder(source: str | Path) -> Path:
    folder = Path(source)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise ValueError(f"{folder} has no config.json, so it is not the folder of a drafter")
    try:
        return Path(snapshot_download(str(source)))
    except Exception as error:
        raise ValueError(
            f"'{source}' is not a folder, not a drafter that needs no training ({', '.join(untrained_kinds())}), "
            f"and not to be had from the hub ({type(error).__name__}); {suggest(str(source), untrained_kinds())}"
        ) from error


def read_document(file: Path) -> dict:
    """The config, as far as it can be read: a JSON object whose `selfdraft` part, if there is one, is whole."""
    try:
        document = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); copy or train the drafter again") from error
    ours = document.get("selfdraft") if isinstance(document, dict) else {}
    missing = set() if ours is None else {"drafter", "config", "target"} - set(ours)
    if missing:
        raise ValueError(f"{file} lacks {', '.join(sorted(missing))}; copy or train the drafter again")
    return document


def check_identity(trained_for: dict, given: dict, strict: bool) -> None:
    """ValueError when a drafter meets another target than its own."""
    keys = IDENTITY if strict else IDENTITY[1:2] + IDENTITY[3:4]
    wrong = [key for key in keys if trained_for.get(key) != given[key]]
    if wrong:
        differences = ", ".join(f"{key} {trained_for.get(key)} against {given[key]}" for key in wrong)
        remedy = "load the matching target or retrain"
        if wrong == ["fingerprint"]:
            remedy += "; if the weights are merely a variant of it, load_drafter(..., strict=False) drafts all the same"
        raise ValueError(
            f"this drafter was trained for {trained_for.get('name')}, and the target is {given['name']} "
            f"({differences}); {remedy}"
        )


def check_adapter(trained_with: str | None, active: str | None, adapter: Path) -> None:
    """ValueError when the target has not the adapter that the drafter was trained along with."""
    if trained_with != active:
        raise ValueError(
            f"this drafter was trained along with an adapter of its target, {adapter}, and the target has "
            f"{'none' if active is None else 'another one'} active; load it: peft.PeftModel.from_pretrained(model, "
            f"'{adapter}'), or --model {adapter}; a target that it was merged into is taken with "
            "load_drafter(..., strict=False)"
        )


def load_weights(drafter: torch.nn.Module, file: Path) -> None:
    """Strict loading with one error that names what is missing, unexpected or misshapen."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    try:
        tensors = load_file(file)
    except Exception as error:
        raise ValueError(f"{file} cannot be read ({error}); copy or train it again") from error
    faults = misfits(tensors, drafter.state_dict())
    if faults:
        raise ValueError(f"{file} does not fit its config: {faults}")
    drafter.load_state_dict(tensors, assign=True)


def misfits(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """What is missing, unexpected or misshapen among the given weights; empty when they fit."""
    faults = [f"missing {name}" for name in wanted.keys() - given.keys()]
    faults += [f"unexpected {name}" for name in given.keys() - wanted.keys()]
    faults += [
        f"{name} is {list(given[name].shape)} and should be {list(wanted[name].shape)}"
        for name in wanted.keys() & given.keys()
        if wanted[name].shape != given[name].shape
    ]
    return "; ".join(sorted(faults))


def config_from_json(kind: Any, values: dict[str, Any]) -> Any:
    """The config of a drafter of class `kind`: JSON knows lists only, and the configs' sequences are tuples."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind.config_class(**plain)

"""Why a drafter is not accepted: checks that say in words what is wrong with it, and how to mend it.

`examine` is the order of the checks, and each check is one function below it. A check returns its finding and the case
with its fault mended (in memory), so that one fault does not hide another and is not told twice. What can be measured
is measured on the target's own greedy answers: of two ways to read a drafter, they fit the one that was trained.
"""

import difflib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from selfdraft.checkpoint import (
    IDENTITY,
    config_from_json,
    drafter_class,
    find_folder,
    load_drafter,
    read_document,
    suggest,
    tokenizer_identity,
    untrained_kinds,
)
from selfdraft.compare import conversation_ids
from selfdraft.drafters import vocabulary
from selfdraft.evidence import (
    BREAKS,
    NEW_TOKENS,
    Agreement,
    Exchange,
    Sample,
    Trial,
    agreement,
    own_prompts,
    take_sample,
    try_out,
)
from selfdraft.target import Target

Level = Literal["ok", "warning", "fault", "skipped"]

MAX_LENGTH = 384  # tokens of a row of data that are looked at
MAPS = {"d2t": "offsets", "draft_tokens": "ids"}  # what the numbers of a vocabulary map are, by its name
NORM = "fc_norm"
USABLE = (torch.float32, torch.bfloat16, torch.float16)

BETTER_COVERAGE = 0.1  # share of answer tokens by which the other reading of a vocabulary map has to cover more
POOR = 0.15  # of the first drafted tokens accepted: below it something is wrong. A Medusa head of no fame has 0.4
SLOW = 1.2  # new tokens per round that hardly pay for the drafting
EIGHT_BITS = 256  # no more values than this in a large matrix: it went through fp8 or int8
FOREIGN, UNSURE = 0.5, 0.1  # nats that answers are less likely than if the target had sampled them at temperature 1

NOT_RUN = "not measured, because the drafter cannot be run"


@dataclass(frozen=True)
class Finding:
    """What one check has found: its figures, what they mean, and how to mend it."""

    check: str
    level: Level
    meaning: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A drafter as it lies in its folder, and the target that it is to draft for."""

    kind: Any  # the class of the drafter
    config: dict[str, Any]  # as in config.json
    tensors: dict[str, Tensor]
    target: Target

    def has(self, name: str) -> bool:
        """Whether drafters of this kind have that field in their config."""
        return name in {each.name for each in fields(self.kind.config_class)}

    def configured(self, **changes: Any) -> "Case":
        return replace(self, config={**self.config, **changes})

    def blank(self) -> Any:
        """The drafter of the config, without its weights."""
        with torch.random.fork_rng():
            return self.kind(config_from_json(self.kind, self.config), self.target)

    def build(self) -> Any:
        """The drafter, in float32; raises one of BREAKS when it cannot be built."""
        drafter = self.blank()
        wanted = {name: tensor.dtype for name, tensor in drafter.state_dict().items()}
        tensors = {name: tensor.to(wanted.get(name, tensor.dtype)) for name, tensor in self.tensors.items()}
        drafter.load_state_dict(tensors, assign=True)
        drafter.check(self.target)
        return drafter.to(self.target.device).eval()


Checked = tuple[Finding, Case]
Measured = tuple[Finding, Case, Agreement | None]


def examine(
    source: str | Path,
    model: PreTrainedModel,
    tokenizer: Any = None,
    prompts: Sequence[list[int]] | None = None,
    data: Sequence[Exchange] = (),
    new_tokens: int = NEW_TOKENS,
) -> list[Finding]:
    """One finding per check. Changes no file.

    Args:
        source: what `load_drafter` takes.
        model: the target.
        tokenizer: its tokenizer, for the chat template; None leaves that out.
        prompts: token ids of the prompts that acceptance is measured on; without them those of `data`, and without
            those some that the target writes itself.
        data: conversations that the drafter was trained on, or that it is to be used for (see `read_exchanges`).
        new_tokens: of every answer that is measured on.

    Raises:
        ValueError: there is no such drafter, or selfdraft cannot draft for this model.
    """
    target = Target(model)
    untrained = str(source) in untrained_kinds()
    folder = None if untrained else find_folder(source)
    readable = [each for each in data if max(each.prompt + each.answer) < target.vocab_size]
    prompts = list(prompts or [each.prompt[:MAX_LENGTH] for each in readable] or own_prompts(target, tokenizer))
    as_it_is = try_out(lambda: load_drafter(source, model), target, prompts, new_tokens)
    findings: list[Finding] = []
    mended = None

    case, record = None, None
    if folder is not None:
        about_config, ours = check_config(folder / "config.json")
        findings.append(about_config)
        if ours is not None:
            record = ours.get("tokenizer")
            answers = as_it_is.answers or try_out(lambda: None, target, prompts, new_tokens).answers
            case, more = examine_folder(folder, ours, target, as_it_is, prompts, answers)
            findings += more
            if case is not None and any(each.level == "fault" for each in more):
                mended = try_out(case.build, target, prompts, new_tokens)
    findings.append(check_template(tokenizer, record, readable))
    findings.append(check_bos(tokenizer, record, readable))
    findings.append(check_data(target, data, readable))
    findings.append(check_acceptance(as_it_is, mended, findings))
    return findings


def examine_folder(
    folder: Path, ours: dict, target: Target, as_it_is: Trial, prompts: list[list[int]], answers: list[list[int]]
) -> tuple[Case | None, list[Finding]]:
    """The checks of a drafter's own config and weights; and the drafter mended as far as possible."""
    about_file, tensors = check_file(folder / "model.safetensors")
    about_target = check_target(ours["target"], target)
    kind = drafter_class(ours["drafter"])
    case = Case(kind, ours["config"], tensors or {}, target)
    about_fields, case = check_fields(case)
    findings = [about_file, about_target, about_fields]
    if tensors is None:
        return None, findings
    about_weights, case = check_weights(case)
    about_values = check_values(case, as_it_is)
    answered = take_sample(target, feature_layers(case), prompts, answers)
    about_map, case = check_map(case, answered)
    # Weights that are no good, or not for this target, tell nothing of how they were meant.
    sample = None if "fault" in (about_target.level, about_values.level) else answered
    given = agreement(case.build, sample)
    about_norm, case, given = check_norm(case, given, sample)
    about_layers, case, given = check_layers(case, given, sample)
    about_rope, case, given = check_rope(case, given, sample, about_target.level != "fault")
    about_squares, case, given = check_squares(case, given, sample)
    findings += [about_weights, about_values, about_map, about_norm, about_layers, about_rope, about_squares]
    return case, findings


# --- What is in the folder --------------------------------------------------------------------------------------------


def check_config(file: Path) -> tuple[Finding, dict | None]:
    """Whether config.json can be read at all; its `selfdraft` part, None where there is none to go on with."""
    copy = "copy or train the drafter again"
    try:
        document = read_document(file)
    except ValueError as error:
        return Finding("config", "fault", str(error), copy), None
    ours = document.get("selfdraft") if isinstance(document, dict) else None
    if ours is None and isinstance(document, dict) and "model_type" in document:
        return Finding("config", "ok", "the folder of an ordinary causal LM, used as a separate draft model"), None
    if ours is None:
        meaning = f"{file.name} describes neither a selfdraft drafter nor a Hugging Face model"
        return Finding("config", "fault", meaning, copy), None
    try:
        if not isinstance(ours["config"], dict) or not isinstance(ours["target"], dict):
            raise ValueError("`config` and `target` have to be objects")
        drafter_class(ours["drafter"])
    except ValueError as error:
        return Finding("config", "fault", f"{file.name}: {error}", "correct them there"), None
    return Finding("config", "ok", f"a drafter of the kind {ours['drafter']}"), ours


def check_fields(case: Case) -> Checked:
    """Fields of the config that this version does not know, of a wrong type, or missing."""
    known = {each.name: each.default for each in fields(case.kind.config_class)}
    unknown = sorted(set(case.config) - set(known))
    kept = {name: value for name, value in case.config.items() if name in known}
    wrong = sorted(name for name, value in kept.items() if not is_like(value, known[name]))
    missing = sorted(name for name in set(known) - set(kept) - {"rope_theta", "feature_layers", NORM})
    figures = {"unknown": unknown, "missing": missing}
    if unknown:
        meaning = f"config fields that this version does not know: {', '.join(unknown)}"
        remedy = f"correct or remove them ({suggest(unknown[0], list(known))})"
        return Finding("config fields", "fault", meaning, remedy, figures), replace(case, config=kept)
    if wrong:
        meaning = "config fields with a value of a wrong type: " + ", ".join(f"{each} {kept[each]!r}" for each in wrong)
        kept = {name: value for name, value in kept.items() if name not in wrong}
        return Finding("config fields", "fault", meaning, "correct them", figures), replace(case, config=kept)
    if missing:
        meaning = f"config.json lacks {', '.join(missing)}; what is taken instead may not be what was trained"
        return Finding("config fields", "warning", meaning, "write them down", figures), case
    return Finding("config fields", "ok", f"all {len(kept)} there", figures=figures), case


def is_like(value: Any, default: Any) -> bool:
    """Whether a value of config.json has the type of a field's default."""
    if isinstance(default, tuple):
        return isinstance(value, list) and all(type(each) is int for each in value)
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return not isinstance(default, bool) or isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_file(file: Path) -> tuple[Finding, dict[str, Tensor] | None]:
    """Whether the weights can be read; the weights."""
    again = "copy the file again and compare its size with the original, or train the drafter again"
    size = file.stat().st_size if file.is_file() else None
    if size is None:
        return Finding("weights file", "fault", f"the file {file.name} is missing", again), None
    if size == 0:
        return Finding("weights file", "fault", f"the file {file.name} is empty (0 bytes)", again, {"bytes": 0}), None
    try:
        tensors = load_file(file)
    except Exception as error:  # of safetensors, and of torch for what it cannot hold
        meaning = f"the file {file.name} is damaged: it has {size:,} bytes and cannot be read ({error})"
        return Finding("weights file", "fault", meaning, again, {"bytes": size}), None
    if not tensors:
        return Finding("weights file", "fault", f"the file {file.name} holds no tensors", again, {"bytes": size}), None
    figures = {"bytes": size, "tensors": len(tensors)}
    return Finding("weights file", "ok", f"{len(tensors)} tensors, {size:,} bytes", figures=figures), tensors


def check_target(trained_for: dict, target: Target) -> Finding:
    """Whether the drafter was made for this target, by name, weights fingerprint and vocabulary size."""
    given = target.identity()
    wrong = [key for key in IDENTITY if trained_for.get(key) != given[key]]
    figures = {"trained_for": trained_for, "given": given}
    if not wrong:
        meaning = f"made for this one: {given['name']}, fingerprint {given['fingerprint']}"
        return Finding("target", "ok", f"{meaning}, {given['vocab_size']:,} tokens", figures=figures)
    differences = ", ".join(f"{key} {trained_for.get(key)} against {given[key]}" for key in wrong)
    meaning = (
        f"this drafter was made for another target, {trained_for.get('name')}; here it meets {given['name']} "
        f"({differences})"
    )
    remedy = "load the target that it was made for, or train a drafter for this one"
    if wrong == ["fingerprint"]:
        remedy += (
            "; for a fine-tuned variant of its target, load_drafter(..., strict=False) drafts as well as is measured "
            "below"
        )
    return Finding("target", "fault", meaning, remedy, figures)


def check_weights(case: Case) -> Checked:
    """Names and shapes. What `fc_norm` has too many or too few as a whole is the business of `check_norm`."""
    try:
        wanted = {name: tensor.shape for name, tensor in case.blank().state_dict().items()}
    except BREAKS as error:
        return Finding(
            "weights", "skipped", f"the config does not fit this target, so nothing to compare: {error}"
        ), case
    tensors = dict(case.tensors)
    if {name for name in wanted if is_norm(name)} and not {name for name in tensors if is_norm(name)}:
        wanted = {name: shape for name, shape in wanted.items() if not is_norm(name)}
    elif not {name for name in wanted if is_norm(name)}:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_norm(name)}
    norms = {name: tensor for name, tensor in case.tensors.items() if name not in tensors}

    faults = []
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    for name in missing:
        alike = [other for other in unexpected if tensors[other].shape == wanted[name]]
        renamed = next(iter(difflib.get_close_matches(name, alike, n=1, cutoff=0.5)), None)
        if renamed is None:
            faults.append(f"the key {describe(name)} is missing")
        else:
            faults.append(f"the key {describe(name)} is missing, and {renamed} is probably what it is called here")
            tensors[name] = tensors.pop(renamed)
            unexpected.remove(renamed)
    for name in unexpected:
        faults.append(f"the key {describe(name)} is unexpected")
        del tensors[name]
    for name in sorted(wanted.keys() & tensors.keys()):
        given = tensors[name].shape
        if given == wanted[name]:
            continue
        shapes = f"{list(given)} instead of {list(wanted[name])}"
        if given == wanted[name][::-1]:
            faults.append(f"{describe(name)} is transposed: {shapes}")
            tensors[name] = tensors[name].T.contiguous()
        else:
            faults.append(f"{describe(name)} has the wrong shape: {shapes}")
    if faults:
        remedy = "name, turn or restore these tensors in model.safetensors as said, or convert or train it again"
        return Finding("weights", "fault", "; ".join(faults), remedy, {"faults": faults}), replace(
            case, tensors=tensors | norms
        )
    return Finding("weights", "ok", f"all {len(tensors)} names and shapes fit the config"), case


def describe(name: str) -> str:
    """The name of a tensor, and for the parts that people know, what it is."""
    parts = {
        "lm_head": "the head ",
        "projections": "the head ",
        "d2t": "the vocabulary map ",
        "embed": "the embedding ",
    }
    return next((word for part, word in parts.items() if part in name), "") + name


def is_norm(name: str) -> bool:
    return name.startswith(f"{NORM}.")


def check_values(case: Case, as_it_is: Trial) -> Finding:
    """Dtype, values that are no numbers, zeros, scale, and the traces of eight bits."""
    floats = {name: tensor for name, tensor in case.tensors.items() if name not in MAPS and name != "stand_ins"}
    unusable = {name: tensor for name, tensor in floats.items() if tensor.dtype not in USABLE}
    matrices = {name: tensor for name, tensor in floats.items() if tensor.ndim > 1 and name not in unusable}
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in floats.values()})
    figures: dict[str, Any] = {"dtypes": dtypes}
    again = "save the drafter again from its original weights, in bfloat16 or float32"

    def fault(meaning: str, remedy: str = again) -> Finding:
        return Finding("dtype and values", "fault", meaning, remedy, figures)

    if unusable:
        meaning = f"{first_few(unusable)} cannot be computed with in their dtype, {unusable_names(unusable)}"
        return fault(meaning)
    if len({tensor.dtype for tensor in matrices.values()}) > 1:
        return fault(f"the matrices are of several dtypes, {', '.join(dtypes)}, which torch does not multiply")
    broken = {name: tensor for name, tensor in floats.items() if not tensor.isfinite().all()}
    if broken:
        share = sum(int((~tensor.isfinite()).sum()) for tensor in broken.values())
        return fault(f"{share:,} weights of dtype {dtypes[0]} are inf or nan, in {first_few(broken)}")
    empty = {name: tensor for name, tensor in matrices.items() if (tensor == 0).float().mean() > 0.5}
    if empty:
        meaning = (
            f"most of {first_few(empty)} is zero: either never trained, or rounded away in a dtype of few bits "
            "(int8 or fp8 without a scale)"
        )
        return fault(meaning)
    norms = {name: t for name, t in floats.items() if t.ndim == 1 and name.endswith("norm.weight") or is_norm(name)}
    scale = {name: float(tensor.float().abs().mean()) for name, tensor in (matrices | norms).items()}
    strange = {name: size for name, size in scale.items() if not 1e-5 < size < (100 if name in norms else 10)}
    if strange:
        sizes = ", ".join(f"{name} ({size:.2g} on average)" for name, size in list(strange.items())[:3])
        return fault(f"weights of a suspicious scale: {sizes}", "look for a scale that was multiplied twice or lost")
    rounded = {name for name, each in matrices.items() if each.numel() >= 4096 and len(each.unique()) <= EIGHT_BITS}
    if rounded:
        meaning = f"{first_few(rounded)} took no more than {EIGHT_BITS} values: the dtype {dtypes[0]} holds what went "
        meaning += "through fp8 or int8"
        if as_it_is.first_accepted < POOR:
            return fault(f"{meaning}, and the drafter no longer works")
        return Finding("dtype and values", "warning", meaning, again, figures)
    return Finding("dtype and values", "ok", f"{', '.join(dtypes)}; all finite and of a usual scale", figures=figures)


def unusable_names(tensors: dict[str, Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))


def first_few(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


# --- What can be measured on the target's own answers -----------------------------------------------------------------


def feature_layers(case: Case) -> tuple[int, ...]:
    """The layers that the drafter reads; what the config leaves out is taken from the target, as in loading."""
    if not case.has("feature_layers"):
        return tuple(getattr(case.kind, "feature_layers", ()))
    given = tuple(case.config.get("feature_layers") or ())
    return given or case.kind.config_class().resolved(case.target).feature_layers


def check_map(case: Case, sample: Sample) -> Checked:
    """The vocabulary map: valid, and of tokens that the target uses. It is read both as offsets and as ids."""
    name = next((each for each in MAPS if each in case.tensors), None)
    if name is None:
        return Finding("vocabulary map", "ok", "none: the whole vocabulary is drafted"), case
    stored, vocab_size = case.tensors[name].long().flatten(), case.target.vocab_size
    steps = torch.arange(len(stored))
    readings = {"offsets": stored + steps, "ids": stored}
    meant = MAPS[name]
    other = "ids" if meant == "offsets" else "offsets"
    # What would have to be stored, so that its reading as `meant` gives what is there as `other`.
    turned = readings[other] - (steps if meant == "offsets" else torch.zeros_like(steps))
    mended = replace(case, tensors={**case.tensors, name: turned})
    here, there = (coverage(readings[each], sample.answer_tokens, vocab_size) for each in (meant, other))
    figures: dict[str, Any] = {"tokens": len(stored), "coverage": here, f"coverage_as_{other}": there}
    is_turned = there is not None and (here is None or there > here + BETTER_COVERAGE)
    if here is not None and there is not None and not is_turned:
        given, otherwise = agreement(case.build, sample), agreement(mended.build, sample)
        is_turned = None not in (given, otherwise) and otherwise.top1 > given.top1 + 0.2  # type: ignore[union-attr]
    if is_turned:
        covers = "is not a valid one" if here is None else f"covers {here:.0%} of the target's own answers"
        meaning = (
            f"the vocabulary map {name} holds {other} where {meant} belong: read as {meant} it {covers}, read as "
            f"{other} it covers {there:.0%} of the target's own answers"
        )
        sign = "subtract 0, 1, 2, ... from" if meant == "offsets" else "add 0, 1, 2, ... to"
        return Finding("vocabulary map", "fault", meaning, f"{sign} the numbers of {name}", figures), mended
    if here is None:
        meaning = f"the vocabulary map {name} leaves the {vocab_size:,} tokens of the target, or names one token twice"
        return Finding("vocabulary map", "fault", meaning, "restore it from the original", figures), case
    meaning = f"the {len(stored):,} draft tokens cover {here:.0%} of the target's own answers"
    if here < 0.5:
        remedy = "train with answers of the kind that is wanted, or with a larger draft_vocab_size"
        return Finding("vocabulary map", "warning", f"{meaning}: the others cannot be drafted", remedy, figures), case
    if (readings[meant].diff() <= 0).any():
        meaning += "; they are in no order, and training writes them in ascending order"
        remedy = "make sure that the rows of the head are in the same order"
        return Finding("vocabulary map", "warning", meaning, remedy, figures), case
    return Finding("vocabulary map", "ok", meaning, figures=figures), case


def coverage(ids: Tensor, tokens: Tensor, vocab_size: int) -> float | None:
    """The share of the tokens that can be drafted; None when the ids are not those of a draft vocabulary."""
    if not len(ids) or not vocabulary.are_valid(ids, vocab_size):
        return None
    return float(vocabulary.among(ids.to(tokens.device), tokens, vocab_size).float().mean())


def check_norm(case: Case, given: Agreement | None, sample: Sample | None) -> Measured:
    """The flag `fc_norm` against the weights, and both ways of it against the target's answers."""
    if not case.has(NORM):
        return Finding("norm flag", "skipped", "drafters of this kind have no such norm"), case, given
    default = next(each.default for each in fields(case.kind.config_class) if each.name == NORM)
    flag, there = bool(case.config.get(NORM, default)), any(is_norm(name) for name in case.tensors)
    other = with_norm(case, not flag)
    otherwise = agreement(other.build, sample)
    if flag != there:
        given = agreement(with_norm(case, flag).build, sample)
    figures = {NORM: flag, "weights": there} | both_figures(given, otherwise)
    both = f"{NORM} {flag}: {given or 'cannot be run'}; {not flag}: {otherwise or 'cannot be run'}"
    if flag != there:
        has = "has its weights" if there else "has no weights for it"
        meaning = f"the norm flag is wrong: config.json says {NORM} {flag}, and the file {has} ({both})"
        remedy = f"set {NORM} to {there} in config.json" + ("" if there else ", or restore the weights of the norm")
        return Finding("norm flag", "fault", meaning, remedy, figures), other, otherwise
    if given is not None and otherwise is not None and otherwise.is_clearly_better_than(given):
        meaning = f"the norm flag is wrong: the drafter fits the target's own answers better the other way ({both})"
        remedy = f"set {NORM} to {not flag} in config.json, with the weights that belong to it"
        return Finding("norm flag", "fault", meaning, remedy, figures), other, otherwise
    meaning = "as the weights have it " + (f"({both})" if given else f"({NOT_RUN})")
    return Finding("norm flag", "ok", meaning, figures=figures), case, given


def with_norm(case: Case, wanted: bool) -> Case:
    """The case with the norm before `fc`, or without; norms of weight one where the file has none."""
    tensors = case.tensors
    if not wanted:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_norm(name)}
    elif not any(is_norm(name) for name in tensors):
        ones = [torch.ones(case.target.hidden_size) for _ in feature_layers(case)]
        tensors = tensors | {f"{NORM}.{index}.weight": one for index, one in enumerate(ones)}
    return replace(case.configured(**{NORM: wanted}), tensors=tensors)


def check_layers(case: Case, given: Agreement | None, sample: Sample | None) -> Measured:
    """The numbers of the feature layers against their neighbours, all together and one by one."""
    if not case.has("feature_layers"):
        return Finding("feature layers", "skipped", "nothing to number: it reads no chosen layers"), case, given
    layers, top = feature_layers(case), case.target.num_layers
    neighbours = [tuple(layer + step for layer in layers) for step in (-1, 1)]
    for index in range(len(layers) if len(layers) > 1 else 0):
        neighbours += [(*layers[:index], layers[index] + step, *layers[index + 1 :]) for step in (-1, 1)]
    neighbours = [each for each in neighbours if min(each) >= 0 and max(each) <= top]
    exist = max(layers) <= top and min(layers) >= -1
    tried: dict[tuple[int, ...], Agreement] = {}
    for each in neighbours:
        found = agreement(case.configured(feature_layers=each).build, sample)
        if found is not None:
            tried[each] = found
    figures: dict[str, Any] = {"feature_layers": list(layers), "given": given and given.figures}
    figures["neighbours"] = [{"feature_layers": list(each), **found.figures} for each, found in tried.items()]
    better = any(found.is_clearly_better_than(given) for found in tried.values())
    written = "" if case.config.get("feature_layers") else "config.json does not say which, and the default is taken: "
    if better:
        # The best of all, which need not be the one that differs most surely: half of the way is a steadier gain.
        best = min(tried, key=lambda each: statistics.fmean(tried[each].losses))
        fits = f"the drafter fits the target's own answers better with {list(best)} ({tried[best]}"
        fits += f" against {given})" if given else ")"
        meaning = f"the feature layers are off by one: {written}{list(layers)} are read, and {fits}"
        remedy = f"set feature_layers to {list(best)} in config.json; they are indices of hidden_states, 0 = embeddings"
        finding = Finding("feature layers", "fault", meaning, remedy, figures)
        return finding, case.configured(feature_layers=best), tried[best]
    if not exist:
        meaning = f"the feature layers {list(layers)} do not exist in a target of {top} layers"
        return (
            Finding("feature layers", "fault", meaning, "correct feature_layers in config.json", figures),
            case,
            given,
        )
    if written:
        meaning = f"{written}{list(layers)} ({given or 'not measured'})"
        return Finding("feature layers", "warning", meaning, "write feature_layers down", figures), case, given
    if given is None:
        return Finding("feature layers", "skipped", f"{list(layers)}; {NOT_RUN}", figures=figures), case, given
    nearest = max((found.top1 for found in tried.values()), default=0.0)
    meaning = f"{list(layers)} ({given}; the best of the neighbours {nearest:.0%} top-1)"
    return Finding("feature layers", "ok", meaning, figures=figures), case, given


def check_rope(case: Case, given: Agreement | None, sample: Sample | None, is_its_target: bool) -> Measured:
    """The base of the rotary angles against the target's, which a draft layer shares unless trained otherwise."""
    if not case.has("rope_theta"):
        return Finding("rope", "skipped", "drafters of this kind have no rotary base of their own"), case, given
    theirs = case.kind.config_class().resolved(case.target).rope_theta
    own = case.config.get("rope_theta")
    figures = {"rope_theta": own, "of_the_target": theirs}
    if not is_its_target:
        return Finding("rope", "skipped", "not compared with that of another target", figures=figures), case, given
    other = case.configured(rope_theta=theirs)
    if not own:
        meaning = f"the rope field rope_theta was dropped from config.json; the target's {theirs:g} is taken instead"
        remedy = f"write down the rope_theta that it was trained with, most likely {theirs:g}"
        return Finding("rope", "fault", meaning, remedy, figures), other, given
    if own == theirs:
        return Finding("rope", "ok", f"rope_theta {own:g}, as the target's", figures=figures), case, given
    otherwise = agreement(other.build, sample)
    figures |= both_figures(given, otherwise)
    both = f"{given or 'cannot be run'} with {own:g}, {otherwise or 'cannot be run'} with {theirs:g}"
    if given is not None and given.is_clearly_better_than(otherwise):
        meaning = f"rope_theta {own:g} is not the target's {theirs:g}, but it is what was trained ({both})"
        return Finding("rope", "ok", meaning, figures=figures), case, given
    meaning = f"the rope field rope_theta is {own:g}, and the target's is {theirs:g} ({both})"
    remedy = f"set rope_theta to {theirs:g} in config.json, unless it was trained with {own:g} on purpose"
    return Finding("rope", "fault", meaning, remedy, figures), other, otherwise


def check_squares(case: Case, given: Agreement | None, sample: Sample | None) -> Measured:
    """Square matrices, whose shape does not tell whether they are transposed: they are tried the other way round."""
    check = "square weights"
    if case.has("layers_of_target"):
        return Finding(check, "skipped", "not tried with a whole model"), case, given
    squares = [name for name, each in case.tensors.items() if each.ndim == 2 and each.shape[0] == each.shape[1]]
    if given is None and squares:
        return Finding(check, "skipped", NOT_RUN), case, given
    turned = []
    for name in squares:
        other = replace(case, tensors={**case.tensors, name: case.tensors[name].T.contiguous()})
        otherwise = agreement(other.build, sample)
        if otherwise is not None and otherwise.is_clearly_better_than(given):
            turned.append(f"{describe(name)} is transposed ({given}; the other way round {otherwise})")
            case, given = other, otherwise
    figures = {"tried": squares, "top1_agreement": given and given.top1}
    if turned:
        return Finding(check, "fault", "; ".join(turned), "transpose them in the file", figures), case, given
    meaning = f"{first_few(squares) or 'none'}: none fits better transposed" if squares else "there are none"
    return Finding(check, "ok", meaning, figures=figures), case, given


def both_figures(given: Agreement | None, otherwise: Agreement | None) -> dict[str, Any]:
    return {"given": given and given.figures, "otherwise": otherwise and otherwise.figures}


# --- The text around it -----------------------------------------------------------------------------------------------


def check_template(tokenizer: Any, record: dict | None, data: Sequence[Exchange]) -> Finding:
    """The chat template against the one that the drafter was trained with, and against the prompts of the data."""
    check = "chat template"
    if tokenizer is None:
        return Finding(check, "skipped", "no tokenizer was given")
    own = tokenizer_identity(tokenizer)["chat_template"]
    figures: dict[str, Any] = {"chat_template": own, "trained_with": record and record["chat_template"]}
    remedy = "use the tokenizer that the drafter was trained with, or train it again with answers through this template"
    if record is not None and record["chat_template"] != own:
        was, now = ("no chat template" if each is None else each for each in (record["chat_template"], own))
        meaning = f"the chat template is another one than in training (digest {was} then, {now} now)"
        return Finding(check, "fault", meaning, remedy, figures)
    if data:
        fits = statistics.fmean(suits_template(tokenizer, each) for each in data)
        figures["share_of_data"] = fits
        if fits < 0.9:
            meaning = f"{1 - fits:.0%} of the prompts in the data are not what the chat template of the tokenizer makes"
            return Finding(check, "fault", meaning, "make the data again with this tokenizer; or " + remedy, figures)
    if record is None and not data:
        meaning = (
            "the drafter does not say which one it was trained with; --data FILE compares with what it was trained on"
        )
        return Finding(check, "skipped", meaning, figures=figures)
    told = [] if record is None else ["the one of training"]
    told += ["the one of the data"] if data else []
    return Finding(check, "ok", f"{own or 'none'}: {' and '.join(told)}", figures=figures)


def suits_template(tokenizer: Any, exchange: Exchange) -> bool:
    """Whether a prompt is what the template makes of its messages; of ids alone, whether it ends as a rendered one."""
    if exchange.messages is not None:
        return conversation_ids(tokenizer, exchange.messages) == exchange.prompt
    if not tokenizer.chat_template:
        return True
    mark = "What is a question"
    asked = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    # Without its first token, which may grow together with the end of a question.
    ending = tokenizer(text.rpartition(mark)[2], add_special_tokens=False)["input_ids"][1:]
    return exchange.prompt[len(exchange.prompt) - len(ending) :] == ending


def check_bos(tokenizer: Any, record: dict | None, data: Sequence[Exchange]) -> Finding:
    """How many beginning-of-text tokens stand in front: now, in training, and in the data."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return Finding("BOS", "skipped", "there is no tokenizer, or it has no beginning-of-text token")
    own = tokenizer_identity(tokenizer)["bos"]
    in_data = sorted({leading(each.prompt, bos) for each in data})
    figures = {"bos": own, "trained_with": record and record["bos"], "in_data": in_data}
    remedy = "tokenize rendered text with add_special_tokens=False, in training and in use alike"
    if own > 1:
        meaning = f"BOS is doubled: the tokenizer puts {own} in front of a chat, its own and that of the template"
        return Finding("BOS", "fault", meaning, remedy, figures)
    if record is not None and record["bos"] != own:
        meaning = f"in training a chat began with {record['bos']} BOS tokens, and now it begins with {own}"
        return Finding("BOS", "fault", meaning, remedy, figures)
    if in_data and in_data != [own]:
        meaning = (
            f"chats of the data begin with {' or '.join(map(str, in_data))} BOS tokens, and those in use with {own}"
        )
        return Finding("BOS", "fault", meaning, remedy, figures)
    return Finding("BOS", "ok", f"a chat begins with {own}", figures=figures)


def leading(ids: Sequence[int], token: int) -> int:
    """How often the token stands at the beginning."""
    return next((index for index, each in enumerate(ids) if each != token), len(ids))


@torch.no_grad()
def check_data(target: Target, data: Sequence[Exchange], readable: Sequence[Exchange]) -> Finding:
    """Whether the answers of the data are the target's own.

    What the target samples itself at temperature T <= 1 is, on average, at least as likely as its entropy says:
    -log p <= H, and less likely only if somebody else wrote it.
    """
    if not data:
        return Finding("data", "skipped", "no data file was given")
    if len(readable) < len(data):
        meaning = (
            f"{len(data) - len(readable)} of {len(data)} conversations hold token ids that the target does not have"
        )
        return Finding("data", "fault", meaning, "the data is of another tokenizer: make it again with this target")
    greedy, gaps = [], []
    for each in readable:
        ids = torch.tensor([(each.prompt + each.answer)[:MAX_LENGTH]], device=target.device)
        count = ids.shape[1] - len(each.prompt)
        if count < 1:
            continue
        _, hidden = target.encode(ids, ())
        logs = target.project(hidden[0, -count - 1 : -1]).float().log_softmax(-1)
        answer = ids[0, -count:]
        own = -(logs.exp() * logs).sum(-1)
        greedy.append((logs.argmax(-1) == answer).float())
        gaps.append(-logs.gather(1, answer.unsqueeze(1)).squeeze(1) - own)
    if not gaps:
        return Finding("data", "skipped", f"no answer begins within the first {MAX_LENGTH} tokens")
    rows = [float(each.mean()) for each in gaps]
    share, gap = float(torch.cat(greedy).mean()), float(torch.cat(gaps).mean())
    error = statistics.stdev(rows) / len(rows) ** 0.5 if len(rows) > 1 else 0.0
    figures = {"conversations": len(rows), "greedy_share": share, "excess_nats": gap, "standard_error": error}
    meaning = (
        f"{share:.0%} of the answer tokens are the target's likeliest, and they are {abs(gap):.2f} nats "
        f"{'less' if gap > 0 else 'more'} likely than what it samples itself"
    )
    if gap > UNSURE and gap > 3 * error:
        level: Level = "fault" if gap > FOREIGN else "warning"
        remedy = "let the target answer the prompts itself, and train on that"
        return Finding("data", level, f"the answers are not the target's own: {meaning}", remedy, figures)
    return Finding("data", "ok", f"the answers may well be the target's own: {meaning}", figures=figures)


def check_acceptance(as_it_is: Trial, mended: Trial | None, others: Sequence[Finding]) -> Finding:
    """What `generate` accepts of the drafter as it lies there, and once it is mended as the other findings say."""
    explained = [each.check for each in others if each.level == "fault"]
    figures: dict[str, Any] = {"as_it_is": trial_figures(as_it_is), "mended": mended and trial_figures(mended)}
    meaning = f"{as_it_is}"
    if mended is not None and mended.stats is not None:
        meaning = f"as it is: {meaning}; mended as said above: {mended}"
    poor = as_it_is.first_accepted < POOR
    if explained and poor:
        return Finding("acceptance", "warning", meaning, f"see {', '.join(explained)}", figures)
    if as_it_is.stats is None:
        return Finding("acceptance", "fault", f"it cannot be used: {meaning}", "do what the message says", figures)
    if poor:
        meaning = f"next to nothing of what is drafted is accepted, and no other check says why: {meaning}"
        remedy = "train longer; if training said otherwise, look at its data, its template and its loss mask"
        return Finding("acceptance", "fault", meaning, remedy, figures)
    if as_it_is.stats.tokens_per_round < SLOW:
        return Finding("acceptance", "warning", f"{meaning}: too little to pay", "train longer, on more data", figures)
    return Finding("acceptance", "ok", meaning, figures=figures)


def trial_figures(trial: Trial) -> dict[str, Any]:
    if trial.stats is None:
        return {"refused": trial.refusal}
    stats = trial.stats
    return {"tokens_per_round": stats.tokens_per_round, "acceptance_by_depth": stats.acceptance_by_depth}

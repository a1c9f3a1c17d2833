"""The measuring behind `selfdraft compare`: every arm answers every prompt, interleaved, and each answer is timed.

An *arm* is one way to decode: "transformers" (plain `model.generate`), "plain" (selfdraft's loop without drafts), or a
drafter. `report.py` makes the figures and tables.
"""

import difflib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import selfdraft
from selfdraft import embedded
from selfdraft.checkpoint import untrained_kinds
from selfdraft.drafters.base import Drafter
from selfdraft.metrics import Stats
from selfdraft.rows import end_tokens
from selfdraft.sampling import Noise

REFERENCE = "transformers"
PLAIN = "plain"
SHIPPED = ("draft_model", "medusa", "eagle3")  # in the order of the table
ASSETS = Path(__file__).resolve().parents[1] / "assets"
SHIPPED_PROMPTS = ASSETS / "prompts.jsonl"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WARM_UP_TOKENS = 16

# Two passes that add up in another order may differ by this many units of the dtype's resolution, relative to the
# score. Measured for SmolLM2-135M in bf16 against float32, 924 positions: the gap of the two best logits was off by
# 0.003 of the best logit at the median, 0.021 at the 99th percentile, 0.055 at most; 8 units of bf16 are 0.0625.
NEAR_TIE_UNITS = 8


@dataclass(frozen=True)
class Settings:
    """What the user asked for: the options of `selfdraft compare` that bear on the figures. `cli.py` explains them."""

    model: str
    prompts: Path
    limit: int | None
    drafters: Sequence[str] | None
    temperature: float
    seed: int
    max_new_tokens: int
    dtype: str
    repeats: int


@dataclass(frozen=True)
class Prompt:
    text: str
    task: str | None = None


@dataclass(frozen=True)
class Answer:
    """One run of one arm on one prompt."""

    arm: str
    prompt: int  # index into the prompts
    tokens: tuple[int, ...]  # the new ones, cut after the end-of-text token
    seconds: float  # the whole call, prefill included
    stats: Stats | None = None  # None for transformers
    peak_bytes: int | None = None  # None on the CPU, where torch does not count


@dataclass(frozen=True)
class Divergence:
    """The first place where an arm's answer leaves the reference's, and what the target thinks of that place.

    `top2_gap` is the difference of the target's two best scores there, recomputed in float32: logits when greedy,
    logits / temperature + noise when sampling. `is_near_tie` says that both tokens stand within `tolerance` of the
    best score: then rounding may decide between them, and otherwise something is wrong. A token is None where an
    answer has ended.
    """

    prompt: int
    position: int  # new tokens that agree
    token: int | None
    reference_token: int | None
    top2_gap: float
    tolerance: float
    is_near_tie: bool


# What one arm does with one prompt: (prompt ids, row seed, new tokens at most) -> (all ids, stats or None).
Decode = Callable[[Tensor, int, int], tuple[Tensor, Stats | None]]


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSONL file: `prompt`, or the first of `turns`; `task` when the row has one.

    With `limit`, every task gives equally many (a task that has fewer leaves room for the others), spread evenly over
    its rows; the order of the file stays. ValueError for rows that hold no prompt, with their line.
    """
    if not path.is_file():
        raise ValueError(f"there is no prompt file {path}; --prompts takes a JSONL file with `turns` or `prompt` rows")
    lines = path.read_text(encoding="utf-8").splitlines()
    prompts = [_prompt_of(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts if limit is None else _spread(prompts, limit)


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict) or ("prompt" not in row and "turns" not in row):
        raise ValueError(f"{where} has neither `prompt` nor `turns`; one of them must hold the text")
    text = row["prompt"] if "prompt" in row else next(iter(row["turns"]), None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} has an empty prompt: {text!r}; give it text or remove the row")
    return Prompt(text, row.get("task"))


def _spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    by_task: dict[str | None, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_task.setdefault(prompt.task, []).append(index)
    shares = dict.fromkeys(by_task, 0)
    while sum(shares.values()) < min(limit, len(prompts)):
        open_tasks = [task for task, rows in by_task.items() if shares[task] < len(rows)]
        shares[min(open_tasks, key=lambda task: shares[task])] += 1
    chosen = [rows[i * len(rows) // shares[task]] for task, rows in by_task.items() for i in range(shares[task])]
    return [prompts[index] for index in sorted(chosen)]


def drafter_sources(settings: Settings, note: Callable[[str], None]) -> dict[str, str]:
    """Arm name -> what `load_drafter` takes. Looks at names and folders only, so that a typo fails early.

    Shipped drafters and those that need no training are named by their kind, others by their folder, with as much of
    the path as makes the names differ. By default a shipped drafter that is missing is passed over, with a note.
    """
    by_kind = known_drafters()
    if settings.drafters is None:
        wanted = ["ngram", *SHIPPED] if settings.model == embedded.TARGET_NAME else ["ngram"]
        for kind in [kind for kind in wanted if kind not in by_kind]:
            note(f"{kind}: there is no shipped drafter in {_shipped_folder(kind)}, so it is passed over")
        return {kind: by_kind[kind] for kind in wanted if kind in by_kind}
    sources = {name: drafter_source(name) for name in settings.drafters}
    folders = [name for name in sources if name not in by_kind]
    names = dict(zip(folders, _short_names(folders, reserved={REFERENCE, PLAIN, *by_kind, *SHIPPED}), strict=True))
    return {names.get(name, name): source for name, source in sources.items()}


def known_drafters() -> dict[str, str]:
    """Name -> what `load_drafter` takes, of the drafters that need no training and of the shipped ones."""
    shipped = {kind: _shipped_folder(kind) for kind in SHIPPED}
    there = {kind: str(folder) for kind, folder in shipped.items() if (folder / "config.json").is_file()}
    return {kind: kind for kind in untrained_kinds()} | there


def _shipped_folder(kind: str) -> Path:
    return ASSETS / embedded.TARGET_NAME / kind


def drafter_source(name: str) -> str:
    """What `load_drafter` takes for a known name or a folder; ValueError when it is neither, nor may be a hub id."""
    known, folder = known_drafters(), Path(name)
    if name in known:
        return known[name]
    if (folder / "config.json").is_file() or (HUB_ID.fullmatch(name) and not folder.parent.exists()):
        return name
    if folder.is_dir():
        raise ValueError(f"{folder} has no config.json, so it is not the folder of a drafter; training writes drafter/")
    nearby = [str(path) for path in folder.parent.glob("*/")] if folder.parent.is_dir() else []
    close = difflib.get_close_matches(name, [*known, *nearby], n=1)
    meant = f'; did you mean "{close[0]}"?' if close else ""
    raise ValueError(f'there is no drafter "{name}": take {", ".join(known)} or the folder of a drafter{meant}')


def _short_names(folders: list[str], reserved: set[str]) -> list[str]:
    paths = [Path(folder).resolve() for folder in folders]
    for length in range(1, max((len(path.parts) for path in paths), default=0)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names) and not set(names) & reserved:
            return names
    return folders


def load_target(name: str, dtype: str, device: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in `dtype`, on `device`, by itself the GPU if there is one, and its tokenizer."""
    folder = embedded.resolve(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f'cannot load the model "{name}": {reason} --model takes a folder, a hub id or {embedded.TARGET_NAME}'
        ) from None
    place: Any = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.to(place).eval(), tokenizer


def load_drafters(sources: dict[str, str], model: PreTrainedModel) -> dict[str, Drafter]:
    """Arm name -> drafter. ValueError, with the arm's name, when one does not fit the model."""
    drafters: dict[str, Drafter] = {}
    for name, source in sources.items():
        try:
            drafters[name] = selfdraft.load_drafter(source, model)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return drafters


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], model: PreTrainedModel, max_new_tokens: int
) -> list[Int[Tensor, "1 _"]]:
    """The ids of every prompt, as one user turn of the chat template when the tokenizer has one.

    ValueError when a prompt and its answer do not fit into the model.
    """
    encoded = []
    for index, prompt in enumerate(prompts):
        ids = conversation_ids(tokenizer, [{"role": "user", "content": prompt.text}])
        refuse_too_long(f"prompt {index}", len(ids), model, max_new_tokens)
        encoded.append(torch.tensor([ids], device=model.device))
    return encoded


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], tools: list | None = None
) -> list[int]:
    """What the model reads before its next turn. Without a chat template that is the last message, as plain text."""
    if not tokenizer.chat_template:
        return tokenizer(messages[-1]["content"])["input_ids"]
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


def refuse_too_long(what: str, length: int, model: PreTrainedModel, max_new_tokens: int) -> None:
    """ValueError when a prompt of `length` tokens and its answer have no room in the positions of the model."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room is not None and length + max_new_tokens > room:
        raise ValueError(
            f"{what} has {length} tokens, and with {max_new_tokens} new ones it does not fit into the {room} positions "
            "of the model; shorten it or lower --max-new-tokens"
        )


def measure(
    model: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Int[Tensor, "1 _"]],
    settings: Settings,
) -> Iterator[Answer]:
    """Every arm's answer to every prompt, `settings.repeats` times, each as soon as it is there.

    For each prompt the arms run one after the other, so that a change in the machine's speed meets all of them; who
    comes first rotates. A short answer to the first prompt warms each arm up and is dropped. Row seed: `settings.seed`
    + index of the prompt.
    """
    arms = decoders(model, drafters, settings.temperature)
    ends = set(end_tokens(model.generation_config))
    for decode in arms.values():
        decode(prompts[0], settings.seed, min(WARM_UP_TOKENS, settings.max_new_tokens))
    for repeat in range(settings.repeats):
        for index, ids in enumerate(prompts):
            for arm in _rotated(list(arms), index + repeat):
                yield timed(arm, arms[arm], index, ids, ends, settings)


def decoders(model: PreTrainedModel, drafters: Mapping[str, Drafter], temperature: float) -> dict[str, Decode]:
    """Arm name -> how it decodes, the two plain arms first. All are asked the same thing, in transformers' words.

    Only the temperature shapes the distribution. What else the model's own generation config may ask for (top-k,
    top-p, a repetition penalty) is off in every arm, so that figures of different models mean the same.
    """
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
    if temperature > 0:
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options["pad_token_id"] = min(
        end_tokens(model.generation_config), default=0
    )  # a single row is never padded: this spares a warning

    def by_transformers(ids: Tensor, seed: int, count: int) -> tuple[Tensor, None]:
        torch.manual_seed(seed)
        generate: Any = model.generate
        return generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options), None

    def by_selfdraft(drafter: Drafter | None) -> Decode:
        def decode(ids: Tensor, seed: int, count: int) -> tuple[Tensor, Stats]:
            output: Any = selfdraft.generate(
                model,
                ids,
                attention_mask=torch.ones_like(ids),
                drafter=drafter,
                seed=seed,
                max_new_tokens=count,
                return_dict_in_generate=True,
                **options,
            )
            return output.sequences, output.stats

        return decode

    arms: dict[str, Decode] = {REFERENCE: by_transformers, PLAIN: by_selfdraft(None)}
    return arms | {name: by_selfdraft(drafter) for name, drafter in drafters.items()}


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def timed(arm: str, decode: Decode, index: int, ids: Tensor, ends: set[int], settings: Settings) -> Answer:
    """One answer of one arm, with the seconds of the whole call; on a GPU the clock waits for the device."""
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats(ids.device)
        torch.cuda.synchronize(ids.device)
    start = time.perf_counter()
    sequences, stats = decode(ids, settings.seed + index, settings.max_new_tokens)
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    seconds = time.perf_counter() - start
    tokens = cut(sequences[0, ids.shape[1] :].tolist(), ends)
    peak_bytes = torch.cuda.max_memory_allocated(ids.device) if ids.is_cuda else None
    return Answer(arm, index, tokens, seconds, stats, peak_bytes)


def cut(tokens: list[int], ends: set[int]) -> tuple[int, ...]:
    """The tokens up to the first of `ends`, that one included."""
    place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: place + 1])


def divergences(
    answers: Sequence[Answer],
    reference: str,
    prompts: Sequence[Int[Tensor, "1 _"]],
    model: PreTrainedModel,
    settings: Settings,
) -> dict[str, list[Divergence]]:
    """Arm name -> where its answers first leave those of the arm `reference`; an empty list when they never do.

    `model` is the target in float32, `settings` those of the answers. When sampling, transformers is left out: it
    draws other random numbers.
    """
    resolution = torch.finfo(getattr(torch, settings.dtype)).eps
    expected = {answer.prompt: answer.tokens for answer in answers if answer.arm == reference}
    found: dict[str, dict[int, Divergence]] = {}
    for answer in answers:
        if answer.arm in (reference, REFERENCE):
            continue
        of_arm = found.setdefault(answer.arm, {})
        position = first_difference(answer.tokens, expected[answer.prompt])
        if position is None:
            continue
        agreed = torch.tensor([answer.tokens[:position]], dtype=torch.long, device=model.device)
        prefix = torch.cat([prompts[answer.prompt], agreed], dim=1)
        scores = target_scores(model, prefix, settings.temperature, settings.seed + answer.prompt)
        both = (answer.tokens, expected[answer.prompt])
        token, reference_token = (tokens[position] if position < len(tokens) else None for tokens in both)
        best, second = scores.topk(2).values.tolist()
        tolerance = NEAR_TIE_UNITS * resolution * abs(best)
        tie = all(each is not None and best - scores[each].item() < tolerance for each in (token, reference_token))
        of_arm[answer.prompt] = Divergence(
            answer.prompt, position, token, reference_token, best - second, tolerance, tie
        )
    return {arm: list(by_prompt.values()) for arm, by_prompt in found.items()}


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first place where two answers differ, the end of the shorter one included; None when they are equal."""
    for position, (one, other) in enumerate(zip(ours, reference, strict=False)):
        if one != other:
            return position
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


@torch.no_grad()
def target_scores(
    model: PreTrainedModel, prefix: Int[Tensor, "1 time"], temperature: float, seed: int
) -> Float[Tensor, " vocab"]:
    """What the target's next token is the argmax of: its logits, or when sampling logits / temperature + noise."""
    logits = model(prefix, logits_to_keep=1).logits[0, -1].float()
    if temperature == 0:
        return logits
    noise = Noise(torch.tensor([seed], device=prefix.device), temperature)
    position = torch.tensor([[prefix.shape[1]]], device=prefix.device)
    return logits / temperature + noise.gumbel(position, torch.arange(len(logits), device=prefix.device))[0, 0]

"""What the checks of `doctor.py` are measured on: prompts, the target's own answers, and the rows of a data file."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import selfdraft
from selfdraft.compare import conversation_ids
from selfdraft.drafters.base import FeatureBatch
from selfdraft.metrics import Stats
from selfdraft.rows import end_tokens
from selfdraft.target import Target

NUM_PROMPTS = 8
NEW_TOKENS = 48

# When one way to read a drafter is clearly better than another: its loss is lower by so many standard errors of the
# mean over the prompts (7 degrees of freedom: by chance once in 400), and by this share at least.
CLEAR_ERRORS, CLEAR_SHARE = 4.0, 0.01

# What a broken drafter may raise when it is built or run.
BREAKS = (ValueError, RuntimeError, TypeError, IndexError, KeyError, AttributeError, OSError)


@dataclass(frozen=True)
class Exchange:
    """A prompt and an answer of a data file."""

    prompt: list[int]
    answer: list[int]
    messages: list[dict] | None = None


@dataclass(frozen=True)
class Sample:
    """The target's own greedy answers, and what it thought of them: one padded row per prompt."""

    tokens: Int[Tensor, "batch time"]
    trained: Bool[Tensor, "batch time"]
    attention: Bool[Tensor, "batch time"]
    states: dict[int, Float[Tensor, "batch time hidden"]]  # by HF index
    hidden: Float[Tensor, "batch time hidden"]

    @property
    def answer_tokens(self) -> Int[Tensor, " answers"]:
        return self.tokens[self.trained]

    def row(self, index: int, layers: tuple[int, ...]) -> FeatureBatch:
        """One prompt and its answer, without padding."""
        part = (slice(index, index + 1), slice(int(self.attention[index].sum())))
        states = [self.hidden if layer == -1 else self.states[layer] for layer in layers]
        features = torch.cat(states, dim=-1) if states else self.hidden[..., :0]
        parts = (self.tokens, self.trained, self.attention, features, self.hidden)
        return FeatureBatch(*(each[part] for each in parts))


@dataclass(frozen=True)
class Agreement:
    """How well a drafter follows the target offline: top-1 agreement in [0, 1], and its loss for each prompt."""

    top1: float
    losses: list[float]  # nats per trained token

    def is_clearly_better_than(self, other: "Agreement | None") -> bool:
        """A paired comparison: both have seen the same prompts."""
        if other is None or len(self.losses) < 3:
            return other is None or self.top1 > other.top1 + 0.2
        gains = [theirs - ours for theirs, ours in zip(other.losses, self.losses, strict=True)]
        gain, error = statistics.fmean(gains), statistics.stdev(gains) / len(gains) ** 0.5
        enough = gain > max(CLEAR_ERRORS * error, CLEAR_SHARE * statistics.fmean(self.losses))
        return enough and self.top1 > other.top1  # never so where a loss is not a number

    @property
    def figures(self) -> dict[str, float]:
        return {"top1_agreement": self.top1, "loss": statistics.fmean(self.losses)}

    def __str__(self) -> str:
        return f"{self.top1:.0%} top-1, loss {statistics.fmean(self.losses):.2f}"


@dataclass(frozen=True)
class Trial:
    """Some prompts, answered greedily by `selfdraft.generate` with the drafter."""

    stats: Stats | None = None
    answers: list[list[int]] = field(default_factory=list)
    refusal: str = ""  # what came instead of the stats

    @property
    def first_accepted(self) -> float:
        """Share of the first drafted tokens that were kept."""
        return next(iter(self.stats.acceptance_by_depth), 0.0) if self.stats else 0.0

    def __str__(self) -> str:
        if self.stats is None:
            return self.refusal
        by_depth = ", ".join(f"{share:.2f}" for share in self.stats.acceptance_by_depth)
        return f"{self.stats.tokens_per_round:.2f} tokens per round, accepted by depth {by_depth or 'nothing'}"


# --- Answers ----------------------------------------------------------------------------------------------------------


def try_out(load: Callable[[], Any], target: Target, prompts: Iterable[list[int]], new_tokens: int) -> Trial:
    """The prompts, answered greedily with a drafter; or why that cannot be done."""
    stats, answers = Stats(), []
    pad = min(end_tokens(target.model.generation_config), default=0)
    try:
        drafter = load()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=target.device)
            output: Any = selfdraft.generate(
                target.model,
                ids,
                attention_mask=torch.ones_like(ids),
                drafter=drafter,
                max_new_tokens=new_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                pad_token_id=pad,
                return_dict_in_generate=True,
            )
            stats.add(output.stats)
            answers.append(output.sequences[0, len(prompt) :].tolist())
    except BREAKS as error:
        return Trial(refusal=f"{type(error).__name__}: {error}".removeprefix("ValueError: "))
    return Trial(stats, answers)


@torch.no_grad()
def take_sample(
    target: Target, layers: tuple[int, ...], prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> Sample:
    """The answers, with the hidden states of the layers that a drafter reads and of their neighbours."""
    near = {layer + step for layer in layers if layer >= 0 for step in (-1, 0, 1)}
    wanted = sorted(near & set(range(target.num_layers + 1)))
    texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    places = torch.arange(tokens.shape[1])
    attention = places < torch.tensor([len(text) for text in texts]).unsqueeze(1)
    trained = attention & (places >= torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1))
    tokens, trained, attention = (each.to(target.device) for each in (tokens, trained, attention))
    features, hidden = target.encode(tokens, tuple(wanted))
    states = dict(zip(wanted, features.split(target.hidden_size, dim=-1), strict=True)) if wanted else {}
    return Sample(tokens, trained, attention, states, hidden)


@torch.no_grad()
def agreement(build: Callable[[], Any], sample: Sample | None) -> Agreement | None:
    """How well a drafter follows the target on its own answers; None without those, or when it does not run."""
    if sample is None:
        return None
    try:
        drafter = build()
        layers = drafter.feature_layers
        results = [drafter.loss(sample.row(index, layers)) for index in range(len(sample.tokens))]
    except BREAKS:
        return None
    results = [each for each in results if each.count > 0]
    counts = [each for result in results for each in result.accuracies]
    hits, tried = (float(sum(part)) for part in zip(*counts, strict=True)) if counts else (0.0, 0.0)
    if not tried:
        return None
    return Agreement(hits / tried, [float(each.total / each.count) for each in results])


# --- Prompts and data -------------------------------------------------------------------------------------------------


def own_prompts(target: Target, tokenizer: Any, count: int = NUM_PROMPTS) -> list[list[int]]:
    """Prompts that the target writes itself: its template up to the user's turn, which it samples (seeds 0, 1, ...)."""
    opening = opening_ids(target, tokenizer)
    chats = getattr(tokenizer, "chat_template", None)
    prompts = []
    for seed in range(count):
        ids = torch.tensor([opening], device=target.device)
        options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        text: Any = selfdraft.generate(target.model, ids, attention_mask=mask, seed=seed, max_new_tokens=32, **options)
        written = text[0].tolist()
        if chats:
            words = tokenizer.decode(written[len(opening) :], skip_special_tokens=True).strip()
            written = conversation_ids(tokenizer, [{"role": "user", "content": words or "Hello"}])
        prompts.append(written)
    return prompts


def opening_ids(target: Target, tokenizer: Any) -> list[int]:
    """What stands before the words of a user; without a chat template, before a text."""
    if getattr(tokenizer, "chat_template", None):
        mark = "What is a question"
        text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        ids = tokenizer(text.partition(mark)[0], add_special_tokens=False)["input_ids"]
        if ids:
            return ids
    bos = getattr(target.config, "bos_token_id", None)
    return [bos if isinstance(bos, int) else 0]


def read_exchanges(file: Path, tokenizer: Any, limit: int = NUM_PROMPTS) -> list[Exchange]:
    """The first prompts and answers of a data file as training reads it: parquet or JSONL rows of `prompt_ids` and
    `response_ids`, or of `messages` that end with an answer.

    ValueError, with what is wrong, when the file has none.
    """
    kinds = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
    if not file.is_file() or file.suffix not in kinds:
        raise ValueError(f"--data {file}: there is no such .parquet or .jsonl file")
    try:
        import datasets
    except ImportError:
        raise ValueError("--data needs the package: pip install datasets") from None
    exchanges: list[Exchange] = []
    try:
        rows = datasets.load_dataset(kinds[file.suffix], data_files=str(file), split="train", streaming=True)
        for row in rows:
            exchanges += exchange_of(row, tokenizer)
            if len(exchanges) == limit:
                break
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"--data {file} cannot be read: {error}") from error
    if not exchanges:
        raise ValueError(
            f"--data {file} has no rows of `prompt_ids` and `response_ids`, nor of `messages` that end with an answer "
            "and suit a chat template of the tokenizer"
        )
    return exchanges


def exchange_of(row: dict, tokenizer: Any) -> list[Exchange]:
    """The prompt and the answer of a row, if it has both."""
    prompt, answer, messages = (row.get(name) for name in ("prompt_ids", "response_ids", "messages"))
    chats = getattr(tokenizer, "chat_template", None)
    before = messages[:-1] if messages and messages[-1]["role"] == "assistant" and chats else None
    if prompt and answer:
        return [Exchange(list(prompt), list(answer), before)]
    if not before:
        return []
    asked = conversation_ids(tokenizer, before)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    said = whole[len(commonprefix([asked, whole])) :]
    if tokenizer.eos_token_id in said:  # what the template puts behind the end marker is not the target's to say
        said = said[: len(said) - said[::-1].index(tokenizer.eos_token_id)]
    return [Exchange(asked, said)] if said else []

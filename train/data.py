"""Conversations -> token ids and a mask of the trained ones, and the order in which a training visits them.

A row holds either `messages` (chat turns; the chat template is given the `tools` beside them) or `prompt_ids` and
`response_ids` (exactly what the target saw and said). The ids win when a row has both: nothing is re-tokenised then.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from selfdraft.datafiles import open_rows, tools_of, without_gaps

OPENING = 2  # ids; later ones may be one system prompt's


@dataclass(frozen=True)
class Conversations:
    """Token ids and masks, one array per conversation, and what was left out on the way."""

    tokens: list[np.ndarray]  # int64
    trained: list[np.ndarray]  # bool; True on answer tokens and the marker that ends an answer
    skipped: int  # conversations without a trained token
    truncated: int  # conversations cut at max_length

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation."""
        return np.array([len(tokens) for tokens in self.tokens])

    def answer_counts(self, vocab_size: int) -> Tensor:
        """How often each token of the vocabulary is a trained one. A draft vocabulary is chosen from it."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for tokens, trained in zip(self.tokens, self.trained, strict=True):
            np.add.at(counts, tokens[trained], 1)
        return torch.from_numpy(counts)

    @property
    def opening(self) -> tuple[int, ...]:
        """The ids that all prompts begin with, `OPENING` at most."""
        return tuple(commonprefix([self.prompt(index)[:OPENING].tolist() for index in range(len(self))]))

    def prompt(self, index: int) -> Tensor:
        """The ids before the first trained token: what the target saw before it answered. One token at least: where
        all is an answer, the first is what the others follow."""
        return torch.from_numpy(self.tokens[index][: max(1, self.trained[index].argmax())])

    def summary(self) -> str:
        """One line for the log."""
        count = sum(int(trained.sum()) for trained in self.trained)
        return (
            f"{len(self):,} conversations, {self.lengths.sum():,} tokens, {count:,} of them trained "
            f"({self.skipped:,} without a trained token skipped, {self.truncated:,} cut at the longest length)"
        )


def read_conversations(
    source: str | list[str],
    max_length: int,
    vocab_size: int,
    tokenizer: Any = None,
    end_ids: Iterable[int] = (),
    split: str = "train",
) -> Conversations:
    """All conversations of a file, glob, folder, list of these, or hub id, as token ids with masks.

    Chat turns need `tokenizer` (a fast one with a chat template); `end_ids` are the ids at which the target stops.
    Raises ValueError for missing files, wrong columns, ids outside the vocabulary, no trained token at all (one
    decoded conversation is shown), or a mask that covers everything although there are user turns.
    """
    rows = open_rows(source, split, f"--data.{split}")
    columns = set(rows.column_names)
    if {"prompt_ids", "response_ids"} <= columns:
        rows = rows.select_columns(["prompt_ids", "response_ids"]).with_format("numpy")
        pairs: Iterator = (_pair_tokens(row, f"{source}, row {number}") for number, row in enumerate(rows))
    elif "messages" in columns:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"{source} holds chat messages, but the target's tokenizer has no chat template; "
                "give rows with prompt_ids and response_ids, or use an instruction-tuned target"
            )
        rows = rows.select_columns([name for name in ("messages", "tools") if name in columns])
        ends = set(end_ids)
        pairs = (_chat_pair(row, f"{source}, row {number}", tokenizer, ends) for number, row in enumerate(rows))
    else:
        raise ValueError(
            f"{source} has the columns {', '.join(sorted(columns))}; "
            "training reads 'messages', or 'prompt_ids' and 'response_ids'"
        )

    kept_tokens, kept_masks, skipped, truncated, example = [], [], 0, 0, None
    for tokens, trained in pairs:
        example = tokens if example is None else example
        truncated += len(tokens) > max_length
        tokens, trained = tokens[:max_length], trained[:max_length]
        # The first token of all is never predicted, so an answer needs something in front of it.
        if not trained[1:].any():
            skipped += 1
            continue
        if tokens.min() < 0:
            raise ValueError(f"{source} holds the token id {tokens.min()}; ids are 0 or more, and padding is not one")
        if tokens.max() >= vocab_size:
            raise ValueError(
                f"{source} holds token ids up to {tokens.max()}, but the target's vocabulary has {vocab_size}; "
                "the data was tokenised for another target"
            )
        kept_tokens.append(tokens)
        kept_masks.append(trained)
    if not kept_tokens:
        shown = "no conversation at all" if example is None else _shown(example[:max_length], tokenizer)
        raise ValueError(
            f"none of the {skipped} conversations of {source} has a trained token within max_length {max_length}; "
            f"the first one reads:\n{shown}"
        )
    return Conversations(kept_tokens, kept_masks, skipped, truncated)


def chat_tokens(
    messages: list[dict], tokenizer: Any, end_ids: set[int], tools: list | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a rendered conversation, and True on every answer token and the marker that ends the answer.

    An answer is what the chat template adds between "the turns before it, and now the assistant" and "the turns up to
    it"; no separator of any model family is known here. What the template puts after the end marker (mostly a line
    break) is not the target's to say and stays untrained, and so do an empty answer and one to nobody. A turn that the
    template renders differently once others follow it (some drop earlier reasoning) is left untrained where it differs.

    Raises ValueError when the mask covers everything although there are user turns: then the template ignores them.
    """
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    text = render(messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = np.array(encoded["input_ids"], dtype=np.int64)
    starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    trained = np.zeros(len(tokens), dtype=bool)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0 or not message.get("content"):
            continue
        before = render(messages[:turn], add_generation_prompt=True)
        after = render(messages[: turn + 1])
        if not text.startswith(after):
            continue
        answer = (starts >= len(commonprefix([before, after]))) & (ends <= len(after))
        markers = np.flatnonzero(answer & np.isin(tokens, list(end_ids)))
        if len(markers):
            answer[markers[-1] + 1 :] = False
        trained |= answer
    if len(trained) and trained.all() and any(message["role"] == "user" for message in messages):
        raise ValueError(
            "the whole conversation would be trained, its user turns included: the chat template does not render "
            f"them. It reads:\n{text}"
        )
    return tokens, trained


def plan_epoch(lengths: np.ndarray, step_tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The conversations of every optimizer step of one epoch: a pure function of its arguments, so that a resume
    continues exactly.

    Steps hold about `step_tokens` tokens each, of conversations of similar length (random windows of about 50 steps
    are sorted by length and cut), so little is padding; their order is random.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    window = max(1, math.ceil(50 * step_tokens / lengths.mean()))
    steps = []
    for start in range(0, len(order), window):
        block = order[start : start + window]
        block = block[np.argsort(lengths[block], kind="stable")]
        before = np.cumsum(lengths[block]) - lengths[block]
        pieces = max(1, round(lengths[block].sum() / step_tokens))
        # Equal shares rather than full ones and a rest: a small last step would weigh as much as the others.
        share = np.minimum(before * pieces // lengths[block].sum(), pieces - 1)
        steps += [block[share == piece] for piece in range(pieces) if (share == piece).any()]
    return [steps[i] for i in random.permutation(len(steps))]


def share_step(step: np.ndarray, lengths: np.ndarray, forward_tokens: int, processes: int) -> list[list[np.ndarray]]:
    """The forward batches of one optimizer step, by process; all processes get the same number, some may be empty.

    A batch holds at most `forward_tokens` tokens, padding included (or one longer conversation).
    """
    by_length = step[np.argsort(-lengths[step], kind="stable")]
    shares: list[list[np.ndarray]] = []
    for process in range(processes):
        batches: list[list[int]] = []
        for index in by_length[process::processes]:
            fits = batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= forward_tokens
            if fits:
                batches[-1].append(index)
            else:
                batches.append([index])
        shares.append([np.array(batch, dtype=np.int64) for batch in batches])
    most = max(len(batches) for batches in shares)
    return [batches + [np.array([], dtype=np.int64)] * (most - len(batches)) for batches in shares]


def collate(conversations: Conversations, indices: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded `tokens`, `trained` and `attention` of the conversations, each `[batch, time]`.

    No indices give one row of two untrained tokens: a process without work still takes part in the backward pass.
    """
    if len(indices) == 0:
        empty = torch.zeros(1, 2, dtype=torch.bool)
        return torch.zeros(1, 2, dtype=torch.long), empty, ~empty
    time = max(len(conversations.tokens[i]) for i in indices)
    tokens = torch.zeros(len(indices), time, dtype=torch.long)
    trained = torch.zeros(len(indices), time, dtype=torch.bool)
    attention = torch.zeros(len(indices), time, dtype=torch.bool)
    for row, i in enumerate(indices):
        length = len(conversations.tokens[i])
        tokens[row, :length] = torch.from_numpy(conversations.tokens[i])
        trained[row, :length] = torch.from_numpy(conversations.trained[i])
        attention[row, :length] = True
    return tokens, trained, attention


def _pair_tokens(row: dict, where: str) -> tuple[np.ndarray, np.ndarray]:
    parts = []
    for name in ("prompt_ids", "response_ids"):
        ids = np.asarray(row[name])
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"{where}: {name} is {str(row[name])[:60]}, and has to be a list of token ids")
        parts.append(ids.astype(np.int64))
    return np.concatenate(parts), np.repeat([False, True], [len(part) for part in parts])


def _chat_pair(row: dict, where: str, tokenizer: Any, end_ids: set[int]) -> tuple[np.ndarray, np.ndarray]:
    messages = without_gaps(row["messages"])
    is_chat = isinstance(messages, list) and all(isinstance(each, dict) and "role" in each for each in messages)
    if not is_chat or not messages:
        shown = str(row["messages"])[:60]
        raise ValueError(f"{where}: messages is {shown}, and has to be a list of turns with role and content")
    try:
        return chat_tokens(messages, tokenizer, end_ids, tools_of(row, where))
    except TemplateError as problem:
        raise ValueError(f"{where}: the target's chat template refuses the conversation: {problem}") from None


def _shown(tokens: np.ndarray, tokenizer: Any) -> str:
    return str(tokens.tolist()) if tokenizer is None else tokenizer.decode(tokens.tolist())

"""The host's side of decoding: the prompt as it came, what every row has said since, and where it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from selfdraft.metrics import Stats, Stopwatch
from selfdraft.sampling import is_transformers_own

# transformers' criteria that are told here from token ids alone, and those that look at one row's text or at the clock.
_TOLD_FROM_IDS = {"MaxLengthCriteria", "EosTokenCriteria"}
_OF_ONE_ROW = {"MaxTimeCriteria", "StopStringCriteria"}


@dataclass(frozen=True)
class Prompt:
    """The prompt, padding in front; padding is given the free slots past the row's tokens, where nothing looks."""

    tokens: Int[Tensor, "batch time"]
    positions: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    host_lengths: list[int]
    order: Int[Tensor, "batch time"]  # where each entry stood in the prompt as it was given

    def as_given(self, values: Float[Tensor, "batch time size"]) -> Float[Tensor, "batch time size"]:
        """`values` of the entries, in the order of the prompt as it was given."""
        return values.gather(1, self.order.argsort(dim=1).unsqueeze(-1).expand_as(values))


def read_prompt(input_ids: Int[Tensor, "batch time"], attention_mask: Tensor | None) -> Prompt:
    """Rows of any padding, brought to padding on the left. ValueError for a row without tokens."""
    valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device).long()
    order = valid.argsort(dim=1, stable=True)
    valid = valid.gather(1, order)
    lengths = valid.sum(dim=1)
    host_lengths = lengths.tolist()
    if min(host_lengths) == 0:
        raise ValueError(f"row {host_lengths.index(0)} of the batch has no tokens: its attention_mask is all zero")
    padding = (1 - valid).cumsum(dim=1) - 1
    positions = torch.where(valid.bool(), valid.cumsum(dim=1) - 1, lengths.unsqueeze(1) + padding)
    return Prompt(input_ids.gather(1, order).long(), positions, lengths, host_lengths, order)


def end_tokens(config: GenerationConfig, criteria: Sequence[StoppingCriteria] = ()) -> list[int]:
    """The token ids that end a text: those of the config, in its order, and then those of the criteria."""
    eos = config.eos_token_id
    stops = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
    for each in criteria:
        if is_transformers_own(each, {"EosTokenCriteria"}):
            stops += [token for token in each.eos_token_id.tolist() if token not in stops]
    return stops


class Rows:
    """What the host knows of each row: its new tokens, how many more it wants, and whether it is finished.

    Stopping criteria are asked after every new token. transformers' own are given the row that the token belongs to,
    from the host's memory. Of the user's own, nobody knows what they look at: they are given the whole batch as it
    grows, for which a batch of several rows must advance one token per round (`one_by_one`).
    """

    def __init__(
        self,
        input_ids: Int[Tensor, "batch time"],
        prompt: Prompt,
        config: GenerationConfig,
        criteria: StoppingCriteriaList,
        streamer: Any,
    ):
        stops = end_tokens(config, criteria)
        self.stops = set(stops)
        self.pad = int(config.pad_token_id) if config.pad_token_id is not None else (stops or [0])[0]  # as transformers
        self.input_ids = input_ids
        self.device = prompt.tokens.device
        limits = [each.max_length for each in criteria if is_transformers_own(each, {"MaxLengthCriteria"})]
        self.max_length = int(min([config.max_length, *limits]))
        self.budget = self.max_length - prompt.tokens.shape[1]
        others = [each for each in criteria if not is_transformers_own(each, _TOLD_FROM_IDS)]
        known = all(is_transformers_own(each, _OF_ONE_ROW) for each in others)
        self.one_by_one = not known and len(input_ids) > 1
        self.of_the_batch = StoppingCriteriaList(others if self.one_by_one else [])
        self.of_one_row = StoppingCriteriaList([] if self.one_by_one else others)
        self.criteria_device = torch.device("cpu") if known else self.device
        self.given: list[list[int]] = input_ids.tolist() if self.of_one_row else []
        self.shown: tuple[Tensor, ...] | None = None  # the scores so far, for criteria that look at them
        self.streamer = streamer
        self.lengths = list(prompt.host_lengths)  # committed tokens in the cache
        self.new: list[list[int]] = [[] for _ in self.lengths]
        self.emitted = [0] * len(self.lengths)  # tokens that the last round gave
        self.pads = len(input_ids) == 1 or any(hasattr(each, "eos_token_id") for each in criteria)
        self.ended: list[int | None] = [None] * len(self.lengths)  # the number of new tokens at the first stop
        self.done = [False] * len(self.lengths)
        self.going = [True] * len(self.lengths)
        self.active = torch.ones(len(self.lengths), dtype=torch.bool, device=self.device)
        self.stats = Stats()

    @property
    def finished(self) -> bool:
        return all(self.done)

    def deepest(self, position_limit: int | None) -> int:
        """How deep a draft can be of use: one token less than the hungriest unfinished row wants, all of them at
        positions that exist."""
        wanted = max(self.budget - len(new) for new, done in zip(self.new, self.done, strict=True) if not done)
        room = wanted if position_limit is None else position_limit - max(self.lengths)
        return max(0, min(wanted, room) - 1)

    @property
    def common_length(self) -> int | None:
        """The committed length, when all rows agree on it."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    def start(self, first: list[int], scores: Float[Tensor, "batch steps vocab"] | None) -> None:
        """The token that the prefill decided in each row."""
        self.stats.prefills = self.stats.new_tokens = len(first)
        self.emitted = [self.emit(row, [token], scores) for row, token in enumerate(first)]
        self.close_round(scores)

    def advance(
        self, report: list[list[int]], scores: Float[Tensor, "batch steps vocab"] | None
    ) -> Bool[Tensor, " batch"]:
        """Books one round, `[drafted, accepted, picks...]` per row; returns which rows go on, on the device."""
        for row, (drafted, accepted, *picks) in enumerate(report):
            if self.done[row]:
                self.emitted[row] = 0
                continue
            wanted = self.budget - len(self.new[row])
            emitted = self.emitted[row] = self.emit(row, picks[: accepted + 1], scores)
            # As in a single run, which drafts no deeper: another row of the batch may want more than this one.
            self.stats.count(min(drafted, wanted - 1), min(accepted, emitted, wanted - 1), emitted)
            if not self.done[row]:
                self.lengths[row] += accepted + 1
        self.close_round(scores)
        return self.active

    def emit(self, row: int, tokens: list[int], scores: Tensor | None) -> int:
        """Appends tokens up to the first stop or the budget; returns how many."""
        for step, token in enumerate(tokens):
            if token < 0:
                raise RuntimeError(
                    "there is nothing to sample from: no token has a probability that is a number above 0"
                )
            self.new[row].append(token)
            full = len(self.new[row]) >= self.budget
            stop = full or token in self.stops
            if self.of_one_row:
                text = torch.tensor([self.given[row] + self.new[row]], device=self.criteria_device)
                stop |= self.ask(self.of_one_row, text, scores, step)[0]
            self.end(row, stop)
            self.done[row] |= full
            if self.streamer is not None:
                self.stream(token, is_drafted=step < len(tokens) - 1)  # a round ends with a token of the target's own
            if self.done[row]:
                return step + 1
        return len(tokens)

    def stream(self, token: int, is_drafted: bool) -> None:
        """To `put_drafted` goes what was drafted and kept, if the streamer cares; all else to `put`."""
        put = getattr(self.streamer, "put_drafted", self.streamer.put) if is_drafted else self.streamer.put
        put(torch.tensor([token]))

    def end(self, row: int, stop: bool) -> None:
        """Notes the first stop of a row."""
        if stop and self.ended[row] is None:
            self.ended[row] = len(self.new[row])
            self.done[row] = self.pads

    def close_round(self, scores: Tensor | None) -> None:
        """Asks the criteria of the whole batch, and tells the device which rows go on."""
        if self.of_the_batch:
            answers = self.ask(self.of_the_batch, self.sequences().to(self.criteria_device), scores, 0)
            for row, stop in enumerate(answers):
                self.end(row, stop)
        if not self.pads:
            all_ended = None not in self.ended
            enough = [all_ended and len(new) >= self.longest for new in self.new]
            self.done = [done or each for done, each in zip(self.done, enough, strict=True)]
        going = [not done for done in self.done]
        if going != self.going:
            self.going, self.active = going, torch.tensor(going, device=self.device)

    def ask(self, criteria: StoppingCriteriaList, text: Tensor, scores: Tensor | None, step: int) -> list[bool]:
        """What the criteria say of every row of `text`. They all are asked after every token, as in transformers."""
        if scores is not None:
            self.shown = (*(self.shown or ()), scores[:, step])
        return criteria(text, self.shown).tolist()

    @property
    def longest(self) -> int:
        """How many new tokens the result has: those of the row that ends last."""
        ends = [end for end in self.ended if end is not None]
        return max(ends) if len(ends) == len(self.ended) else max(map(len, self.new))

    def sequences(self) -> Int[Tensor, "batch total"]:
        """The prompt as it was given, followed by the new tokens; finished rows are padded to the longest."""
        new = [(tokens + [self.pad] * self.longest)[: self.longest] for tokens in self.new]
        return torch.cat([self.input_ids, torch.tensor(new, device=self.input_ids.device)], dim=1)

    def stats_with(self, clock: Stopwatch) -> Stats:
        """The counts, and the seconds of the clock's laps. A row that went on while another ended its text may have
        gone further than the result does."""
        self.stats.new_tokens = sum(min(len(tokens), self.longest) for tokens in self.new)
        seconds = clock.seconds()
        self.stats.prefill_seconds = seconds.get("prefill", 0.0)
        self.stats.draft_seconds = seconds.get("draft", 0.0)
        self.stats.verify_seconds = seconds.get("verify", 0.0)
        self.stats.total_seconds = sum(seconds.values())
        return self.stats

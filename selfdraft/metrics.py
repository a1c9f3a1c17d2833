"""What happened in one call of generate(): counts of rounds and tokens, and where the time went."""

import time
from dataclasses import dataclass, field
from itertools import zip_longest

import torch


@dataclass
class Stats:
    """Counts over all rows of a call, and seconds of the call.

    A *round* is one target pass after the prefill, for one row that was not finished. `drafted[d-1]` counts the
    rounds whose tree reached depth d, `accepted[d-1]` those whose kept path did (cut at a stop, as the output is).
    """

    new_tokens: int = 0
    prefills: int = 0  # rows prefilled; each gives one new token outside any round
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's forward passes
    total_seconds: float = 0.0

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """One round of one row: the depth of its tree, the drafted tokens kept, and the tokens emitted."""
        self.rounds += 1
        self.new_tokens += emitted
        for counts, depth in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (max(drafted, accepted) - len(counts)))
            for level in range(depth):
                counts[level] += 1

    def add(self, other: "Stats") -> None:
        """Adds the counts and seconds of another call."""
        for counts, more in ((self.drafted, other.drafted), (self.accepted, other.accepted)):
            counts[:] = [count + extra for count, extra in zip_longest(counts, more, fillvalue=0)]
        self.new_tokens += other.new_tokens
        self.prefills += other.prefills
        self.rounds += other.rounds
        self.prefill_seconds += other.prefill_seconds
        self.draft_seconds += other.draft_seconds
        self.verify_seconds += other.verify_seconds
        self.total_seconds += other.total_seconds

    @property
    def tokens_per_round(self) -> float:
        """New tokens per target forward, the bonus token included, the prefill left out; 0 without rounds."""
        return (self.new_tokens - self.prefills) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the trees of at least that depth whose kept path reached it, for depth 1, 2, ...; in [0, 1]."""
        return [kept / tried if tried else 0.0 for kept, tried in zip(self.accepted, self.drafted, strict=True)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted along the longest path of the tree; in [0, 1], 0 when nothing was drafted."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else 0.0

    @property
    def other_seconds(self) -> float:
        """Everything that is neither a target pass nor the drafter: masks, picks, walk, keep, bookkeeping."""
        return self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds


class Stopwatch:
    """Laps that do not make the host wait: clock readings on the CPU, recorded events on a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, object]] = []
        self.lap("start")

    def lap(self, name: str) -> None:
        """Everything since the last lap was `name`."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds by name. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        totals: dict[str, float] = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            passed = before.elapsed_time(after) / 1000 if self.device.type == "cuda" else after - before  # type: ignore
            totals[name] = totals.get(name, 0.0) + passed
        return totals

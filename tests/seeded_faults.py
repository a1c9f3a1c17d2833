"""Breaks the core on purpose, in five ways one at a time, and shows that a contract check sees each.

    python -m tests.seeded_faults

prints which checks fail under which fault; exit status 1 when a fault passes all of them, or when a check fails
without any fault.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from selfdraft.cache import SlotCache
from selfdraft.sampling import Noise
from selfdraft.target import Target
from tests.contract import checks
from tests.contract.arms import CHAIN, LOOP, TREE, Case, arms, plain

ARMS = arms()

# --- The faults -------------------------------------------------------------------------------------------------------


def no_reorder_in_keep() -> AbstractContextManager:
    """Accepted slots stay where the tree put them."""
    return mock.patch.object(SlotCache, "keep", lambda self, source, target: None)


def positions_off_by_one() -> AbstractContextManager:
    """Drafted nodes stand one position too far on."""
    whole = Target.score

    def score(self, tokens, positions, *rest, **named):
        drafted = torch.arange(tokens.shape[1]) > 0
        return whole(self, tokens, positions + drafted, *rest, **named)

    return mock.patch.object(Target, "score", score)


def siblings_visible() -> AbstractContextManager:
    """A node attends to all nodes before it, and not to its own path alone."""
    whole = LOOP.tree_visibility

    def tree_visibility(lengths, reach, depths, width):
        return whole(lengths, torch.ones_like(reach).tril(), depths, width)

    return mock.patch.object(LOOP, "tree_visibility", tree_visibility)


def window_ignored() -> AbstractContextManager:
    """Sliding-window layers attend to everything."""
    whole = Target.__init__

    def init(self, model):
        whole(self, model)
        self.window = None

    return mock.patch.object(Target, "__init__", init)


def noise_not_tied_to_the_position() -> AbstractContextManager:
    """Every draw takes the next noise of the run, as a generator would give it."""
    whole, calls = Noise.gumbel, itertools.count()

    def gumbel(self, positions, tokens):
        return whole(self, positions + 1000 * next(calls), tokens)

    return mock.patch.object(Noise, "gumbel", gumbel)


FAULTS: dict[str, Callable[[], AbstractContextManager]] = {
    "no reorder in keep": no_reorder_in_keep,
    "positions off by one": positions_off_by_one,
    "siblings visible": siblings_visible,
    "window ignored": window_ignored,
    "noise not tied to the position": noise_not_tied_to_the_position,
}

# --- The checks -------------------------------------------------------------------------------------------------------


def drafted(name: str, family: str, policy: str, shape) -> Callable[[], object]:
    case = Case(family, "", policy, 3)
    return lambda: checks.equals_plain(case, ARMS[name](case), shape)


LLAMA = Case("llama", "", "greedy", 3)
CHECKS: dict[str, Callable[[], object]] = {
    "plain is transformers' own, llama": lambda: checks.plain_equals_transformers(LLAMA),
    "plain is transformers' own, mistral": lambda: checks.plain_equals_transformers(Case("mistral", "", "greedy", 3)),
    "plain is the slow loop, T=1": lambda: checks.plain_equals_slow_loop(Case("llama", "", "T1", 1)),
    "script equals plain, chain, greedy": drafted("script", "llama", "greedy", CHAIN),
    "script equals plain, tree, greedy": drafted("script", "llama", "greedy", TREE),
    "noisy equals plain, tree, greedy, gemma2": drafted("noisy", "gemma2", "greedy", TREE),
    "noisy equals plain, chain, T=1": drafted("noisy", "llama", "T1", CHAIN),
    "noisy equals plain, tree, T=1": drafted("noisy", "llama", "T1", TREE),
    "copy is always accepted, chain, T=1": lambda: checks.copy_is_always_accepted(
        Case("llama", "", "T1", 3), ARMS["copy"](LLAMA), CHAIN
    ),
}


@contextlib.contextmanager
def seeded(fault: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """The fault is there for the block, and so is every plain text that is made in it."""
    plain.cache_clear()
    try:
        with fault():
            yield
    finally:
        plain.cache_clear()


def failing() -> list[str]:
    """The names of the checks that fail now."""
    names = []
    for name, check in CHECKS.items():
        try:
            check()
        except AssertionError:
            names.append(name)
    return names


def seen_by() -> dict[str, list[str]]:
    """Which checks fail under each fault, and under none."""
    found = {"none": failing()}
    for name, fault in FAULTS.items():
        with seeded(fault):
            found[name] = failing()
    return found


def main() -> int:
    found = seen_by()
    table = Table("fault", "seen by")
    for fault, names in found.items():
        table.add_row(fault, "\n".join(names) or ("no check, as it should be" if fault == "none" else "NO CHECK"))
    Console().print(table)
    return int(bool(found.pop("none")) or not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())

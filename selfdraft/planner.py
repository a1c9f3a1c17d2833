"""What to draft in a round, and whether."""

from dataclasses import dataclass, replace

from selfdraft.metrics import Stats

FAILURES = 8  # rounds in a row without a kept draft, after which drafting pauses
FIRST_PAUSE = 16  # rounds; every pause that follows a vain try is twice as long as the one before, up to the longest:
LONGEST_PAUSE = 64  # what was decided in a pause has to be read in one go after it


@dataclass(frozen=True)
class Plan:
    """The shape of one round's draft. Every tensor of the round has a size that follows from it.

    `depth` is the longest path below the root, `width` the most children that any node gets, and `nodes` the most
    drafted nodes in all (the root is not counted). `width=1` is a chain, and then `nodes` equals `depth`.
    """

    depth: int
    width: int = 1
    nodes: int = 0

    def __post_init__(self):
        if self.depth < 0 or self.width < 1 or self.nodes < 0:
            raise ValueError(f"a plan needs depth >= 0, width >= 1 and nodes >= 0, not {self}")
        largest = self.depth if self.width == 1 else sum(self.width**d for d in range(1, self.depth + 1))
        wanted = largest if self.nodes == 0 else self.nodes
        object.__setattr__(self, "nodes", max(self.depth, min(wanted, largest)))

    def cut(self, depth: int) -> "Plan":
        """The same plan with at most `depth` levels."""
        return self if depth >= self.depth else replace(self, depth=depth)


@dataclass
class Patience:
    """Bounds what a drafter costs whose drafts are never kept: one of another target, or one out of its depth.

    It drafts in 12 of the first 200 rounds, so that 3 % of the time are lost if a draft costs half a pass of the
    target. What is drafted then never changes the text. Tokens are counted and not seconds, so that a call does the
    same every time.
    """

    pause: int = 0  # the length of the latest one
    resting: int = 0  # rounds of it that are still to come
    failures: int = 0
    tried: int = 0
    kept: int = 0

    def allows(self, stats: Stats) -> bool:
        """Whether the next round should draft, given the counts of all rounds so far. To be asked once per round."""
        tried, kept = sum(stats.drafted[:1]), sum(stats.accepted[:1])
        if kept > self.kept:
            self.pause = self.failures = 0
        elif tried > self.tried:
            self.failures += 1
        self.tried, self.kept = tried, kept
        if self.failures >= (1 if self.pause else FAILURES):
            self.failures = 0
            self.pause = self.resting = min(2 * self.pause, LONGEST_PAUSE) or FIRST_PAUSE
        if self.resting > 0:
            self.resting -= 1
            return False
        return True

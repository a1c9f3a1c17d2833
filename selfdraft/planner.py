"""What to draft in a round."""

from dataclasses import dataclass, replace


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

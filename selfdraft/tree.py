"""DraftTree: candidate tokens and who follows whom."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class DraftTree:
    """A batch of token trees that one target pass can score.

    Node 0 is the root: the newest decided token, which is not in the target's cache yet. A parent comes before its
    children, siblings differ. A node other than the root whose parent is -1 is empty: it fills the shape up and is
    never accepted. All of it stays on the device.

    A drafter that was given noise of its own (`Noise.draws`) says what it drew from: the children of a node, in the
    order of their indices, are draws without replacement from the node's row of `draft_probs`. The row of a node
    without children is zero in a chain, and does not matter in a tree. None: no child is left to chance.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]
    draft_probs: Float[Tensor, "batch nodes draft_vocab"] | None = None
    draft_ids: Int[Tensor, " draft_vocab"] | None = None  # the target's ids of that axis; None for 0, 1, 2, ...
    is_chain: bool = False  # surely every node follows the one before it, up to the last that is not empty

    @classmethod
    def chain(cls, tokens: Int[Tensor, "batch nodes"]) -> "DraftTree":
        """Every token follows the one before it; `tokens[:, 0]` is the root."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        return cls(tokens, parents.expand_as(tokens), is_chain=True)

    def filled(self, nodes: int) -> "DraftTree":
        """The same with empty nodes behind it, `nodes` in all."""
        extra = nodes - self.tokens.shape[1]
        return replace(
            self,
            tokens=pad(self.tokens, (0, extra)),
            parents=pad(self.parents, (0, extra), value=-1),
            draft_probs=None if self.draft_probs is None else pad(self.draft_probs, (0, 0, 0, extra)),
        )

    @property
    def is_node(self) -> Bool[Tensor, "batch nodes"]:
        """True for the root and every node that is not empty."""
        first = torch.arange(self.tokens.shape[1], device=self.tokens.device) == 0
        return (self.parents >= 0) | first

    @cached_property
    def reach(self) -> Bool[Tensor, "batch nodes nodes"]:
        """`[b, n, m]` is True when m lies on the path from the root to n, n itself included."""
        return ancestors(self.parents)

    @cached_property
    def depths(self) -> Int[Tensor, "batch nodes"]:
        """How many steps each node is below the root; 0 for empty nodes too."""
        return self.reach.sum(dim=2) - 1


def ancestors(parents: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch nodes nodes"]:
    """`[b, n, m]` is True when following `parents` from n leads to m, which may be n itself.

    Squaring the one-step relation doubles its reach, so log2(nodes) small products serve any tree.
    """
    count = parents.shape[1]
    if count == 1:
        return torch.ones_like(parents, dtype=torch.bool).unsqueeze(1)
    own = torch.eye(count, device=parents.device)
    index = torch.arange(count, device=parents.device)
    reach = own + (parents.unsqueeze(-1) == index).to(own.dtype)
    for _ in range(math.ceil(math.log2(count))):
        reach = (reach @ reach).clamp(max=1)
    return reach > 0


def visible_slots(
    lengths: Int[Tensor, " batch"], own: Bool[Tensor, "batch nodes drafted"], width: int
) -> tuple[Bool[Tensor, "batch nodes width"], Int[Tensor, "batch width"]]:
    """Which of the first `width` slots of a cache each node attends to, and which drafted entry lies in each slot.

    A row's committed text fills the slots before its length, where the index of the entry is negative; drafted
    entries follow. A node attends to all committed slots and to the drafted ones that `own` names: its own path.
    """
    drafted = torch.arange(width, device=lengths.device) - lengths.unsqueeze(1)
    last = own.shape[2] - 1
    index = drafted.clamp(0, last).unsqueeze(1).expand(-1, own.shape[1], -1)
    in_tree = (drafted >= 0) & (drafted <= last)
    return (drafted < 0).unsqueeze(1) | (in_tree.unsqueeze(1) & own.gather(2, index)), drafted

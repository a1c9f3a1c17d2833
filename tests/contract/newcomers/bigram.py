"""A drafter that selfdraft has never heard of: what followed a word the last time. Add a file like this, no more."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from selfdraft.drafters.base import Observed
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target
from selfdraft.tree import DraftTree


@dataclass
class Successors:
    """For every row and token, the token that followed it last; a token follows itself until another one did."""

    table: Int[Tensor, "batch vocab"]


class Bigram:
    """Drafts a path through the table of successors; the siblings of a node are its neighbours in the vocabulary."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, vocab: int, plan: Plan = Plan(depth=3, width=2)):
        self.vocab = vocab
        self.plan = plan

    @classmethod
    def for_target(cls, target: Target) -> "Bigram":
        """Fits any target."""
        return cls(target.vocab_size)

    def check(self, target: Target) -> None:
        """ValueError when the vocabularies differ."""
        if self.vocab != target.vocab_size:
            raise ValueError(f"this table is for {self.vocab} tokens, and the target has {target.vocab_size}")

    def begin(self, batch_size: int) -> Successors:
        return Successors(torch.arange(self.vocab + 1).expand(batch_size, -1).clone())

    def propose(
        self, state: Successors, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        place = torch.where(seen.valid, seen.tokens, self.vocab)  # what only fills the shape goes to a spare place
        state.table = state.table.to(root.device).scatter(1, place, seen.next_tokens(root))
        width = max(1, min(plan.width, plan.nodes // plan.depth))
        tokens, parents = [root.unsqueeze(1)], [-1]
        path = tokens[0]
        for level in range(plan.depth):
            path = state.table.gather(1, path)
            tokens += [(path + off) % self.vocab for off in range(width)]
            parents += [max(0, 1 + (level - 1) * width)] * width
        all_parents = torch.tensor(parents, device=root.device).expand(len(root), -1)
        return DraftTree(torch.cat(tokens, dim=1), all_parents)


drafter_class = Bigram

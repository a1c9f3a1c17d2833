"""N-gram lookup: what followed the last words the last time they stood in this text. Needs no training."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from selfdraft.drafters.base import Observed
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target
from selfdraft.tree import DraftTree

GROWTH = 1024  # places added at a time


@dataclass
class History:
    """The text of each row by position."""

    tokens: Int[Tensor, "batch capacity"] | None = None


class Ngram:
    """Prompt lookup decoding (Saxena 2023): drafts the continuation of the latest earlier match of the text's end.

    The longest match of up to `longest` tokens counts, the latest one among equals. Rows without a match draft
    nothing. Its drafts are certain, so there is no use for the noise.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, longest: int = 3, plan: Plan = Plan(depth=7)):
        self.longest = longest
        self.plan = plan

    @classmethod
    def for_target(cls, target: Target) -> "Ngram":
        """Fits any target."""
        return cls()

    def check(self, target: Target) -> None:
        """Fits any target."""

    def begin(self, batch_size: int) -> History:
        return History()

    def propose(
        self, state: History, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        text = self.remember(state, seen, root)
        places = torch.arange(text.shape[1], device=text.device)
        length = (seen.lengths + 1).unsqueeze(1)  # the root is the last token of the text
        matched = torch.zeros_like(text)
        running = torch.ones_like(text, dtype=torch.bool)
        for back in range(self.longest):
            # running[b, j]: the `back + 1` tokens that end at j equal the last ones of the text.
            wanted = text.gather(1, (length - 1 - back).clamp(min=0))
            earlier = torch.nn.functional.pad(text, (back, 0), value=-1)[:, : text.shape[1]]
            running = running & (earlier == wanted) & (places < length - 1) & (length - 1 - back >= 0)
            matched = matched + running
        best = (matched * text.shape[1] + places).argmax(dim=1, keepdim=True)
        found = matched.gather(1, best) > 0
        steps = torch.arange(1, plan.depth + 1, device=text.device)
        draft = text.gather(1, (best + steps).clamp(max=text.shape[1] - 1))
        # A draft ends where the text ends, or where its row has no match at all.
        present = found & (best + steps < length)
        parents = torch.where(present, steps - 1, -1)
        tokens = torch.cat([root.unsqueeze(1), draft], dim=1)
        return DraftTree(tokens, torch.cat([torch.full_like(parents[:, :1], -1), parents], dim=1), is_chain=True)

    def remember(self, state: History, seen: Observed, root: Int[Tensor, " batch"]) -> Int[Tensor, "batch capacity"]:
        """Writes what was seen, and the root, into the history; grows it by a large step when it may be full."""
        if state.tokens is None:
            state.tokens = seen.tokens.new_zeros(len(root), 0)
        if seen.longest + seen.tokens.shape[1] >= state.tokens.shape[1]:
            state.tokens = torch.nn.functional.pad(state.tokens, (0, seen.tokens.shape[1] + GROWTH))
        state.tokens.scatter_(1, seen.positions, seen.tokens)
        state.tokens.scatter_(1, seen.lengths.unsqueeze(1), root.unsqueeze(1))
        return state.tokens


drafter_class = Ngram

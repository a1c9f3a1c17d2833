"""Drafting by layers that run on the target's hidden states and feed on their own output: what all EAGLEs share."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from selfdraft.cache import SlotCache
from selfdraft.drafters.base import Observed
from selfdraft.drafters.growth import Levels, grow
from selfdraft.drafters.layers import Turn
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target, prompt_parts
from selfdraft.tree import DraftTree


@dataclass
class FeedbackState:
    """The drafter's own keys and values: slot t holds the entry of position t (feature t, token t + 1)."""

    cache: SlotCache
    rows: Float[Tensor, "draft_vocab hidden"]  # of the vocabulary projection


class Feedback(nn.Module):
    """Drafts x_{t+2} from a hidden state at t and the embedding of x_{t+1}, then from its own output.

    A subclass says how a hidden state comes from the target's features (`fuse`), what its layers make of it (`run`),
    and which tokens follow (`rows`, `readout`, `ids`).
    """

    config: Any  # the layer's sizes; depth, width and nodes of a draft

    def __init__(self, target: Target):
        super().__init__()
        self.lend = lambda: target  # a function, so that the target is not a submodule, not saved and not copied

    @property
    def target(self) -> Target:
        return self.lend()

    @property
    def plan(self) -> Plan:
        return Plan(self.config.depth, self.config.width, self.config.nodes)

    @property
    def sampling_plan(self) -> Plan:
        """When the target samples, deep levels are seldom reached, and the noise of every node takes time too: two
        thirds of the depth, half of the nodes. A chain stays as it is."""
        plan = self.plan
        return plan if plan.width == 1 else Plan(-(-2 * plan.depth // 3), plan.width, plan.nodes // 2)

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """The target's token id of every draft token; None when they are the same."""
        raise NotImplementedError

    def fuse(self, features: Float[Tensor, "batch time features"]) -> Float[Tensor, "batch time hidden"]:
        """The hidden state that the target's features stand for."""
        raise NotImplementedError

    def run(
        self,
        cache: SlotCache,
        tokens: Int[Tensor, "batch time"],
        hidden: Float[Tensor, "batch time hidden"],
        positions: Int[Tensor, "batch time"],
        visible: Bool[Tensor, "batch time width"],
    ) -> Float[Tensor, "batch time hidden"]:
        """The next hidden states, from those at `positions` and the tokens that follow them. Keys and values are
        written where `cache` was opened."""
        raise NotImplementedError

    def rows(self) -> Float[Tensor, "draft_vocab hidden"]:
        """The weight of the vocabulary projection."""
        raise NotImplementedError

    def readout(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape hidden"]:
        """What the vocabulary projection reads of a hidden state."""
        raise NotImplementedError

    # --- drafting -----------------------------------------------------------------------------------------------------

    def begin(self, batch_size: int) -> FeedbackState:
        return FeedbackState(SlotCache(capacity=1024), self.rows())

    def propose(
        self, state: FeedbackState, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        hidden = seen.last(self.read(state.cache, seen, root)).unsqueeze(1)
        logits = linear(self.readout(hidden).to(state.rows.dtype), state.rows)
        levels = Levels(state.cache, seen.lengths, seen.longest)

        def step(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal hidden
            hidden = hidden.gather(1, parents.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            positions, visible, _ = levels.next(parents)
            hidden = self.run(state.cache, tokens, hidden, positions, visible)
            return linear(self.readout(hidden).to(state.rows.dtype), state.rows)

        return grow(root, logits, self.ids, plan, step, noise, seen.lengths)

    def read(self, cache: SlotCache, seen: Observed, root: Int[Tensor, " batch"]) -> Float[Tensor, "batch time hidden"]:
        """Takes the newly committed positions into the drafter's cache, with the target's true features."""
        assert seen.features is not None, "feature_layers asks for them"
        tokens, time, outputs = seen.next_tokens(root), seen.tokens.shape[1], []
        for part in prompt_parts(time):
            positions = seen.positions[:, part]
            if seen.start is None:
                width = cache.open(positions, seen.longest + time)
            else:
                width = cache.open(positions, seen.start + part.stop, seen.start + part.start)
            visible = torch.arange(width, device=root.device) <= positions.unsqueeze(-1)
            hidden = self.fuse(seen.features[:, part])
            outputs.append(self.run(cache, tokens[:, part], hidden, positions, visible))
        return torch.cat(outputs, dim=1)

    def turn(self, positions: Int[Tensor, "batch time"], dtype: torch.dtype) -> Turn:
        return Turn(positions, self.config.head_dim, self.config.rope_theta, dtype)


def pack(wanted: Bool[Tensor, "batch time"]) -> tuple[Int[Tensor, "batch places"], Bool[Tensor, "batch places"]]:
    """The places of the True entries of each row, in order, and which of them are real (the rest fills the shape)."""
    counts = wanted.sum(dim=1)
    most = max(1, int(counts.max()))
    place = (~wanted).long().argsort(dim=1, stable=True)[:, :most]
    return place, torch.arange(most, device=wanted.device) < counts.unsqueeze(1)


def take(values: Float[Tensor, "batch time size"], place: Int[Tensor, "batch places"]) -> Tensor:
    return values.gather(1, place.unsqueeze(-1).expand(-1, -1, values.shape[-1]))

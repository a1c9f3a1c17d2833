"""The protocol: what a drafter is, and what passes between it, the decoding loop and the trainer."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target
from selfdraft.tree import DraftTree


@dataclass(frozen=True)
class Observed:
    """The tokens that entered the target's cache since the drafter last proposed; the whole prompt in the first round.

    Entry j of row b holds a token, its place in the row and the target's features there. Rows are ragged: entries
    with `positions >= lengths` only fill the shape, and their positions are free slots past the row's committed ones.
    The valid entries of a row are consecutive and in order (padding may stand before or after them).
    """

    tokens: Int[Tensor, "batch time"]
    positions: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]  # committed tokens of each row, and so the position of the root
    features: Float[Tensor, "batch time features"] | None  # the layers of `feature_layers`, concatenated
    longest: int  # no row has more committed tokens; known to the host without asking the device
    start: int | None = None  # the first position, where every row of `positions` is the same run of numbers

    @property
    def valid(self) -> Bool[Tensor, "batch time"]:
        return self.positions < self.lengths.unsqueeze(1)

    def next_tokens(self, root: Int[Tensor, " batch"]) -> Int[Tensor, "batch time"]:
        """The token that follows each entry; after a row's last valid entry that is `root`."""
        following = torch.cat([self.tokens[:, 1:], root.unsqueeze(1)], dim=1)
        last = self.positions == self.lengths.unsqueeze(1) - 1
        return torch.where(last, root.unsqueeze(1), following)

    def then(self, later: "Observed") -> "Observed":
        """Both together, for a drafter that was not asked in between. What fills the shape goes to the front."""
        tokens = torch.cat([self.tokens, later.tokens], dim=1)
        positions = torch.cat([self.positions, later.positions], dim=1)
        features = None
        if self.features is not None and later.features is not None:
            features = torch.cat([self.features, later.features], dim=1)
        if self.start is not None and later.start == self.start + self.tokens.shape[1]:
            return replace(later, tokens=tokens, positions=positions, features=features, start=self.start)
        valid = torch.cat([self.valid, later.valid], dim=1)
        order = valid.long().argsort(dim=1, stable=True)
        free = later.lengths.unsqueeze(1) + (~valid).cumsum(dim=1) - 1
        return replace(
            later,
            tokens=tokens.gather(1, order),
            positions=torch.where(valid, positions, free).gather(1, order),
            features=None if features is None else features.gather(1, order.unsqueeze(-1).expand_as(features)),
            start=None,
        )

    def last(self, values: Float[Tensor, "batch time size"]) -> Float[Tensor, "batch size"]:
        """`values` at each row's last valid entry."""
        index = (self.positions == self.lengths.unsqueeze(1) - 1).int().argmax(dim=1)
        return values[torch.arange(len(index), device=values.device), index]


@runtime_checkable
class Drafter(Protocol):
    """Proposes trees. `selfdraft.generate` calls `begin` once and then `propose` once per round.

    Whatever is proposed, the output is the target's own; a drafter only decides how many tokens a round yields.
    """

    feature_layers: tuple[int, ...]  # indices into HF `hidden_states` (0 = embeddings, -1 = after the final norm)
    plan: Plan  # what it drafts when the caller asks for nothing else; when sampling, its `sampling_plan` if it has one

    def begin(self, batch_size: int) -> Any:
        """Fresh state for one call of `generate`. Two calls, two states; nothing is kept on the drafter."""
        ...

    def propose(self, state: Any, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise) -> DraftTree:
        """A tree of at most `plan.nodes` drafted nodes and `plan.depth` levels below `root`.

        Updates `state`. Must not read from the device: no `.item()`, `.tolist()`, `nonzero` or boolean indexing.
        """
        ...

    def check(self, target: Target) -> None:
        """Raises ValueError when the drafter does not belong to this target."""
        ...


def own_plan(drafter: Drafter | None, sampling: bool) -> Plan:
    """What is drafted when the caller asks for nothing else; without a drafter, nothing."""
    if drafter is None:
        return Plan(depth=0)
    return getattr(drafter, "sampling_plan", drafter.plan) if sampling else drafter.plan


@dataclass(frozen=True)
class FeatureBatch:
    """A training batch: right-padded conversations of the target and what the target thought of them."""

    tokens: Int[Tensor, "batch time"]
    trained: Bool[Tensor, "batch time"]  # answer tokens, its end marker included: the ones worth predicting
    attention: Bool[Tensor, "batch time"]  # False on padding
    features: Float[Tensor, "batch time features"]  # the layers of `feature_layers`, concatenated
    hidden: Float[Tensor, "batch time hidden"]  # hidden_states[-1]: what the target's head reads


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum over trained positions, and their count, so that the trainer can divide by the global count."""

    total: Float[Tensor, ""]
    count: Int[Tensor, ""]
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # name -> (sum, count), e.g. accuracy_1

    @property
    def accuracies(self) -> list[tuple[Tensor, Tensor]]:
        """By depth, how many positions the drafter had right, of how many: the metrics accuracy_1, accuracy_2, ..."""
        return [value for name, value in self.metrics.items() if name.startswith("accuracy_")]


@runtime_checkable
class TrainableDrafter(Protocol):
    """A drafter that is an `nn.Module` and knows its own loss: time shift, unrolling and weights of the depths.

    `loss` is the module's `forward`, so that DDP wraps it. The target's embedding and head are lent, not owned:
    they are absent from `parameters()` and `state_dict()`. `config` is a frozen dataclass of plain values.
    """

    config: Any

    def start(self, answer_counts: Int[Tensor, " vocab"]) -> None:
        """Starting point of a training: weights taken from the target, a draft vocabulary from the answers' tokens."""
        ...

    def loss(self, batch: FeatureBatch) -> LossSum: ...

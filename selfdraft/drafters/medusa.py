"""Medusa: small heads on the target's last hidden state, each guessing one token further ahead.

Cai et al. 2024 (arXiv 2401.10774). Head i (from 0) reads the hidden state of the newest cached token, from which the
target has picked the root already, and guesses the token i + 1 places after the root. The heads do not see each
other's guesses, so a tree combines their candidates; it has the combinations that are most often right.
"""

import heapq
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from selfdraft.drafters import vocabulary
from selfdraft.drafters.base import FeatureBatch, LossSum, Observed
from selfdraft.losses import Loss, check_loss, vocabulary_loss
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target
from selfdraft.tree import DraftTree

RANKS = 10  # candidates of a head whose hit rates are known, and so the most children of a node
CALIBRATED = 256  # labels of a batch that the hit rates are measured on: finding the best candidates costs time
MEMORY = 0.98  # how much of the hit rates stays when a batch is added


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads."""

    heads: int = 4
    """Number of heads; the deepest draft has as many levels."""
    layers: int = 1
    """Residual blocks of a head."""
    own_projection: bool = False
    """Every head trains a vocabulary projection of its own instead of using the target's."""
    draft_vocab_size: int = 0
    """How many of the most frequent answer tokens it can draft; 0 for the whole vocabulary."""
    decay: float = 0.8
    """Training: weight of head i is decay ** i."""
    loss: Loss = "soft"
    """Training: what is minimised, `soft` (forward KL from the target), `hard` (the answer's own tokens), `reverse_kl`,
    `total_variation`, `log_acceptance` or `lk`; see docs/training.md."""
    depth: int = 4
    """Draft: levels of the tree."""
    width: int = 4
    """Draft: most children of a node; 1 is a chain."""
    nodes: int = 12
    """Draft: nodes that are sent to the target."""

    def __post_init__(self) -> None:
        check_loss(self.loss, self.decay)

    def resolved(self, target: Target) -> "MedusaConfig":
        """The same with the vocabulary's size filled in from the target. ValueError for an impossible shape."""
        if self.heads < 1 or self.layers < 1:
            raise ValueError(f"Medusa needs at least one head of one layer, not {self.heads} of {self.layers}")
        return replace(self, draft_vocab_size=vocabulary.size_of(self.draft_vocab_size, target.vocab_size))


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`, the identity at the start."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*shape size"]) -> Float[Tensor, "*shape size"]:
        return hidden + silu(self.linear(hidden))


@dataclass
class MedusaState:
    """What a call of `generate` keeps at hand: the projections, and the tree of every plan so far."""

    rows: list[Float[Tensor, "draft_vocab size"]]
    hits: list[list[float]]
    shapes: dict[Plan, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)


class Medusa(nn.Module):
    """Drafts x_{t+2+i} with head i from the target's last hidden state at t."""

    config_class = MedusaConfig
    feature_layers: tuple[int, ...] = (-1,)
    rank_hits: Tensor
    draft_tokens: Tensor

    def __init__(self, config: MedusaConfig, target: Target):
        super().__init__()
        self.config = config = config.resolved(target)
        self.lend = lambda: target  # a function, so that the target is not a submodule, not saved and not copied
        size, vocab = target.hidden_size, config.draft_vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.layers))) for _ in range(config.heads)
        )
        own = config.heads if config.own_projection else 0
        self.projections = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(own))
        if vocab < target.vocab_size:
            self.register_buffer("draft_tokens", torch.arange(vocab))  # the target's token id of every draft token
        # rank_hits[i, r]: how often candidate r of head i is the target's token. A plausible guess before training.
        guess = [[0.8**head * 0.5 ** (rank + 1) for rank in range(RANKS)] for head in range(config.heads)]
        self.register_buffer("rank_hits", torch.tensor(guess))

    @property
    def target(self) -> Target:
        return self.lend()

    @property
    def plan(self) -> Plan:
        return Plan(self.config.depth, self.config.width, self.config.nodes).cut(self.config.heads)

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """The target's token id of every draft token; None when they are the same."""
        return getattr(self, "draft_tokens", None)

    @property
    def weight(self) -> Float[Tensor, "size size"]:
        """The first weight of the first head: it has the size and dtype that all heads have."""
        return next(self.heads.parameters())

    def check(self, target: Target) -> None:
        """ValueError unless width and vocabulary fit, and the draft vocabulary is a valid one."""
        size = self.weight.shape[1]
        if size != target.hidden_size:
            raise ValueError(
                f"these Medusa heads read hidden states of size {size}, and the target's have {target.hidden_size}; "
                "load the heads of this target or train new ones"
            )
        if self.target.model is not target.model:
            raise ValueError("these Medusa heads use the projection of another model object; load them for this one")
        if self.ids is not None and not vocabulary.are_valid(self.ids, target.vocab_size):
            raise ValueError("draft_tokens has an id outside the target's vocabulary, or one id twice")

    # --- drafting -----------------------------------------------------------------------------------------------------

    def begin(self, batch_size: int) -> MedusaState:
        return MedusaState(self.vocabulary_rows(), self.rank_hits.tolist())

    def propose(
        self, state: MedusaState, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        plan = plan.cut(self.config.heads)
        if plan not in state.shapes:
            # Of draws from a distribution, the first is tried first.
            hits = [sorted(each, reverse=True) for each in state.hits] if noise.draws else state.hits
            state.shapes[plan] = tree_shape(hits, plan, min(RANKS, self.config.draft_vocab_size), root.device)
        levels, ranks, parents = state.shapes[plan]
        assert seen.features is not None, "feature_layers asks for them"
        newest = seen.last(seen.features)
        hidden = [self.think(head, newest).to(state.rows[0].dtype) for head in range(plan.depth)]
        if self.config.own_projection:
            logits = torch.stack([linear(each, rows) for each, rows in zip(hidden, state.rows, strict=False)], dim=1)
        else:  # the vocabulary's rows are most of what a draft reads: read them once for all heads
            logits = linear(torch.stack(hidden, dim=1), state.rows[0])
        positions = seen.lengths.unsqueeze(1) + torch.arange(1, plan.depth + 1, device=root.device)
        scores = noise.score(logits, positions, self.ids)
        best = scores.topk(min(plan.width, RANKS, scores.shape[-1]), dim=-1).indices
        drafted = best if self.ids is None else self.ids[best]
        tokens = torch.cat([root.unsqueeze(1), drafted[:, levels, ranks]], dim=1)
        parents = parents.expand(len(root), -1)
        if not noise.draws:
            return DraftTree(tokens, parents, is_chain=plan.width == 1)
        below = nn.functional.pad(noise.probs(logits), (0, 0, 0, 1))  # by depth of the parent; none below the deepest
        depths = nn.functional.pad(levels + 1, (1, 0))
        return DraftTree(tokens, parents, below[:, depths], self.ids, is_chain=plan.width == 1)

    def think(self, head: int, hidden: Float[Tensor, "*shape size"]) -> Float[Tensor, "*shape size"]:
        """What head `head` makes of the target's hidden state."""
        return self.heads[head](hidden.to(self.weight.dtype))

    def vocabulary_rows(self) -> list[Tensor]:
        """The weight of every head's vocabulary projection: one and the same of the target's, or its own.

        A bias or soft cap of the target's projection (few families have one) is left out, in training as in use.
        Copies rows when the draft vocabulary is a part of the target's, so ask once per call or step.
        """
        if self.config.own_projection:
            return list(self.projections.parameters())
        rows = self.target.head_weight()
        return [rows if self.ids is None else rows[self.ids]] * self.config.heads

    # --- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, answer_counts: Int[Tensor, " vocab"]) -> None:
        """The most frequent answer tokens become the draft vocabulary; every head starts as the target's own."""
        if self.ids is not None:
            self.ids.copy_(vocabulary.most_frequent(answer_counts.to(self.ids.device), len(self.ids)))
        rows = self.target.head_weight()
        for own in self.projections.parameters():
            own.copy_(rows if self.ids is None else rows[self.ids])

    def forward(self, batch: FeatureBatch) -> LossSum:
        """Sum over heads i of decay^i * loss(target over the draft vocabulary, head i), at answer tokens.

        The token at place L is what head i predicts from the hidden state at L - 2 - i, which may be one of the
        prompt. What it should say is the target's own distribution, that of the hidden state at L - 1: of all texts
        that may stand between, it is a less noisy witness than the one token that came. Tokens outside the draft
        vocabulary are left out, but counted, so that the loss is a mean per trained token for any vocabulary.
        In training mode the heads' hit rates are updated on the way.
        """
        trained = batch.trained & batch.attention
        trained[:, :2] = False  # no head reaches them
        wanted = trained & vocabulary.among(self.ids, batch.tokens, self.target.vocab_size)
        rows, places = wanted.nonzero(as_tuple=True)
        probs, best = self.target_probs(batch.hidden[rows, places - 1])
        labels = vocabulary.places(self.ids, batch.tokens[rows, places], self.target.vocab_size)

        total, metrics = torch.zeros((), device=trained.device), {}
        for head, weight in enumerate(self.vocabulary_rows()):
            reach = (places >= 2 + head).nonzero().squeeze(1)  # all, but for prompts shorter than the heads reach
            if len(reach) < len(places):
                rows, places, probs, best, labels = (each[reach] for each in (rows, places, probs, best, labels))
            hidden = self.think(head, batch.features[rows, places - 2 - head])
            loss, hits = vocabulary_loss(self.config.loss, hidden, weight, probs, best, labels)
            total = total + self.config.decay**head * loss
            metrics[f"accuracy_{head + 1}"] = (hits, torch.tensor(len(rows), device=hits.device))
            if self.training and len(rows) > 0:
                self.calibrate(head, hidden.detach(), weight.detach(), best)
        return LossSum(total, trained.sum(), metrics)

    loss = forward

    @torch.no_grad()
    def target_probs(
        self, hidden: Float[Tensor, "places size"]
    ) -> tuple[Float[Tensor, "places draft_vocab"], Int[Tensor, " places"]]:
        """The target's distribution over the draft vocabulary, which all heads share, and its best token there."""
        logits = self.target.project(hidden, self.ids)
        return logits.softmax(-1), logits.argmax(-1)

    def calibrate(self, head: int, hidden: Tensor, weight: Tensor, best: Int[Tensor, " places"]) -> None:
        """Moves the hit rates of `head` towards those on a sample that is spread evenly over this batch."""
        step = -(-len(hidden) // CALIBRATED)
        logits = linear(hidden[::step].to(weight.dtype), weight)
        candidates = logits.topk(min(RANKS, logits.shape[-1])).indices
        rates = (candidates == best[::step].unsqueeze(1)).to(self.rank_hits.dtype).mean(0)
        self.rank_hits[head].lerp_(nn.functional.pad(rates, (0, RANKS - len(rates))), 1 - MEMORY)


def tree_shape(
    hits: list[list[float]], plan: Plan, ranks: int, device: torch.device
) -> tuple[Int[Tensor, " nodes"], Int[Tensor, " nodes"], Int[Tensor, "one nodes_and_root"]]:
    """Level and rank of every drafted node, and the parents with the root's -1 in front: the likeliest tree.

    A node is as likely as the product of the hit rates on its path, and the next one to be added is always the
    likeliest that can be: this gives the largest expected number of accepted tokens (Medusa, section 2.3.3).
    """
    width = min(plan.width, ranks)
    levels: list[int] = []
    chosen: list[int] = []
    parents = [-1]
    # (minus the likelihood, its level, its rank, its parent); equal ones in the order of level and rank.
    candidates = [(-hits[0][rank], 0, rank, 0) for rank in range(width)]
    heapq.heapify(candidates)
    while candidates and len(levels) < plan.nodes:
        minus, level, rank, parent = heapq.heappop(candidates)
        levels.append(level)
        chosen.append(rank)
        parents.append(parent)
        if level + 1 < plan.depth:
            for each in range(width):
                heapq.heappush(candidates, (minus * hits[level + 1][each], level + 1, each, len(levels)))
    return (
        torch.tensor(levels, device=device),
        torch.tensor(chosen, device=device),
        torch.tensor([parents], device=device),
    )


drafter_class = Medusa

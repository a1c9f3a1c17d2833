"""Hydra: heads on the target's last hidden state, each of which also reads the tokens drafted before it on its path.

Ankner et al. 2024 (arXiv 2402.05109). Medusa's heads guess without knowing each other's guesses; these know the path,
so that a tree is grown from what really follows what.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from selfdraft.drafters import vocabulary
from selfdraft.drafters.base import FeatureBatch, LossSum, Observed
from selfdraft.drafters.growth import grow
from selfdraft.drafters.medusa import ResidualBlock
from selfdraft.losses import Loss, check_loss, vocabulary_loss
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target
from selfdraft.tree import DraftTree


@dataclass(frozen=True)
class HydraConfig:
    """Hydra heads."""

    heads: int = 4
    """Number of heads; the deepest draft has as many levels."""
    layers: int = 1
    """Layers of a head's MLP."""
    draft_vocab_size: int = 0
    """How many of the most frequent answer tokens it can draft; 0 for the whole vocabulary."""
    loss: Loss = "soft"
    """Training: what is minimised, `soft` (forward KL from the target), `hard` (the answer's own tokens), `reverse_kl`,
    `total_variation`, `log_acceptance` or `lk`; see docs/training.md."""
    decay: float = 0.8
    """Training: weight of head i is decay ** i."""
    depth: int = 4
    """Draft: levels of the tree."""
    width: int = 4
    """Draft: nodes expanded per level, and children of each; 1 is a chain."""
    nodes: int = 12
    """Draft: nodes that are sent to the target."""

    def __post_init__(self) -> None:
        check_loss(self.loss, self.decay)
        if self.heads < 1 or self.layers < 1:
            raise ValueError(f"Hydra needs at least one head of one layer, not {self.heads} of {self.layers}")

    def resolved(self, target: Target) -> "HydraConfig":
        """The same with the vocabulary's size filled in from the target."""
        return replace(self, draft_vocab_size=vocabulary.size_of(self.draft_vocab_size, target.vocab_size))


class PathBlock(nn.Module):
    """`R y + SiLU(W y + b)` of a hidden state and the embeddings on a path, side by side in y: a head's first layer.

    At the start it gives the hidden state, so that a fresh head says what the target's own head says.
    """

    def __init__(self, size: int, tokens: int):
        super().__init__()
        wide = (1 + tokens) * size
        self.linear = nn.Linear(wide, size)
        self.res_connection = nn.Linear(wide, size, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.eye_(self.res_connection.weight)

    def forward(self, path: Float[Tensor, "*shape wide"]) -> Float[Tensor, "*shape size"]:
        return self.res_connection(path) + silu(self.linear(path))


class Hydra(nn.Module):
    """Drafts x_{t+2+i} with head i from the target's last hidden state at t and the tokens x_{t+1} to x_{t+1+i}."""

    config_class = HydraConfig
    feature_layers: tuple[int, ...] = (-1,)
    draft_tokens: Tensor

    def __init__(self, config: HydraConfig, target: Target):
        super().__init__()
        self.config = config = config.resolved(target)
        self.lend = lambda: target  # a function, so that the target is not a submodule, not saved and not copied
        size = target.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(PathBlock(size, 1 + head), *(ResidualBlock(size) for _ in range(config.layers - 1)))
            for head in range(config.heads)
        )
        if config.draft_vocab_size < target.vocab_size:
            # The target's token id of every draft token.
            self.register_buffer("draft_tokens", torch.arange(config.draft_vocab_size))

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

    def check(self, target: Target) -> None:
        """ValueError unless they were made for this model, and the draft vocabulary is a valid one."""
        if self.target.model is not target.model:
            raise ValueError(
                "these Hydra heads use embeddings and head of another model object; load them for this one"
            )
        if self.ids is not None and not vocabulary.are_valid(self.ids, target.vocab_size):
            raise ValueError("draft_tokens has an id outside the target's vocabulary, or one id twice")

    # --- drafting -----------------------------------------------------------------------------------------------------

    def begin(self, batch_size: int) -> Float[Tensor, "draft_vocab size"]:
        """The rows of the vocabulary: all else follows from what the target has just seen."""
        return self.vocabulary_rows()

    def propose(
        self, state: Tensor, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        assert seen.features is not None, "feature_layers asks for them"
        heads = iter(self.heads)
        path = self.lengthened(seen.last(seen.features).unsqueeze(1), root.unsqueeze(1))

        def logits() -> Float[Tensor, "batch nodes draft_vocab"]:
            return linear(next(heads)(path).to(state.dtype), state)

        def step(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal path
            path = path.gather(1, parents.unsqueeze(-1).expand(-1, -1, path.shape[-1]))
            path = self.lengthened(path, tokens)
            return logits()

        return grow(root, logits(), self.ids, plan.cut(self.config.heads), step, noise, seen.lengths)

    def lengthened(
        self, path: Float[Tensor, "*shape wide"], tokens: Int[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape wider"]:
        """A hidden state and the embeddings behind it, with those of one more token each."""
        dtype = next(self.heads.parameters()).dtype
        return torch.cat([path.to(dtype), self.target.embed(tokens).to(dtype)], dim=-1)

    def vocabulary_rows(self) -> Float[Tensor, "draft_vocab size"]:
        """The target's vocabulary projection, lent. Copies rows when the draft vocabulary is a part of the target's, so
        ask once per call or step.

        A bias or soft cap of the projection (few families have one) is left out, in training as in use.
        """
        rows = self.target.head_weight()
        return rows if self.ids is None else rows[self.ids]

    # --- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, answer_counts: Int[Tensor, " vocab"]) -> None:
        """The most frequent answer tokens become the draft vocabulary."""
        if self.ids is not None:
            self.ids.copy_(vocabulary.most_frequent(answer_counts.to(self.ids.device), len(self.ids)))

    def forward(self, batch: FeatureBatch) -> LossSum:
        """Sum over heads i of decay^i * loss(target over the draft vocabulary, head i), at answer tokens.

        The token at place L is what head i predicts from the hidden state at L - 2 - i and the tokens between, and what
        it should say is the target's distribution at L - 1. Tokens outside the draft vocabulary are left out, but
        counted, so that the loss is a mean per trained token for any vocabulary.
        """
        trained = batch.trained & batch.attention
        trained[:, :2] = False  # no head reaches them
        wanted = trained & vocabulary.among(self.ids, batch.tokens, self.target.vocab_size)
        rows, places = wanted.nonzero(as_tuple=True)
        labels = vocabulary.places(self.ids, batch.tokens, self.target.vocab_size)
        weight = self.vocabulary_rows().detach()
        with torch.no_grad():
            logits = self.target.project(batch.hidden[rows, places - 1], self.ids)
            probs, best = logits.softmax(-1), logits.argmax(-1)

        total, metrics = torch.zeros((), device=trained.device), {}
        for number, head in enumerate(self.heads):
            reach = (places >= 2 + number).nonzero().squeeze(1)  # all, but for prompts shorter than the heads reach
            rows, places, probs, best = rows[reach], places[reach], probs[reach], best[reach]
            path = batch.features[rows, places - 2 - number]
            for back in range(number + 1, 0, -1):
                path = self.lengthened(path, batch.tokens[rows, places - back])
            loss, hits = vocabulary_loss(self.config.loss, head(path), weight, probs, best, labels[rows, places])
            total = total + self.config.decay**number * loss
            metrics[f"accuracy_{number + 1}"] = (hits, torch.tensor(len(rows), device=hits.device))
        return LossSum(total, trained.sum(), metrics)

    loss = forward


drafter_class = Hydra

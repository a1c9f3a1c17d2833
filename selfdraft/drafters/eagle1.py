"""EAGLE-1 and EAGLE-2: one decoder layer that foretells the target's last hidden state, for the target's own head.

Li et al. 2024 (arXiv 2401.15077). EAGLE-2 (arXiv 2406.16858) has the same weights and drafts trees that follow the
drafter's own confidence, as those of EAGLE-3, Hydra and draft models do here. The names of tensors are those of the
method's public checkpoints.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from selfdraft.cache import SlotCache
from selfdraft.drafters import vocabulary
from selfdraft.drafters.base import FeatureBatch, LossSum
from selfdraft.drafters.feedback import Feedback, pack, take
from selfdraft.drafters.layers import MLP, Attention, Layer, Memory, RMSNorm, Sizes, attend_cached, fitted
from selfdraft.losses import Loss, check_loss, vocabulary_loss
from selfdraft.target import Target, additive_mask

NOISE_LENGTH = 512  # a text of so many tokens gets `noise` as it stands; a longer one less, a shorter one more


@dataclass(frozen=True)
class Eagle1Config(Sizes):
    """An EAGLE-1 or EAGLE-2 drafter. Zero means: taken from the target, and written down when the drafter is made."""

    draft_vocab_size: int = 0
    """How many of the most frequent answer tokens it can draft; 0 for the whole vocabulary."""
    loss: Loss = "soft"
    """Training: what is minimised beside the distance to the target's hidden state, `soft` (forward KL from the
    target), `hard` (the answer's own tokens), `reverse_kl`, `total_variation`, `log_acceptance` or `lk`; see
    docs/training.md."""
    token_weight: float = 0.1
    """Training: weight of `loss`; the distance to the target's hidden state has weight 1."""
    noise: float = 0.1
    """Training: uniform noise of up to this size, times 512 / length of the text, on the hidden states it reads."""
    depth: int = 5
    """Draft: levels of the tree."""
    width: int = 4
    """Draft: nodes expanded per level, and children of each; 1 is a chain."""
    nodes: int = 16
    """Draft: nodes that are sent to the target."""

    def __post_init__(self) -> None:
        check_loss(self.loss)

    def resolved(self, target: Target) -> "Eagle1Config":
        """The same with every 0 filled in from the target. ValueError for another width than the target's."""
        if self.hidden_size not in (0, target.hidden_size):
            raise ValueError(
                f"EAGLE-1 foretells the target's hidden states, so hidden_size is {target.hidden_size}, "
                f"not {self.hidden_size}; EAGLE-3 can be narrower"
            )
        vocab = vocabulary.size_of(self.draft_vocab_size, target.vocab_size)
        return replace(self, **self.filled(target), draft_vocab_size=vocab)


class BareLayer(Layer):
    """A decoder layer whose attention reads the residual stream as it is."""

    def __init__(self, config: Eagle1Config):
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle1(Feedback):
    """Drafts x_{t+2} from the target's last hidden state at t and the embedding of x_{t+1}, then from its output."""

    config_class = Eagle1Config
    feature_layers: tuple[int, ...] = (-1,)
    draft_tokens: Tensor

    def __init__(self, config: Eagle1Config, target: Target):
        super().__init__(target)
        self.config = config = config.resolved(target)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([BareLayer(config)])
        if config.draft_vocab_size < target.vocab_size:
            # The target's token id of every draft token.
            self.register_buffer("draft_tokens", torch.arange(config.draft_vocab_size))

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """The target's token id of every draft token; None when they are the same."""
        return getattr(self, "draft_tokens", None)

    @property
    def layer(self) -> BareLayer:
        """The only one; in the method's checkpoints it is the first of a list."""
        return cast(BareLayer, self.layers[0])

    def check(self, target: Target) -> None:
        """ValueError unless it was made for this model, and the draft vocabulary is a valid one."""
        if self.target.model is not target.model:
            raise ValueError("this drafter uses embeddings and head of another model object; load it for this one")
        if self.ids is not None and not vocabulary.are_valid(self.ids, target.vocab_size):
            raise ValueError("draft_tokens has an id outside the target's vocabulary, or one id twice")

    # --- one pass -----------------------------------------------------------------------------------------------------

    def fuse(self, features: Float[Tensor, "batch time features"]) -> Float[Tensor, "batch time hidden"]:
        return fitted(features, self.fc.weight)

    def enter(
        self, tokens: Int[Tensor, "batch time"], hidden: Float[Tensor, "batch time hidden"]
    ) -> Float[Tensor, "batch time hidden"]:
        """The residual stream's beginning: the tokens' embeddings and the hidden states before them, in one."""
        return self.fc(torch.cat([self.target.embed(tokens).to(hidden.dtype), hidden], dim=-1))

    def run(
        self,
        cache: SlotCache,
        tokens: Int[Tensor, "batch time"],
        hidden: Float[Tensor, "batch time hidden"],
        positions: Int[Tensor, "batch time"],
        visible: Bool[Tensor, "batch time width"],
    ) -> Float[Tensor, "batch time hidden"]:
        """What the target's last hidden states one position further on may be."""
        layer, x = self.layer, self.enter(tokens, hidden)
        turn = self.turn(positions, x.dtype)
        return layer.finish(x, attend_cached(layer.self_attn, x, turn, cache, 0, visible))

    def rows(self) -> Float[Tensor, "draft_vocab hidden"]:
        """Those of the target, lent. Copies them when the draft vocabulary is a part of the target's, so ask once.

        A bias or soft cap of the target's projection (few families have one) is left out, in training as in use.
        """
        rows = self.target.head_weight()
        return rows if self.ids is None else rows[self.ids]

    def readout(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape hidden"]:
        """As it is: the target's final norm is in what the layer foretells."""
        return hidden

    # --- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, answer_counts: Int[Tensor, " vocab"]) -> None:
        """The most frequent answer tokens become the draft vocabulary."""
        if self.ids is not None:
            self.ids.copy_(vocabulary.most_frequent(answer_counts.to(self.ids.device), len(self.ids)))

    def forward(self, batch: FeatureBatch) -> LossSum:
        """SmoothL1(f', f) + token_weight * loss(target, head(f')), at answer tokens (the paper's section 4.2).

        f' at position t comes from the target's true hidden states up to t and the tokens up to t + 1; f is the hidden
        state at t + 1, which says what the token at t + 2 is. The distance is a mean over the numbers of a hidden
        state. Answer tokens outside the draft vocabulary are left out of the second term, but counted. In training
        mode the true hidden states get noise from torch's generator: in use they are the drafter's own, and less exact.
        """
        layer, tokens, time = self.layer, batch.tokens, batch.tokens.shape[1]
        trained = batch.trained & batch.attention
        place, used = pack(nn.functional.pad(trained, (0, 2))[:, 2:])
        features = self.fuse(batch.features)
        if self.training and self.config.noise > 0:
            size = self.config.noise * NOISE_LENGTH / batch.attention.sum(dim=1).clamp(min=1)
            features = features + (2 * torch.rand_like(features) - 1) * size.view(-1, 1, 1)
        x = self.enter(nn.functional.pad(tokens, (0, 1))[:, 1:], features)
        everywhere = torch.arange(time, device=tokens.device).expand_as(tokens)
        memory = Memory(layer.self_attn, x, self.turn(everywhere, x.dtype))
        mask = additive_mask(everywhere.unsqueeze(1) <= place.unsqueeze(2), x.dtype)
        x = take(x, place)
        foretold = layer(x, memory, x, self.turn(place, x.dtype), mask)

        index = used.flatten().nonzero().squeeze(1)
        foretold = foretold.flatten(0, 1)[index]
        true = take(batch.hidden, (place + 1).clamp(max=time - 1)).flatten(0, 1)[index]
        labels = tokens.gather(1, (place + 2).clamp(max=time - 1)).flatten()[index]
        distance = smooth_l1_loss(foretold.float(), true.float(), reduction="none").mean(dim=-1).sum()

        wanted = vocabulary.among(self.ids, labels, self.target.vocab_size).nonzero().squeeze(1)
        with torch.no_grad():
            logits = self.target.project(true[wanted], self.ids)
            probs, best = logits.softmax(-1), logits.argmax(-1)
        drafted = vocabulary.places(self.ids, labels[wanted], self.target.vocab_size)
        rows = self.rows().detach()
        loss, hits = vocabulary_loss(self.config.loss, foretold[wanted], rows, probs, best, drafted)
        count = used.sum()
        metrics = {
            "accuracy_1": (hits, torch.tensor(len(wanted), device=hits.device)),
            "distance": (distance.detach(), count),
        }
        return LossSum(distance + self.config.token_weight * loss, count, metrics)

    loss = forward


drafter_class = Eagle1

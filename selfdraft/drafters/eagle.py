"""EAGLE-3: one decoder layer that runs on the target's own hidden states and feeds its output back to itself.

Li et al. 2025 (arXiv 2503.01840). The names of modules and tensors are those of the method's public checkpoints, and of
the speculators library where the method has grown since (EAGLE-3.1: the norms; more layers).
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from selfdraft.cache import SlotCache
from selfdraft.drafters import vocabulary
from selfdraft.drafters.base import FeatureBatch, LossSum
from selfdraft.drafters.feedback import Feedback, pack, take
from selfdraft.drafters.layers import MLP, Attention, Layer, Memory, RMSNorm, Sizes, attend_cached, fitted
from selfdraft.losses import Loss, check_loss, vocabulary_loss
from selfdraft.target import Target, additive_mask


@dataclass(frozen=True)
class EagleConfig(Sizes):
    """An EAGLE-3 drafter. Zero or empty means: taken from the target, and written down when the drafter is made."""

    feature_layers: tuple[int, ...] = ()
    """Target hidden states that it reads, as HF `hidden_states` indices; by default a low, a middle and a high one."""
    draft_vocab_size: int = 0
    """How many of the most frequent answer tokens it can draft; 0 for the whole vocabulary."""
    fc_norm: bool = True
    """One RMS norm per feature layer before they are fused (EAGLE-3.1)."""
    input_norm: bool = False
    """One RMS norm over all feature layers together before they are fused; instead of `fc_norm`."""
    norm_output: bool = False
    """What a step feeds to the next is its output after the final norm, not before it (EAGLE-3.1)."""
    layers: int = 1
    """Decoder layers; those after the first are ordinary ones."""
    unroll: int = 4
    """Training: drafted steps that each feed on their own output (the method's training-time test)."""
    decay: float = 0.8
    """Training: weight of step s is decay ** s."""
    loss: Loss = "soft"
    """Training: what is minimised, `soft` (forward KL from the target), `hard` (the answer's own tokens), `reverse_kl`,
    `total_variation`, `log_acceptance` or `lk`; see docs/training.md."""
    depth: int = 5
    """Draft: levels of the tree."""
    width: int = 4
    """Draft: nodes expanded per level, and children of each; 1 is a chain."""
    nodes: int = 16
    """Draft: nodes that are sent to the target."""

    def __post_init__(self) -> None:
        check_loss(self.loss, self.decay)
        if self.fc_norm and self.input_norm:
            raise ValueError("fc_norm and input_norm both norm the features; set fc_norm to false for input_norm")
        if self.layers < 1:
            raise ValueError(f"EAGLE-3 needs at least one layer, not {self.layers}")
        if self.unroll < 1:
            raise ValueError(f"unroll is {self.unroll}: a training unrolls at least one step")

    def resolved(self, target: Target) -> "EagleConfig":
        """The same with every 0 and () filled in from the target."""
        layers = target.num_layers
        spread = sorted({min(2, layers), layers // 2, max(1, layers - 3)})
        return replace(
            self,
            **self.filled(target),
            feature_layers=self.feature_layers or tuple(spread),
            draft_vocab_size=vocabulary.size_of(self.draft_vocab_size, target.vocab_size),
        )


class FirstLayer(Layer):
    """It reads the embedding and the hidden state side by side; only the latter is carried on."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 2 * size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def read(self, embedded: Tensor, hidden: Tensor) -> Float[Tensor, "batch time wide"]:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1).to(hidden.dtype)


class FurtherLayer(Layer):
    """An ordinary decoder layer."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def read(self, embedded: Tensor, hidden: Tensor) -> Float[Tensor, "batch time wide"]:
        return self.input_layernorm(hidden)


class Eagle(Feedback):
    """Drafts x_{t+2} from the target's features at t and the embedding of x_{t+1}, then from its own output."""

    config_class = EagleConfig
    d2t: Tensor

    def __init__(self, config: EagleConfig, target: Target):
        super().__init__(target)
        self.config = config = config.resolved(target)
        size, theirs, eps = config.hidden_size, target.hidden_size, config.rms_norm_eps
        if size > theirs:
            raise ValueError(
                f"the draft layer starts from the target's weights, so hidden_size is {theirs} or less, not {size}"
            )
        wide = len(config.feature_layers) * theirs
        self.fc = nn.Linear(wide, size, bias=False)
        self.fc_norm = nn.ModuleList([RMSNorm(theirs, eps=eps) for _ in config.feature_layers if config.fc_norm])
        self.midlayer = FirstLayer(config)
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # d2t holds offsets: draft token i is target token i + d2t[i].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.layers = nn.ModuleDict({str(index): FurtherLayer(config) for index in range(1, config.layers)})
        if config.input_norm:
            self.input_norm = RMSNorm(wide, eps=eps)
        if size < theirs:  # the target's embeddings are lent, and wider
            self.embed_proj = nn.Linear(theirs, size, bias=False)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.feature_layers

    @property
    def stack(self) -> list[Layer]:
        """All decoder layers, from below. (The first has a name of its own in the method's checkpoints.)"""
        return [self.midlayer, *(cast(Layer, each) for each in self.layers.values())]

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"]:
        """The target's token id of every draft token."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def check(self, target: Target) -> None:
        """ValueError unless width and vocabulary fit, and the draft vocabulary is a valid one."""
        if self.target.model is not target.model:
            raise ValueError("this drafter lends embeddings from another model object; load it for this one")
        last = target.num_layers
        if not all(-last - 1 <= layer <= last for layer in self.feature_layers):
            raise ValueError(f"feature_layers {self.feature_layers} do not exist in {target.num_layers} layers")
        if not vocabulary.are_valid(self.ids, target.vocab_size):
            raise ValueError("d2t maps outside the target's vocabulary or maps two draft tokens to one")

    # --- one pass -----------------------------------------------------------------------------------------------------

    def run(
        self,
        cache: SlotCache,
        tokens: Int[Tensor, "batch time"],
        hidden: Float[Tensor, "batch time hidden"],
        positions: Int[Tensor, "batch time"],
        visible: Bool[Tensor, "batch time width"],
    ) -> Float[Tensor, "batch time hidden"]:
        """What the layers make of the hidden states and the tokens that follow them, to be fed to the next step."""
        embedded = self.embed(tokens)
        turn = self.turn(positions, embedded.dtype)
        for index, layer in enumerate(self.stack):
            x = layer.read(embedded, hidden)
            hidden = layer.finish(hidden, attend_cached(layer.self_attn, x, turn, cache, index, visible))
        return self.norm(hidden) if self.config.norm_output else hidden

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = fitted(self.target.embed(tokens), self.fc.weight)
        return self.embed_proj(embedded) if self.config.hidden_size < self.target.hidden_size else embedded

    def fuse(self, features: Float[Tensor, "batch time features"]) -> Float[Tensor, "batch time hidden"]:
        """The feature layers, normed each or together, fused into one hidden state."""
        features = fitted(features, self.fc.weight)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.input_norm:
            features = self.input_norm(features)
        return self.fc(features)

    def rows(self) -> Float[Tensor, "draft_vocab hidden"]:
        return self.lm_head.weight

    def readout(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape hidden"]:
        """After the final norm, which `norm_output` has seen to already."""
        return hidden if self.config.norm_output else self.norm(hidden)

    # --- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, answer_counts: Int[Tensor, " vocab"]) -> None:
        """The most frequent answer tokens become the draft vocabulary; the head starts from the target's rows.

        A narrower drafter keeps of these, and of the embeddings, the directions in which they differ most.
        """
        chosen = vocabulary.most_frequent(answer_counts.to(self.d2t.device), len(self.d2t))
        self.d2t.copy_(chosen - torch.arange(len(chosen), device=chosen.device))
        rows, size = self.target.head_weight()[chosen], self.config.hidden_size
        if size < self.target.hidden_size:
            embedded = self.target.embed(torch.arange(self.target.vocab_size, device=chosen.device))
            self.embed_proj.weight.copy_(vocabulary.main_directions(embedded, size).T)
            rows = rows.float() @ vocabulary.main_directions(rows, size)
        self.lm_head.weight.copy_(rows)
        for layer in self.stack[1:]:  # they add nothing at first, and learn what the first leaves over
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    @torch.no_grad()
    def grown(self, smaller: "Eagle") -> dict[str, Tensor]:
        """The weights of a drafter with fewer layers or draft tokens, filled up with those of this one after `start`.

        So a training goes on from where the smaller one stood: its new layers add nothing at first, and its new tokens
        have the target's rows of the head, moved as training has moved the others: by the linear map that fits those
        best. (With the target's rows alone, accuracy fell from 66 to 24 % on the embedded target; so, to 64 %.) A token
        of the smaller one that this one cannot draft is given up.
        """
        mine, weights = self.state_dict(), smaller.state_dict()
        weights |= {name: mine[name] for name in mine.keys() - weights.keys() if name.startswith("layers.")}
        if len(smaller.ids) < len(self.ids):
            known = vocabulary.among(smaller.ids, self.ids, self.target.vocab_size)
            places = vocabulary.places(smaller.ids, self.ids, self.target.vocab_size)
            rows, before = smaller.lm_head.weight[places].float(), self.lm_head.weight.float()
            moved = before @ torch.linalg.lstsq(before[known], rows[known]).solution
            weights |= {"lm_head.weight": torch.where(known.unsqueeze(1), rows, moved), "d2t": self.d2t}
        return weights

    def forward(self, batch: FeatureBatch) -> LossSum:
        """Sum over steps s of decay^s * loss(target over the draft vocabulary, drafter), at answer tokens.

        Step s at position t reads the embedding of x_{t+1+s} and predicts x_{t+2+s}. In every layer it attends to the
        entries of step 0 up to t, which stand for the committed text, and to the own entries of steps 1..s at t, which
        stand for the drafted path. Only positions whose step 0 predicts an answer token are computed beyond that; a
        step counts where its token is an answer token of the draft vocabulary (the target cannot be followed
        elsewhere). The count is that of step 0, so that the loss is a mean per trained token whatever the number of
        steps.
        """
        steps, stack = self.config.unroll, self.stack
        tokens, time = batch.tokens, batch.tokens.shape[1]
        padded = nn.functional.pad(tokens, (0, steps + 2))
        trained = nn.functional.pad(batch.trained & batch.attention, (0, steps + 2))
        place, used = pack(trained[:, 2 : time + 2])
        everywhere = torch.arange(time, device=tokens.device).expand_as(tokens)

        # Step 0 up to what the last layer reads is needed at all positions, for the later steps to look at.
        hidden, embedded = self.fuse(batch.features), self.embed(padded[:, 1 : time + 1])
        x = stack[0].read(embedded, hidden)
        dtype = hidden.dtype
        turn = self.turn(everywhere, dtype)
        memories = [Memory(stack[0].self_attn, x, turn)]
        for below, layer in zip(stack, stack[1:], strict=False):
            earlier = additive_mask(everywhere.unsqueeze(1) <= everywhere.unsqueeze(2), dtype)
            hidden = below(hidden, memories[-1], x, turn, earlier)
            x = layer.read(embedded, hidden)
            memories.append(Memory(layer.self_attn, x, turn))
        x, hidden = take(x, place), take(hidden, place)
        mask = additive_mask(everywhere.unsqueeze(1) <= place.unsqueeze(2), dtype)

        with torch.no_grad():  # the target's distribution over the draft vocabulary, computed once for all steps
            target_hidden = take(batch.hidden, (place + 1).clamp(max=time - 1))
            probs = self.target.project(target_hidden, self.ids).softmax(-1)
            likeliest = probs.max(dim=-1).indices
        draftable = vocabulary.among(self.ids, padded, self.target.vocab_size)
        labels = vocabulary.places(self.ids, padded, self.target.vocab_size)

        total, count, metrics = hidden.new_zeros((), dtype=torch.float32), used.sum(), {}
        for step in range(steps):
            turn = self.turn(place + step, dtype)
            if step == 0:
                hidden = stack[-1](hidden, memories[-1], x, turn, mask)
            else:
                embedded = self.embed(padded.gather(1, place + 1 + step))
                for layer, memory in zip(stack, memories, strict=True):
                    x = layer.read(embedded, hidden)
                    memory.append(x, turn)
                    hidden = layer(hidden, memory, x, turn, mask, step)
            hidden = self.norm(hidden) if self.config.norm_output else hidden
            label_place = place + 2 + step
            # The packed places of a turn are consecutive, so the probabilities for step s stand s places further on.
            reaches = torch.roll(place, -step, 1) == place + step
            wanted = used & reaches & (trained & draftable).gather(1, label_place)
            rows = wanted.flatten().nonzero().squeeze(1)
            loss, hits = vocabulary_loss(
                self.config.loss,
                self.readout(hidden.flatten(0, 1)[rows]),
                self.lm_head.weight,
                probs.flatten(0, 1),
                likeliest.flatten(),
                labels.gather(1, label_place).flatten()[rows],
                at=rows + step,
            )
            total = total + self.config.decay**step * loss
            metrics[f"accuracy_{step + 1}"] = (hits, wanted.sum())
        return LossSum(total, count, metrics)

    loss = forward


drafter_class = Eagle

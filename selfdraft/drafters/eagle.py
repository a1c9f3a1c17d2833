"""EAGLE-3: one decoder layer that runs on the target's own hidden states and feeds its output back to itself.

Li et al. 2025 (arXiv 2503.01840). The names of modules and tensors are those of the method's public checkpoints.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from selfdraft.cache import SlotCache
from selfdraft.drafters import vocabulary
from selfdraft.drafters.base import FeatureBatch, LossSum, Observed
from selfdraft.drafters.growth import Levels, grow
from selfdraft.losses import Loss, refuse_unknown, vocabulary_loss
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target, prompt_parts
from selfdraft.tree import DraftTree


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-3 drafter. Zero or empty means: taken from the target, and written down when the drafter is made."""

    hidden_size: int = 0
    """Width of the draft layer."""
    intermediate_size: int = 0
    """Width of the layer's MLP."""
    num_heads: int = 0
    """Attention heads."""
    num_kv_heads: int = 0
    """Key/value heads."""
    head_dim: int = 0
    """Size of one head."""
    rope_theta: float = 0.0
    """Base of the rotary position angles."""
    rms_norm_eps: float = 0.0
    """Epsilon of every norm."""
    feature_layers: tuple[int, ...] = ()
    """Target hidden states that it reads, as HF `hidden_states` indices; by default a low, a middle and a high one."""
    draft_vocab_size: int = 0
    """How many of the most frequent answer tokens it can draft; 0 for the whole vocabulary."""
    fc_norm: bool = True
    """One RMS norm per feature layer before they are fused (EAGLE-3.1)."""
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
        refuse_unknown(self.loss)

    def resolved(self, target: Target) -> "EagleConfig":
        """The same with every 0 and () filled in from the target."""
        theirs, layers = target.config, target.num_layers
        rope = getattr(theirs, "rope_parameters", None) or {}
        heads = theirs.num_attention_heads
        hidden = self.hidden_size or target.hidden_size
        spread = sorted({min(2, layers), layers // 2, max(1, layers - 3)})
        return replace(
            self,
            hidden_size=hidden,
            intermediate_size=self.intermediate_size or getattr(theirs, "intermediate_size", None) or 4 * hidden,
            num_heads=self.num_heads or heads,
            num_kv_heads=self.num_kv_heads or getattr(theirs, "num_key_value_heads", None) or heads,
            head_dim=self.head_dim or getattr(theirs, "head_dim", None) or hidden // heads,
            rope_theta=self.rope_theta or float(rope.get("rope_theta", 10000.0)),
            rms_norm_eps=self.rms_norm_eps or getattr(theirs, "rms_norm_eps", None) or 1e-5,
            feature_layers=self.feature_layers or tuple(spread),
            draft_vocab_size=min(self.draft_vocab_size or target.vocab_size, target.vocab_size),
        )


class Attention(nn.Module):
    """Grouped-query attention over inputs of twice the width; who attends to what is the caller's `attend`."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        wide, size = 2 * config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, size
        self.q_proj = nn.Linear(wide, config.num_heads * size, bias=False)
        self.k_proj = nn.Linear(wide, config.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, config.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * size, config.hidden_size, bias=False)

    def queries(self, x: Tensor, turn: "Turn") -> Float[Tensor, "batch heads time dim"]:
        return turn.apply(self.split(self.q_proj(x)))

    def keys_values(self, x: Tensor, turn: "Turn") -> tuple[Tensor, Tensor]:
        """Each [batch, kv_heads, time, dim]."""
        return turn.apply(self.split(self.k_proj(x))), self.split(self.v_proj(x))

    def split(self, x: Float[Tensor, "batch time wide"]) -> Float[Tensor, "batch heads time dim"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def spread(self, x: Float[Tensor, "batch kv_heads time dim"]) -> Float[Tensor, "batch heads time dim"]:
        """Every key/value head serves a group of query heads."""
        groups = self.heads // self.kv_heads
        return x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


class Turn:
    """Rotary position embedding (Su et al. 2021) of some positions: halves rotated against each other.

    Made once for queries and keys, with angles in float32.
    """

    def __init__(self, positions: Int[Tensor, "batch time"], head_dim: int, theta: float, dtype: torch.dtype):
        half = head_dim // 2
        rates = theta ** (-torch.arange(half, device=positions.device).float() / half)
        angles = positions[:, None, :, None].float() * rates
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def apply(self, x: Float[Tensor, "batch heads time dim"]) -> Float[Tensor, "batch heads time dim"]:
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * self.cos - right * self.sin, right * self.cos + left * self.sin], dim=-1)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` whose weight follows its input's dtype, which keeps the fused kernel under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class MLP(nn.Module):
    """The gated MLP of llama."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The decoder layer. It reads the embedding and the hidden state side by side; only the latter is carried on."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)

    def pair(self, embedded: Tensor, hidden: Tensor) -> Float[Tensor, "batch time wide"]:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def finish(self, hidden: Tensor, attended: Float[Tensor, "batch heads time dim"]) -> Tensor:
        """Residual stream after attention and MLP."""
        hidden = hidden + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class EagleState:
    """The drafter's own keys and values: slot t holds the entry of position t (feature t, token t + 1)."""

    cache: SlotCache


class Eagle(nn.Module):
    """Drafts x_{t+2} from the target's features at t and the embedding of x_{t+1}, then from its own output."""

    config_class = EagleConfig
    d2t: Tensor

    def __init__(self, config: EagleConfig, target: Target):
        super().__init__()
        self.config = config = config.resolved(target)
        self.lend = lambda: target  # a function, so that the target is not a submodule, not saved and not copied
        size, eps = config.hidden_size, config.rms_norm_eps
        if size != target.hidden_size:
            raise ValueError(
                f"the draft layer reads the target's embeddings, so hidden_size is {target.hidden_size}, not {size}"
            )
        self.fc = nn.Linear(len(config.feature_layers) * target.hidden_size, size, bias=False)
        norms = [RMSNorm(target.hidden_size, eps=eps) for _ in config.feature_layers if config.fc_norm]
        self.fc_norm = nn.ModuleList(norms)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # d2t holds offsets: draft token i is target token i + d2t[i].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @property
    def target(self) -> Target:
        return self.lend()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.feature_layers

    @property
    def plan(self) -> Plan:
        return Plan(self.config.depth, self.config.width, self.config.nodes)

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"]:
        """The target's token id of every draft token."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def check(self, target: Target) -> None:
        """ValueError unless width and vocabulary fit, and the draft vocabulary is a valid one."""
        if self.target.model is not target.model:
            raise ValueError("this drafter lends embeddings from another model object; load it for this one")
        if max(self.feature_layers) > target.num_layers:
            raise ValueError(f"feature_layers {self.feature_layers} do not exist in {target.num_layers} layers")
        if not vocabulary.are_valid(self.ids, target.vocab_size):
            raise ValueError("d2t maps outside the target's vocabulary or maps two draft tokens to one")

    # --- drafting -----------------------------------------------------------------------------------------------------

    def begin(self, batch_size: int) -> EagleState:
        return EagleState(SlotCache(capacity=1024))

    def propose(
        self, state: EagleState, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        hidden = seen.last(self.read(state.cache, seen, root)).unsqueeze(1)
        logits = self.logits(hidden)
        levels = Levels(state.cache, seen.lengths, seen.longest)

        def step(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal hidden
            hidden = hidden.gather(1, parents.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            positions, visible, _ = levels.next(parents)
            hidden = self.attend(state.cache, tokens, hidden, positions, visible)
            return self.logits(hidden)

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
            outputs.append(self.attend(cache, tokens[:, part], hidden, positions, visible))
        return torch.cat(outputs, dim=1)

    def attend(
        self,
        cache: SlotCache,
        tokens: Int[Tensor, "batch time"],
        hidden: Float[Tensor, "batch time hidden"],
        positions: Int[Tensor, "batch time"],
        visible: Bool[Tensor, "batch time width"],
    ) -> Float[Tensor, "batch time hidden"]:
        """The layer's output, its keys and values written where `cache` was opened."""
        attention = self.midlayer.self_attn
        x = self.midlayer.pair(self.embed(tokens), hidden)
        turn = self.turn(positions, x.dtype)
        keys, values = cache.update(*attention.keys_values(x, turn), layer_idx=0)
        # The query heads of one key/value head lie along the time axis: so its keys and values need no copies.
        groups, time = attention.heads // attention.kv_heads, x.shape[1]
        queries = attention.queries(x, turn).unflatten(1, (-1, groups)).flatten(2, 3)
        attended = scaled_dot_product_attention(queries, keys, values, visible.repeat(1, groups, 1).unsqueeze(1))
        return self.midlayer.finish(hidden, attended.unflatten(2, (groups, time)).flatten(1, 2))

    def turn(self, positions: Int[Tensor, "batch time"], dtype: torch.dtype) -> Turn:
        return Turn(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.fc.weight.dtype)

    def fuse(self, features: Float[Tensor, "batch time features"]) -> Float[Tensor, "batch time hidden"]:
        """The feature layers, each normed, fused into one hidden state."""
        features = features.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    # --- training -----------------------------------------------------------------------------------------------------

    def start(self, answer_counts: Int[Tensor, " vocab"]) -> None:
        """The most frequent answer tokens become the draft vocabulary; the head starts from the target's rows."""
        chosen = vocabulary.most_frequent(answer_counts.to(self.d2t.device), len(self.d2t))
        self.d2t.copy_(chosen - torch.arange(len(chosen), device=chosen.device))
        with torch.no_grad():
            self.lm_head.weight.copy_(self.target.head_weight()[chosen])

    def forward(self, batch: FeatureBatch) -> LossSum:
        """Sum over steps s of decay^s * loss(target over the draft vocabulary, drafter), at answer tokens.

        Step s at position t reads the embedding of x_{t+1+s} and predicts x_{t+2+s}. It attends to the entries of
        step 0 up to t, which stand for the committed text, and to the own entries of steps 1..s at t, which stand
        for the drafted path. Only positions whose step 0 predicts an answer token are computed at all; a step counts
        where its token is an answer token of the draft vocabulary (the target cannot be followed elsewhere).
        The count is that of step 0, so that the loss is a mean per trained token whatever the number of steps.
        """
        layer, attention, steps = self.midlayer, self.midlayer.self_attn, self.config.unroll
        tokens, time = batch.tokens, batch.tokens.shape[1]
        padded = nn.functional.pad(tokens, (0, steps + 2))
        trained = nn.functional.pad(batch.trained & batch.attention, (0, steps + 2))
        place, used = pack(trained[:, 2 : time + 2])

        hidden = self.fuse(batch.features)
        everywhere = torch.arange(time, device=tokens.device).expand_as(tokens)
        x = layer.pair(self.embed(padded[:, 1 : time + 1]), hidden)
        keys, values = attention.keys_values(x, self.turn(everywhere, x.dtype))
        x, hidden = take(x, place), take(hidden, place)
        seen = everywhere.unsqueeze(1) <= place.unsqueeze(2)
        with torch.no_grad():  # the target's distribution over the draft vocabulary, computed once for all steps
            target_hidden = take(batch.hidden, (place + 1).clamp(max=time - 1))
            probs = self.target.project(target_hidden, self.ids).softmax(-1)
        likeliest = probs.float().argmax(dim=-1)
        draftable = vocabulary.among(self.ids, padded, self.target.vocab_size)
        labels = vocabulary.places(self.ids, padded, self.target.vocab_size)

        total, count, metrics = hidden.new_zeros((), dtype=torch.float32), used.sum(), {}
        own_keys, own_values = [], []
        for step in range(steps):
            turn = self.turn(place + step, x.dtype)
            if step > 0:
                x = layer.pair(self.embed(padded.gather(1, place + 1 + step)), hidden)
                own_key, own_value = attention.keys_values(x, turn)
                own_keys.append(own_key)
                own_values.append(own_value)
            queries = attention.queries(x, turn)
            attended = attend_unrolled(attention, queries, keys, values, own_keys, own_values, seen)
            hidden = layer.finish(hidden, attended)
            label_place = place + 2 + step
            # The packed places of a turn are consecutive, so the probabilities for step s stand s places further on.
            reaches = torch.roll(place, -step, 1) == place + step
            wanted = used & reaches & (trained & draftable).gather(1, label_place)
            rows = wanted.flatten().nonzero().squeeze(1)
            loss, hits = vocabulary_loss(
                self.config.loss,
                self.norm(hidden.flatten(0, 1)[rows]),
                self.lm_head.weight,
                probs.flatten(0, 1)[rows + step],
                likeliest.flatten()[rows + step],
                labels.gather(1, label_place).flatten()[rows],
            )
            total = total + self.config.decay**step * loss
            metrics[f"accuracy_{step + 1}"] = (hits, wanted.sum())
        return LossSum(total, count, metrics)

    loss = forward


def pack(wanted: Bool[Tensor, "batch time"]) -> tuple[Int[Tensor, "batch places"], Bool[Tensor, "batch places"]]:
    """The places of the True entries of each row, in order, and which of them are real (the rest fills the shape)."""
    counts = wanted.sum(dim=1)
    most = max(1, int(counts.max()))
    place = (~wanted).long().argsort(dim=1, stable=True)[:, :most]
    return place, torch.arange(most, device=wanted.device) < counts.unsqueeze(1)


def take(values: Float[Tensor, "batch time size"], place: Int[Tensor, "batch places"]) -> Tensor:
    return values.gather(1, place.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def attend_unrolled(
    attention: Attention,
    queries: Float[Tensor, "batch heads places dim"],
    keys: Float[Tensor, "batch kv_heads time dim"],
    values: Float[Tensor, "batch kv_heads time dim"],
    own_keys: list[Tensor],
    own_values: list[Tensor],
    seen: Bool[Tensor, "batch places time"],
) -> Float[Tensor, "batch heads places dim"]:
    """One softmax over the step-0 entries that a place may see and its own entries of the later steps."""
    keys, values = attention.spread(keys), attention.spread(values)
    if not own_keys:
        return scaled_dot_product_attention(queries, keys, values, seen.unsqueeze(1))
    scale = queries.shape[-1] ** -0.5
    shared = (queries @ keys.transpose(2, 3)).masked_fill(~seen.unsqueeze(1), float("-inf"))
    own = torch.stack([(queries * attention.spread(key)).sum(-1) for key in own_keys], dim=-1)
    weights = (torch.cat([shared, own.to(shared.dtype)], dim=-1) * scale).softmax(dim=-1).to(values.dtype)
    attended = weights[..., : keys.shape[2]] @ values
    for index, value in enumerate(own_values):
        attended = attended + weights[..., keys.shape[2] + index, None] * attention.spread(value)
    return attended


drafter_class = Eagle

"""The parts of a llama decoder layer, for the drafters that have layers of their own."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from selfdraft.cache import SlotCache
from selfdraft.drafters.attention import attend_jointly
from selfdraft.target import Target


@dataclass(frozen=True)
class Sizes:
    """What a decoder layer is made of. Zero means: taken from the target, and written down when the drafter is made."""

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

    def filled(self, target: Target) -> dict[str, Any]:
        """The same as values by name, every 0 filled in from the target. ValueError for sizes that do not fit."""
        theirs = target.config
        rope = getattr(theirs, "rope_parameters", None) or {}
        heads = theirs.num_attention_heads
        hidden = self.hidden_size or target.hidden_size
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": self.intermediate_size or getattr(theirs, "intermediate_size", None) or 4 * hidden,
            "num_heads": self.num_heads or heads,
            "num_kv_heads": self.num_kv_heads or getattr(theirs, "num_key_value_heads", None) or heads,
            "head_dim": self.head_dim or getattr(theirs, "head_dim", None) or hidden // heads,
            "rope_theta": self.rope_theta or float(rope.get("rope_theta", 10000.0)),
            "rms_norm_eps": self.rms_norm_eps or getattr(theirs, "rms_norm_eps", None) or 1e-5,
        }
        for name, value in sizes.items():
            if value <= 0:
                raise ValueError(f"{name} is {value}, and has to be above 0; 0 takes the target's")
        if sizes["num_heads"] % sizes["num_kv_heads"] or sizes["head_dim"] % 2:
            raise ValueError(
                f"num_heads {sizes['num_heads']} has to be a multiple of num_kv_heads {sizes['num_kv_heads']}, and "
                f"head_dim {sizes['head_dim']} an even number"
            )
        return sizes


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


def fitted(x: Tensor, weight: Tensor) -> Tensor:
    """In the dtype of a weight that it will meet; under autocast as it is, which has every product fit its factors."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` whose weight follows its input's dtype, which keeps the fused kernel under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention over inputs of width `wide`; who attends to what is the caller's affair."""

    def __init__(self, config: Sizes, wide: int):
        super().__init__()
        size = config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, size
        self.q_proj = nn.Linear(wide, config.num_heads * size, bias=False)
        self.k_proj = nn.Linear(wide, config.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, config.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * size, config.hidden_size, bias=False)

    def queries(self, x: Tensor, turn: Turn) -> Float[Tensor, "batch heads time dim"]:
        return turn.apply(self.split(self.q_proj(x)))

    def keys_values(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Each [batch, kv_heads, time, dim]."""
        return turn.apply(self.split(self.k_proj(x))), self.split(self.v_proj(x))

    def split(self, x: Float[Tensor, "batch time wide"]) -> Float[Tensor, "batch heads time dim"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def spread(self, x: Float[Tensor, "batch kv_heads time dim"]) -> Float[Tensor, "batch heads time dim"]:
        """Every key/value head serves a group of query heads."""
        groups = self.heads // self.kv_heads
        return x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


class MLP(nn.Module):
    """The gated MLP of llama."""

    def __init__(self, config: Sizes):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer, which says what its attention reads, and goes on as llama's does."""

    self_attn: Attention
    mlp: MLP
    post_attention_layernorm: RMSNorm

    def read(self, embedded: Tensor, hidden: Tensor) -> Float[Tensor, "batch time wide"]:
        """The attention's input, of the token's embedding and the residual stream."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, memory: "Memory", x: Tensor, turn: Turn, mask: Tensor, own: int = 0) -> Tensor:
        """Training: the residual stream after a pass of queries over `memory`, of whose own entries they see `own`.

        All that a step of training computes in a layer, so that it can be computed again instead of kept.
        """
        return self.finish(hidden, memory.attend(x, turn, mask, own))

    def finish(self, hidden: Tensor, attended: Float[Tensor, "batch heads time dim"]) -> Tensor:
        """Residual stream after attention and MLP."""
        hidden = hidden + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def attend_cached(
    attention: Attention,
    x: Float[Tensor, "batch time wide"],
    turn: Turn,
    cache: SlotCache,
    layer: int,
    visible: Bool[Tensor, "batch time width"],
) -> Float[Tensor, "batch heads time dim"]:
    """Attention over the cache of layer `layer`; keys and values of `x` are written where the cache was opened."""
    keys, values = cache.update(*attention.keys_values(x, turn), layer_idx=layer)
    # The query heads of one key/value head lie along the time axis: so its keys and values need no copies.
    groups, time = attention.heads // attention.kv_heads, x.shape[1]
    queries = attention.queries(x, turn).unflatten(1, (-1, groups)).flatten(2, 3)
    attended = scaled_dot_product_attention(queries, keys, values, visible.repeat(1, groups, 1).unsqueeze(1))
    return attended.unflatten(2, (groups, time)).flatten(1, 2)


class Memory:
    """What the queries of a training pass look at in one layer: the text's entries, and each query's own later ones."""

    def __init__(self, attention: Attention, x: Float[Tensor, "batch time wide"], turn: Turn):
        self.attention = attention
        self.keys, self.values = attention.keys_values(x, turn)
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def append(self, x: Float[Tensor, "batch places wide"], turn: Turn) -> None:
        """One more entry for every query, which it alone sees."""
        key, value = self.attention.keys_values(x, turn)
        self.own_keys.append(key)
        self.own_values.append(value)

    def attend(
        self, x: Float[Tensor, "batch places wide"], turn: Turn, mask: Float[Tensor, "batch 1 places time"], own: int
    ) -> Float[Tensor, "batch heads places dim"]:
        """One softmax over the text's entries that the additive `mask` leaves a query, and its first `own` ones."""
        attention = self.attention
        keys, values, queries = attention.spread(self.keys), attention.spread(self.values), attention.queries(x, turn)
        if own == 0:
            return scaled_dot_product_attention(queries, keys, values, mask)
        own_keys = torch.stack([attention.spread(key) for key in self.own_keys[:own]], dim=2)
        own_values = torch.stack([attention.spread(value) for value in self.own_values[:own]], dim=2)
        return attend_jointly(queries, keys, values, mask, own_keys, own_values)

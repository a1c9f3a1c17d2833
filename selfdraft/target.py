"""Target: the one file that knows Hugging Face names. Scores a tree in one pass of any causal LM."""

import hashlib
import inspect
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from selfdraft.cache import SlotCache

PROMPT_PART = 512  # prompt tokens per pass: bounds the memory of activations and masks

_ALIBI = {"bloom", "mpt", "mpt-7b"}
_LOOKS_FOR_PADDING = {"gpt2", "biogpt"}  # without a mask these read or build one from the text, on the host
_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


class Target:
    """A Hugging Face causal LM as drafting needs it. Holds a reference; stores nothing on the model.

    Raises ValueError for models whose cache cannot be rolled back, or whose attention takes no explicit mask.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config()
        refuse(model, self.config)
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.window: int | None = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or [])
        self.layer_kinds = kinds or {"sliding_attention" if self.window else "full_attention"}
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def read(
        self,
        tokens: Int[Tensor, "batch time"],
        positions: Int[Tensor, "batch time"],
        end: int,
        start: int | None,
        cache: SlotCache,
        layers: tuple[int, ...] = (),
        logits_to_keep: int = 0,
    ) -> tuple[Float[Tensor, "batch kept vocab"], Float[Tensor, "batch time features"] | None]:
        """One forward pass over text: every token goes to the slot of its position, and sees the slots up to there.

        No position is `end` or more. `start` is the first one where all rows continue alike. Then most models make
        their own causal mask, or need none, and run the kernels of their own `generate`. Returns what `score` returns.
        """
        if start is not None and self.config.model_type not in _LOOKS_FOR_PADDING:
            cache.extend(start, start + tokens.shape[1])
            return self._forward(tokens, positions, None, cache, layers, logits_to_keep)
        slots = torch.arange(cache.open(positions, end), device=tokens.device).expand(len(tokens), -1)
        masks = self._masks(slots.unsqueeze(1) <= positions.unsqueeze(2), positions, slots)
        return self._forward(tokens, positions, masks, cache, layers, logits_to_keep)

    def score(
        self,
        tokens: Int[Tensor, "batch nodes"],
        positions: Int[Tensor, "batch nodes"],
        visible: Bool[Tensor, "batch nodes width"],
        slot_positions: Int[Tensor, "batch width"],
        cache: SlotCache,
        layers: tuple[int, ...] = (),
        logits_to_keep: int = 0,
    ) -> tuple[Float[Tensor, "batch kept vocab"], Float[Tensor, "batch nodes features"] | None]:
        """One forward pass: logits after every node (or the last `logits_to_keep`), and the asked hidden states.

        `visible[b, n, s]` says whether node n attends to slot s, `slot_positions[b, s]` which position slot s holds
        (for the sliding window). Writes the nodes' keys and values into the slots that `cache.open` named. `layers`
        are HF `hidden_states` indices; the features are their concatenation.
        """
        masks = self._masks(visible, positions, slot_positions)
        return self._forward(tokens, positions, masks, cache, layers, logits_to_keep)

    def _forward(
        self, tokens: Tensor, positions: Tensor, masks: Any, cache: SlotCache, layers: tuple, logits_to_keep: int
    ) -> tuple[Tensor, Tensor | None]:
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            output_hidden_states=sorted(set(layers)) or False,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **{self._cache_name: cache},
        )
        features = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1) if layers else None
        return output.logits, features

    def encode(
        self, tokens: Int[Tensor, "batch time"], layers: tuple[int, ...]
    ) -> tuple[Float[Tensor, "batch time features"], Float[Tensor, "batch time hidden"]]:
        """Hidden states of right-padded text for training: the concatenated `layers`, and the last one (post-norm).

        The vocabulary projection is left out: a trainer wants it at few positions only (see `project`). Padding on
        the right needs no mask under causal attention, and without one attention takes its fastest kernel; what
        stands at padding is meaningless.
        """
        output = self.model.base_model(
            input_ids=tokens,
            use_cache=False,
            output_hidden_states=sorted({*layers, -1}),
            return_dict=True,
        )
        states = output.hidden_states
        return torch.cat([states[layer] for layer in layers], dim=-1) if layers else states[-1][..., :0], states[-1]

    def embed(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """The target's input embeddings, lent."""
        return self.model.get_input_embeddings()(tokens)

    def project(
        self, hidden: Float[Tensor, "*shape hidden"], ids: Int[Tensor, " kept"] | None = None
    ) -> Float[Tensor, "*shape kept"]:
        """The target's vocabulary projection (soft-capped where the family does so), lent; of the tokens `ids` alone
        when given, which costs only as much as there are."""
        head = self.model.get_output_embeddings()
        hidden = hidden.to(head.weight.dtype)
        if ids is None:
            logits = head(hidden)
        else:
            bias = getattr(head, "bias", None)
            logits = torch.nn.functional.linear(hidden, head.weight[ids], None if bias is None else bias[ids])
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The decoder layers, whatever the family calls them."""
        lists = (part for part in self.model.modules() if isinstance(part, torch.nn.ModuleList))
        return next(layers for layers in lists if len(layers) == self.num_layers)

    def identity(self) -> dict:
        """What a drafter remembers of the target it was trained for. Independent of the dtype it was loaded in."""
        name = str(self.config._name_or_path)
        embedding = self.model.get_input_embeddings().weight
        rows = embedding[:: max(1, len(embedding) // 64), :64]
        digest = hashlib.sha256(rows.detach().to("cpu", torch.bfloat16).float().numpy().tobytes())
        return {
            "name": Path(name).name if Path(name).exists() else name,
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "fingerprint": digest.hexdigest()[:16],
        }

    def _masks(self, visible: Tensor, positions: Tensor, slot_positions: Tensor) -> Tensor | dict[str, Tensor]:
        masks = {kind: visible for kind in self.layer_kinds}
        if "sliding_attention" in masks and self.window is not None:
            distance = positions.unsqueeze(2) - slot_positions.unsqueeze(1)
            masks["sliding_attention"] = visible & (distance < self.window)
        masks = {kind: self._as_attention_mask(mask) for kind, mask in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_attention_mask(self, visible: Tensor) -> Tensor:
        """What is added to the scores. sdpa would take booleans too, but turn them into this in every layer."""
        zeros = torch.zeros((), dtype=self.dtype, device=visible.device)
        return torch.where(visible, zeros, torch.finfo(self.dtype).min).unsqueeze(1)


def prompt_parts(length: int) -> list[slice]:
    """Where a prompt of `length` tokens is cut for reading."""
    return [slice(first, min(first + PROMPT_PART, length)) for first in range(0, length, PROMPT_PART)]


def refuse(model: PreTrainedModel, config: Any) -> None:
    """ValueError, by name, for a model that cannot be verified by slots."""
    kind = config.model_type
    layer_types = set(getattr(config, "layer_types", None) or [])
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder model; selfdraft decodes causal language models only")
    if getattr(model, "_is_stateful", False) or layer_types - _ATTENTION_KINDS - {"chunked_attention"}:
        raise ValueError(
            f"{kind} keeps a recurrent state, which cannot be rolled back when a draft is rejected; "
            "use model.generate without selfdraft for this model"
        )
    if "chunked_attention" in layer_types:
        raise ValueError(f"{kind} uses chunked attention, which selfdraft has no mask for yet")
    if kind in _ALIBI or getattr(config, "alibi", False):
        raise ValueError(
            f"{kind} uses ALiBi, whose bias follows the order of the cache and not the positions of a tree"
        )
    if kind == "gpt_neo":
        raise ValueError(f"{kind} cuts its own causal mask by the length of the cache, whatever mask it is given")
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attention '{config._attn_implementation}' takes no explicit 4-D mask; load the model with "
            "attn_implementation='sdpa' (or 'eager')"
        )

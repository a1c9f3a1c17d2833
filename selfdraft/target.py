"""Target: the one file that knows Hugging Face names. Scores a tree in one pass of any causal LM."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from selfdraft.cache import SlotCache

PROMPT_PART = 512  # prompt tokens per pass: bounds the memory of activations and masks

_INDEXED = "keeps an index of the text beside its keys and values, which selfdraft's cache has no place for"
_OWN_WAYS = {
    "blt": "cuts the text into patches of its own, and what follows a token depends on where they end",
    "dory": "runs its layers in loops that read the cache by themselves",
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "git": "builds its mask around an image in front of the text",
    "gpt_neo": "cuts its own causal mask by the length of the cache, whatever mask it is given",
    "xlm": "takes no explicit 4-D mask",
}
# Their hidden states are not one per layer of [batch, time, hidden].
_ODD_STATES = {"gemma3n", "gemma3n_text", "longcat_flash"}
_ALWAYS_CAUSAL = {"gpt_neox", "gpt_neox_japanese"}  # whatever their is_decoder says
_ALIBI = {"bloom", "mpt", "mpt-7b"}
# Without a mask these read or build one from the text, on the host; opt with older transformers.
_LOOKS_FOR_PADDING = {"gpt2", "biogpt", "opt"}
_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


class Target:
    """A Hugging Face causal LM as drafting needs it. Holds a reference; stores nothing on the model.

    Raises ValueError for models whose cache cannot be rolled back, or whose attention takes no explicit mask.
    """

    model: PreTrainedModel

    def __init__(self, model: torch.nn.Module):
        self.model = unwrapped(model)
        self.config = self.model.config.get_text_config()
        refuse(self.model, self.config)
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.vocab_size: int = stored_weight(self.model.get_output_embeddings()).shape[0]
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = device_of(self.model.get_input_embeddings())
        self.adapter = adapter_of(self.model)  # a drafter keeps its Target, and so remembers which one it was made for
        self.window: int | None = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or [])
        self.layer_kinds = kinds or {"sliding_attention" if self.window else "full_attention"}
        # Learned positions end where their table does; rotary ones go on.
        learned = getattr(self.config, "rope_parameters", None) is None
        self.position_limit: int | None = getattr(self.config, "max_position_embeddings", None) if learned else None
        self.logit_scale = logit_scale(self.config)
        self.uncompiled = uncompiled(self.model)
        self._cache_name = "cache" if "cache" in arguments_of(type(self.model).forward) else "past_key_values"

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
        if start is not None and self.uncompiled is None and self.config.model_type not in _LOOKS_FOR_PADDING:
            cache.extend(start, start + tokens.shape[1])
            return self._forward(tokens, positions, None, cache, layers, logits_to_keep)
        # Slots of their own: torch.compile makes another graph for passes where two inputs are one tensor.
        width = cache.open(positions.clone(), end)
        slots = torch.arange(width, device=tokens.device).expand(len(tokens), -1)
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
        # The first pass makes the cache's tensors, and would be one more graph: it is not worth its compilation.
        run = self.model if self.uncompiled is None or cache.keys else self.uncompiled
        output = run(
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
        self,
        tokens: Int[Tensor, "batch time"],
        layers: tuple[int, ...],
        positions: Int[Tensor, "batch time"] | None = None,
    ) -> tuple[Float[Tensor, "batch time features"], Float[Tensor, "batch time hidden"]]:
        """Hidden states of right-padded text for training: the concatenated `layers`, and the last one (post-norm).

        The vocabulary projection is left out: a trainer wants it at few positions only (see `project`). Padding on
        the right needs no mask under causal attention, and without one attention takes its fastest kernel; what
        stands at padding is meaningless. Several texts in one row, none of which sees another, are told by their
        `positions`, which begin anew with each of them (transformers then makes the mask, or the flash kernel's
        lengths).
        """
        if layers:
            self.refuse_odd_states()
        output = self.model.base_model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            output_hidden_states=sorted(set(layers)) or False,
            return_dict=True,
        )
        states, last = output.hidden_states, output.last_hidden_state
        return torch.cat([states[layer] for layer in layers], dim=-1) if layers else last[..., :0], last

    def refuse_odd_states(self) -> None:
        """ValueError for a model whose hidden states neither a drafter nor the caller can be given."""
        if self.config.model_type in _ODD_STATES:
            raise ValueError(
                f"the hidden states of {self.config.model_type} are of a shape of their own: output_hidden_states and "
                "drafters that read them (eagle, medusa) are not supported; take 'ngram' or a draft model"
            )

    def embed(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """The target's input embeddings, lent."""
        return self.model.get_input_embeddings()(tokens)

    def project(
        self, hidden: Float[Tensor, "*shape hidden"], ids: Int[Tensor, " kept"] | None = None
    ) -> Float[Tensor, "*shape kept"]:
        """The target's vocabulary projection (scaled and soft-capped where the family does so), lent; of the tokens
        `ids` alone when given, which costs only as much as there are."""
        head = self.model.get_output_embeddings()
        if ids is None:
            weight = stored_weight(head)
            logits = head(hidden.to(weight.dtype if weight.is_floating_point() else self.dtype))
        else:
            weight, bias = lent_weight(head).to(self.device), getattr(head, "bias", None)
            bias = None if bias is None else bias[ids]
            logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight[ids], bias)
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def head_weight(self) -> Float[Tensor, "vocab hidden"]:
        """The weight of the target's vocabulary projection, lent, on the target's device.

        It is the model's own tensor, but where that lies elsewhere, is offloaded or is quantized: then a copy. In the
        families that scale their logits, a copy that is scaled.
        """
        weight = lent_weight(self.model.get_output_embeddings()).to(self.device)
        return weight if self.logit_scale == 1 else weight * self.logit_scale

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The decoder layers, whatever the family calls them."""
        lists = (part for part in self.model.modules() if isinstance(part, torch.nn.ModuleList))
        return next(layers for layers in lists if len(layers) == self.num_layers)

    def identity(self) -> dict:
        """What a drafter remembers of the target it was trained for. Independent of the dtype it was loaded in."""
        name = str(self.config._name_or_path)
        embedding = lent_weight(self.model.get_input_embeddings())
        rows = embedding[:: max(1, len(embedding) // 64), :64]
        digest = hashlib.sha256(rows.detach().to("cpu", torch.bfloat16).float().numpy().tobytes())
        return {
            "name": Path(name).name if Path(name).exists() else name,
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "fingerprint": digest.hexdigest()[:16],
            "adapter": self.adapter,
        }

    def _masks(self, visible: Tensor, positions: Tensor, slot_positions: Tensor) -> Tensor | dict[str, Tensor]:
        masks = {kind: visible for kind in self.layer_kinds}
        if "sliding_attention" in masks and self.window is not None:
            distance = positions.unsqueeze(2) - slot_positions.unsqueeze(1)
            masks["sliding_attention"] = visible & (distance < self.window)
        masks = {kind: additive_mask(mask, self.dtype) for kind, mask in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def additive_mask(
    visible: Bool[Tensor, "batch queries width"], dtype: torch.dtype
) -> Float[Tensor, "batch 1 queries width"]:
    """What is added to the scores. sdpa would take booleans too, but turn them into this in every layer."""
    zeros = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zeros, torch.finfo(dtype).min).unsqueeze(1)


def prompt_parts(length: int) -> list[slice]:
    """Where a prompt of `length` tokens is cut for reading."""
    return [slice(first, min(first + PROMPT_PART, length)) for first in range(0, length, PROMPT_PART)]


@functools.cache
def arguments_of(forward: Callable) -> set[str]:
    """What the forward of a class of models takes by name. (That of a model may have something around it.)"""
    return set(inspect.signature(forward).parameters)


def logit_scale(config: Any) -> float:
    """What a family multiplies its logits by (cohere, hyperclovax), or divides them by (granite and its kin)."""
    scaling = getattr(config, "logits_scaling", None) or 1
    divided = scaling if config.model_type.startswith("hyperclovax") else 1 / scaling
    return getattr(config, "logit_scale", None) or divided


def refuse(model: PreTrainedModel, config: Any) -> None:
    """ValueError, by name, for a model that cannot be verified by slots."""
    kind = config.model_type
    takes = arguments_of(type(model).forward)
    strange = set(getattr(config, "layer_types", None) or []) - _ATTENTION_KINDS
    unmasked = {each for each in strange if each.endswith("_attention") and each != "linear_attention"}
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder model; selfdraft decodes causal language models only")
    if kind in _OWN_WAYS:
        raise ValueError(f"{kind} {_OWN_WAYS[kind]}")
    if getattr(model, "_is_stateful", False) or strange - unmasked:
        raise ValueError(
            f"{kind} keeps a recurrent state, which cannot be rolled back when a draft is rejected; "
            "use model.generate without selfdraft for this model"
        )
    if unmasked:
        named = " and ".join(each.replace("_", " ") for each in sorted(unmasked))
        raise ValueError(f"{kind} uses {named}, which selfdraft has no mask for yet")
    if kind in _ALIBI or getattr(config, "alibi", False):
        raise ValueError(
            f"{kind} uses ALiBi, whose bias follows the order of the cache and not the positions of a tree"
        )
    if getattr(config, "is_decoder", True) is False and kind not in _ALWAYS_CAUSAL:
        raise ValueError(f"{kind} reads in both directions; if it is a causal model, load it with is_decoder=True")
    if "position_ids" not in takes:
        raise ValueError(f"{kind} takes no position_ids: it counts positions by itself, and a tree has several of one")
    if not takes & {"cache", "past_key_values"}:
        raise ValueError(f"{kind} takes no cache, so every token would cost a pass over the whole text")
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attention '{config._attn_implementation}' takes no explicit 4-D mask; load the model with "
            "attn_implementation='sdpa' (or 'eager')"
        )


# --- Models that are not as they came ---------------------------------------------------------------------------------


def unwrapped(model: Any) -> Any:
    """The model itself: adapters of peft lie inside of what they adapt, torch.compile wraps it without a change.

    ValueError, by name, for an adapter that is more than other weights of the same model.
    """
    # Within peft's own generate, all that the base model shows of it is a borrowed method.
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    for config in (getattr(each, "active_peft_config", None) for each in (model, owner)):
        if config is not None and config.is_prompt_learning:
            raise ValueError(f"{config.peft_type.value} puts its own tokens in front of the text; use a LoRA adapter")
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError("an activated LoRA (alora_invocation_tokens) looks for its place in the text; merge it")
    return getattr(model, "get_base_model", lambda: getattr(model, "_orig_mod", model))()


def stored_weight(module: Any) -> Tensor:
    """The weight of an embedding or projection as it is kept: maybe offloaded (without values), maybe quantized."""
    return module.weight() if callable(module.weight) else module.weight  # torch's quantized modules have a method


def lent_weight(module: Any) -> Tensor:
    """The weight of an embedding or projection as plain numbers, fetched when offloaded."""
    weight = stored_weight(module)
    if weight.is_meta and hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device  # whoever offloaded the model has it

        with align_module_device(module):
            weight = module.weight.detach()
    return weight.dequantize() if weight.is_quantized else weight


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a module computes: of an offloaded one, accelerate's hook knows; its weights have no values there."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return stored_weight(module).device if device is None else torch.device(device)


def uncompiled(model: PreTrainedModel) -> Callable | None:
    """The pass of a model as it was before torch.compile, by either of its two ways; None when it is not compiled."""
    compiled = model._compiled_call_impl is not None
    return getattr(model.forward, "_torchdynamo_orig_callable", model._call_impl if compiled else None)


def adapter_of(model: PreTrainedModel) -> str | None:
    """A hash of the adapters of peft that are switched on, None without: the same in any dtype, under any name."""
    if not hasattr(model, "peft_config"):
        return None
    digest, found = hashlib.sha256(), False
    for place, layer in model.named_modules():
        if not hasattr(layer, "adapter_layer_names") or layer.disable_adapters:
            continue
        for part in layer.adapter_layer_names:
            for name, weight in getattr(layer, part).named_parameters():
                adapter, _, inner = name.partition(".")
                if adapter not in layer.active_adapters or weight.is_meta:  # offloaded ones are not looked at
                    continue
                scale, found = getattr(layer, "scaling", {}).get(adapter, 1), True
                digest.update(f"{place} {part} {inner} {list(weight.shape)} {scale:g}".encode())
                numbers = weight.detach().to("cpu", torch.bfloat16).contiguous()
                digest.update(numbers.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16] if found else None

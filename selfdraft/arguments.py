"""What becomes of every argument of transformers' `generate`: honoured, mapped, refused, or without effect.

`docs/generate.md` shows this table; a test walks the installed transformers and fails on an argument that is not here.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

# What transformers' generate hands over and the loop makes for itself.
_OWN_INPUTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}
_CLASSIFIER_FREE = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor"}


@dataclass(frozen=True)
class Argument:
    """One argument: what becomes of it, and a sentence. A refused one is let pass when it is one of `harmless`."""

    outcome: Literal["honoured", "mapped", "refused", "no effect"]
    note: str = ""
    harmless: tuple = ()

    def allows(self, value: Any) -> bool:
        plain = isinstance(value, (bool, int, float, str))
        return self.outcome != "refused" or any(value is each or (plain and value == each) for each in self.harmless)


def honoured(note: str = "") -> Argument:
    return Argument("honoured", note)


def refused(note: str, *harmless: Any) -> Argument:
    return Argument("refused", note, (None, False, *harmless))


_BEAMS = "selfdraft decodes greedily or by sampling; use model.generate for beam search"
_ONLY_BEAMS = Argument("no effect", "of beam search only")
_ONLY_ASSISTED = Argument("no effect", "of transformers' own assisted decoding; how much is drafted says `plan`")
_OTHER_MODE = "is another way of decoding; use model.generate for it"
_OTHER_CACHE = "keys and values are kept in selfdraft's own cache, which is neither offloaded, quantized nor paged"

CONFIG: dict[str, Argument] = {
    # How long.
    "max_length": honoured(),
    "max_new_tokens": honoured(),
    "min_length": honoured(),
    "min_new_tokens": honoured(),
    "max_time": honoured("looked at after every token, as transformers does; several come at once"),
    "stop_strings": honoured("needs `tokenizer`"),
    "eos_token_id": honoured(),
    "pad_token_id": honoured(),
    "bos_token_id": honoured("begins an empty prompt, which transformers makes"),
    # Which token.
    "do_sample": honoured(),
    "temperature": honoured(),
    "top_k": honoured(),
    "top_p": honoured(),
    "min_p": honoured(),
    "top_h": honoured(),
    "typical_p": honoured(),
    "epsilon_cutoff": honoured(),
    "eta_cutoff": honoured(),
    "repetition_penalty": honoured(),
    "encoder_repetition_penalty": honoured(),
    "no_repeat_ngram_size": honoured(),
    "encoder_no_repeat_ngram_size": honoured(),
    "bad_words_ids": honoured(),
    "sequence_bias": honoured(),
    "suppress_tokens": honoured(),
    "begin_suppress_tokens": honoured(),
    "forced_bos_token_id": honoured(),
    "forced_eos_token_id": honoured(),
    "exponential_decay_length_penalty": honoured(),
    "remove_invalid_values": honoured(),
    "renormalize_logits": honoured(),
    "watermarking_config": honoured(),
    # What is returned.
    "num_return_sequences": honoured("row b of the expanded batch uses seed + b"),
    "return_dict_in_generate": honoured("a GenerateOutput: transformers' own fields, and `stats`"),
    "output_scores": honoured(),
    "output_logits": honoured(),
    "output_hidden_states": honoured("one entry per new token, the first one for the whole prompt"),
    "output_attentions": refused("attention weights of a tree are not those of plain decoding"),
    # What drafts.
    "prompt_lookup_num_tokens": Argument("mapped", "the drafter 'ngram' with a chain of that many tokens"),
    "max_matching_ngram_size": Argument("mapped", "the longest match that the drafter 'ngram' looks for"),
    "num_assistant_tokens": _ONLY_ASSISTED,
    "num_assistant_tokens_schedule": _ONLY_ASSISTED,
    "assistant_confidence_threshold": _ONLY_ASSISTED,
    "assistant_lookbehind": _ONLY_ASSISTED,
    "assistant_ensemble_weight": _ONLY_ASSISTED,
    "target_lookbehind": _ONLY_ASSISTED,
    "speculation_type": _ONLY_ASSISTED,
    "is_assistant": _ONLY_ASSISTED,
    "assistant_early_exit": refused(_OTHER_MODE),
    "use_mtp": refused(_OTHER_MODE),
    # Other ways of decoding.
    "num_beams": refused(_BEAMS, 1),
    "num_beam_groups": refused(_BEAMS, 1),
    "constraints": refused(_BEAMS),
    "force_words_ids": refused(_BEAMS),
    "early_stopping": _ONLY_BEAMS,
    "length_penalty": _ONLY_BEAMS,
    "diversity_penalty": _ONLY_BEAMS,
    "low_memory": _ONLY_BEAMS,
    "penalty_alpha": refused(f"contrastive search {_OTHER_MODE}", 0),
    "dola_layers": refused(f"DoLa {_OTHER_MODE}"),
    "guidance_scale": refused("guidance runs the model by itself, on a text of its own; use model.generate for it", 1),
    "token_healing": refused("it changes the prompt; heal the tokens before the call"),
    # How it is run.
    "use_cache": Argument("no effect", "the same tokens with and without; selfdraft always keeps a cache"),
    "cache_implementation": refused(_OTHER_CACHE, "dynamic", "static", "dynamic_full", "hybrid", "sliding_window"),
    "cache_config": Argument("no effect", "of transformers' own caches"),
    "max_cache_len": Argument("no effect", "of transformers' own caches"),
    "prefill_chunk_size": Argument("no effect", "prompts are always read in parts, of 512 tokens"),
    "compile_config": Argument("no effect", "of transformers' own loop; a compiled `model.forward` is used as it is"),
    "disable_compile": Argument("no effect", "as compile_config"),
    "continuous_batching_config": Argument("no effect", "of cache_implementation='paged', which is refused"),
    "decoder_start_token_id": Argument("no effect", "of encoder-decoder models, which are refused"),
    "transformers_version": Argument("no effect", "a note in the file"),
}

_FILLED_CACHE = refused("keys and values are kept in selfdraft's own cache; pass the whole conversation as input_ids")

CALL: dict[str, Argument] = {
    "inputs": honoured("int64 [batch, time]"),
    "generation_config": honoured(),
    "logits_processor": honoured("the user's own may keep a state: see below"),
    "stopping_criteria": honoured("the user's own may look at the whole batch: see below"),
    "prefix_allowed_tokens_fn": honoured(),
    "streamer": honoured("for one row; a method `put_drafted`, if it has one, gets the drafted tokens that were kept"),
    "assistant_model": Argument("mapped", "the separate draft model; the same as `drafter=`"),
    "synced_gpus": refused("the rows of other processes are not waited for"),
    "negative_prompt_ids": refused("of guidance"),
    "negative_prompt_attention_mask": refused("of guidance"),
    "custom_generate": refused(
        "selfdraft.generate is itself a custom_generate; pass selfdraft.decode to model.generate"
    ),
    # Among the keyword arguments.
    "tokenizer": honoured("for stop_strings"),
    "assistant_tokenizer": refused("a draft model has to share the target's tokenizer"),
    "attention_mask": honoured("padding on either side"),
    "position_ids": honoured("as far as they count the tokens of the attention_mask"),
    "past_key_values": _FILLED_CACHE,
    "cache": _FILLED_CACHE,
    "inputs_embeds": refused("drafters read token ids; pass input_ids"),
    "trust_remote_code": Argument("no effect", "of custom_generate by name"),
}

_OF_THE_MODEL = refused("")  # whatever else a model's forward takes


def value_of(name: str, given: dict[str, Any], *configs: GenerationConfig | None) -> Any:
    """What an argument is for a call: as given, or else as in the first config that says something."""
    values = [given.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in values if value is not None), None)


def refuse_arguments(given: dict[str, Any], *configs: GenerationConfig | None) -> None:
    """ValueError that names the first argument that is refused with the value it has for this call."""
    for name, argument in (CALL | CONFIG).items():
        value = value_of(name, given, *configs)
        if not argument.allows(value):
            shown = f"={value!r}" if isinstance(value, (bool, int, float, str)) else ""
            raise ValueError(f"{name}{shown}: {argument.note}")


def refuse_inputs(
    input_ids: Tensor, processors: LogitsProcessorList, streamer: Any, model_kwargs: dict[str, Any]
) -> None:
    """ValueError that names what transformers prepared for the loop and the loop cannot honour exactly."""
    for processor in processors:
        if type(processor).__name__ in _CLASSIFIER_FREE:
            raise ValueError(f"{type(processor).__name__}: {CONFIG['guidance_scale'].note}")
    for name, value in model_kwargs.items():
        if name not in _OWN_INPUTS and not CONFIG.get(name, _OF_THE_MODEL).allows(value):
            raise ValueError(f"the model argument '{name}' is not supported; pass input_ids and attention_mask only")
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    for name, given in (("position_ids", positions), ("attention_mask", mask)):
        if given is not None and given.shape != input_ids.shape:
            raise ValueError(f"{name} is {list(given.shape)}, and the prompt it belongs to {list(input_ids.shape)}")
    valid = torch.ones_like(input_ids) if mask is None else mask.long()
    if positions is not None and ((positions - valid.cumsum(dim=1) + 1) * valid).any():
        raise ValueError("position_ids that do not count the tokens of the attention_mask are not supported")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("continuing from a filled cache is not supported; pass the whole conversation as input_ids")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer takes one row, and the batch has {len(input_ids)}")

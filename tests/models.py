"""Tiny random models of every family that selfdraft promises to work with, and prompts for them.

`initializer_range=0.3` makes greedy text lively and its top-2 gaps wide: at the default 0.02 it is a few tokens over
and over, and a wrong token would often be the right one by chance.
"""

import functools

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
WINDOW = 16

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SLIDING = {"sliding_window": WINDOW}
# Untied, since gemma's large embeddings would make a tied head repeat the last token for ever.
_GEMMA = {
    **_SLIDING,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

# What each family needs beside the common part. Fields that a family does not know are left out below.
FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": _SLIDING,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": _SLIDING,
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.3},
    "olmo2": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "head_dim": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {**_EXPERTS, **_SLIDING, "head_dim": 16},
}
SLIDING = ["mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss"]
ONE_ATTENTION = {"gemma2": "eager", "gpt_oss": "eager"}  # soft-capped scores and attention sinks have no sdpa form


def attentions(family: str) -> list[str]:
    """The attention implementations of a family that selfdraft works with."""
    return [ONE_ATTENTION[family]] if family in ONE_ATTENTION else ["sdpa", "eager"]


EVERY = [(family, attention) for family in FAMILIES for attention in attentions(family)]


@functools.cache
def tiny(family: str, attention: str = "", vocab: int = VOCAB) -> PreTrainedModel:
    """A random float32 model of a family, the same in every call and every process. Do not change it."""
    known = AutoConfig.for_model(family)
    wanted = {**_COMMON, **FAMILIES[family], "vocab_size": vocab}
    settings = {name: value for name, value in wanted.items() if hasattr(known, name)}
    attention = attention or attentions(family)[0]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **settings), attn_implementation=attention, dtype=torch.float32
        )
    model.generation_config.pad_token_id = 0
    return model.eval()


def prompts(lengths: tuple[int, ...], seed: int = 0, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Random prompts of these lengths, left-padded: `input_ids` and `attention_mask`, int64 [batch, time]."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, vocab, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


def row(inputs: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """One row of a batch without its padding: the prompt of its own single run."""
    ids = inputs["input_ids"][index, inputs["attention_mask"][index].bool()].unsqueeze(0)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

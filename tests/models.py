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
# Families that are built still smaller, and go through a shorter contract (`test_families.py`).
_SMALLER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
    **_SLIDING,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 48}
_SOME_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {**_SOME_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MORE_FAMILIES: dict[str, dict] = {
    "afmoe": {**_SOME_EXPERTS, **_KINDS, "num_dense_layers": 1, "head_dim": 8},
    "apertus": {},
    "arcee": {},
    "bert": {"is_decoder": True},
    "biogpt": {},
    "bitnet": {},
    "codegen": {**_GPT, "rotary_dim": 8},
    "cohere": {},
    "cohere2": _KINDS,
    "ctrl": {**_GPT, "dff": 48},
    "cwm": {**_KINDS, "head_dim": 8},
    "deepseek_v2": {**_ROUTED, **_LATENT},
    "diffllama": {},
    "doge": {},
    "dots1": {**_ROUTED, "n_shared_experts": 1, "head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {**_SOME_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": {**_KINDS, "head_dim": 8},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "flex_olmo": _SOME_EXPERTS,
    "gemma": {"head_dim": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "gpt_bigcode": _GPT,
    "gpt_neox_japanese": {},
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite": {},
    "granitemoe": _SOME_EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "jetmoe": {"num_key_value_heads": 4, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "longcat_flash": {
        **_LATENT,
        "head_dim": 8,
        "num_layers": 2,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 48,
        "zero_expert_num": 2,
    },
    "minimax_m2": {**_SOME_EXPERTS, "head_dim": 8},
    "ministral": {**_KINDS, "head_dim": 8},
    "nanochat": {},
    "nemotron": {"head_dim": 8},
    "olmo": {},
    "olmo3": _KINDS,
    "olmoe": _SOME_EXPERTS,
    "persimmon": {},
    "phi": {},
    "phimoe": _SOME_EXPERTS,
    "qwen2_moe": {**_SOME_EXPERTS, "shared_expert_intermediate_size": 48},
    "roberta": {"is_decoder": True},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {**_KINDS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.3},
}
SLIDING = ["mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss"]
# Soft-capped scores and attention sinks have no sdpa form; a few other families were never given one, or lately.
ONE_ATTENTION = dict.fromkeys(
    ["gemma2", "gpt_oss", "codegen", "gptj", "gpt_neox_japanese", "vaultgemma", "xglm"], "eager"
)


def attentions(family: str) -> list[str]:
    """The attention implementations of a family that selfdraft works with."""
    return [ONE_ATTENTION[family]] if family in ONE_ATTENTION else ["sdpa", "eager"]


EVERY = [(family, attention) for family in FAMILIES for attention in attentions(family)]


@functools.cache
def tiny(family: str, attention: str = "", vocab: int = VOCAB) -> PreTrainedModel:
    """A random float32 model of a family, the same in every call and every process. Do not change it."""
    known = AutoConfig.for_model(family)
    own = FAMILIES[family] if family in FAMILIES else {**_SMALLER, **MORE_FAMILIES[family]}
    wanted = {**_COMMON, **own, "vocab_size": vocab}
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

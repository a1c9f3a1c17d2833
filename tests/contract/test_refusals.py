"""What cannot be honoured is refused by one ValueError, before the model runs."""

import inspect
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteriaList,
)

import selfdraft
from selfdraft.checkpoint import drafter_class
from selfdraft.target import Target
from tests.contract.arms import GREEDY, Case
from tests.models import prompts, tiny

CASE = Case("llama", "sdpa", "greedy", 3)
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "n_layer": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# The family, what the message must say beside its name, and what its config needs.
REFUSED = {
    "mamba": ("recurrent", {}),
    "mamba2": ("recurrent", {"head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 16}),
    "rwkv": ("recurrent", {}),
    "recurrent_gemma": ("recurrent", {"num_hidden_layers": 3, "attention_window_size": 16}),
    "jamba": ("recurrent", {}),
    "bamba": ("recurrent", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16}),
    "falcon_h1": ("recurrent", {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}),
    "qwen3_next": ("recurrent", {}),
    "lfm2": ("recurrent", {"layer_types": ["conv", "full_attention"]}),
    "bloom": ("ALiBi", {}),
    "mpt": ("ALiBi", {}),
    "falcon": ("ALiBi", {"alibi": True}),
    "gpt_neo": ("causal mask", {"attention_types": [[["global", "local"], 1]]}),
    "llama4_text": ("chunked", {"num_local_experts": 2, "intermediate_size_mlp": 64, "pad_token_id": 0}),
    "deepseek_v32": ("index", {}),
    "minimax": ("recurrent", {}),
    "nemotron_h": ("recurrent", {"n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16}),
    "zaya": ("recurrent", {"num_experts_per_tok": 1}),
    "bert": ("both directions", {}),
    "xlm-roberta": ("both directions", {}),
    "roformer": ("position_ids", {"is_decoder": True}),
    "trocr": ("position_ids", {}),
    "pegasus": ("position_ids", {}),
    "cpmant": ("position_ids", {}),
    "openai-gpt": ("no cache", {}),
    "xlm": ("mask", {}),
    "git": ("image", {}),
    "blt": ("patches", {}),
    "t5": ("encoder-decoder", {"decoder_start_token_id": 0}),
    "bart": ("encoder-decoder", {"decoder_start_token_id": 0}),
}


@pytest.fixture
def model(monkeypatch):
    """A model that must not run."""
    model = CASE.model
    monkeypatch.setattr(model, "forward", never, raising=False)
    return model


def never(*args, **kwargs):
    raise AssertionError("the model ran before the refusal")


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("through", ["selfdraft", "transformers"])
def test_a_family_that_cannot_be_rolled_back_is_refused_by_name(family, through):
    why, settings = REFUSED[family]
    known = AutoConfig.for_model(family)
    settings = {name: value for name, value in {**_SMALL, **settings}.items() if hasattr(known, name)}
    kind = AutoModelForSeq2SeqLM if why == "encoder-decoder" else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(family, **settings))
    model.forward = never
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=f"{family}.*{why}"):
        if through == "selfdraft":
            selfdraft.generate(model, ids, drafter="ngram", max_new_tokens=4)
        else:
            nothing = LogitsProcessorList(), StoppingCriteriaList()
            selfdraft.decode(model, ids, *nothing, model.generation_config, drafter="ngram")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("num_beams", {"num_beams": 3}),
        ("num_beams", {"num_beams": 2, "do_sample": True}),
        ("guidance_scale", {"guidance_scale": 2.0}),
        ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
        ("dola_layers", {"dola_layers": "low"}),
        ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
        ("position_ids", {"position_ids": torch.zeros(3, 14, dtype=torch.long)}),
        ("inputs_embeds", {"input_ids": None, "inputs_embeds": torch.zeros(3, 14, 64)}),
    ],
)
def test_an_option_that_cannot_be_honoured_is_named(name, settings, model):
    with pytest.raises(ValueError, match=f"(?i){name}"):
        selfdraft.generate(model, drafter="ngram", **{**CASE.inputs, "max_new_tokens": 8, **GREEDY, **settings})


def test_options_of_the_checkpoints_own_config_are_not_forgotten(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "guidance_scale", 1.5)
    with pytest.raises(ValueError, match="guidance_scale"):
        selfdraft.generate(model, **CASE.inputs, max_new_tokens=8)


def test_what_transformers_prepares_is_refused_inside_its_own_generate_too(model):
    for settings in ({"num_beams": 3}, {"guidance_scale": 1.5}, {"output_attentions": True}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            model.generate(**CASE.inputs, max_new_tokens=8, custom_generate=selfdraft.decode, **settings)


def test_a_filled_cache_is_refused():
    cache = DynamicCache()
    inputs = {name: each[2:] for name, each in CASE.inputs.items()}
    # Older versions of transformers call the argument `past_key_values`.
    name = "cache" if "cache" in inspect.signature(CASE.model.forward).parameters else "past_key_values"
    with torch.no_grad():
        CASE.model(input_ids=inputs["input_ids"][:, :-1], use_cache=True, **{name: cache})
    assert cache.get_seq_length() == 13
    with pytest.raises(ValueError, match=f"{name}: .* own cache"):
        selfdraft.generate(CASE.model, **inputs, **{name: cache}, max_new_tokens=8, **GREEDY)
    with pytest.raises(ValueError, match="filled cache"):
        CASE.model.generate(**inputs, **{name: cache}, max_new_tokens=8, custom_generate=selfdraft.decode, **GREEDY)
    with pytest.raises(ValueError, match=name):  # nothing would be put into it
        selfdraft.generate(CASE.model, **CASE.inputs, **{name: DynamicCache()}, max_new_tokens=8, **GREEDY)


@pytest.mark.parametrize("shape", [(1, 0), (0, 4), (4,)], ids=str)
def test_a_prompt_without_tokens_is_refused(shape, model):
    with pytest.raises(ValueError, match="at least one token"):
        selfdraft.generate(model, torch.zeros(shape, dtype=torch.long), max_new_tokens=4, **GREEDY)


def test_a_row_of_padding_alone_is_refused(model):
    mask = CASE.inputs["attention_mask"].clone()
    mask[1] = 0
    with pytest.raises(ValueError, match="row 1"):
        selfdraft.generate(model, CASE.inputs["input_ids"], attention_mask=mask, max_new_tokens=4, **GREEDY)


@pytest.mark.parametrize("seed", [2**63 - 2, -(2**63) - 1, [1, 2, 2**63]])
def test_a_seed_of_more_than_64_bits_is_refused(seed, model):
    with pytest.raises(ValueError, match="64 bits"):
        selfdraft.generate(model, **CASE.inputs, seed=seed, do_sample=True, max_new_tokens=4)


def test_arguments_of_a_wrong_type_are_refused_by_name():
    """In a process of its own: here a checker of types would speak first."""
    code = """
import torch, selfdraft
from transformers import AutoModelForCausalLM, LlamaConfig
small = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(LlamaConfig(**small))
def never(*args, **kwargs): raise SystemExit('the model ran')
model.forward = never
class Streamer:
    def put(self, value): pass
    def end(self): print("ended", end=" ")
for wrong in ({"plan": 4}, {"drafter": 5}, {"seed": 1.5}, {"seed": [1.0]}, {"seed": "7"}, {"width": 3}):
    try:
        selfdraft.generate(model, torch.tensor([[5]]), streamer=Streamer(), do_sample=True, max_new_tokens=4, **wrong)
    except ValueError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = [
        "plan=4 is no Plan",
        "drafter=5 is no drafter",
        "seed=1.5: ",
        "seed=[1.0]: ",
        "seed='7': ",
        "width is 'fixed'",
    ]
    assert [line[: len("ended " + start)] for line, start in zip(said, expected, strict=True)] == [
        f"ended {start}" for start in expected
    ]


@pytest.mark.parametrize("time", [9, 15])
def test_a_mask_of_another_length_is_refused(time, model):
    with pytest.raises(ValueError, match="attention_mask"):
        selfdraft.generate(
            model, CASE.inputs["input_ids"], attention_mask=torch.ones(3, time), max_new_tokens=4, **GREEDY
        )


@pytest.mark.parametrize("family", ["gemma3n_text", "longcat_flash"])
def test_hidden_states_of_an_odd_shape_are_refused_by_name(family, monkeypatch):
    model, inputs = tiny(family), prompts((7,))
    selfdraft.generate(model, **inputs, drafter="ngram", max_new_tokens=2, **GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", never, raising=False)
        with pytest.raises(ValueError, match=f"hidden states of {family}"):
            wanted = {"output_hidden_states": True, "return_dict_in_generate": True}
            selfdraft.generate(model, **inputs, **wanted, max_new_tokens=4, **GREEDY)
        medusa = drafter_class("medusa")
        with pytest.raises(ValueError, match=f"hidden states of {family}"):
            drafter = medusa(medusa.config_class(), Target(model))
            selfdraft.generate(model, **inputs, drafter=drafter, max_new_tokens=4, **GREEDY)
    with pytest.raises(ValueError, match=f"hidden states of {family}"):
        Target(model).encode(inputs["input_ids"], (-1,))


def test_seeds_that_are_not_one_per_row_are_refused(model):
    with pytest.raises(ValueError, match="2 seeds for a batch of 3"):
        selfdraft.generate(model, **CASE.inputs, seed=[1, 2], do_sample=True, max_new_tokens=4)


def test_flash_attention_is_refused_with_the_remedy():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**_SMALL, "head_dim": 8}))
    model.config._attn_implementation = "flash_attention_2"
    model.forward = never
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        selfdraft.generate(model, torch.tensor([[5]]), max_new_tokens=4)


def test_a_misspelt_argument_is_refused_by_transformers_own_check(model):
    with pytest.raises(ValueError, match="max_new_tokns"):
        selfdraft.generate(model, **CASE.inputs, max_new_tokns=4, **GREEDY)

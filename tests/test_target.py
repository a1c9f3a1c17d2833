"""Target: the features and logits it hands out are those of an ordinary pass of the model, in every family."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import selfdraft
from selfdraft.cache import SlotCache
from selfdraft.target import Target
from tests.models import EVERY, FAMILIES, MORE_FAMILIES, prompts, row, tiny

# Passes of different widths add up in another order; logits of these models are of size 10.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def ordinary(model, ids: torch.Tensor):
    """One pass as anybody would write it."""
    with torch.no_grad():
        return model(input_ids=ids, output_hidden_states=True, use_cache=False)


def right_padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The texts as a batch, and each alone."""
    inputs = prompts(lengths)
    rows = [row(inputs, index)["input_ids"] for index in range(len(lengths))]
    return torch.nn.utils.rnn.pad_sequence([each[0] for each in rows], batch_first=True), rows


@pytest.mark.parametrize(("family", "attention"), EVERY)
def test_the_features_for_training_are_the_hidden_states_of_an_ordinary_pass(family, attention):
    model = tiny(family, attention)
    tokens, rows = right_padded((20, 5, 31))
    with torch.no_grad():
        features, hidden = Target(model).encode(tokens, (1, 3, 4, -1))
    for index, ids in enumerate(rows):
        states = ordinary(model, ids).hidden_states
        expected = torch.cat([states[layer][0] for layer in (1, 3, 4, -1)], dim=-1)
        assert torch.allclose(features[index, : ids.shape[1]], expected, **CLOSE)
        assert torch.allclose(hidden[index, : ids.shape[1]], states[-1][0], **CLOSE)


@pytest.mark.parametrize(("family", "attention"), EVERY)
def test_the_features_in_decoding_are_those_for_training(family, attention):
    model = tiny(family, attention)
    target, ids = Target(model), prompts((23,))["input_ids"]
    cache = SlotCache(64)
    places = torch.arange(23).unsqueeze(0)
    width = cache.open(places, end=23, start=0)
    slots = torch.arange(width).unsqueeze(0)
    visible = slots.unsqueeze(1) <= places.unsqueeze(2)
    with torch.no_grad():
        logits, features = target.score(ids, places, visible, slots, cache, (1, 3, 4, -1))
        trained, _ = target.encode(ids, (1, 3, 4, -1))
    assert torch.allclose(features, trained, **CLOSE)
    assert torch.allclose(logits, ordinary(model, ids).logits, **CLOSE)


@pytest.mark.parametrize(("family", "attention"), EVERY)
def test_text_read_in_pieces_is_an_ordinary_pass_over_it(family, attention):
    """Pieces of many tokens and of one, inside the sliding window and past it."""
    model = tiny(family, attention)
    target, ids, cache = Target(model), prompts((29,))["input_ids"].repeat(2, 1), SlotCache(8)
    places = torch.arange(29).expand_as(ids)
    pieces = [slice(0, 7), slice(7, 8), slice(8, 9), slice(9, 25), slice(25, 28), slice(28, 29)]
    with torch.no_grad():
        read = [target.read(ids[:, piece], places[:, piece], 29, piece.start, cache, (1, -1)) for piece in pieces]
    expected = ordinary(model, ids)
    states = torch.cat([expected.hidden_states[1], expected.hidden_states[-1]], dim=-1)
    assert torch.allclose(torch.cat([logits for logits, _ in read], dim=1), expected.logits, **CLOSE)
    assert torch.allclose(torch.cat([features for _, features in read], dim=1), states, **CLOSE)


# Not gpt2, which is given a mask; nor where transformers' own cache holds the window alone.
SAME_KERNELS = [each for each in FAMILIES if each != "gpt2" and Target(tiny(each)).window is None]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", SAME_KERNELS)
def test_plain_decoding_in_bfloat16_is_that_of_the_model_itself(family, batch):
    """Rounding as coarse as this shows every other order of sums: the kernels must be the same."""
    model, inputs = copy.deepcopy(tiny(family)).bfloat16(), prompts((23,) * batch)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}  # so rows stay equally long
    assert torch.equal(selfdraft.generate(model, **inputs, **settings), model.generate(**inputs, **settings))


# Their vocabulary is behind a layer of the head's own, which is not lent: a drafter learns less of what they say.
OWN_LAYER_IN_THE_HEAD = {"bert", "roberta"}


def the_lent_head_is_the_models_own(model) -> None:
    target, ids, some = Target(model), prompts((12,))["input_ids"], torch.arange(3, 128, 7)
    expected = ordinary(model, ids).logits
    with torch.no_grad():
        _, hidden = target.encode(ids, ())
        assert torch.allclose(target.project(hidden), expected, **CLOSE)
        assert torch.allclose(target.project(hidden, some), expected[..., some], **CLOSE)


@pytest.mark.parametrize("family", [*FAMILIES, *(each for each in MORE_FAMILIES if each not in OWN_LAYER_IN_THE_HEAD)])
def test_the_lent_head_turns_the_stored_hidden_state_into_the_models_logits(family):
    """TR6: on the wrong side of the final norm, or without the soft cap, a drafter learns another head."""
    the_lent_head_is_the_models_own(tiny(family))


@pytest.mark.parametrize("settings", [{"do_layer_norm_before": False}, {"_remove_final_layer_norm": True}])
def test_a_family_that_may_have_no_final_norm_lends_its_head_right_without_it(settings):
    config = copy.deepcopy(tiny("opt").config)
    config.update(settings)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config).eval()
    assert model.model.decoder.final_layer_norm is None
    the_lent_head_is_the_models_own(model)


@pytest.mark.parametrize("family", ["granite", "granitemoe", "cohere"])
def test_logits_that_a_family_scales_are_scaled_in_the_lent_head_too(family):
    config = copy.deepcopy(tiny(family).config)
    setattr(config, "logit_scale" if family == "cohere" else "logits_scaling", 3.0)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config).eval()
    the_lent_head_is_the_models_own(model)
    target, ids = Target(model), prompts((12,))["input_ids"]
    with torch.no_grad():
        _, hidden = target.encode(ids, ())
        assert torch.allclose(hidden @ target.head_weight().T, ordinary(model, ids).logits, **CLOSE)


def test_the_window_covers_as_many_tokens_as_the_family_says():
    target = Target(tiny("gemma2"))
    places = torch.arange(40).unsqueeze(0)
    visible = places.unsqueeze(1) <= places.unsqueeze(2)
    masks = target._masks(visible, places, places)
    assert set(masks) == {"full_attention", "sliding_attention"}
    seen = {kind: (mask == 0).sum(dim=-1)[0, 0].tolist() for kind, mask in masks.items()}
    assert seen["full_attention"] == list(range(1, 41))
    assert seen["sliding_attention"] == [min(16, count) for count in range(1, 41)]


def test_the_identity_follows_the_weights_and_not_their_dtype(tmp_path):
    model = tiny("llama")
    own = Target(model).identity()
    model.save_pretrained(tmp_path / "model")
    low = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    theirs = Target(low).identity()
    assert {**theirs, "name": ""} == {**own, "name": ""}
    assert theirs["name"] == "model"
    assert Target(tiny("qwen2")).identity()["fingerprint"] != own["fingerprint"]


def test_nothing_is_stored_on_the_model():
    model = tiny("llama")
    before, config = set(vars(model)), copy.deepcopy(model.config.to_dict())
    target = Target(model)
    target.identity()
    assert set(vars(model)) == before and model.config.to_dict() == config


def test_an_adapter_is_known_by_its_values_places_and_scale_and_not_by_its_name():
    def adapted(name: str = "one", dtype: torch.dtype = torch.float32, factor: float = 1, **settings) -> str | None:
        model = copy.deepcopy(tiny("llama")).to(dtype)
        settings = {"r": 4, "lora_alpha": 4, "target_modules": ["v_proj"], "init_lora_weights": False} | settings
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(**settings), adapter_name=name)
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                weight.data.mul_(factor)
        return Target(model).adapter

    ours = adapted()
    assert ours is not None and ours == adapted("two") == adapted(dtype=torch.bfloat16)
    others = [adapted(factor=-1), adapted(lora_alpha=8), adapted(target_modules=["k_proj"]), adapted(r=2)]
    assert len({ours, *others}) == 5

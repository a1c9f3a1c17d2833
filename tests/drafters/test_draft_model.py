"""The separate draft model: its cache, its vocabulary, its folder, and what it learns from."""

import copy
import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import selfdraft
from selfdraft import Plan
from selfdraft.drafters import growth
from selfdraft.drafters.draft_model import DraftModel, DraftModelConfig
from selfdraft.target import Target
from tests.drafters.rounds import (
    ANSWER,
    PROMPT,
    NoDeviceReads,
    Watched,
    batch_of,
    check_tree,
    overfit,
    own_text,
    stats_of,
)
from tests.models import VOCAB, prompts, tiny
from tests.scripted import copy_of, noisy

SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
CUT = 48  # a draft vocabulary of our own tests
RAGGED = (3, 9, 14)
SAMPLING = [{"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 4}]


def small(cut: int = 0, **changes) -> DraftModel:
    """A freshly made draft model for the tiny llama."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return DraftModel(DraftModelConfig(model={**SMALL, **changes}, draft_vocab_size=cut), Target(tiny("llama")))


def cut_vocabulary() -> DraftModel:
    """One that knows only the highest ids, and has learned nothing, but has weights that make it say something."""
    drafter = small(CUT, initializer_range=0.3).eval()
    drafter.start(torch.arange(VOCAB))
    return drafter


# --- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("plan", [Plan(4), Plan(3, 2, 5)])
@pytest.mark.parametrize(
    "make", [lambda: noisy(tiny("llama"), 0.05), lambda: noisy(tiny("mistral"), 0.05), cut_vocabulary]
)
def test_the_live_cache_drafts_what_a_cache_made_anew_would(make, plan, sampling):
    """Equal text does not show a drafter's stale or misplaced entries; a state made of the kept text alone does."""
    drafter = make()
    watched = Watched(drafter)
    inputs = prompts(RAGGED)
    output = selfdraft.generate(
        drafter.target.model, **inputs, drafter=watched, plan=plan, max_new_tokens=24, **sampling
    )
    whole = torch.cat([inputs["attention_mask"], torch.ones_like(output[:, inputs["input_ids"].shape[1] :])], dim=1)
    order = (1 - whole).argsort(dim=1, stable=True)
    texts = output.gather(1, order)
    assert len(watched.rounds) > 5
    for seen, root, asked, noise, live in watched.rounds:
        places = torch.arange(int(seen.longest)).expand(len(root), -1)
        anew = dataclasses.replace(seen, tokens=texts[:, : seen.longest], positions=places, start=None)
        tree = drafter.propose(drafter.begin(len(root)), anew, root, asked, noise)
        unfinished = seen.valid.any(dim=1)  # nothing new comes from a row that is done
        assert torch.equal(live.tokens[unfinished], tree.tokens[unfinished])
        assert torch.equal(live.parents[unfinished], tree.parents[unfinished])


def test_the_cache_holds_the_committed_text_and_the_root_in_the_slots_of_their_positions():
    drafter = noisy(tiny("llama"), 0.05)
    watched = Watched(drafter)
    tokens = own_text()
    stats_of(drafter.target.model, watched, tokens, Plan(4, 2, 8))
    seen = watched.rounds[-1][0]
    known = int(seen.lengths) + 1
    reference = drafter.model(tokens[:, :known], use_cache=True).past_key_values
    cache = watched.states[0].cache
    for layer in range(drafter.model.config.num_hidden_layers):
        torch.testing.assert_close(cache.keys[layer][:, :, :known], reference.layers[layer].keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            cache.values[layer][:, :, :known], reference.layers[layer].values, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("plan", [Plan(1), Plan(4), Plan(3, 3, 10)])
@pytest.mark.parametrize("make", [lambda: copy_of(tiny("llama")), cut_vocabulary])
def test_trees_are_valid_and_proposing_never_waits_for_the_device(make, plan, sampling):
    drafter = make()
    watched = Watched(drafter)
    selfdraft.generate(tiny("llama"), **prompts(RAGGED), drafter=watched, plan=plan, max_new_tokens=12, **sampling)
    state = drafter.begin(len(RAGGED))
    for seen, root, asked, noise, tree in watched.rounds:
        check_tree(tree, root, asked, VOCAB)
        with NoDeviceReads():
            again = drafter.propose(state, seen, root, asked, noise)
        assert torch.equal(again.tokens, tree.tokens)


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr("selfdraft.target.PROMPT_PART", 4)
    for inputs in (prompts((13,)), prompts(RAGGED)):
        output = selfdraft.generate(
            tiny("llama"),
            **inputs,
            drafter=copy_of(tiny("llama")),
            plan=Plan(3),
            max_new_tokens=12,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert output.stats.acceptance_by_depth == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("family", ["llama", "mistral"])  # mistral's window counts positions, and not slots
def test_a_copy_of_the_target_is_accepted_all_along_its_best_path(family, sampling, monkeypatch):
    monkeypatch.setattr(growth, "SIGMA", 1e-3)  # sure of itself: the tree has the path of its best tokens
    output = selfdraft.generate(
        tiny(family),
        **prompts(RAGGED),
        drafter=copy_of(tiny(family)),
        plan=Plan(6, 3, 24),
        max_new_tokens=36,
        return_dict_in_generate=True,
        **sampling,
    )
    assert output.stats.acceptance_by_depth == [1.0] * 6


def test_two_calls_share_nothing():
    drafter, model = noisy(tiny("llama"), 0.05), tiny("llama")
    call = {"drafter": drafter, "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    alone = selfdraft.generate(model, **prompts((6,)), **call).stats
    selfdraft.generate(model, **prompts((40,)), **call)
    after = selfdraft.generate(model, **prompts((6,)), **call).stats
    assert (after.accepted, after.drafted) == (alone.accepted, alone.drafted)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # rotary positions would go on, a table of positions would not
def test_past_the_draft_models_longest_text_it_stops_drafting_with_one_warning(family):
    limit = 32
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    config = type(tiny(family).config)(**{**tiny(family).config.to_dict(), name: limit})
    drafter = DraftModel.from_model(AutoModelForCausalLM.from_config(config).eval(), Target(tiny("llama")))
    tokens = own_text(prompt=20, answer=40)
    with pytest.warns(UserWarning, match="32 positions") as warned:
        stats = stats_of(tiny("llama"), drafter, tokens, Plan(4), prompt=20)
    assert len(warned) == 1
    assert 0 < stats.drafted[0] < stats.rounds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats_of(tiny("llama"), drafter, own_text(prompt=5, answer=10), Plan(4), prompt=5)


# --- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "own"), [(160, VOCAB), (VOCAB, 160)])
def test_vocabularies_padded_to_different_sizes_work_together(theirs, own):
    model, other = tiny("llama", vocab=theirs), tiny("llama", vocab=own)
    drafter = DraftModel.from_model(other, Target(model))
    drafter.check(Target(model))
    inputs = prompts(RAGGED, vocab=theirs)
    reference = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    watched = Watched(drafter)
    ours = selfdraft.generate(model, **inputs, drafter=watched, plan=Plan(3, 2, 6), max_new_tokens=24, do_sample=False)
    assert ours.tolist() == reference.tolist()
    assert theirs <= VOCAB or bool((ours[:, -24:] >= VOCAB).any())  # the target says ids that the draft lacks
    for _, _, _, _, tree in watched.rounds:
        assert int(tree.tokens[:, 1:].max()) < min(theirs, own)


def test_a_vocabulary_of_another_tokenizer_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 64 tokens and the target one of 128"):
        DraftModel.from_model(tiny("llama", vocab=64), Target(tiny("llama"))).check(Target(tiny("llama")))


def test_a_model_with_a_recurrent_state_is_refused_by_name():
    config = AutoConfig.for_model(
        "mamba", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, intermediate_size=32
    )
    drafter = DraftModel.from_model(AutoModelForCausalLM.from_config(config), Target(tiny("llama")))
    with pytest.raises(ValueError, match="draft model.*mamba"):
        drafter.check(Target(tiny("llama")))


def test_a_cut_vocabulary_drafts_its_own_tokens_only_and_reads_the_others_as_the_most_alike():
    drafter = cut_vocabulary()
    chosen = drafter.ids.tolist()
    assert chosen == list(range(VOCAB - CUT, VOCAB))  # the highest counts, and a token stands in for itself
    assert drafter.stand_ins[chosen].tolist() == list(range(CUT))
    directions = nn.functional.normalize(tiny("llama").get_input_embeddings().weight, dim=-1)
    unknown = directions[: VOCAB - CUT] @ directions[chosen].T
    assert drafter.stand_ins[: VOCAB - CUT].tolist() == unknown.argmax(-1).tolist()
    assert drafter.model.config.vocab_size == CUT
    watched = Watched(drafter)
    selfdraft.generate(tiny("llama"), **prompts(RAGGED), drafter=watched, max_new_tokens=12, do_sample=False)
    for _, _, _, _, tree in watched.rounds:
        assert set(tree.tokens[:, 1:].flatten().tolist()) <= set(chosen)


@pytest.mark.parametrize(("name", "place", "wrong"), [("ids", 7, VOCAB), ("ids", 7, 100), ("stand_ins", 3, CUT)])
def test_a_bad_vocabulary_map_is_refused(name, place, wrong):
    drafter = cut_vocabulary()
    drafter.check(drafter.target)
    getattr(drafter, name)[place] = wrong
    with pytest.raises(ValueError, match="draft_tokens or stand_ins"):
        drafter.check(drafter.target)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, VOCAB - 28])
@pytest.mark.parametrize("plan", [Plan(4), Plan(4, 2, 8)])
def test_what_is_learned_by_heart_is_accepted_as_often_as_it_was_right_in_training(cut, plan, monkeypatch):
    monkeypatch.setattr(growth, "SIGMA", 1e-3)  # sure of itself: the tree has the path of its best tokens
    drafter, tokens = small(cut), own_text()
    accuracy = overfit(drafter, batch_of(drafter.target, (), tokens), steps=300, lr=2e-3)["accuracy_1"]
    stats = stats_of(tiny("llama"), drafter, tokens, plan)
    assert accuracy >= 0.98
    assert all(abs(accepted - accuracy) <= 0.02 for accepted in stats.acceptance_by_depth)


@pytest.mark.parametrize("cut", [0, CUT])
def test_the_loss_is_the_slow_formula_of_the_plain_models_at_answer_tokens_alone(cut):
    drafter, tokens = small(cut), own_text()
    if cut:
        drafter.start(torch.arange(VOCAB))
    ids = drafter.ids if cut else torch.arange(VOCAB)
    own = drafter.model(drafter.translate(tokens)).logits[0].log_softmax(-1)
    theirs = tiny("llama")(tokens).logits[0]
    known = [place for place in range(PROMPT, PROMPT + ANSWER) if int(tokens[0, place]) in ids.tolist()]
    assert len(known) == ANSWER if not cut else 0 < len(known) < ANSWER
    reference = -sum((theirs[place - 1, ids].softmax(-1) * own[place - 1]).sum() for place in known)
    for pad in (0, 3):
        loss = drafter(batch_of(drafter.target, (), tokens, pad=pad))
        torch.testing.assert_close(loss.total, reference, atol=1e-3, rtol=1e-5)
        assert int(loss.count) == ANSWER


def test_nothing_leaks_back_from_later_tokens():
    drafter = small()
    batch = batch_of(drafter.target, (), own_text())
    until = PROMPT + 8
    early = batch.trained & (torch.arange(batch.tokens.shape[1]) <= until)
    tokens, hidden = batch.tokens.clone(), batch.hidden.clone()
    tokens[:, until:] = 7  # the last label itself is said by the target's state, not by the token
    hidden[:, until:] *= -1
    before = drafter(dataclasses.replace(batch, trained=early))
    after = drafter(dataclasses.replace(batch, trained=early, tokens=tokens, hidden=hidden))
    assert before.total == after.total


def test_a_batch_without_answers_has_no_loss_and_moves_nothing():
    drafter = small(CUT)
    batch = batch_of(drafter.target, (), own_text())
    loss = drafter(dataclasses.replace(batch, trained=torch.zeros_like(batch.trained)))
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and int(loss.count) == 0
    assert all((weight.grad == 0).all() for weight in drafter.parameters())


def test_embeddings_start_from_the_targets():
    same = small(hidden_size=64, num_attention_heads=4)
    ours, theirs = same.model.get_input_embeddings().weight, tiny("llama").get_input_embeddings().weight
    size = ours.std()
    same.start(torch.ones(VOCAB, dtype=torch.long))
    torch.testing.assert_close(ours, theirs * (size / theirs.std()))
    narrow = small()
    ours = narrow.model.get_input_embeddings().weight
    size = float(ours.detach().std())
    narrow.start(torch.ones(VOCAB, dtype=torch.long))
    assert float(ours.detach().std()) == pytest.approx(size, rel=1e-3)
    left, size, right = torch.linalg.svd(theirs.detach(), full_matrices=False)
    best = left[:, :32] * size[:32] @ right[:32]  # Eckart-Young: the nearest matrix of rank 32
    ours, best = (each / each.norm() for each in (ours @ ours.T, best @ best.T))
    torch.testing.assert_close(ours, best, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("cut", [0, CUT])
def test_every_weight_learns(cut):
    drafter = small(cut)
    drafter(batch_of(drafter.target, (), own_text())).total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())


def test_a_misspelt_field_of_the_models_config_is_named():
    with pytest.raises(ValueError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
        small(hiden_size=8)
    with pytest.raises(ValueError, match="config has no model_type, only hidden_size"):
        DraftModel(DraftModelConfig(model={"hidden_size": 8}), Target(tiny("llama")))


# --- out of the target's own layers -----------------------------------------------------------------------------------


def cut_out(layers: tuple[int, ...], family: str = "llama", cut: int = 0) -> DraftModel:
    drafter = DraftModel(DraftModelConfig(layers_of_target=layers, draft_vocab_size=cut), Target(tiny(family)))
    drafter.start(torch.arange(VOCAB))
    return drafter.eval()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_with_all_of_the_targets_layers_it_is_the_target(family):
    drafter = cut_out((0, 1, 2, 3), family)
    assert stats_of(tiny(family), drafter, own_text(family), Plan(4)).acceptance_by_depth == [1.0] * 4


def test_it_starts_as_the_named_layers_in_their_order_between_the_targets_embedding_and_head():
    drafter, theirs = cut_out((3, 1)), tiny("llama").model
    model, tokens = drafter.model.model, own_text()
    assert len(model.layers) == 2
    # The same as a target whose other layers are taken out by hand.
    by_hand = copy.deepcopy(tiny("llama"))
    by_hand.model.layers = nn.ModuleList([by_hand.model.layers[3], by_hand.model.layers[1]])
    for index, layer in enumerate(by_hand.model.layers):
        layer.self_attn.layer_idx = index
    by_hand.config.num_hidden_layers = 2
    assert torch.equal(drafter.model(tokens).logits, by_hand(tokens).logits)
    assert model.layers[0].mlp.up_proj.weight.data_ptr() != theirs.layers[3].mlp.up_proj.weight.data_ptr()


def test_every_layer_stays_of_its_kind():
    drafter, theirs = cut_out((1, 2), "gemma2"), tiny("gemma2").config.layer_types
    assert drafter.model.config.layer_types == theirs[1:3] and theirs[1] != theirs[2]


def test_with_a_cut_vocabulary_it_starts_from_the_rows_of_the_known_tokens(tmp_path):
    drafter = cut_out((0, 3), cut=CUT)
    rows = tiny("llama").get_input_embeddings().weight[drafter.ids]
    assert torch.equal(drafter.model.get_input_embeddings().weight, rows)
    overfit(drafter, batch_of(drafter.target, (), own_text()), steps=20)
    selfdraft.save_drafter(drafter, tmp_path / "draft")
    loaded = selfdraft.load_drafter(tmp_path / "draft", tiny("llama"))
    assert loaded.config == drafter.config and loaded.config.layers_of_target == (0, 3)
    tokens = loaded.translate(own_text())
    assert torch.equal(loaded.model(tokens).logits, drafter.model(tokens).logits)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()  # and the folder is an ordinary model's
    assert torch.equal(plain(tokens).logits, drafter.model(tokens).logits)


def test_layers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="leave out `model`"):
        DraftModelConfig(layers_of_target=(0,), model=SMALL)
    with pytest.raises(ValueError, match=r"has \[4, -1\], and the target's layers are 0 to 3"):
        cut_out((0, 4, -1))
    with pytest.raises(ValueError, match="cannot be cut out of a deepseek_v3"):
        cut_out((1, 2), "deepseek_v3")  # its first layer is dense, and the others are not


# --- its folder -------------------------------------------------------------------------------------------------------


def test_the_saved_folder_is_that_of_an_ordinary_model(tmp_path):
    drafter = small().eval()
    selfdraft.save_drafter(drafter, tmp_path / "draft")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    tokens = own_text()
    assert torch.equal(plain(tokens).logits, drafter.model(tokens).logits)
    assert not any(name.startswith("model.model.") for name in drafter.state_dict())
    assert "lm_head.weight" not in drafter.state_dict()  # tied, so the embedding says it
    size = sum(weight.numel() * 4 for weight in drafter.parameters())
    assert (tmp_path / "draft" / "model.safetensors").stat().st_size < size + 10_000
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["selfdraft"]["drafter"] == "draft_model"


@pytest.mark.parametrize("cut", [0, CUT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_drafts_the_same(tmp_path, cut, dtype):
    drafter = small(cut).eval()
    drafter.start(torch.arange(VOCAB))
    drafter.to(dtype)
    selfdraft.save_drafter(drafter, tmp_path / "draft")
    loaded = selfdraft.load_drafter(tmp_path / "draft", tiny("llama"))
    assert loaded.model.dtype == dtype
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    rounds = []
    for each in (drafter, loaded):
        watched = Watched(each)
        stats_of(tiny("llama"), watched, own_text(), Plan(3, 2, 6))
        rounds.append(watched.rounds)
    for (*_, mine), (*_, theirs) in zip(*rounds, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.parents, theirs.parents)


def test_the_folder_of_a_plain_model_is_a_drafter(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "plain")
    drafter = selfdraft.load_drafter(tmp_path / "plain", tiny("llama"))
    assert isinstance(drafter, DraftModel)
    tokens = own_text()
    assert stats_of(tiny("llama"), drafter, tokens, Plan(4)).acceptance_by_depth == [1.0] * 4
    selfdraft.save_drafter(drafter, tmp_path / "again")
    again = selfdraft.load_drafter(tmp_path / "again", tiny("llama"))
    assert stats_of(tiny("llama"), again, tokens, Plan(4)).acceptance_by_depth == [1.0] * 4


def test_weights_survive_a_wrapped_module_as_a_resume_needs():
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.module = inner

    first, second = Wrapped(small(CUT)), Wrapped(small(CUT))
    first.module.start(torch.arange(VOCAB))
    second.load_state_dict(first.state_dict())
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert second.module.model.lm_head.weight is second.module.model.model.embed_tokens.weight


def test_the_target_is_lent_not_owned():
    drafter = small()
    assert len(list(drafter.parameters())) == len(list(drafter.model.parameters()))
    assert copy.deepcopy(drafter).target is drafter.target
    assert set(copy.deepcopy(drafter).state_dict()) == set(drafter.state_dict())

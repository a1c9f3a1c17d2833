"""EAGLE: its own cache, its training and its drafting are three views of the same layer, and they must agree."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import selfdraft
from selfdraft import Plan
from selfdraft.cache import SlotCache
from selfdraft.drafters import eagle
from selfdraft.drafters.base import FeatureBatch, Observed, TrainableDrafter
from selfdraft.drafters.eagle import Eagle, EagleConfig, FirstLayer
from selfdraft.drafters.growth import Levels
from selfdraft.sampling import Noise
from selfdraft.target import Target
from tests.contract.arms import GREEDY, LENGTHS, NEW, Case, arms, own_answers, plain, train
from tests.contract.checks import same_tokens
from tests.models import FAMILIES, prompts, tiny
from tests.scripted import Passing

ARMS = arms()
SILENT = Noise(torch.zeros(1, dtype=torch.long), 0.0)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_output": {"norm_output": True},
    "input_norm": {"fc_norm": False, "input_norm": True},
    "two_layers": {"layers": 2},
    "narrow": {"hidden_size": 48},
    "all": {"norm_output": True, "fc_norm": False, "input_norm": True, "layers": 3, "hidden_size": 48},
}


def observed(text: Tensor, drafter: Eagle, length: int) -> Observed:
    """The first `length` tokens of one text, as a first round sees them."""
    with torch.no_grad():
        features, _ = drafter.target.encode(text[:, :length], drafter.feature_layers)
    places = torch.arange(length).unsqueeze(0)
    return Observed(text[:, :length], places, torch.tensor([length]), features, length, 0)


def rebuilt(drafter: Eagle, text: Tensor, length: int) -> SlotCache:
    """The drafter's cache over the first `length` tokens, from one fresh pass of the target."""
    state = drafter.begin(1)
    with torch.no_grad():
        drafter.read(state.cache, observed(text, drafter, length), text[:, length])
    return state.cache


class Watch(Passing):
    """Compares the drafter's cache with a fresh one in every round."""

    def __init__(self, inner: Eagle, texts: list[Tensor]):
        super().__init__(inner)
        self.texts, self.rounds = texts, 0

    def propose(self, state, seen, root, plan, noise):
        self.rounds += 1
        tree = super().propose(state, seen, root, plan, noise)
        for row, length in enumerate(seen.lengths.tolist()):
            fresh = rebuilt(self.inner, self.texts[row], length)
            pairs = zip(state.cache.keys + state.cache.values, fresh.keys + fresh.values, strict=True)
            for ours, reference in pairs:
                live, expected = ours[row, :, :length], reference[0, :, :length]
                assert torch.allclose(live, expected, atol=1e-4, rtol=1e-4)
        return tree


class Afresh(Passing):
    """Forgets everything after each round and reads the text again."""

    def __init__(self, inner: Eagle, text: Tensor):
        super().__init__(inner)
        self.text = text

    def propose(self, state, seen, root, plan, noise):
        again = observed(self.text, self.inner, int(seen.lengths[0]))
        return super().propose(self.inner.begin(1), again, root, plan, noise)


@pytest.mark.parametrize("plan", [Plan(4), Plan(3, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("name", ["eagle-trained", "eagle-untrained", "eagle1-trained"])
def test_its_keys_and_values_are_those_of_a_fresh_pass_in_every_round(name, family, plan):
    """CR6. The batch is ragged: each row is compared with its own single text."""
    case = Case(family, "", "greedy", 3)
    drafter, reference = ARMS[name](case), plain(case)
    mask = case.inputs["attention_mask"].bool()
    texts = [torch.cat([row[:14][mask[index]], row[14:]]).unsqueeze(0) for index, row in enumerate(reference)]
    watch = Watch(drafter, texts)
    settings: dict[str, Any] = {"plan": plan, "max_new_tokens": NEW, **GREEDY}
    same_tokens(selfdraft.generate(case.model, **case.inputs, drafter=watch, **settings), reference)
    assert watch.rounds > 3


@pytest.mark.parametrize("plan", [Plan(4), Plan(3, 3)], ids=["chain", "tree"])
def test_a_live_cache_is_accepted_as_often_as_one_rebuilt_each_round(plan):
    case = Case("llama", "", "greedy", 1)
    drafter = ARMS["eagle-trained"](case)
    counts = []
    for each in (drafter, Afresh(drafter, plain(case))):
        ours = selfdraft.generate(
            case.model,
            **case.inputs,
            drafter=each,
            plan=plan,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            **GREEDY,
        )
        counts.append((ours.stats.rounds, ours.stats.drafted, ours.stats.accepted))
    assert counts[0] == counts[1]


def test_training_and_drafting_say_the_same_at_every_position_and_step(monkeypatch):
    """TR1 and TR4: the unrolled steps of training are the levels of a draft, with the same features and positions.

    A step of training reads the true tokens, a level of a draft its own: they are compared where these are equal.
    """
    target = Target(tiny("llama"))
    text = plain(Case("llama", "", "greedy", 1))
    time, steps = text.shape[1], 4
    everything = torch.ones_like(text, dtype=torch.bool)
    with torch.no_grad():
        batch = FeatureBatch(text, everything, everything, *target.encode(text, (2, 3)))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        drafter = Eagle(EagleConfig(feature_layers=(2, 3), unroll=steps, loss="hard"), target)
    train(drafter, batch, steps=200)
    drafter.eval()

    trained: list[list[int]] = []

    def caught(loss, hidden, head, probs, best, labels, at):
        trained.append((hidden @ head.T).argmax(dim=-1).tolist())
        return hidden.sum() * 0, (hidden[:, 0] * 0).long().sum()

    monkeypatch.setattr(eagle, "vocabulary_loss", caught)
    with torch.no_grad():
        drafter(batch)
    # Step s, number t: reads the features of position t and says what stands at t + 2 + s.
    assert [len(each) for each in trained] == [time - 2 - step for step in range(steps)]
    compared = 0
    for position in range(time - 2):
        seen = observed(text, drafter, position + 1)
        with torch.no_grad():
            tree = drafter.propose(drafter.begin(1), seen, text[:, position + 1], Plan(steps), SILENT)
        for step, token in enumerate(tree.tokens[0, 1:].tolist()):
            if position + 2 + step >= time:
                break
            assert token == trained[step][position], (position, step)
            compared += 1
            if token != int(text[0, position + 2 + step]):
                break
    assert compared > 0.8 * sum(len(each) for each in trained), "the drafter must know the text for this to see much"


def test_a_text_learnt_by_heart_is_drafted():
    """Overfitting one text: if acceptance stays low although the loss is low, training and use differ."""
    case = Case("llama", "", "greedy", 1)
    target, text = Target(case.model), plain(case)
    trained = torch.arange(text.shape[1]).unsqueeze(0) >= LENGTHS[1][0]
    drafter = Eagle(EagleConfig(unroll=3, loss="hard"), target)
    with torch.no_grad():
        features, hidden = target.encode(text, drafter.feature_layers)
    losses = train(drafter, FeatureBatch(text, trained, torch.ones_like(trained), features, hidden), steps=80)
    assert losses[-1] < losses[0]
    ours = selfdraft.generate(
        case.model,
        **case.inputs,
        drafter=drafter.eval(),
        plan=Plan(3),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **GREEDY,
    )
    assert sum(ours.stats.acceptance_by_depth) >= 0.9 * 3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_prediction_knows_nothing_of_what_comes_after_it(shape):
    """The leak probe: labels up to T, then everything behind T changed. The loss stays the same to the last bit."""
    drafter = shaped(shape)
    batch = own_answers(drafter.target, drafter.feature_layers)
    last = 20
    places = torch.arange(batch.tokens.shape[1])
    batch = dataclasses.replace(batch, trained=batch.trained & (places <= last))

    def changed(values: Tensor, first: int) -> Tensor:
        values = values.clone()
        values[:, first:] = torch.randint_like(values[:, first:], 128) if values.ndim == 2 else 7.0
        return values

    # Position t says what stands at t + 2 (+ step), from features up to t, tokens up to t + 1 (+ step), and is held
    # against the target's own opinion at t + 1 (+ step).
    other = dataclasses.replace(
        batch,
        tokens=changed(batch.tokens, last + 1),
        features=changed(batch.features, last - 1),
        hidden=changed(batch.hidden, last),
    )
    assert drafter(batch).count == drafter(other).count > 0
    assert drafter(batch).total.equal(drafter(other).total)
    seen = dataclasses.replace(batch, features=changed(batch.features, last - 2))
    assert not drafter(batch).total.equal(drafter(seen).total)


def test_padding_and_neighbours_change_no_loss():
    """NA3: the sum of a batch is the sum of its rows, whatever stands behind them."""
    drafter = Eagle(EagleConfig(feature_layers=(1, 2, 3)), Target(tiny("llama")))
    batch = own_answers(drafter.target, drafter.feature_layers)
    whole = drafter(batch)
    parts = []
    for row in range(3):
        length = int(batch.attention[row].sum())
        alone = FeatureBatch(
            *(getattr(batch, field.name)[row : row + 1, :length] for field in dataclasses.fields(batch))
        )
        parts.append(drafter(alone))
    assert whole.count == sum(part.count for part in parts)
    assert torch.allclose(whole.total, sum(part.total for part in parts), rtol=1e-5)


def test_a_batch_without_trained_tokens_has_no_loss_and_no_gradient():
    """NA1"""
    drafter = Eagle(EagleConfig(feature_layers=(1, 2, 3)), Target(tiny("llama")))
    batch = own_answers(drafter.target, drafter.feature_layers)
    loss = drafter(dataclasses.replace(batch, trained=torch.zeros_like(batch.trained)))
    loss.total.backward()
    assert loss.count == 0 and loss.total == 0
    assert all(each.grad is None or (each.grad == 0).all() for each in drafter.parameters())


def test_it_drafts_from_its_own_vocabulary_only():
    """VO3: the draft vocabulary is the most frequent tokens of the answers, wherever they lie."""
    case = Case("llama", "", "T1", 3)
    drafter = Eagle(EagleConfig(draft_vocab_size=32), Target(case.model)).eval()
    counts = torch.zeros(128, dtype=torch.long)
    wanted = torch.randperm(128, generator=torch.Generator().manual_seed(4))[:32]
    counts[wanted] = torch.arange(1, 33)
    drafter.start(counts)
    assert sorted(drafter.ids.tolist()) == sorted(wanted.tolist())
    assert drafter.lm_head.weight.equal(case.model.get_output_embeddings().weight[drafter.ids])
    drafted = set()

    class Seen(Passing):
        def propose(self, state, seen, root, plan, noise):
            tree = super().propose(state, seen, root, plan, noise)
            drafted.update(tree.tokens[:, 1:].flatten().tolist())
            return tree

    settings: dict[str, Any] = {"drafter": Seen(drafter), "plan": Plan(3, 3), "max_new_tokens": NEW}
    ours = selfdraft.generate(case.model, **case.inputs, seed=5, do_sample=True, top_k=0, **settings)
    same_tokens(ours, plain(case))
    assert len(drafted) > 10 and drafted <= set(wanted.tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_it_fits_every_family_by_default(family):
    """Layers, heads and sizes that the config leaves open are taken from the target, and written down."""
    target = Target(tiny(family))
    config = Eagle(EagleConfig(), target).config
    assert 0 not in (config.hidden_size, config.num_heads, config.head_dim, config.draft_vocab_size, config.rope_theta)
    assert config.feature_layers and max(config.feature_layers) <= target.num_layers
    assert Eagle(config, target).config == config


def test_nothing_of_the_target_is_its_own():
    drafter = Eagle(EagleConfig(), Target(tiny("llama")))
    assert isinstance(drafter, TrainableDrafter)
    theirs = {each.data_ptr() for each in tiny("llama").parameters()}
    assert not theirs & {each.data_ptr() for each in drafter.parameters()}
    assert not any("embed" in name for name in drafter.state_dict())


def test_layers_that_do_not_exist_are_refused():
    target = Target(tiny("llama"))
    drafter = Eagle(EagleConfig(feature_layers=(1, 5)), target)
    with pytest.raises(ValueError, match="4 layers"):
        selfdraft.generate(target.model, **prompts((4,)), drafter=drafter, max_new_tokens=2, **GREEDY)
    with pytest.raises(ValueError, match="hidden_size is 64 or less, not 96"):
        Eagle(EagleConfig(hidden_size=96), target)


# --- EAGLE-3.1, deeper and narrower -----------------------------------------------------------------------------------


def shaped(shape: dict[str, Any], **settings: Any) -> Eagle:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Eagle(EagleConfig(feature_layers=(1, 2, 3), **shape, **settings), Target(tiny("llama", "")))


def test_the_shapes_have_the_tensors_of_the_public_checkpoints():
    plain_names = set(shaped({}).state_dict())
    assert {"norm.weight", "fc_norm.2.weight", "midlayer.hidden_norm.weight"} <= plain_names
    assert set(shaped(SHAPES["norm_output"]).state_dict()) == plain_names
    normed = shaped(SHAPES["input_norm"]).state_dict()
    assert set(normed) - plain_names == {"input_norm.weight"} and normed["input_norm.weight"].shape == (3 * 64,)
    assert plain_names - set(normed) == {f"fc_norm.{index}.weight" for index in range(3)}
    deep = set(shaped(SHAPES["two_layers"]).state_dict()) - plain_names
    first = {name.removeprefix("midlayer.") for name in plain_names if name.startswith("midlayer.")}
    assert deep == {f"layers.1.{name}" for name in first - {"hidden_norm.weight"}}
    narrow = shaped(SHAPES["narrow"]).state_dict()
    assert set(narrow) - plain_names == {"embed_proj.weight"} and narrow["embed_proj.weight"].shape == (48, 64)
    assert narrow["fc.weight"].shape == (48, 3 * 64) and narrow["lm_head.weight"].shape == (128, 48)


@torch.no_grad()
def drafted_along(drafter: Eagle, text: Tensor, length: int, steps: int) -> list[Tensor]:
    """What the head reads after `length` committed tokens, and at every level of a chain that is the text itself."""
    cache, seen = drafter.begin(1).cache, observed(text, drafter, length)
    hidden = drafter.read(cache, seen, text[:, length])[:, -1:]
    levels, read = Levels(cache, seen.lengths, length), [drafter.readout(hidden)[0, 0]]
    for step in range(1, steps):
        positions, visible, _ = levels.next(torch.zeros(1, 1, dtype=torch.long))
        hidden = drafter.run(cache, text[:, length + step : length + step + 1], hidden, positions, visible)
        read.append(drafter.readout(hidden)[0, 0])
    return read


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_unrolled_step_of_training_is_a_level_of_a_draft_number_by_number(shape, monkeypatch):
    """With weights that nothing was learnt with: a text known by heart would hide what is only a little wrong."""
    drafter, text = shaped(shape, unroll=3).eval(), plain(Case("llama", "", "greedy", 1))
    everything = torch.ones_like(text, dtype=torch.bool)
    trained: list[Tensor] = []

    def caught(loss, hidden, head, probs, best, labels, at):
        trained.append(hidden)
        return hidden.sum() * 0, (hidden[:, 0] * 0).long().sum()

    monkeypatch.setattr(eagle, "vocabulary_loss", caught)
    with torch.no_grad():
        drafter(FeatureBatch(text, everything, everything, *drafter.target.encode(text, drafter.feature_layers)))
    for place in (0, 5, 11):
        drafted = drafted_along(drafter, text, place + 1, steps=3)
        for step, reference in enumerate(drafted):
            assert torch.allclose(trained[step][place], reference, atol=1e-4), (place, step)


@pytest.mark.parametrize("plan", [Plan(4), Plan(3, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("shape", [SHAPES["two_layers"], SHAPES["all"]], ids=["two_layers", "all"])
def test_every_layer_has_keys_and_values_of_its_own_as_a_fresh_pass_writes_them(shape, plan):
    case = Case("llama", "", "greedy", 1)
    drafter = shaped(shape)
    train(drafter, own_answers(drafter.target, drafter.feature_layers), steps=40)
    watch = Watch(drafter.eval(), [plain(case)])
    settings: dict[str, Any] = {"plan": plan, "max_new_tokens": NEW, **GREEDY}
    same_tokens(selfdraft.generate(case.model, **case.inputs, drafter=watch, **settings), plain(case))
    assert watch.rounds > 3
    assert len(drafter.stack) == len(rebuilt(drafter, plain(case), 9).keys) == shape["layers"]


@pytest.mark.parametrize(
    ("plan", "sampled"), [(Plan(6, 8, 32), Plan(4, 8, 16)), (Plan(3, 2, 6), Plan(2, 2, 3)), (Plan(5), Plan(5))]
)
def test_trees_are_smaller_when_sampling_unless_a_plan_is_given(plan, sampled, monkeypatch):
    drafter = Eagle(EagleConfig(**dataclasses.asdict(plan)), Target(tiny("llama"))).eval()
    plans: list[Plan] = []
    propose = Eagle.propose
    monkeypatch.setattr(Eagle, "propose", lambda self, *given: plans.append(given[3]) or propose(self, *given))
    for given, sampling, wanted in [(None, False, plan), (None, True, sampled), (plan, True, plan)]:
        settings = {"drafter": drafter, "plan": given, "do_sample": sampling, "max_new_tokens": 20, "seed": 1}
        selfdraft.generate(tiny("llama"), torch.tensor([[5, 6, 7]]), **settings)
        assert plans[0] == wanted
        plans.clear()


@pytest.mark.parametrize("normed", [False, True])
def test_what_is_fed_back_is_the_output_or_its_norm(normed, monkeypatch):
    """What the second step's layer reads is the first step's output; with `norm_output`, as the head has read it."""
    drafter = shaped({"norm_output": normed}, unroll=2).eval()
    outputs, inputs = [], []
    finish, read = FirstLayer.finish, FirstLayer.read

    def finished(self, *args):
        outputs.append(finish(self, *args))
        return outputs[-1]

    def reading(self, embedded, hidden):
        inputs.append(hidden)
        return read(self, embedded, hidden)

    monkeypatch.setattr(FirstLayer, "finish", finished)
    monkeypatch.setattr(FirstLayer, "read", reading)
    drafter(own_answers(drafter.target, drafter.feature_layers))
    assert len(outputs) == len(inputs) == 2
    assert inputs[1].equal(drafter.norm(outputs[0])) is normed
    assert inputs[1].equal(outputs[0]) is not normed


def test_a_narrow_drafter_starts_with_the_main_directions_of_the_targets_embeddings_and_rows():
    drafter = shaped(SHAPES["narrow"])
    drafter.start(torch.ones(128, dtype=torch.long))
    theirs = drafter.target.head_weight().detach()  # tied to the embedding in this family: the same directions
    left, size, right = torch.linalg.svd(theirs, full_matrices=False)
    best = left[:, :48] * size[:48] @ right[:48]  # Eckart-Young: the nearest matrix of rank 48
    ours = drafter.lm_head.weight.detach()
    torch.testing.assert_close(ours @ ours.T, best @ best.T, atol=1e-3, rtol=1e-3)
    embedded = drafter.embed(torch.arange(128)).detach()
    vectors = drafter.target.embed(torch.arange(128)).detach()
    kept = torch.linalg.svd(vectors, full_matrices=False)[1][:48].square().sum()
    torch.testing.assert_close(embedded.square().sum(), kept, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [SHAPES["input_norm"], SHAPES["all"]], ids=["input_norm", "all"])
def test_every_weight_learns(shape):
    drafter = shaped(shape)
    drafter(own_answers(drafter.target, drafter.feature_layers)).total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())


def test_a_saved_drafter_of_every_shape_comes_back(tmp_path):
    drafter = shaped(SHAPES["all"])
    selfdraft.save_drafter(drafter, tmp_path / "heads")
    again = selfdraft.load_drafter(tmp_path / "heads", drafter.target.model)
    assert again.config == drafter.config
    assert all(again.state_dict()[name].equal(weight) for name, weight in drafter.state_dict().items())


def test_a_config_saved_before_these_fields_were_there_still_loads(tmp_path):
    drafter = shaped({})
    selfdraft.save_drafter(drafter, tmp_path / "heads")
    file = tmp_path / "heads" / "config.json"
    document = json.loads(file.read_text())
    for name in ("loss", "input_norm", "norm_output", "layers"):
        del document["selfdraft"]["config"][name]
    file.write_text(json.dumps(document))
    assert selfdraft.load_drafter(tmp_path / "heads", drafter.target.model).config == drafter.config


@pytest.mark.parametrize("wrong", [(1, 5), (-6,), (0, -9)])
def test_every_feature_layer_has_to_exist(wrong):
    target = Target(tiny("llama"))
    with pytest.raises(ValueError, match="do not exist in 4 layers"):
        Eagle(EagleConfig(feature_layers=wrong), target).check(target)
    Eagle(EagleConfig(feature_layers=(-5, 4)), target).check(target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 has to be a multiple of num_kv_heads 2"),
        ({"num_kv_heads": 8}, "num_heads 4 has to be a multiple of num_kv_heads 8"),
        ({"head_dim": 7}, "head_dim 7 an even number"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"draft_vocab_size": -4}, "draft_vocab_size is -4"),
        ({"unroll": 0}, "unroll is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Eagle(EagleConfig(**settings), Target(tiny("llama")))


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="set fc_norm to false for input_norm"):
        EagleConfig(input_norm=True)
    with pytest.raises(ValueError, match="at least one layer, not 0"):
        EagleConfig(layers=0)

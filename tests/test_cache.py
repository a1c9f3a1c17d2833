"""SlotCache: keys and values land where they are sent, move together, and survive growth."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import selfdraft
from selfdraft import Plan
from selfdraft.cache import BUCKET, GROWTH, SlotCache
from selfdraft.drafters.base import Observed
from tests.contract.arms import GREEDY, LOOP, NEW, Case, arms, plain
from tests.contract.checks import same_tokens
from tests.scripted import Passing, texts_of

ARMS = arms()


def states(batch: int, time: int) -> torch.Tensor:
    """Keys or values, [batch, 2 heads, time, 3 numbers]."""
    return torch.randn(batch, 2, time, 3)


def filled(batch: int, time: int, layers: int = 2) -> SlotCache:
    cache = SlotCache(capacity=time)
    slots = torch.arange(time).expand(batch, -1)
    cache.open(slots, end=time, start=0)
    for layer in range(layers):
        cache.update(states(batch, time), states(batch, time), layer)
    return cache


@settings(deadline=None)
@given(st.data())
def test_keep_equals_a_slow_copy_that_reads_before_it_writes(data):
    batch, time = 2, 10
    cache = filled(batch, time)
    moved = data.draw(st.integers(1, 6))
    slot = st.integers(0, time - 1)
    source = [data.draw(st.lists(slot, min_size=moved, max_size=moved)) for _ in range(batch)]
    target = [data.draw(st.lists(slot, min_size=moved, max_size=moved, unique=True)) for _ in range(batch)]
    before = [store.clone() for store in (*cache.keys, *cache.values)]
    cache.keep(torch.tensor(source), torch.tensor(target))
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        expected = old.clone()
        for row in range(batch):
            for here, there in zip(source[row], target[row], strict=True):
                expected[row, :, there] = old[row, :, here]
        assert new.equal(expected)


@settings(deadline=None)
@given(st.integers(1, 150), st.integers(1, 9))
def test_slots_and_a_run_of_slots_write_the_same(first, time):
    keys, values, end = states(2, time), states(2, time), first + time
    slots = torch.arange(first, end).expand(2, -1)
    one, other = SlotCache(capacity=end), SlotCache(capacity=end)
    assert one.open(slots, end) == other.open(slots, end, start=first)
    for ours, reference in zip(one.update(keys, values, 0), other.update(keys, values, 0), strict=True):
        assert ours.equal(reference)
        assert ours[:, :, first:end].equal(keys) or ours[:, :, first:end].equal(values)


@settings(deadline=None)
@given(st.integers(1, 300))
def test_attention_sees_whole_buckets_of_slots_and_never_too_few(end):
    cache = SlotCache(capacity=8)
    width = cache.open(torch.arange(end).unsqueeze(0), end, start=0)
    assert width % BUCKET == 0 and end <= width < end + BUCKET
    keys, _ = cache.update(states(1, end), states(1, end), 0)
    assert keys.shape[2] == width


def test_growing_keeps_what_was_written_and_goes_by_large_steps():
    cache = filled(2, BUCKET)
    before = [store.clone() for store in cache.keys]
    cache.open(torch.full((2, 1), BUCKET), end=BUCKET + 1)
    assert cache.capacity == BUCKET + GROWTH
    for old, new in zip(before, cache.keys, strict=True):
        assert new.shape[2] == cache.capacity and new[:, :, :BUCKET].equal(old)
    capacity = cache.capacity
    cache.open(torch.full((2, 1), 2 * BUCKET), end=2 * BUCKET + 1)
    assert cache.capacity == capacity


class Watch(Passing):
    """Looks at the caches whenever a round has been drafted."""

    def __init__(self, inner, look):
        super().__init__(inner)
        self.look, self.rounds = look, 0

    def propose(self, state, seen, root, plan, noise):
        self.rounds += 1
        tree = super().propose(state, seen, root, plan, noise)
        self.look(state, seen, root)
        return tree


class Recorded(SlotCache):
    """Lets a test find the cache of a call of generate()."""

    made: list[SlotCache] = []

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.made.append(self)


@pytest.fixture
def caches(monkeypatch):
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(LOOP, "SlotCache", Recorded)
    return Recorded.made


@torch.no_grad()
def fresh(model, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of one ordinary pass over a text."""
    cache = DynamicCache()  # without the config, so that a sliding window drops nothing
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=ids, use_cache=True, **{name: cache})
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def compare(cache: SlotCache, row: int, model, ids: torch.Tensor) -> None:
    """The first slots of a row hold what one ordinary pass over the text gives, within 1e-4."""
    for ours, reference in zip((cache.keys, cache.values), fresh(model, ids), strict=True):
        assert len(ours) == len(reference) == model.config.num_hidden_layers
        for layer, expected in zip(ours, reference, strict=True):
            # Passes of different widths add up in another order; 1e-4 of numbers of size 1 is far above that.
            assert torch.allclose(layer[row : row + 1, :, : ids.shape[1]], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("plan", [Plan(8), Plan(3, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["anti", "script", "noisy"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "deepseek_v3", "gpt_oss"])
def test_after_every_round_the_cache_holds_the_committed_text_and_nothing_else_is_seen(family, name, plan, caches):
    """CR1: one token fewer than is decided, since the root is not in the cache yet."""
    case = Case(family, "", "greedy", 3)
    reference = plain(case)
    texts = texts_of(case.inputs, reference)
    before = [0, 0, 0]

    def look(state, seen: Observed, root):
        for row, length in enumerate(seen.lengths.tolist()):
            if length > before[row]:  # a row that stands still is finished
                assert int(root[row]) == texts[row][length]
                compare(caches[0], row, case.model, torch.tensor([texts[row][:length]]))
            before[row] = length

    watch = Watch(ARMS[name](case), look)
    same_tokens(
        selfdraft.generate(case.model, **case.inputs, drafter=watch, plan=plan, max_new_tokens=NEW, **GREEDY), reference
    )
    assert watch.rounds > 3


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["copy", "noisy", "draft_model-untrained"])
def test_the_draft_models_cache_holds_the_text_and_the_root(name, width):
    """CR5: a draft cache that loses its place still gives the right text, with fewer tokens per round."""
    case = Case("llama", "sdpa", "greedy", 3)
    drafter, reference = ARMS[name](case), plain(case)
    texts = texts_of(case.inputs, reference)
    before = [0, 0, 0]

    def look(state, seen: Observed, root):
        for row, length in enumerate(seen.lengths.tolist()):
            if length > before[row]:
                compare(state.cache, row, drafter.model, torch.tensor([texts[row][: length + 1]]))
            before[row] = length

    watch = Watch(drafter, look)
    wanted = {"plan": Plan(4, width), "max_new_tokens": NEW, **GREEDY}
    same_tokens(selfdraft.generate(case.model, **case.inputs, drafter=watch, **wanted), reference)
    assert watch.rounds > 3


def test_a_copy_is_accepted_over_two_hundred_tokens():
    case = Case("llama", "sdpa", "greedy", 1)
    reference = case.model.generate(**case.inputs, max_new_tokens=200, **GREEDY)
    for depth in (1, 4, 8):
        ours = selfdraft.generate(
            case.model,
            **case.inputs,
            drafter=ARMS["copy"](case),
            plan=Plan(depth),
            max_new_tokens=200,
            return_dict_in_generate=True,
            **GREEDY,
        )
        same_tokens(ours.sequences, reference)
        assert ours.stats.acceptance_by_depth == [1.0] * depth


def test_a_cache_that_must_grow_in_the_middle_of_a_text_changes_nothing(monkeypatch):
    monkeypatch.setattr(LOOP, "SlotCache", lambda capacity: SlotCache(8))
    monkeypatch.setattr("selfdraft.drafters.draft_model.SlotCache", lambda capacity: SlotCache(8))
    monkeypatch.setattr("selfdraft.drafters.eagle.SlotCache", lambda capacity: SlotCache(8))
    monkeypatch.setattr("selfdraft.cache.GROWTH", BUCKET)
    case = Case("llama", "sdpa", "greedy", 3)
    reference = case.model.generate(**case.inputs, max_new_tokens=150, **GREEDY)
    for name in ("copy", "eagle-untrained"):
        ours = selfdraft.generate(
            case.model, **case.inputs, drafter=ARMS[name](case), plan=Plan(3, 2), max_new_tokens=150, **GREEDY
        )
        same_tokens(ours, reference)

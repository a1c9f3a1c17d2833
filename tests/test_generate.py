"""generate(): called in every way that transformers' own is, it answers in the same way and leaves nothing behind."""

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer

import selfdraft
from selfdraft import Plan
from tests.contract.arms import GREEDY, NEW, Case, arms, plain, seeded
from tests.contract.checks import same_tokens
from tests.models import prompts
from tests.scripted import Script, texts_of

ARMS = arms()
CASE = Case("llama", "sdpa", "greedy", 3)
ONE = Case("llama", "sdpa", "greedy", 1)
SAMPLED = Case("llama", "sdpa", "T1", 3)


def test_the_prompt_comes_by_position_or_by_name():
    mask = CASE.inputs["attention_mask"]
    settings: dict[str, Any] = {"attention_mask": mask, "drafter": "ngram", "max_new_tokens": NEW, **GREEDY}
    same_tokens(selfdraft.generate(CASE.model, CASE.inputs["input_ids"], **settings), plain(CASE))
    same_tokens(selfdraft.generate(CASE.model, inputs=CASE.inputs["input_ids"], **settings), plain(CASE))
    same_tokens(selfdraft.generate(CASE.model, input_ids=CASE.inputs["input_ids"], **settings), plain(CASE))


@pytest.mark.parametrize("case", [CASE, SAMPLED], ids=["greedy", "sampled"])
def test_transformers_own_generate_takes_the_loop(case):
    drafter = ARMS["noisy"](case)
    ours = case.model.generate(
        **case.inputs,
        custom_generate=selfdraft.decode,
        drafter=drafter,
        plan=Plan(3, 2),
        max_new_tokens=NEW,
        **seeded(case.policy),
    )
    same_tokens(ours, plain(case))


def test_settings_come_from_a_generation_config_as_well():
    config = GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0)
    ours = selfdraft.generate(SAMPLED.model, **SAMPLED.inputs, generation_config=config, seed=5, drafter="ngram")
    same_tokens(ours, plain(SAMPLED))


def test_the_models_own_defaults_hold(monkeypatch):
    """GE3: what the checkpoint's generation_config says is meant, without being passed."""
    suppressed = sorted(set(plain(ONE)[0, -10:].tolist()))[:2]
    monkeypatch.setattr(ONE.model.generation_config, "suppress_tokens", suppressed)
    monkeypatch.setattr(ONE.model.generation_config, "max_new_tokens", NEW)
    monkeypatch.setattr(ONE.model.generation_config, "eos_token_id", [3, 4])
    reference = ONE.model.generate(**ONE.inputs)
    assert reference.tolist() != plain(ONE).tolist()
    same_tokens(selfdraft.generate(ONE.model, **ONE.inputs, drafter=ARMS["copy"](ONE)), reference)


def test_greedy_processors_are_applied_at_every_node():
    settings: dict[str, Any] = {"suppress_tokens": list(range(0, 128, 3)), "max_new_tokens": NEW, **GREEDY}
    reference = CASE.model.generate(**CASE.inputs, **settings)
    for name in ("noisy", "eagle-untrained"):
        drafter = ARMS[name](CASE)
        ours = selfdraft.generate(CASE.model, **CASE.inputs, drafter=drafter, plan=Plan(3, 3), **settings)
        same_tokens(ours, reference)


def test_a_drafter_brings_its_own_plan():
    for drafter in (ARMS["copy"](CASE), ARMS["medusa-untrained"](CASE), ARMS["eagle-untrained"](CASE), "ngram"):
        ours = selfdraft.generate(
            CASE.model,
            **CASE.inputs,
            drafter=drafter,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            **GREEDY,
        )
        same_tokens(ours.sequences, plain(CASE))
        assert ours.stats.drafted or drafter == "ngram"


def test_the_output_is_a_model_output_with_stats():
    ours = selfdraft.generate(
        CASE.model,
        **CASE.inputs,
        drafter=ARMS["noisy"](CASE),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **GREEDY,
    )
    assert isinstance(ours, selfdraft.GenerateOutput) and ours["sequences"] is ours.sequences
    stats = ours.stats
    assert stats.new_tokens == 3 * NEW and stats.prefills == 3
    assert all(0 <= rate <= 1 for rate in stats.acceptance_by_depth)
    # A round gives its accepted tokens and one more, but for the last of a row, whose length may cut that one off.
    assert 0 <= sum(stats.accepted) - (stats.new_tokens - stats.prefills - stats.rounds) <= 3
    parts = (stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds, stats.other_seconds)
    assert all(part > 0 for part in parts) and sum(parts) == pytest.approx(stats.total_seconds)


# --- Streaming --------------------------------------------------------------------------------------------------------


class Heard:
    """A streamer that remembers what it was given."""

    def __init__(self):
        self.tokens: list[int] = []
        self.puts = 0
        self.ends = 0

    def put(self, value):
        self.puts += 1
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("name", ["copy", "noisy", "ngram"])
def test_a_streamer_hears_every_token_once_and_in_order(name):
    ours, reference = Heard(), Heard()
    eos = int(plain(ONE)[0, -4])
    settings: dict[str, Any] = {**ONE.inputs, "max_new_tokens": NEW, "eos_token_id": eos, **GREEDY}
    ONE.model.generate(**settings, streamer=reference)
    drafter = ARMS[name](ONE)
    ids = selfdraft.generate(ONE.model, **settings, drafter=drafter, plan=Plan(8), streamer=ours)
    assert ours.tokens == reference.tokens == ids[0].tolist()
    assert (ours.puts, ours.ends) == (reference.puts, reference.ends)


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_transformers_own_streamers_give_the_text_of_plain_decoding(skip_prompt, smollm2, capsys):
    """The answer is a row of emoji of several tokens each, and none of them is torn apart."""
    model, tokenizer = copy.deepcopy(smollm2[0]).float(), smollm2[1]
    chat = [{"role": "user", "content": "Say hello in three languages."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings: dict[str, Any] = {"max_new_tokens": 24, **ids.to(model.device), **GREEDY}
    sequences = selfdraft.generate(model, **settings)
    start = settings["input_ids"].shape[1] if skip_prompt else 0
    expected = tokenizer.decode(sequences[0, start:])
    for depth in (1, 3, 8):
        script = Script(texts_of(settings, sequences), [3, 0, 1, 5], model.config.vocab_size, Plan(depth))
        printed = TextStreamer(tokenizer, skip_prompt=skip_prompt)
        assert selfdraft.generate(model, **settings, drafter=script, streamer=printed).equal(sequences)
        assert capsys.readouterr().out == expected + "\n"
        pieces = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt)
        thread = threading.Thread(
            target=selfdraft.generate, args=(model,), kwargs=settings | {"drafter": script, "streamer": pieces}
        )
        thread.start()
        assert "".join(pieces) == expected
        thread.join()


def test_a_streamer_takes_one_row_only():
    with pytest.raises(ValueError, match="streamer"):
        selfdraft.generate(CASE.model, **CASE.inputs, drafter="ngram", streamer=Heard(), max_new_tokens=2, **GREEDY)


# --- What a call leaves behind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ARMS if name not in ("anti", "script")])
def test_a_second_request_knows_nothing_of_the_first(name):
    """CR8: same text, same drafts and same acceptance as with fresh objects; no config changed."""
    drafter = ARMS[name](ONE)
    short: dict[str, Any] = {
        **prompts((4,), seed=8),
        "drafter": drafter,
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        **GREEDY,
    }
    fresh = selfdraft.generate(ONE.model, **short)
    configs = copy.deepcopy((ONE.model.config.to_dict(), ONE.model.generation_config.to_dict(), drafter.plan))
    names = set(vars(ONE.model))
    selfdraft.generate(ONE.model, **{**short, **prompts((200,), seed=9)}, plan=Plan(2, 2))
    after = selfdraft.generate(ONE.model, **short)
    same_tokens(after.sequences, fresh.sequences)
    assert (after.stats.drafted, after.stats.accepted) == (fresh.stats.drafted, fresh.stats.accepted)
    assert configs == (ONE.model.config.to_dict(), ONE.model.generation_config.to_dict(), drafter.plan)
    assert names == set(vars(ONE.model))


def test_a_seed_keeps_the_global_random_state_untouched():
    before = torch.get_rng_state()
    settings: dict[str, Any] = {**SAMPLED.inputs, "max_new_tokens": NEW, "drafter": ARMS["noisy"](SAMPLED)}
    one = selfdraft.generate(SAMPLED.model, **settings, **seeded("T1"))
    assert torch.get_rng_state().equal(before)
    same_tokens(selfdraft.generate(SAMPLED.model, **settings, **seeded("T1")), one)


def test_a_seed_may_be_a_number_of_numpy_or_torch():
    settings = {**SAMPLED.inputs, "max_new_tokens": 8, "do_sample": True}
    wanted = selfdraft.generate(SAMPLED.model, **settings, seed=3)
    for seed in (np.int64(3), torch.tensor(3)):
        assert selfdraft.generate(SAMPLED.model, **settings, seed=seed).equal(wanted)
    rows = len(wanted)
    for seeds in (np.arange(3, 3 + rows), torch.arange(3, 3 + rows), list(np.arange(3, 3 + rows))):
        assert selfdraft.generate(SAMPLED.model, **settings, seed=seeds).equal(wanted)


def test_without_a_seed_torchs_own_decides():
    settings: dict[str, Any] = {**SAMPLED.inputs, "max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(selfdraft.generate(SAMPLED.model, **settings, drafter="ngram").tolist())
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(1)
    assert selfdraft.generate(SAMPLED.model, **settings).tolist() == texts[0]


# --- Numbers that differ by the width of a pass -----------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(4), Plan(3, 2), Plan(2, 4)], ids=["chain", "narrow", "wide"])
def test_in_bf16_a_text_parts_from_the_plain_one_at_near_ties_only(plan):
    """GE2: a pass of many tokens rounds unlike a pass of one. Where texts part, the float32 model is undecided."""
    model = copy.deepcopy(CASE.model).bfloat16()
    case = Case("llama", "sdpa", "greedy", 1)
    drafter, parted = ARMS["noisy"](case).to(torch.float32), 0
    for seed in range(10):
        inputs = prompts((8,), seed=seed)
        reference = selfdraft.generate(model, **inputs, max_new_tokens=NEW, **GREEDY)
        ours = selfdraft.generate(model, **inputs, drafter=drafter, plan=plan, max_new_tokens=NEW, **GREEDY)
        different = (ours != reference).flatten().nonzero().flatten().tolist()
        if not different:
            continue
        parted += 1
        prefix = reference[:, : different[0]]
        with torch.no_grad():
            best = case.model(input_ids=prefix, use_cache=False).logits[0, -1].topk(2).values
        # bf16 keeps 8 bits: a logit of size 10 is known to about 0.1 after a few layers.
        assert best[0] - best[1] < 0.3, (seed, different[0])
    assert parted < 10

"""Every argument of transformers' `generate` has a place in the table, and the honoured ones do what they do there."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import selfdraft
from selfdraft import Plan
from selfdraft.arguments import CALL, CONFIG
from tests.contract.arms import CHAIN, GREEDY, NEW, TREE, Case, arms, plain
from tests.contract.checks import same_tokens
from tests.models import VOCAB
from tests.scripted import Script, texts_of

ARMS = arms()
CASES = {"one row": Case("llama", "sdpa", "greedy", 1), "three rows": Case("llama", "sdpa", "greedy", 3)}
SAMPLE: dict[str, Any] = {"do_sample": True, "top_k": 0}


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of one character per token."""
    inner = Tokenizer(WordLevel({chr(i): i for i in range(VOCAB)}, unk_token=chr(0)))
    inner.pre_tokenizer = Split("", "isolated")
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


# For every honoured argument, settings with which it changes the text. They are given the plain text of the first row.
# Samplers are set so that a single token is left to draw from: then transformers' own sampling is certain too.
CHANGES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "max_length": lambda new: {"max_length": 20, "max_new_tokens": None},
    "max_new_tokens": lambda new: {"max_new_tokens": 5},
    "min_length": lambda new: {"min_length": 26, "eos_token_id": new[3]},
    "min_new_tokens": lambda new: {"min_new_tokens": 12, "eos_token_id": new[3]},
    "max_time": lambda new: {"max_time": 0.0},
    "stop_strings": lambda new: {
        "stop_strings": [chr(new[5]) + chr(new[6])],
        "tokenizer": letters(),
        "eos_token_id": 1,
    },
    "eos_token_id": lambda new: {"eos_token_id": [new[9], new[6]]},
    "pad_token_id": lambda new: {"eos_token_id": new[6], "pad_token_id": 3},
    "do_sample": lambda new: {**SAMPLE, "temperature": 1e-4, "suppress_tokens": [new[2]]},
    "temperature": lambda new: {**SAMPLE, "temperature": 1e-4, "suppress_tokens": [new[2]]},
    "top_k": lambda new: {"do_sample": True, "top_k": 1, "suppress_tokens": [new[2]]},
    "top_p": lambda new: {**SAMPLE, "top_p": 1e-6, "suppress_tokens": [new[2]]},
    "min_p": lambda new: {**SAMPLE, "min_p": 1.0, "suppress_tokens": [new[2]]},
    "top_h": lambda new: {**SAMPLE, "top_h": 1e-6, "suppress_tokens": [new[2]]},
    "typical_p": lambda new: {**SAMPLE, "typical_p": 1e-6},
    "epsilon_cutoff": lambda new: {**SAMPLE, "epsilon_cutoff": 0.999, "suppress_tokens": [new[2]]},
    "eta_cutoff": lambda new: {**SAMPLE, "eta_cutoff": 0.999, "temperature": 0.02, "suppress_tokens": [new[2]]},
    "repetition_penalty": lambda new: {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": lambda new: {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": lambda new: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda new: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda new: {"bad_words_ids": [[new[1]], new[3:5]]},
    "sequence_bias": lambda new: {"sequence_bias": [[[new[1]], -50.0], [new[4:6], -50.0]]},
    "suppress_tokens": lambda new: {"suppress_tokens": [new[2]]},
    "begin_suppress_tokens": lambda new: {"begin_suppress_tokens": [new[0]]},
    "forced_eos_token_id": lambda new: {"forced_eos_token_id": [9], "eos_token_id": 9},
    "exponential_decay_length_penalty": lambda new: {
        "exponential_decay_length_penalty": (4, 1.8),
        "eos_token_id": min(set(range(VOCAB)) - set(new)),
    },
    "renormalize_logits": lambda new: {"renormalize_logits": True, "output_scores": True, "suppress_tokens": [new[2]]},
    "watermarking_config": lambda new: {"watermarking_config": WatermarkingConfig(bias=5.0)},
    "num_return_sequences": lambda new: {"num_return_sequences": 2, **SAMPLE, "temperature": 1e-4},
    "stopping_criteria": lambda new: {"stopping_criteria": [MaxLengthCriteria(19)]},
    "prefix_allowed_tokens_fn": lambda new: {"prefix_allowed_tokens_fn": nine_tokens},
    "logits_processor": lambda new: {"logits_processor": [Pattern()]},
    "generation_config": lambda new: {
        "generation_config": GenerationConfig(suppress_tokens=[new[2]], max_new_tokens=NEW)
    },
}
# Honoured arguments that other tests are about, or that change nothing in the text of an ordinary prompt.
ELSEWHERE = {
    "inputs", "input_ids", "attention_mask", "position_ids", "tokenizer", "streamer", "bos_token_id",
    "return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states",
    "forced_bos_token_id",  # of a prompt of one token: below
    "remove_invalid_values",  # of a model that gives invalid values: below
}  # fmt: skip


def nine_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """Which tokens may come next: a function of the row's number, its last token and its length."""
    return [(int(ids[-1]) * 7 + row + len(ids) * 11 + i * 11) % VOCAB for i in range(9)]


class Pattern(LogitsProcessor):
    """LP3: allows one of two tokens, by a count of its own calls, and dislikes what it has seen last."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        allowed = torch.tensor([10 + self.calls % 3, 20 + self.calls % 3])
        self.calls += 1
        kept = torch.full_like(scores, float("-inf"))
        kept[:, allowed] = scores[:, allowed]
        return kept


def test_every_argument_of_transformers_is_in_the_table():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - set(CONFIG) == set()
    call = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert call - set(CALL) == set()


def test_every_honoured_argument_is_compared_with_transformers():
    honoured = {name for name, argument in (CALL | CONFIG).items() if argument.outcome == "honoured"}
    assert honoured - set(CHANGES) - ELSEWHERE == set()


@pytest.mark.parametrize("rows", CASES)
@pytest.mark.parametrize("name", CHANGES)
def test_an_honoured_argument_gives_the_text_of_transformers(name, rows):
    case = CASES[rows]
    new = plain(case)[0, case.inputs["input_ids"].shape[1] :].tolist()
    common: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, "pad_token_id": 0, **GREEDY}
    if name == "generation_config":  # both at once would be two voices
        common = case.inputs
    wanted = CHANGES[name](new)
    reference = case.model.generate(**common | wanted)
    assert name == "renormalize_logits" or reference.tolist() != plain(case).tolist(), "the case shows nothing"
    for drafter, plan in (("noisy", TREE), ("eagle-trained", CHAIN)):
        ours = selfdraft.generate(
            **common | CHANGES[name](new), model=case.model, drafter=ARMS[drafter](case), plan=plan
        )
        same_tokens(ours, reference)


@pytest.mark.parametrize("name", [name for name, each in (CALL | CONFIG).items() if each.outcome == "refused"])
def test_a_refused_argument_is_refused_by_name(name, monkeypatch):
    case = CASES["one row"]
    values = {"num_beams": 2, "num_beam_groups": 2, "guidance_scale": 1.5, "penalty_alpha": 0.6}
    values |= {"cache_implementation": "offloaded", "custom_generate": selfdraft.decode}
    monkeypatch.setattr(case.model, "forward", lambda *args, **kwargs: pytest.fail("the model ran"), raising=False)
    with pytest.raises(ValueError, match=name):
        selfdraft.generate(
            case.model, **case.inputs, drafter="ngram", max_new_tokens=4, **{name: values.get(name, True)}
        )
    if name in CONFIG:
        with pytest.raises(ValueError):
            config = GenerationConfig(max_new_tokens=4)
            setattr(config, name, values.get(name, True))
            selfdraft.generate(case.model, **case.inputs, drafter="ngram", generation_config=config)


# --- What is returned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", CASES)
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"suppress_tokens": [5, 7]}])
def test_scores_logits_and_hidden_states_are_those_of_transformers(rows, plan, settings):
    """OU3: one entry per new token, whatever was accepted in which round."""
    case = CASES[rows]
    wanted: dict[str, Any] = {
        **case.inputs,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        **GREEDY,
        **settings,
    }
    reference = case.model.generate(**wanted)
    for drafter in ("noisy", "eagle-trained"):
        ours = selfdraft.generate(case.model, **wanted, drafter=ARMS[drafter](case), plan=plan)
        same_tokens(ours.sequences, reference.sequences)
        for name in ("scores", "logits"):
            assert len(ours[name]) == NEW
            torch.testing.assert_close(torch.stack(ours[name]), torch.stack(reference[name]), atol=1e-3, rtol=1e-4)
        assert len(ours.hidden_states) == NEW
        told = case.inputs["attention_mask"].bool()  # what stands at padding is nobody's
        for ours_entry, entry in zip(ours.hidden_states, reference.hidden_states, strict=True):
            for layer, other in zip(ours_entry, entry, strict=True):
                assert layer.shape == other.shape
                if layer.shape[1] > 1:
                    layer, other = layer[told], other[told]
                torch.testing.assert_close(layer, other, atol=1e-3, rtol=1e-4)


def test_hidden_states_of_the_prompt_stand_where_its_tokens_do():
    """Also where padding stands on the right, or in the middle."""
    case = CASES["three rows"]
    ids, mask = torch.randint(3, 128, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, 3] = 0
    wanted: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    ours = selfdraft.generate(case.model, ids, attention_mask=mask, **wanted, **GREEDY).hidden_states[0]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        reference = case.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, output_hidden_states=True
        ).hidden_states
    for layer, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(layer[mask.bool()], other[mask.bool()], atol=1e-3, rtol=1e-4)


def test_entries_end_with_the_row_that_is_longest():
    case = CASES["three rows"]
    eos = [int(token) for token in (plain(case)[0, -20], plain(case)[1, -12], plain(case)[2, -5])]
    wanted: dict[str, Any] = {
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        "eos_token_id": eos,
        "output_scores": True,
        **GREEDY,
    }
    reference = case.model.generate(**case.inputs, **wanted, return_dict_in_generate=True)
    ours = selfdraft.generate(
        case.model, **case.inputs, **wanted, return_dict_in_generate=True, drafter=ARMS["noisy"](case), plan=TREE
    )
    same_tokens(ours.sequences, reference.sequences)
    assert len(ours.scores) == len(reference.scores) == ours.sequences.shape[1] - case.inputs["input_ids"].shape[1]
    for step, (one, other) in enumerate(zip(ours.scores, reference.scores, strict=True)):
        for row in range(3):
            new = reference.sequences[row, -len(ours.scores) :].tolist()
            if not set(new[:step]) & set(eos):
                torch.testing.assert_close(one[row], other[row], atol=1e-3, rtol=1e-4)


# --- What the user brings ---------------------------------------------------------------------------------------------


class Counting(StoppingCriteria):
    """Stops at its tenth call, and remembers what it saw."""

    def __init__(self):
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return torch.full((len(input_ids),), len(self.seen) == 10)


class Witness(LogitsProcessor):
    """Remembers every text that it was given, and changes the scores by the number of its calls."""

    def __init__(self):
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores.roll(len(self.seen), dims=-1)


@pytest.mark.parametrize("rows", CASES)
@pytest.mark.parametrize("drafter", ["copy", "noisy", "ngram"])
@pytest.mark.parametrize("kind", [Counting, Witness])
def test_what_keeps_a_state_is_called_as_in_plain_decoding(kind, drafter, rows):
    """LP3: the same texts, in the same order, as often."""
    case = CASES[rows]
    name = "stopping_criteria" if kind is Counting else "logits_processor"
    eos = plain(case)[0, -15].item() if kind is Counting else None
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": eos, **GREEDY}
    theirs, own = kind(), kind()
    reference = case.model.generate(**wanted, **{name: [theirs]})
    same_tokens(
        selfdraft.generate(case.model, **wanted, **{name: [own]}, drafter=ARMS[drafter](case), plan=TREE), reference
    )
    assert own.seen == theirs.seen


def test_a_processor_that_keeps_a_state_is_drafted_for_all_the_same():
    """A run of accepted drafts, each processed in its turn."""
    case = CASES["one row"]
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, **GREEDY}
    reference = case.model.generate(**wanted, logits_processor=[Witness()])
    script = Script(texts_of(case.inputs, reference), [4], VOCAB)
    ours = selfdraft.generate(
        case.model, **wanted, logits_processor=[Witness()], drafter=script, plan=CHAIN, return_dict_in_generate=True
    )
    same_tokens(ours.sequences, reference)
    assert ours.stats.tokens_per_round > 4


def test_a_processor_sees_two_dimensions_of_one_batch():
    """LP4, in rounds where all is accepted and where nothing is."""

    class Strict(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.ndim == scores.ndim == 2 and len(input_ids) == len(scores)
            return scores

    for rows in CASES:
        case = CASES[rows]
        for drafter in ("copy", "anti", "eagle-trained"):
            for plan in (CHAIN, TREE):
                selfdraft.generate(
                    case.model, **case.inputs, logits_processor=[Strict()], drafter=ARMS[drafter](case), plan=plan,
                    do_sample=True, temperature=0.1, top_p=0.9, seed=1, max_new_tokens=8,
                )  # fmt: skip


def test_an_assistant_model_is_a_draft_model():
    case = CASES["one row"]
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, **GREEDY}
    ours = selfdraft.generate(
        case.model, **wanted, assistant_model=ARMS["noisy"](case).model, return_dict_in_generate=True
    )
    same_tokens(ours.sequences, plain(case))
    assert ours.stats.acceptance_rate > 0
    with pytest.raises(ValueError, match="assistant_model and drafter"):
        selfdraft.generate(case.model, **wanted, assistant_model=ARMS["noisy"](case).model, drafter="ngram")


@pytest.mark.parametrize("through", ["selfdraft", "transformers"])
def test_prompt_lookup_is_the_ngram_drafter(through):
    case = CASES["one row"]
    ids = case.inputs["input_ids"].repeat(1, 3)
    wanted: dict[str, Any] = {"max_new_tokens": NEW, "prompt_lookup_num_tokens": 3, "return_dict_in_generate": True}
    if through == "selfdraft":
        ours = selfdraft.generate(case.model, ids, **wanted, **GREEDY)
    else:
        ours = case.model.generate(ids, custom_generate=selfdraft.decode, **wanted, **GREEDY)
    same_tokens(ours.sequences, case.model.generate(ids, max_new_tokens=NEW, **GREEDY))
    assert len(ours.stats.drafted) == 3 and ours.stats.drafted[2] > 0
    with pytest.raises(ValueError, match="ngram"):
        selfdraft.generate(case.model, ids, **wanted, drafter=ARMS["copy"](case), **GREEDY)


@pytest.mark.parametrize("drafter", ["copy", "noisy", "ngram"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_inside_a_run_cuts_everything_at_once(drafter, length):
    """ES2, ES4: ids, stream, scores and counters end with the token that completes the string."""
    case = CASES["one row"]
    new = plain(case)[0, case.inputs["input_ids"].shape[1] :].tolist()
    text = "".join(map(chr, new))
    wanted: dict[str, Any] = {
        **case.inputs, "max_new_tokens": NEW, "stop_strings": [text[3 : 3 + length]], "tokenizer": letters(),
        "output_scores": True, "return_dict_in_generate": True, **GREEDY,
    }  # fmt: skip
    reference = case.model.generate(**wanted)
    heard: list[int] = []
    ours = selfdraft.generate(
        case.model, **wanted, drafter=ARMS[drafter](case), plan=Plan(depth=8), streamer=Listener(heard)
    )
    same_tokens(ours.sequences, reference.sequences)
    assert len(ours.scores) == len(reference.scores) == ours.stats.new_tokens < NEW
    assert heard == ours.sequences[0].tolist()


def test_a_stop_string_may_begin_in_the_prompt():
    case = CASES["one row"]
    prompt = case.inputs["input_ids"].shape[1]
    whole = "".join(map(chr, plain(case)[0].tolist()))
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, "tokenizer": letters(), **GREEDY}
    wanted["stop_strings"] = [whole[prompt - 1 : prompt + 2]]
    reference = case.model.generate(**wanted)
    assert reference.shape[1] < plain(case).shape[1]
    same_tokens(selfdraft.generate(case.model, **wanted, drafter=ARMS["copy"](case), plan=Plan(depth=8)), reference)


def test_stop_strings_without_a_tokenizer_are_refused():
    case = CASES["one row"]
    with pytest.raises(ValueError, match="tokenizer"):
        selfdraft.generate(case.model, **case.inputs, stop_strings=["x"], drafter="ngram", max_new_tokens=4)


def test_the_stop_strings_of_the_models_own_config_hold(monkeypatch):
    case = CASES["one row"]
    new = plain(case)[0, case.inputs["input_ids"].shape[1] :].tolist()
    monkeypatch.setattr(case.model.generation_config, "stop_strings", [chr(new[4])])
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, "tokenizer": letters(), **GREEDY}
    reference = case.model.generate(**wanted)
    same_tokens(selfdraft.generate(case.model, **wanted, drafter=ARMS["copy"](case), plan=Plan(depth=8)), reference)
    assert case.model.generation_config.stop_strings == [chr(new[4])]


def test_max_time_ends_a_text_that_would_go_on():
    case = CASES["one row"]
    ours = selfdraft.generate(case.model, **case.inputs, drafter="ngram", max_new_tokens=10**5, max_time=0.3, **GREEDY)
    assert case.inputs["input_ids"].shape[1] < ours.shape[1] < 10**5


def test_a_watermark_that_keeps_a_state_is_exact_in_a_batch():
    case = CASES["three rows"]
    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, "watermarking_config": config, "seed": 3, **SAMPLE}
    reference = selfdraft.generate(case.model, **wanted)
    ours = selfdraft.generate(case.model, **wanted, drafter=ARMS["noisy"](case), plan=TREE)
    same_tokens(ours, reference)


def test_a_forced_first_token_of_a_prompt_of_one_token():
    case = CASES["one row"]
    wanted: dict[str, Any] = {"max_new_tokens": NEW, "forced_bos_token_id": 7, **GREEDY}
    ids = torch.tensor([[5]])
    reference = case.model.generate(ids, **wanted)
    assert int(reference[0, 1]) == 7 != int(case.model.generate(ids, max_new_tokens=1, **GREEDY)[0, 1])
    same_tokens(selfdraft.generate(case.model, ids, **wanted, drafter=ARMS["noisy"](case), plan=TREE), reference)


def test_invalid_values_are_removed_where_transformers_removes_them(monkeypatch):
    case = CASES["one row"]
    model, never = case.model, 9
    whole = type(model).forward

    def forward(self, *args, **kwargs):
        output = whole(self, *args, **kwargs)
        output.logits[..., never] = float("inf")
        return output

    monkeypatch.setattr(type(model), "forward", functools.wraps(whole)(forward))
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, "remove_invalid_values": True, **GREEDY}
    reference = model.generate(**wanted)
    assert never in reference[0].tolist()
    same_tokens(selfdraft.generate(model, **wanted, drafter="ngram"), reference)


class Listener:
    """A streamer that writes into a list; at a given token it breaks."""

    def __init__(self, heard: list[int], breaks_at: int = 10**9):
        self.heard, self.breaks_at, self.ends = heard, breaks_at, 0

    def put(self, value):
        self.heard.extend(value.flatten().tolist())
        if len(self.heard) >= self.breaks_at:
            raise RuntimeError("the listener has gone")

    def end(self):
        self.ends += 1


def test_a_streamer_that_breaks_is_ended_once_and_leaves_nothing_behind():
    case = CASES["one row"]
    drafter, listener = ARMS["copy"](case), Listener([], breaks_at=12)
    before = torch.get_rng_state(), vars(case.model.generation_config).copy()
    with pytest.raises(RuntimeError, match="gone"):
        selfdraft.generate(case.model, **case.inputs, drafter=drafter, streamer=listener, max_new_tokens=NEW, **GREEDY)
    assert listener.ends == 1
    assert torch.get_rng_state().equal(before[0]) and vars(case.model.generation_config) == before[1]
    same_tokens(
        selfdraft.generate(case.model, **case.inputs, drafter=drafter, max_new_tokens=NEW, **GREEDY), plain(case)
    )


def test_a_streamer_is_bound_to_the_loop_inside_transformers():
    case, heard = CASES["one row"], []
    loop = functools.partial(selfdraft.decode, streamer=Listener(heard))
    ids = case.model.generate(**case.inputs, custom_generate=loop, drafter="ngram", max_new_tokens=NEW, **GREEDY)
    assert heard == ids[0, case.inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("drafter", ["copy", "noisy", "ngram", "eagle-trained", "medusa-trained"])
@pytest.mark.parametrize("first", range(4))
def test_a_stop_string_may_end_inside_a_token(drafter, first):
    """Tokens of three letters, and strings that begin and end anywhere in them."""
    case = CASES["one row"]
    vocabulary = {f"{chr(97 + i % 26)}{chr(97 + i // 26)}{chr(97 + i % 7)}": i for i in range(VOCAB)}
    letter = {chr(97 + i): VOCAB + i for i in range(26)}  # for texts that are encoded
    inner = Tokenizer(WordLevel(vocabulary | letter, unk_token="a"))
    inner.pre_tokenizer = Split("", "isolated")
    inner.decoder = Fuse()
    words = {index: word for word, index in vocabulary.items()}
    text = "".join(words[token] for token in plain(case)[0, case.inputs["input_ids"].shape[1] :].tolist())
    wanted: dict[str, Any] = {
        **case.inputs, "max_new_tokens": NEW, "stop_strings": [text[10 + first : 15 + first]],
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=inner), "output_scores": True,
        "output_hidden_states": True, "return_dict_in_generate": True, **GREEDY,
    }  # fmt: skip
    reference = case.model.generate(**wanted)
    ours = selfdraft.generate(case.model, **wanted, drafter=ARMS[drafter](case), plan=Plan(depth=8))
    same_tokens(ours.sequences, reference.sequences)
    assert len(ours.scores) == len(ours.hidden_states) == len(reference.scores) == ours.stats.new_tokens < NEW


@pytest.mark.parametrize("drafter", ["copy", "noisy", "ngram"])
def test_rows_that_end_without_end_tokens_go_on_until_all_have_ended_as_in_transformers(drafter):
    case = CASES["three rows"]
    new = plain(case)[:, case.inputs["input_ids"].shape[1] :].tolist()
    ends = [chr(new[0][3]), chr(new[1][9]), chr(new[2][6])]
    wanted: dict[str, Any] = {
        **case.inputs,
        "max_new_tokens": NEW,
        "stop_strings": ends,
        "tokenizer": letters(),
        **GREEDY,
    }
    wanted |= {"return_dict_in_generate": True, "output_scores": True}
    reference = case.model.generate(**wanted)
    assert reference.sequences.shape[1] < plain(case).shape[1]
    ours = selfdraft.generate(case.model, **wanted, drafter=ARMS[drafter](case), plan=Plan(depth=6))
    same_tokens(ours.sequences, reference.sequences)
    assert len(ours.scores) == len(reference.scores)
    assert ours.stats.new_tokens == 3 * len(reference.scores)  # not what a faster row said past the end


def test_the_documentation_shows_the_table_as_it_is():
    shown = (Path(__file__).parents[2] / "docs" / "generate.md").read_text()
    for name, argument in (CALL | CONFIG).items():
        assert f"| `{name}` | {argument.outcome} | {argument.note} |" in shown, f"docs/generate.md: {name}"


def test_an_end_token_that_was_drafted_ends_the_calls_of_a_processor_that_keeps_a_state():
    case = CASES["one row"]
    wanted: dict[str, Any] = {**case.inputs, "max_new_tokens": NEW, **GREEDY}
    text = case.model.generate(**wanted, logits_processor=[Witness()])
    wanted["eos_token_id"] = int(text[0, -10])
    theirs = Witness()
    reference = case.model.generate(**wanted, logits_processor=[theirs])
    script = Script(texts_of(case.inputs, text), [4], VOCAB)
    for plan in (CHAIN, TREE):
        own = Witness()
        same_tokens(
            selfdraft.generate(case.model, **wanted, logits_processor=[own], drafter=script, plan=plan), reference
        )
        assert own.seen == theirs.seen

"""Where the text ends and where it begins: stop tokens, length limits, short, long and padded prompts."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import EosTokenCriteria

import selfdraft
from selfdraft import Plan
from tests.contract.arms import CHAIN, GREEDY, LENGTHS, NEW, POLICIES, SEED, TREE, Case, arms, plain, seeded
from tests.contract.checks import equals_plain, same_tokens
from tests.models import FAMILIES, prompts, row
from tests.scripted import Passing, Script, texts_of

ARMS = arms()
DEEP = Plan(depth=8)
ONE = Case("llama", "sdpa", "greedy", 1)
THREE = Case("llama", "sdpa", "greedy", 3)


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("name", ["copy", "eagle-trained", "medusa-trained", "ngram", "anti"])
def test_an_eos_anywhere_in_a_run_ends_the_text(name, index):
    drafter = ARMS[name](ONE)
    eos = int(plain(ONE)[0, LENGTHS[1][0] + index])
    settings: dict[str, Any] = {"eos_token_id": eos, "max_new_tokens": NEW, **GREEDY}
    ours = selfdraft.generate(
        ONE.model, **ONE.inputs, drafter=drafter, plan=DEEP, return_dict_in_generate=True, **settings
    )
    same_tokens(ours.sequences, ONE.model.generate(**ONE.inputs, **settings))
    assert int(ours.sequences[0, -1]) == eos
    assert ours.stats.new_tokens == ours.sequences.shape[1] - LENGTHS[1][0]


@pytest.mark.parametrize(
    "kind", [torch.tensor, np.int64, np.array, lambda eos: (eos, eos), lambda eos: torch.tensor([eos])]
)
def test_end_tokens_of_any_kind_end_the_text(kind):
    settings: dict[str, Any] = {"eos_token_id": kind(int(plain(ONE)[0, -12])), "max_new_tokens": NEW, **GREEDY}
    reference = ONE.model.generate(**ONE.inputs, **settings)
    assert reference.shape[1] < plain(ONE).shape[1]
    same_tokens(
        selfdraft.generate(ONE.model, **ONE.inputs, drafter=ARMS["copy"](ONE), plan=DEEP, **settings), reference
    )


def test_rows_are_padded_when_a_criterion_has_end_tokens():
    """transformers asks whether one has the attribute, whatever it is."""

    class Own(EosTokenCriteria):
        pass

    new = plain(THREE)[:, LENGTHS[3][-1] :].tolist()
    settings: dict[str, Any] = {
        "stopping_criteria": [Own(eos_token_id=[new[0][3], new[1][8], new[2][6]])], "pad_token_id": 0,
        "max_new_tokens": NEW, **GREEDY,
    }  # fmt: skip
    reference = THREE.model.generate(**THREE.inputs, **settings)
    assert (reference[:, -1] == 0).any()
    same_tokens(selfdraft.generate(THREE.model, **THREE.inputs, drafter=ARMS["copy"](THREE), **settings), reference)


@pytest.mark.parametrize("name", ["copy", "ngram", "eagle-untrained"])
def test_a_prompt_of_32_bit_numbers_is_a_prompt(name):
    inputs = {**ONE.inputs, "input_ids": ONE.inputs["input_ids"].int()}
    ours = selfdraft.generate(ONE.model, **inputs, drafter=ARMS[name](ONE), max_new_tokens=NEW, **GREEDY)
    same_tokens(ours, ONE.model.generate(**inputs, max_new_tokens=NEW, **GREEDY))


def test_a_number_of_tokens_may_be_written_as_a_float():
    settings: dict[str, Any] = {"max_new_tokens": 9.0, **GREEDY}
    reference = ONE.model.generate(**ONE.inputs, **settings)
    same_tokens(selfdraft.generate(ONE.model, **ONE.inputs, drafter="ngram", **settings), reference)


@pytest.mark.parametrize("plan", [CHAIN, TREE, Plan(0)], ids=["chain", "tree", "plain"])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_nothing_left_to_sample_from_is_an_error_as_in_transformers(plan, penalty):
    settings: dict[str, Any] = {
        "suppress_tokens": list(range(ONE.model.config.vocab_size)), "do_sample": True, "max_new_tokens": 4,
        "repetition_penalty": penalty,
    }  # fmt: skip
    with pytest.raises(RuntimeError):
        ONE.model.generate(**ONE.inputs, **settings)
    with pytest.raises(RuntimeError, match="nothing to sample from"):
        selfdraft.generate(ONE.model, **ONE.inputs, drafter="ngram", plan=plan, seed=1, **settings)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["copy", "noisy", "ngram"])
@pytest.mark.parametrize("pad", [0, None])
@pytest.mark.parametrize("order", [1, -1])
def test_rows_end_at_any_of_several_eos_and_are_padded_as_transformers_pads_them(name, plan, pad, order):
    text = plain(THREE)
    eos = [int(text[0, -20]), int(text[1, -12]), int(text[2, -5])][::order]
    settings: dict[str, Any] = {"eos_token_id": eos, "max_new_tokens": NEW, "pad_token_id": pad, **GREEDY}
    reference = THREE.model.generate(**THREE.inputs, **settings)
    drafter = ARMS[name](THREE)
    same_tokens(selfdraft.generate(THREE.model, **THREE.inputs, drafter=drafter, plan=plan, **settings), reference)


@pytest.mark.parametrize("name", ["copy", "noisy", "eagle-untrained"])
@pytest.mark.parametrize("index", [0, 1, 4, 9])
def test_a_sampled_text_ends_at_the_eos_and_is_the_same_up_to_there(name, index):
    case = Case("llama", "sdpa", "T1", 1)
    whole = plain(case)[0].tolist()
    start = LENGTHS[1][0]
    eos = whole[start + index]
    ours = selfdraft.generate(
        case.model,
        **case.inputs,
        drafter=ARMS[name](case),
        plan=TREE,
        eos_token_id=eos,
        max_new_tokens=NEW,
        **seeded("T1"),
    )
    assert ours[0].tolist() == whole[: whole.index(eos, start) + 1]


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("new", range(1, 7))
def test_no_depth_makes_the_text_longer_than_was_asked(name, new):
    drafter = ARMS[name](THREE)
    reference = plain(THREE)[:, : LENGTHS[3][-1] + new]
    for depth in range(1, 9):
        settings: dict[str, Any] = {"drafter": drafter, "plan": Plan(depth), **GREEDY}
        same_tokens(selfdraft.generate(THREE.model, **THREE.inputs, max_new_tokens=new, **settings), reference)


def test_max_length_is_a_limit_like_that_of_transformers():
    for extra in (1, 2, 5):
        settings: dict[str, Any] = {"max_length": LENGTHS[3][-1] + extra, **GREEDY}
        reference = THREE.model.generate(**THREE.inputs, **settings)
        ours = selfdraft.generate(THREE.model, **THREE.inputs, drafter=ARMS["copy"](THREE), plan=DEEP, **settings)
        same_tokens(ours, reference)


class Recorder(Passing):
    """Remembers what was asked."""

    def __init__(self, inner):
        super().__init__(inner)
        self.plans: list[Plan] = []

    def propose(self, state, seen, root, plan, noise):
        self.plans.append(plan)
        return super().propose(state, seen, root, plan, noise)


def test_nothing_is_drafted_when_one_token_is_left():
    for new, depths in ((1, []), (2, []), (3, [1]), (6, [4])):
        recorder = Recorder(ARMS["copy"](ONE))
        selfdraft.generate(ONE.model, **ONE.inputs, drafter=recorder, plan=DEEP, max_new_tokens=new, **GREEDY)
        assert [plan.depth for plan in recorder.plans] == depths


def test_statistics_are_those_counted_by_hand():
    """Runs 3, 0, 5 of depth 5, and an EOS as the second token of the fourth round, worked out on paper."""
    text = plain(ONE)
    start = LENGTHS[1][0]
    new = text[0, start:].tolist()
    # The prefill gives token 0, the rounds 4, 1, 6 tokens: 1..4, 5, 6..11. The fourth round is cut at token 13.
    eos = new[13]
    assert eos not in new[:13]
    drafter = Script(texts_of(ONE.inputs, text), [3, 0, 5, 5], ONE.model.config.vocab_size, Plan(depth=5))
    ours = selfdraft.generate(
        ONE.model,
        **ONE.inputs,
        drafter=drafter,
        eos_token_id=eos,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **GREEDY,
    )
    stats = ours.stats
    assert ours.sequences[0, start:].tolist() == new[:14]
    assert (stats.prefills, stats.rounds, stats.new_tokens) == (1, 4, 14)
    assert stats.drafted == [3, 3, 3, 3, 3]
    assert stats.accepted == [3, 3, 2, 1, 1]
    assert stats.tokens_per_round == 13 / 4
    assert stats.acceptance_by_depth == [1.0, 1.0, 2 / 3, 1 / 3, 1 / 3]
    assert stats.acceptance_rate == 10 / 15


def test_statistics_of_a_text_without_rounds_divide_by_nothing():
    ours = selfdraft.generate(
        ONE.model, **ONE.inputs, drafter="ngram", max_new_tokens=1, return_dict_in_generate=True, **GREEDY
    )
    assert ours.stats.rounds == 0 and ours.stats.tokens_per_round == 0 and ours.stats.acceptance_rate == 0
    assert ours.stats.acceptance_by_depth == []


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("name", ["copy", "noisy", "anti", "medusa-untrained", "eagle-untrained"])
@pytest.mark.parametrize("ids", [[10], [1], [1, 10]], ids=str)
def test_prompts_of_one_and_two_tokens(ids, name, width):
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    settings: dict[str, Any] = {**inputs, "max_new_tokens": NEW, **GREEDY}
    reference = ONE.model.generate(**settings)
    if name == "anti":
        drafter: Any = type(ARMS[name](ONE))(texts_of(inputs, reference), ONE.model.config.vocab_size)
    else:
        drafter = ARMS[name](ONE)
    for depth in (1, 2, 5, 8):
        same_tokens(
            selfdraft.generate(ONE.model, drafter=drafter, plan=Plan(depth, width, 3 * depth), **settings), reference
        )


@pytest.mark.parametrize("chunk", [1, 4, 5])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["copy", "eagle-trained", "medusa-trained", "ngram"])
def test_a_prompt_longer_than_a_chunk_of_the_prefill(name, batch, chunk, monkeypatch):
    case = Case("llama", "sdpa", "T1", batch)
    drafter, whole = ARMS[name](case), equals_plain(case, ARMS[name](case), TREE)
    monkeypatch.setattr("selfdraft.target.PROMPT_PART", chunk)
    in_chunks = equals_plain(case, drafter, TREE)
    assert (in_chunks.drafted, in_chunks.accepted) == (whole.drafted, whole.accepted)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_its_prompt_in_chunks(family, monkeypatch):
    case = Case(family, "", "greedy", 3)
    reference = plain(case)
    monkeypatch.setattr("selfdraft.target.PROMPT_PART", 4)
    settings: dict[str, Any] = {"max_new_tokens": NEW, **GREEDY}
    same_tokens(selfdraft.generate(case.model, **case.inputs, drafter="ngram", **settings), reference)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "phi3", "gpt_oss"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_prompts_around_the_size_of_the_window(family, length):
    case = Case(family, "", "greedy", 1)
    inputs = prompts((length,), seed=1)
    settings: dict[str, Any] = {**inputs, "max_new_tokens": 40, **GREEDY}
    reference = case.model.generate(**settings)
    for plan in (Plan(depth=8), TREE):
        same_tokens(selfdraft.generate(case.model, drafter=ARMS["noisy"](case), plan=plan, **settings), reference)


@pytest.mark.parametrize("policy", ["greedy", "T1"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral"])
@pytest.mark.parametrize("name", ["copy", "eagle-untrained", "ngram"])
def test_padding_may_stand_on_the_right(name, family, policy):
    """transformers' own generate goes wrong here, so the reference is each row's single run."""
    case = Case(family, "", policy, 3)
    inputs = case.inputs
    order = inputs["attention_mask"].argsort(dim=1, descending=True, stable=True)
    inputs = {name: each.gather(1, order) for name, each in inputs.items()}
    settings: dict[str, Any] = {"max_new_tokens": NEW, "drafter": ARMS[name](case), "plan": TREE}
    ours = selfdraft.generate(case.model, **inputs, **settings, **seeded(policy))
    for index in range(3):
        reference = selfdraft.generate(
            case.model, **row(case.inputs, index), max_new_tokens=NEW, **seeded(policy, index)
        )
        same_tokens(ours[index : index + 1, -NEW:], reference[:, -NEW:])


def test_a_pad_token_that_is_also_the_eos():
    eos = int(plain(THREE)[1, -8])
    inputs = {**THREE.inputs, "input_ids": THREE.inputs["input_ids"].where(THREE.inputs["attention_mask"] > 0, eos)}
    settings: dict[str, Any] = {"eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": NEW, **GREEDY}
    reference = THREE.model.generate(**inputs, **settings)
    same_tokens(selfdraft.generate(THREE.model, **inputs, drafter=ARMS["copy"](THREE), **settings), reference)


def test_several_sequences_per_prompt():
    settings: dict[str, Any] = {"num_return_sequences": 3, "max_new_tokens": NEW, "drafter": ARMS["noisy"](ONE)}
    with pytest.raises(ValueError, match="num_return_sequences"):  # transformers' own answer
        selfdraft.generate(ONE.model, **ONE.inputs, **settings, **GREEDY)
    sampled = selfdraft.generate(ONE.model, **ONE.inputs, **settings, **seeded("T1"))
    for index in range(3):
        alone = selfdraft.generate(ONE.model, **ONE.inputs, max_new_tokens=NEW, **seeded("T1", index))
        same_tokens(sampled[index : index + 1], alone)
    assert len({tuple(each) for each in sampled.tolist()}) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_per_row_is_the_seed_of_its_single_run(policy):
    if policy == "greedy":
        return
    case = Case("llama", "sdpa", policy, 3)
    settings: dict[str, Any] = {"drafter": ARMS["noisy"](case), "max_new_tokens": NEW, **POLICIES[policy]}
    ours = selfdraft.generate(case.model, **case.inputs, seed=[SEED, SEED + 1, SEED + 2], **settings)
    same_tokens(ours, plain(case))

"""How long a drafter is asked whose drafts are never kept, and whether it finds its place when it is asked again."""

import warnings

import pytest
from transformers import LogitsProcessor

import selfdraft
from selfdraft.planner import FAILURES, FIRST_PAUSE, LONGEST_PAUSE
from tests.contract.arms import LENGTHS, Case, arms, seeded
from tests.models import tiny
from tests.scripted import Anti, Passing, Rounds, texts_of

ARMS = arms()
VOCAB = tiny("llama").config.vocab_size
ENDLESS = 10**6


class Late(Passing):
    """Another drafter that knows the text and spoils its first `failures` drafts; remembers what it wanted to draft."""

    def __init__(self, inner, texts, failures):
        super().__init__(inner)
        self.wrong, self.failures = Anti(texts, VOCAB), failures
        self.trees = {}
        self.rounds = 0

    def propose(self, state, seen, root, plan, noise):
        tree = super().propose(state, seen, root, plan, noise)
        self.rounds += 1
        for row, length in enumerate(seen.lengths.tolist()):
            self.trees[row, length] = tree.tokens[row].tolist(), tree.parents[row].tolist()
        return tree if self.rounds > self.failures else self.wrong.propose(Rounds(), seen, root, plan, noise)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", ["greedy", "T1"])
@pytest.mark.parametrize("name", [name for name in ARMS if name not in ("anti", "script")])
def test_a_drafter_that_had_to_pause_drafts_what_it_would_have_without_the_pause(name, policy, batch):
    new, case = FAILURES + FIRST_PAUSE + 24, Case("llama", "sdpa", policy, batch)
    settings = {**case.inputs, "max_new_tokens": new, "return_dict_in_generate": True, **seeded(policy)}
    texts = texts_of(case.inputs, selfdraft.generate(case.model, **settings).sequences)
    always, pausing = (Late(ARMS[name](case), texts, failures) for failures in (ENDLESS, FAILURES))
    selfdraft.generate(case.model, **settings, drafter=always, plan=always.plan)
    output = selfdraft.generate(case.model, **settings, drafter=pausing)

    assert texts_of(case.inputs, output.sequences) == texts
    later = {}
    for (row, length), tree in pausing.trees.items():
        done = length - LENGTHS[batch][row]  # plans are cut near the end, by what the hungriest row still wants
        if FAILURES + FIRST_PAUSE <= done < new - 8:
            later[row, length] = tree
        assert not FAILURES < done < FAILURES + FIRST_PAUSE
    assert len(later) >= batch
    assert later == {key: always.trees[key] for key in later}


def test_a_drafter_of_no_use_drafts_in_a_twentieth_of_the_rounds_and_as_often_as_told_with_a_plan():
    case = Case("llama", "sdpa", "greedy", 1)
    settings = {**case.inputs, "max_new_tokens": 201, "do_sample": False, "return_dict_in_generate": True}
    plain = selfdraft.generate(case.model, **settings)
    anti = Anti(texts_of(case.inputs, plain.sequences), VOCAB)
    for plan, most in ((None, FAILURES + 4), (anti.plan, 199)):
        stats = selfdraft.generate(case.model, **settings, drafter=anti, plan=plan).stats
        assert stats.rounds == 200
        assert stats.drafted[0] == most


def test_a_pause_costs_nothing_where_the_text_is_read_and_does_not_bring_the_draft_models_limit_nearer():
    """Rounds without a draft are those of plain decoding: one call of the processors each, and no more text to read
    afterwards than was decided."""
    case = Case("llama", "sdpa", "greedy", 1)
    calls = []

    class Reading(LogitsProcessor):
        def __call__(self, input_ids, scores):
            calls.append(input_ids.shape[1])
            return scores

    draft = ARMS["copy"](case)
    draft.model.config.max_position_embeddings = 300
    settings = {"max_new_tokens": 200, "do_sample": False, "return_dict_in_generate": True, "repetition_penalty": 1.05}
    plain = selfdraft.generate(case.model, **case.inputs, **settings)
    wrong = Late(draft, texts_of(case.inputs, plain.sequences), ENDLESS)
    rows = []
    head = draft.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, given, output: rows.append(output.shape[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = selfdraft.generate(case.model, **case.inputs, **settings, drafter=wrong)
    handle.remove()
    assert output.sequences.equal(plain.sequences)
    assert wrong.rounds == FAILURES + 4
    assert max(rows) <= LONGEST_PAUSE + 1 + draft.plan.depth
    settings.pop("repetition_penalty")
    selfdraft.generate(case.model, **case.inputs, **settings, logits_processor=[Reading()], drafter=wrong)
    assert calls == list(range(calls[0], calls[0] + 200))


def test_a_drafter_that_is_right_now_and_then_is_never_paused():
    case = Case("llama", "sdpa", "greedy", 1)
    settings = {**case.inputs, "max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}
    texts = texts_of(case.inputs, selfdraft.generate(case.model, **settings).sequences)

    class Seldom(Late):
        def propose(self, state, seen, root, plan, noise):
            self.failures = 0 if self.rounds % FAILURES == FAILURES - 1 else ENDLESS
            return super().propose(state, seen, root, plan, noise)

    seldom = Seldom(ARMS["copy"](case), texts, ENDLESS)
    stats = selfdraft.generate(case.model, **settings, drafter=seldom).stats
    assert stats.rounds > 2 * FAILURES
    assert seldom.rounds in (stats.rounds - 1, stats.rounds)  # nothing is drafted when one token is left

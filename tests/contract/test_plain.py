"""Decoding without a drafter: the reference that all drafted text is compared with must itself be right."""

import pytest

from tests.contract.arms import POLICIES, Case
from tests.contract.checks import plain_equals_slow_loop, plain_equals_transformers, rows_equal_single_runs
from tests.models import EVERY, attentions

SAMPLED = [name for name, policy in POLICIES.items() if policy["do_sample"]]
# Every family and attention meets one sampling policy, and llama all of them.
SLOW = [("llama", each, policy) for each in attentions("llama") for policy in SAMPLED]
SLOW += [(*every, SAMPLED[index % len(SAMPLED)]) for index, every in enumerate(EVERY) if every[0] != "llama"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("family", "attention"), EVERY)
def test_greedy_text_is_that_of_transformers(family, attention, batch):
    plain_equals_transformers(Case(family, attention, "greedy", batch))


@pytest.mark.parametrize(("family", "attention", "policy"), SLOW)
def test_sampled_text_is_what_the_definition_says(family, attention, policy):
    plain_equals_slow_loop(Case(family, attention, policy, batch=1))


@pytest.mark.parametrize("policy", ["greedy", "T0.7-top_k"])
@pytest.mark.parametrize(("family", "attention"), EVERY)
def test_each_row_of_a_ragged_batch_is_its_own_single_run(family, attention, policy):
    rows_equal_single_runs(Case(family, attention, policy, batch=3))

"""A draft model that is the target must be accepted always: equal text alone does not show a drafter's own faults."""

import pytest

from selfdraft import Plan
from selfdraft.drafters import growth
from tests.contract.arms import Case, arms
from tests.contract.checks import copy_is_always_accepted
from tests.models import EVERY

COPY = arms()["copy"]
DEPTHS = range(1, 9)
# Every family and attention: four depths, both as chain and as tree, both greedy and sampled, turn about.
TURNS = [
    (family, attention, depth, 1 + (depth // 2 + number) % 2, ["greedy", "T1"][(depth // 4 + number) % 2])
    for number, (family, attention) in enumerate(EVERY)
    for depth in DEPTHS
    if (depth + number) % 2
]


@pytest.mark.parametrize("policy", ["greedy", "T1"])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_copy_is_accepted_at_every_depth(depth, width, policy, certain):
    case = Case("llama", "sdpa", policy, batch=3 if depth % 2 else 1)
    copy_is_always_accepted(case, COPY(case), Plan(depth, width, nodes=2 * depth * width))


@pytest.mark.parametrize(("family", "attention", "depth", "width", "policy"), TURNS)
def test_copy_is_accepted_in_every_family(family, attention, depth, width, policy, certain):
    case = Case(family, attention, policy, batch=3)
    copy_is_always_accepted(case, COPY(case), Plan(depth, width, nodes=2 * depth * width))


@pytest.fixture
def certain(monkeypatch):
    """A drafter that is sure of itself: its best path is kept in any tree, so that only its own faults can lose it."""
    monkeypatch.setattr(growth, "SIGMA", 1e-3)

"""Every drafter x family x policy x batch x shape: the text is the plain text, token for token, in float32.

llama goes through the full product. The other families go through a covering design: for every policy, batch size and
shape there is every drafter with some family, and every family meets every drafter.
"""

import itertools

import pytest

import selfdraft
from tests.contract.arms import NEW, NEWCOMERS, PLANS, POLICIES, Case, arms, modules, plain, seeded
from tests.contract.checks import equals_plain, same_tokens
from tests.models import FAMILIES, attentions

ARMS = arms()
COMBINATIONS = list(itertools.product(POLICIES, [1, 3], PLANS))


def product() -> list[tuple]:
    """The full product for llama."""
    return [("llama", "sdpa", name, *rest) for name in ARMS for rest in COMBINATIONS]


def covering() -> list[tuple]:
    """One drafter and one attention per combination, moving on by one from family to family; llama's eager form too."""
    found, names, families = [], list(ARMS), list(FAMILIES)
    for number in range(max(len(families), len(names))):
        family = families[number % len(families)]
        for index, (policy, batch, shape) in enumerate(COMBINATIONS):
            choices = ["eager"] if family == "llama" else attentions(family)
            attention = choices[(number + index + index // 2 + index // 4) % len(choices)]
            found.append((family, attention, names[(number + index) % len(names)], policy, batch, shape))
    return found


@pytest.mark.parametrize(("family", "attention", "name", "policy", "batch", "shape"), product() + covering())
def test_drafted_text_is_the_plain_text(family, attention, name, policy, batch, shape):
    case = Case(family, attention, policy, batch)
    equals_plain(case, ARMS[name](case), PLANS[shape])


def test_the_covering_design_covers():
    rows = covering()
    for combination in COMBINATIONS:
        assert {row[2] for row in rows if row[3:] == combination} == set(ARMS), combination
    for family in FAMILIES:
        assert {row[2] for row in rows if row[0] == family} == set(ARMS), family
        assert {row[1] for row in rows if row[0] == family} >= set(attentions(family)) - {"sdpa"}, family


def test_the_arms_are_all_modules_of_the_package_and_the_tests_own_newcomer():
    assert set(modules()) >= {"ngram", "draft_model", "medusa", "eagle", "bigram"}
    for name in modules():
        assert any(arm == name or arm.startswith(f"{name}-") for arm in ARMS), name


def test_a_new_file_in_the_package_is_a_drafter_by_its_name(monkeypatch):
    monkeypatch.setattr(selfdraft.drafters, "__path__", [*selfdraft.drafters.__path__, str(NEWCOMERS)])
    case = Case("llama", "sdpa", "T1", 3)
    ours = selfdraft.generate(case.model, **case.inputs, drafter="bigram", max_new_tokens=NEW, **seeded(case.policy))
    same_tokens(ours, plain(case))


@pytest.mark.parametrize("name", [name for name in ARMS if name.endswith("-trained")])
def test_a_trained_drafter_is_accepted_more_often_than_an_untrained_one(name):
    """Without this, "trained" drafters might be nonsense that is always refused, and the tests above see little."""
    case = Case("llama", "sdpa", "greedy", 3)
    trained = equals_plain(case, ARMS[name](case), PLANS["chain"])
    untrained = equals_plain(case, ARMS[name.replace("-trained", "-untrained")](case), PLANS["chain"])
    assert trained.tokens_per_round > untrained.tokens_per_round + 0.5

"""Families beside those of `FAMILIES`: built smaller, and by a shorter contract. Every one of them is exact too."""

import pytest

from tests.contract.arms import PLANS, Case, plain
from tests.contract.checks import equals_plain, plain_equals_transformers
from tests.models import FAMILIES, MORE_FAMILIES, VOCAB, attentions
from tests.scripted import Script, texts_of

SHAPES = [{"greedy": "tree", "T1": "chain"}, {"greedy": "chain", "T1": "tree"}]


@pytest.mark.parametrize(("index", "family"), list(enumerate(MORE_FAMILIES)))
def test_drafted_text_is_the_plain_text_and_that_is_the_text_of_transformers(index, family):
    """Every family greedily and sampled, by a chain and by a tree; the attentions take turns."""
    attention = attentions(family)[index % len(attentions(family))]
    plain_equals_transformers(Case(family, attention, "greedy", 3))
    for policy, shape in SHAPES[index // 2 % 2].items():
        case = Case(family, attention, policy, 3)
        script = Script(texts_of(case.inputs, plain(case)), [3, 0, 1, 4, 2], VOCAB)
        assert equals_plain(case, script, PLANS[shape]).tokens_per_round > 1


def test_at_least_the_promised_number_of_families_is_exact():
    assert len(FAMILIES | MORE_FAMILIES) >= 37

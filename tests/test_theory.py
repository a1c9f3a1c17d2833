"""The formulas against worked examples, against each other, and against a simulated chain."""

import math

import pytest
import torch

from selfdraft.theory import (
    acceptance_chance,
    chain_speedup,
    expected_tokens_over_rounds,
    expected_tokens_per_round,
    measured_alpha,
    round_speedup,
)


@pytest.mark.parametrize(("alpha", "depth", "tokens"), [(0.7, 5, 2.941), (0.3, 5, 1.428), (0.0, 5, 1), (1.0, 5, 6)])
def test_expected_tokens_are_those_of_the_table(alpha, depth, tokens):
    assert expected_tokens_per_round(alpha, depth) == pytest.approx(tokens, abs=1e-3)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("depth", [0, 1, 7])
def test_expected_tokens_equal_the_closed_form(alpha, depth):
    assert expected_tokens_per_round(alpha, depth) == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha))


def test_chain_speedup_of_a_worked_example():
    """Five drafts of 5 ms each and a pass of 30 ms: a round costs 55/30 of a plain one."""
    tokens = expected_tokens_per_round(2 / 3, 5)
    assert chain_speedup(tokens, draft_seconds=5 * 0.005, pass_seconds=0.030) == pytest.approx(tokens * 30 / 55)
    assert chain_speedup(tokens, 0.025, 0.030) == pytest.approx(1.49, abs=0.01)


def test_round_speedup_is_one_for_plain_rounds_and_counts_what_a_round_costs():
    assert round_speedup(1.0, 0.03, 0.03) == 1
    assert round_speedup(3.0, 0.06, 0.03) == pytest.approx(1.5)


def test_acceptance_chance_of_a_worked_example():
    """q = (.8, .2), p = (.3, .7): A is accepted with 3/8, B always, so .8 * 3/8 + .2 = .5; and the output is p."""
    p, q = torch.tensor([0.3, 0.7]), torch.tensor([0.8, 0.2])
    accept = (p / q).clamp(max=1)
    alpha = acceptance_chance(p, q)
    assert alpha.item() == pytest.approx((q * accept).sum().item()) == pytest.approx(0.5)
    residual = (p - q).clamp(min=0)
    output = q * accept + (1 - alpha) * residual / residual.sum()
    assert output.tolist() == pytest.approx(p.tolist())


def test_chain_of_chances_is_recovered_from_its_counts():
    """Simulated rounds, 20,000 of depth 6: alpha has a standard error below 0.003, tokens per round below 0.015.

    At five standard errors the false-alarm odds are below one in a million; the seed is fixed besides.
    """
    alpha, depth, rounds = 0.6, 6, 20_000
    hits = torch.rand(rounds, depth, generator=torch.Generator().manual_seed(0)) < alpha
    reached = hits.long().cumprod(dim=1)
    drafted, accepted = [rounds] * depth, reached.sum(dim=0).tolist()
    assert measured_alpha(drafted, accepted) == pytest.approx(alpha, abs=0.015)
    tokens = 1 + reached.sum().item() / rounds
    assert tokens == pytest.approx(expected_tokens_per_round(alpha, depth), abs=0.075)


def test_measured_alpha_leaves_untested_drafts_out():
    """Ten rounds draft two tokens, six keep the first, three of them the second: 9 kept of 16 tested."""
    assert measured_alpha([10, 10], [6, 3]) == pytest.approx(9 / 16)
    # Only four rounds draft a second token, so at most four second tokens were tested.
    assert measured_alpha([10, 4], [6, 3]) == pytest.approx(9 / 14)


def test_measured_alpha_is_none_without_drafts():
    assert measured_alpha([], []) is None
    assert measured_alpha([0], [0]) is None


def test_mixed_rounds_are_the_mean_of_their_chains():
    """Two rounds without a draft, three of one token, five of three."""
    chains = [expected_tokens_per_round(0.5, depth) for depth in [0, 0, 1, 1, 1, 3, 3, 3, 3, 3]]
    assert expected_tokens_over_rounds(0.5, drafted=[8, 5, 5], rounds=10) == pytest.approx(sum(chains) / 10)


def test_a_chance_outside_its_range_is_refused():
    for alpha, depth in [(1.2, 3), (-0.1, 3), (0.5, -1), (math.nan, 2)]:
        with pytest.raises(ValueError, match="alpha is a chance"):
            expected_tokens_per_round(alpha, depth)

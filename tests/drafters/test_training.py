"""What every drafter that trains must keep: what it learns is what it is asked in use, and it looks at nothing later.

The drafters are found as the contract finds them, so that a new one is tested without a line here.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from selfdraft import Plan
from selfdraft.target import Target
from tests.contract.arms import SMALL, modules, own_answers
from tests.drafters.rounds import ANSWER, PROMPT, Watched, batch_of, overfit, own_text, stats_of
from tests.models import VOCAB, tiny

TRAINABLE = [name for name, kind in modules().items() if hasattr(kind, "config_class")]
DEPTH = 3  # no deeper than any of them is trained by default


def fresh(name: str, **settings: Any) -> Any:
    """The drafter with its defaults; without noise, which is there so that nothing is learnt by heart."""
    kind = modules()[name].config_class
    quiet = {"noise": 0.0} if hasattr(kind, "noise") else {}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return modules()[name](kind(**SMALL.get(name, {}), **quiet, **settings), Target(tiny("llama")))


def at_depth(metrics: dict[str, Any], depth: int) -> Any:
    """What training says of a depth. A drafter that has one accuracy is asked the same at every depth."""
    return metrics.get(f"accuracy_{depth}", metrics["accuracy_1"])


@pytest.mark.parametrize("name", TRAINABLE)
def test_what_is_learnt_by_heart_is_accepted_as_often_as_it_was_right_in_training(name):
    """If the loss is low and acceptance is not, training and use differ somewhere: a shift, a norm, a map, a mask.

    Hard labels, because the softest of the target's opinions on this text are not learnt by heart in 300 steps.
    """
    drafter, tokens = fresh(name, loss="hard"), own_text()
    accuracy = overfit(drafter, batch_of(drafter.target, drafter.feature_layers, tokens), steps=300, lr=3e-3)
    stats = stats_of(drafter.target.model, drafter, tokens, Plan(DEPTH))
    assert stats.tokens_per_round - 1 >= 0.9 * DEPTH * (ANSWER - 1) / (ANSWER - 1 + DEPTH)  # the last round is cut
    for depth, accepted in enumerate(stats.acceptance_by_depth, start=1):
        assert abs(accepted - at_depth(accuracy, depth)) <= 0.02, (depth, stats.acceptance_by_depth, accuracy)


@pytest.mark.parametrize("name", TRAINABLE)
def test_predictions_up_to_a_place_know_nothing_of_what_comes_after_it(name):
    """The leak probe, on a ragged batch: labels up to LAST, then all that stands behind them is changed. The token at
    LAST is a label; the newest hidden state that may foretell it is that of LAST - 2, or the text up to LAST - 1; what
    the target thinks of it is the state at LAST - 1."""
    drafter = fresh(name, draft_vocab_size=96).eval()
    batch = own_answers(drafter.target, drafter.feature_layers)
    drafter.start(torch.bincount(batch.tokens[batch.trained], minlength=VOCAB))
    last = 20
    batch = dataclasses.replace(batch, trained=batch.trained & (torch.arange(batch.tokens.shape[1]) <= last))

    def changed(values: Tensor, first: int) -> Tensor:
        values = values.clone()
        values[:, first:] = (values[:, first:] + 5) % VOCAB if values.ndim == 2 else 7.0
        return values

    other = dataclasses.replace(
        batch,
        tokens=changed(batch.tokens, last + 1),
        features=changed(batch.features, last - 1),
        hidden=changed(batch.hidden, last),
    )
    before, after = drafter(batch), drafter(other)
    assert before.total.equal(after.total) and before.count.equal(after.count) and before.count > 0
    for metric, values in before.metrics.items():
        assert all(mine.equal(theirs) for mine, theirs in zip(values, after.metrics[metric], strict=True)), metric
    # And the probe is no nearer than it must be: one place earlier, each of them is seen.
    assert not drafter(dataclasses.replace(batch, tokens=changed(batch.tokens, last - 1))).total.equal(before.total)
    assert not drafter(dataclasses.replace(batch, hidden=changed(batch.hidden, last - 1))).total.equal(before.total)
    if drafter.feature_layers:
        seen = dataclasses.replace(batch, features=changed(batch.features, last - 2))
        assert not drafter(seen).total.equal(before.total)


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_losses_of_a_conversations_answers_add_up_however_near_they_stand(name):
    """Two answers, and between them a turn of one token, which no depth may reach across."""
    drafter = fresh(name, draft_vocab_size=96).eval()
    batch = batch_of(drafter.target, drafter.feature_layers, own_text())
    drafter.start(torch.bincount(batch.tokens[batch.trained], minlength=VOCAB))
    places, gap = torch.arange(batch.tokens.shape[1]), PROMPT + ANSWER // 2
    parts = [dataclasses.replace(batch, trained=batch.trained & one) for one in (places < gap, places > gap)]
    whole = drafter(dataclasses.replace(batch, trained=batch.trained & (places != gap)))
    first, second = map(drafter, parts)
    assert int(whole.count) == int(first.count) + int(second.count) == ANSWER - 1
    torch.testing.assert_close(whole.total, first.total + second.total, rtol=1e-5, atol=1e-4)
    for metric, (hits, count) in whole.metrics.items():
        assert int(count) == int(first.metrics[metric][1]) + int(second.metrics[metric][1])
        torch.testing.assert_close(hits, first.metrics[metric][0] + second.metrics[metric][0])


@pytest.mark.parametrize("name", TRAINABLE)
def test_decoding_asks_only_for_places_and_depths_that_were_trained(name):
    """A draft of depth d from the text up to place t foretells the token at t + 1 + d. In training, those are the
    labels that count at depth d; the counts tell which, as the answer grows by one token after the other."""
    drafter, tokens = fresh(name).eval(), own_text()
    batch = batch_of(drafter.target, drafter.feature_layers, tokens)
    places = torch.arange(tokens.shape[1])

    def counts(last: int) -> list[int]:
        metrics = drafter(dataclasses.replace(batch, trained=batch.trained & (places <= last))).metrics
        return [int(at_depth(metrics, depth)[1]) for depth in range(1, DEPTH + 1)]

    trained = set()
    for last in range(PROMPT, PROMPT + ANSWER):
        more = zip(counts(last), counts(last - 1), strict=True)
        trained |= {(last - 1 - depth, depth) for depth, (now, before) in enumerate(more, start=1) if now > before}
    watched = Watched(drafter)
    stats_of(drafter.target.model, watched, tokens, Plan(DEPTH))
    asked = {
        (int(seen.lengths) - 1, depth) for seen, _, plan, _, _ in watched.rounds for depth in range(1, plan.depth + 1)
    }
    assert (PROMPT - 1, 1) in asked  # the last token of the prompt drafts the second one of the answer
    assert asked <= trained, sorted(asked - trained)

"""The losses: their closed gradients against autograd, their chunks against the whole, and a choice in every config."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from selfdraft import losses
from selfdraft.drafters import vocabulary
from selfdraft.losses import LOSSES, vocabulary_loss
from selfdraft.target import Target
from tests.contract.arms import SMALL, made, modules, own_answers, train
from tests.models import tiny

TRAINABLE = [name for name, kind in modules().items() if hasattr(kind, "config_class")]
POSITIONS, VOCABULARY = 23, 11

# The definitions, of probabilities, one position after the other.
PLAIN = {
    "soft": lambda p, q, y: -(p * q.log()).sum(),
    "hard": lambda p, q, y: -q[y].log(),
    "reverse_kl": lambda p, q, y: (q * (q.log() - p.log())).sum(),
    "total_variation": lambda p, q, y: 1 - torch.minimum(p, q).sum(),
    "log_acceptance": lambda p, q, y: -torch.minimum(p, q).sum().log(),
    "lk": lambda p, q, y: hybrid(p, q),
}


def hybrid(p: Tensor, q: Tensor) -> Tensor:
    alpha = torch.minimum(p, q).sum()
    weight = torch.exp(-3 * alpha.detach())
    return weight * (p * (p.log() - q.log())).sum() + (1 - weight) * (1 - alpha)


def plainly(loss: str, logits: Tensor, probs: Tensor, labels: Tensor) -> Tensor:
    rows = zip(probs, logits.softmax(-1), labels, strict=True)
    return torch.stack([PLAIN[loss](p, q, y) for p, q, y in rows]).sum()


def some(dtype: torch.dtype, size: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a head, the target's distribution and best tokens, and labels that are not always the best."""
    generator = torch.Generator().manual_seed(2)
    hidden, head, theirs = (
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((POSITIONS, size), (VOCABULARY, size), (POSITIONS, VOCABULARY))
    )
    labels = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), (2 * theirs).softmax(-1), theirs.argmax(-1), labels


def test_every_loss_has_a_plain_definition_here():
    assert set(PLAIN) == set(LOSSES)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_closed_gradient_is_that_of_autograd(loss):
    """In float64, so that the two differ by rounding alone."""
    hidden, head, probs, _, labels = some(torch.float64)
    logits = (hidden @ head.T).detach().requires_grad_()
    reference = plainly(loss, logits, probs, labels)
    reference.backward()
    shifted = logits.detach() - logits.detach().amax(1, keepdim=True)
    start = torch.tensor(3.0, dtype=torch.float64)
    total, gradient = LOSSES[loss](start, shifted, probs, labels)
    torch.testing.assert_close(total - start, reference.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-12)
    assert logits.grad.abs().max() > 0.01


@pytest.mark.parametrize("loss", LOSSES)
def test_in_chunks_it_is_the_whole_with_gradients_of_both_factors(loss, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 5)  # the last of 23 positions stand in a chunk of three
    hidden, head, probs, best, labels = some(torch.float32)
    reference = plainly(loss, hidden @ head.T, probs, labels)
    wanted = torch.autograd.grad(7 * reference, (hidden, head))
    total, hits = vocabulary_loss(loss, hidden, head, probs, best, labels)
    torch.testing.assert_close(total, reference)
    assert int(hits) == int(((hidden @ head.T).argmax(-1) == best).sum()) > 0
    for ours, theirs in zip(torch.autograd.grad(7 * total, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.seen |= {
            tuple(each.shape) for each in (made if isinstance(made, tuple) else (made,)) if torch.is_tensor(each)
        }
        return made


@pytest.mark.parametrize("loss", LOSSES)
def test_the_logits_of_all_positions_never_exist_at_once(loss, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 5)
    hidden, head, probs, best, labels = some(torch.float32)
    with Shapes() as shapes:
        vocabulary_loss(loss, hidden, head, probs, best, labels)[0].backward()
    assert (5, VOCABULARY) in shapes.seen
    assert not {shape for shape in shapes.seen if POSITIONS in shape and VOCABULARY in shape}


def test_what_the_target_thinks_is_found_where_it_stands(monkeypatch):
    """In another order, among positions that are not asked for; it is never copied for all positions at once."""
    monkeypatch.setattr(losses, "CHUNK", 5)
    hidden, head, probs, best, labels = some(torch.float32)
    places = torch.randperm(2 * POSITIONS, generator=torch.Generator().manual_seed(1))
    more = torch.cat([probs, probs.flip(-1)])[places], torch.cat([best, VOCABULARY - 1 - best])[places]
    at = places.argsort()[:POSITIONS]
    wanted = vocabulary_loss("soft", hidden, head, probs, best, labels)
    with Shapes() as shapes:
        found = vocabulary_loss("soft", hidden, head, *more, labels, at=at)
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
    assert (POSITIONS, VOCABULARY) not in shapes.seen
    gradients = (torch.autograd.grad(total, (hidden, head)) for total, _ in (found, wanted))
    assert all(ours.equal(theirs) for ours, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("loss", ["reverse_kl", "log_acceptance", "lk", "total_variation"])
def test_distributions_without_a_token_in_common_give_a_finite_loss_and_gradient(loss):
    """softmax of far logits is 0 in float32, and so is the smaller of two such numbers."""
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    head = torch.tensor([[200.0, 0.0], [-200.0, 0.0]])
    total, _ = vocabulary_loss(loss, hidden, head, torch.tensor([[0.0, 1.0]]), torch.tensor([1]), torch.tensor([1]))
    total.backward()
    assert total.isfinite() and hidden.grad.isfinite().all()


def test_places_are_the_draft_tokens_in_any_order_of_the_vocabulary():
    ids, tokens = torch.tensor([7, 2, 5]), torch.tensor([[5, 7], [2, 7]])
    assert vocabulary.places(ids, tokens, 9).tolist() == [[2, 0], [1, 0]]
    assert vocabulary.places(None, tokens, 9).tolist() == tokens.tolist()


# --- The choice in the drafters' configs ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "medusa", "hydra"])
@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, float("nan")])
def test_a_decay_that_leaves_heads_untrained_is_refused(name, decay):
    with pytest.raises(ValueError, match="decay is .* learn nothing"):
        modules()[name].config_class(decay=decay)


@pytest.mark.parametrize("name", TRAINABLE)
def test_an_unknown_loss_is_refused_when_the_config_is_made(name):
    config = modules()[name].config_class()
    object.__setattr__(config, "loss", "kl")  # the tests' own type checks would be faster than the config's
    with pytest.raises(ValueError, match="loss is 'kl'; known: soft, hard, reverse_kl"):
        config.__post_init__()


def small(name: str, **settings):
    """The drafter with a vocabulary of its own, in evaluation: nothing random is added to its features."""
    config = modules()[name].config_class(**SMALL.get(name, {}), **settings)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return modules()[name](config, Target(tiny("llama"))).eval()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", TRAINABLE)
def test_every_drafter_learns_its_targets_greedy_answers_by_every_loss(name, loss):
    drafter = small(name, loss=loss, draft_vocab_size=96)
    batch = own_answers(drafter.target, drafter.feature_layers)
    losses = train(drafter, batch, steps=40)
    first, last = sum(losses[:5]), sum(losses[-5:])
    assert last < first, (first, last)
    hits, count = drafter.eval()(batch).metrics["accuracy_1"]
    assert int(hits) > 0.3 * int(count) > 0


@pytest.mark.parametrize("name", TRAINABLE)
def test_hard_labels_are_the_answers_own_tokens_and_not_the_targets_opinion(name):
    drafter = small(name, loss="hard", draft_vocab_size=96)
    batch = own_answers(drafter.target, drafter.feature_layers)
    drafter.start(torch.bincount(batch.tokens[batch.trained], minlength=128))
    other = dataclasses.replace(batch, hidden=batch.hidden.flip(-1))
    last = int(batch.attention[0].sum()) - 1  # nothing reads the last token: it is a label only
    changed = batch.tokens.clone()
    changed[0, last] = next(int(each) for each in drafter.ids if each != changed[0, last])

    def of_tokens(some) -> Tensor:
        """The loss without the distance to the target's hidden states, which EAGLE-1 adds to it."""
        loss = drafter(some)
        return loss.total - loss.metrics.get("distance", (0.0,))[0]

    before = of_tokens(batch)
    torch.testing.assert_close(of_tokens(other), before, rtol=1e-5, atol=1e-3)
    assert (of_tokens(dataclasses.replace(batch, tokens=changed)) - before).abs() > 0.01


@pytest.mark.parametrize("name", TRAINABLE)
def test_soft_is_what_is_minimised_by_default(name):
    assert made(name, Target(tiny("llama"))).config.loss == "soft"

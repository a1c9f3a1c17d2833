"""Hydra: what each head reads and foretells, along which path, and what is its own."""

import copy

import pytest
import torch

from selfdraft import Plan
from selfdraft.drafters.hydra import Hydra, HydraConfig
from selfdraft.target import Target
from tests.drafters.rounds import ANSWER, PROMPT, NoDeviceReads, Watched, batch_of, check_tree, own_text, stats_of
from tests.models import VOCAB, tiny

HEADS = 3


def hydra(**settings) -> Hydra:
    return Hydra(HydraConfig(**{"heads": HEADS, **settings}), Target(tiny("llama"))).eval()


def stirred(**settings) -> Hydra:
    """Heads that listen to all that they read."""
    drafter = hydra(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for weight in drafter.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    return drafter


def slow_logits(drafter: Hydra, hidden: torch.Tensor, path: list[int]) -> torch.Tensor:
    """What follows a path that begins with the root, from the definition: [draft_vocab]."""
    read = torch.cat([hidden, *(drafter.target.embed(torch.tensor(token)) for token in path)])
    return drafter.vocabulary_rows() @ drafter.heads[len(path) - 1](read)


def test_a_fresh_head_says_what_the_targets_own_head_says():
    watched = Watched(hydra())
    stats_of(tiny("llama"), watched, own_text(), Plan(HEADS))
    for _, root, _, _, tree in watched.rounds:
        assert (tree.tokens == root.unsqueeze(1)).all()


@pytest.mark.parametrize("plan", [Plan(HEADS), Plan(HEADS, 3, 12), Plan(9, 2, 10)])
def test_every_node_is_one_of_the_best_after_its_own_path(plan):
    drafter = stirred(draft_vocab_size=100)
    drafter.start(torch.arange(VOCAB))
    watched, deeper = Watched(drafter), 0
    stats_of(tiny("llama"), watched, own_text(), plan)
    for seen, root, asked, noise, tree in watched.rounds:
        asked = asked.cut(HEADS)
        check_tree(tree, root, asked, VOCAB)
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        for node in range(1, len(tokens)):
            path, above = [], parents[node]
            while above >= 0:
                path, above = [tokens[above], *path], parents[above]
            logits = slow_logits(drafter, seen.last(seen.features)[0], path)
            best = drafter.ids[logits.topk(asked.width).indices].tolist()
            assert tokens[node] in best
            deeper += len(path) == HEADS
        with NoDeviceReads():
            again = drafter.propose(watched.states[0], seen, root, asked, noise)
        assert torch.equal(again.tokens, tree.tokens)
    assert deeper > 0


def test_the_loss_is_the_sum_over_heads_of_the_slow_formula():
    drafter, tokens = stirred(decay=0.5, draft_vocab_size=40, layers=2), own_text()
    drafter.start(torch.arange(VOCAB))  # the draft vocabulary is the 40 highest ids
    batch = batch_of(drafter.target, (-1,), tokens, pad=2)
    reference, labels = torch.zeros(()), 0
    for place in range(PROMPT, PROMPT + ANSWER):
        if batch.tokens[0, place] < VOCAB - 40:
            continue
        labels += 1
        p = (drafter.vocabulary_rows() @ batch.hidden[0, place - 1]).softmax(-1)
        for head in range(HEADS):
            path = tokens[0, place - 1 - head : place].tolist()
            q = slow_logits(drafter, batch.features[0, place - 2 - head], path).log_softmax(-1)
            reference = reference - 0.5**head * (p * q).sum()
    loss = drafter(batch)
    assert 0 < labels < ANSWER and int(loss.count) == ANSWER  # some can be drafted, and all count
    torch.testing.assert_close(loss.total, reference, rtol=1e-4, atol=1e-3)


def test_a_prompt_shorter_than_the_heads_reach_trains_the_heads_that_reach():
    drafter, tokens = hydra(), own_text(prompt=1, answer=6)
    loss = drafter(batch_of(drafter.target, (-1,), tokens, prompt=1))
    assert int(loss.count) == 5  # the first answer token is the root of the first round, which no head drafts
    assert [int(count) for _, count in loss.metrics.values()] == [5, 4, 3]
    assert loss.total.isfinite()


def test_a_batch_without_answers_has_no_loss_and_moves_nothing():
    drafter = hydra()
    loss = drafter(batch_of(drafter.target, (-1,), own_text(), prompt=PROMPT + ANSWER))
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and int(loss.count) == 0
    assert all((weight.grad == 0).all() for weight in drafter.parameters())


def test_every_weight_learns_and_none_is_the_targets():
    drafter = hydra(layers=2)
    drafter(batch_of(drafter.target, (-1,), own_text())).total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())
    block = {f"{part}.{kind}" for part in ("linear",) for kind in ("weight", "bias")}
    names = {f"heads.{head}.0.{name}" for head in range(HEADS) for name in {*block, "res_connection.weight"}}
    names |= {f"heads.{head}.1.{name}" for head in range(HEADS) for name in block}
    assert set(drafter.state_dict()) == names
    assert copy.deepcopy(drafter).target is drafter.target


def test_half_precision_heads_serve_a_full_precision_target():
    stats_of(tiny("llama"), stirred().to(torch.bfloat16), own_text(), Plan(HEADS, 2, 5))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at least one head of one layer, not 0 of 1"):
        HydraConfig(heads=0)
    with pytest.raises(ValueError, match="another model object"):
        hydra().check(Target(copy.deepcopy(tiny("llama"))))
    drafter = hydra(draft_vocab_size=40)
    drafter.check(drafter.target)
    drafter.ids[7] = VOCAB
    with pytest.raises(ValueError, match="draft_tokens"):
        drafter.check(drafter.target)

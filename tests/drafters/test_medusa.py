"""Medusa: what each head reads and predicts, the tree, the draft vocabulary, and what is (not) saved."""

import copy
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import selfdraft
from selfdraft import Plan
from selfdraft.drafters.medusa import RANKS, Medusa, MedusaConfig, tree_shape
from selfdraft.target import Target
from tests.drafters.rounds import (
    ANSWER,
    PROMPT,
    NoDeviceReads,
    Watched,
    batch_of,
    check_tree,
    overfit,
    own_text,
    stats_of,
)
from tests.models import VOCAB, prompts, tiny

HEADS = 3
LEARNED = MedusaConfig(heads=HEADS, layers=2, depth=HEADS)


def medusa(config: MedusaConfig = MedusaConfig(heads=HEADS), family: str = "llama") -> Medusa:
    return Medusa(config, Target(tiny(family)))


def watch(drafter: Medusa, plan: Plan, tokens: torch.Tensor) -> Watched:
    """The rounds in which a known text comes out."""
    watched = Watched(drafter)
    stats_of(drafter.target.model, watched, tokens, plan)
    return watched


def test_a_fresh_head_says_what_the_targets_own_head_says():
    # The hidden state that the heads read is the one that the root was picked from.
    watched = watch(medusa(), Plan(HEADS), own_text())
    for _, root, _, _, tree in watched.rounds:
        assert (tree.tokens == root.unsqueeze(1)).all()


@pytest.mark.parametrize("own_projection", [False, True])
@pytest.mark.parametrize("plan", [Plan(HEADS), Plan(HEADS, width=2, nodes=6)])
def test_what_is_learned_by_heart_is_accepted_as_often_as_it_was_right_in_training(own_projection, plan):
    drafter = medusa(dataclasses.replace(LEARNED, own_projection=own_projection, draft_vocab_size=VOCAB // 2))
    tokens = own_text()
    accuracy = overfit(drafter, batch_of(drafter.target, (-1,), tokens), steps=300)
    stats = stats_of(drafter.target.model, drafter, tokens, plan)
    assert stats.tokens_per_round - 1 >= 0.9 * HEADS * (ANSWER - 1) / (ANSWER - 1 + HEADS)  # the last round is cut
    for depth, accepted in enumerate(stats.acceptance_by_depth, start=1):
        assert abs(accepted - accuracy[f"accuracy_{depth}"]) <= 0.02


def test_head_i_learns_the_token_at_t_plus_2_plus_i_and_decoding_asks_for_nothing_else():
    drafter, tokens = medusa(), own_text()
    read = {head: [] for head in range(HEADS)}
    for head, module in enumerate(drafter.heads):
        module.register_forward_hook(lambda _, given, __, head=head: read[head].append(given[0]))
    batch = batch_of(drafter.target, (-1,), tokens, pad=3)
    drafter.eval()(batch)
    trained = set()
    for head in range(HEADS):
        wanted = list(range(PROMPT - 2 - head, PROMPT + ANSWER - 2 - head))  # two or more before every answer token
        assert torch.equal(read[head][0], batch.features[0, wanted])
        trained |= {(place, head) for place in wanted}
    used = {
        (int(seen.lengths) - 1, level)
        for seen, _, plan, _, _ in watch(drafter, Plan(HEADS), tokens).rounds
        for level in range(plan.depth)
    }
    assert (PROMPT - 1, 0) in used  # the last token of the prompt drafts the second one of the answer
    assert used <= trained


def test_the_labels_are_the_targets_distributions_at_answer_tokens_alone():
    drafter = medusa().eval()
    batch = batch_of(drafter.target, (-1,), own_text(), pad=2)
    total = drafter(batch).total
    labels = torch.zeros(batch.tokens.shape[1], dtype=torch.bool)
    labels[PROMPT - 1 : PROMPT + ANSWER - 1] = True  # the state before each answer token
    elsewhere = torch.where(labels.unsqueeze(1), batch.hidden, torch.randn_like(batch.hidden))
    assert drafter(dataclasses.replace(batch, hidden=elsewhere)).total == total
    for place in labels.nonzero().flatten().tolist():
        hidden = batch.hidden.clone()
        hidden[0, place] *= -1
        assert drafter(dataclasses.replace(batch, hidden=hidden)).total != total


def test_the_loss_is_the_sum_over_heads_of_the_slow_formula():
    drafter = medusa(dataclasses.replace(LEARNED, decay=0.5, draft_vocab_size=40))
    batch = batch_of(drafter.target, (-1,), own_text())
    counts = torch.arange(VOCAB)  # the draft vocabulary is the 40 highest ids
    drafter.start(counts)
    for block in drafter.heads.parameters():
        torch.nn.init.normal_(block, std=0.1)
    weight = drafter.target.model.get_output_embeddings().weight[-40:]
    reference, labels = 0.0, 0
    for place in range(PROMPT, PROMPT + ANSWER):
        if batch.tokens[0, place] < VOCAB - 40:
            continue
        labels += 1
        p = (batch.hidden[0, place - 1] @ weight.T).softmax(-1)
        for head in range(HEADS):
            q = (drafter.heads[head](batch.features[0, place - 2 - head]) @ weight.T).log_softmax(-1)
            reference = reference - 0.5**head * (p * q).sum()
    loss = drafter.eval()(batch)
    assert 0 < labels < ANSWER  # some answer tokens can be drafted, and some cannot
    assert int(loss.count) == ANSWER  # but all of them count
    torch.testing.assert_close(loss.total, reference)


def test_nothing_leaks_back_from_later_tokens():
    drafter = medusa()
    torch.nn.init.normal_(drafter.heads[0][0].linear.weight)
    batch = batch_of(drafter.target, (-1,), own_text())
    until = PROMPT + 8
    early = batch.trained & (torch.arange(batch.tokens.shape[1]) <= until)
    tokens, features, hidden = batch.tokens.clone(), batch.features.clone(), batch.hidden.clone()
    tokens[:, until + 1 :] = 7
    features[:, until - 1 :] *= -1  # the first head reads until - 2 at most
    hidden[:, until:] *= -1
    before = drafter.eval()(dataclasses.replace(batch, trained=early))
    after = drafter(dataclasses.replace(batch, trained=early, tokens=tokens, features=features, hidden=hidden))
    assert before.total == after.total
    assert before.count == after.count == 9


def test_a_prompt_shorter_than_the_heads_reach_trains_the_heads_that_reach():
    drafter, tokens = medusa(), own_text(prompt=1, answer=6)
    loss = drafter.eval()(batch_of(drafter.target, (-1,), tokens, prompt=1))
    assert int(loss.count) == 5  # the first answer token is the root of the first round, which no head drafts
    assert [int(count) for _, count in loss.metrics.values()] == [5, 4, 3]
    assert loss.total.isfinite()


def test_a_batch_without_answers_has_no_loss_and_moves_nothing():
    drafter = medusa().train()
    batch = batch_of(drafter.target, (-1,), own_text())
    rates = drafter.rank_hits.clone()
    loss = drafter(dataclasses.replace(batch, trained=torch.zeros_like(batch.trained)))
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and int(loss.count) == 0
    assert all((weight.grad == 0).all() for weight in drafter.parameters())
    assert torch.equal(drafter.rank_hits, rates)


def test_the_hit_rates_become_those_of_the_training_and_stay_as_they_are_in_use():
    drafter, tokens = medusa(LEARNED), own_text()
    batch = batch_of(drafter.target, (-1,), tokens)
    accuracy = overfit(drafter, batch, steps=300)
    for head in range(HEADS):
        # 0.98^300 of the first guess is left, and the early mistakes fade as fast.
        assert abs(float(drafter.rank_hits[head, 0]) - accuracy[f"accuracy_{head + 1}"]) < 0.1
        assert float(drafter.rank_hits[head].sum()) <= 1 + 1e-5
    rates = drafter.rank_hits.clone()
    drafter(batch)
    assert torch.equal(drafter.rank_hits, rates)


# --- the tree ---------------------------------------------------------------------------------------------------------

RATES = st.lists(st.lists(st.floats(0, 1), min_size=RANKS, max_size=RANKS), min_size=3, max_size=3)


@given(RATES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_the_tree_is_the_likeliest_one(hits, depth, width, nodes):
    plan = Plan(depth, width, nodes)
    levels, ranks, parents = (part.flatten().tolist() for part in tree_shape(hits, plan, RANKS, torch.device("cpu")))
    chosen, paths = [], [()]
    for level, rank, parent in zip(levels, ranks, parents[1:], strict=True):
        assert len(paths[parent]) == level < depth and rank < width and parent < len(paths)
        paths.append((*paths[parent], rank))
        chosen.append(likelihood(hits, paths[-1]))
    assert len(set(paths)) == len(paths) == plan.nodes + 1
    # A parent is at least as likely as its child, so the likeliest nodes of the full tree are a tree.
    full = [path for levels in range(1, depth + 1) for path in itertools.product(range(width), repeat=levels)]
    best = sorted((likelihood(hits, path) for path in full), reverse=True)[: plan.nodes]
    assert sum(chosen) == pytest.approx(sum(best))


def likelihood(hits: list[list[float]], path: tuple[int, ...]) -> float:
    product = 1.0
    for level, rank in enumerate(path):
        product *= hits[level][rank]
    return product


@pytest.mark.parametrize("heads", range(1, 6))
@pytest.mark.parametrize("plan", [None, Plan(9), Plan(1, 3), Plan(9, 7, 30)], ids=["own", "chain", "flat", "large"])
def test_a_tree_is_cut_to_the_heads_and_to_the_vocabulary_that_there_are(heads, plan):
    drafter = medusa(MedusaConfig(heads=heads, draft_vocab_size=4)).eval()
    drafter.start(torch.arange(VOCAB))
    watched = Watched(drafter)
    stats_of(drafter.target.model, watched, own_text(answer=12), plan or drafter.plan)
    for _, root, wanted, _, tree in watched.rounds:
        asked = wanted.cut(heads)
        check_tree(tree, root, asked, VOCAB)
        possible = sum(min(asked.width, 4) ** depth for depth in range(1, asked.depth + 1))
        assert tree.tokens.shape[1] - 1 == min(asked.nodes, possible)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 0, "seed": 4}])
@pytest.mark.parametrize("plan", [Plan(1), Plan(HEADS), Plan(2, 3, 7), Plan(9, 4, 20), Plan(1, 100)])
def test_trees_are_valid_and_proposing_never_waits_for_the_device(plan, sampling):
    drafter = medusa(MedusaConfig(heads=HEADS, draft_vocab_size=100)).eval()
    drafter.start(torch.arange(VOCAB))
    inputs = prompts((3, 9, 14))
    watched = Watched(drafter)
    selfdraft.generate(tiny("llama"), **inputs, drafter=watched, plan=plan, max_new_tokens=12, **sampling)
    allowed = set(drafter.ids.tolist())
    for seen, root, asked, noise, tree in watched.rounds:
        check_tree(tree, root, asked.cut(HEADS), VOCAB)
        assert tree.tokens.shape[1] - 1 == min(asked.cut(HEADS).nodes, most_nodes(asked.cut(HEADS)))
        assert set(tree.tokens[:, 1:].flatten().tolist()) <= allowed
        with NoDeviceReads():
            again = drafter.propose(watched.states[0], seen, root, asked, noise)
        assert torch.equal(again.tokens, tree.tokens)


def most_nodes(plan: Plan) -> int:
    width = min(plan.width, RANKS)
    return sum(width**level for level in range(1, plan.depth + 1))


def test_shared_noise_decides_the_candidates_when_sampling():
    drafter = medusa(MedusaConfig(heads=1))
    watched = Watched(drafter)
    model, inputs = tiny("llama"), prompts((6, 6))
    selfdraft.generate(
        model,
        **inputs,
        drafter=watched,
        plan=Plan(1),
        max_new_tokens=8,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        seed=9,
    )
    for seen, _, _, noise, tree in watched.rounds:
        place = seen.lengths.unsqueeze(1) + 1  # the root stands at `lengths`
        logits = drafter.target.project(seen.last(seen.features)).unsqueeze(1)
        expected = logits.log_softmax(-1) / 0.7 + noise.gumbel(place, torch.arange(VOCAB))
        assert tree.tokens[:, 1].tolist() == expected[:, 0].argmax(-1).tolist()


# --- what belongs to it, and what does not ----------------------------------------------------------------------------


def test_the_target_is_lent_not_owned():
    drafter = medusa()
    names = {name for name, _ in drafter.named_parameters()}
    assert names == {f"heads.{head}.0.linear.{part}" for head in range(HEADS) for part in ("weight", "bias")}
    assert set(drafter.state_dict()) == names | {"rank_hits"}
    assert copy.deepcopy(drafter).target is drafter.target


def test_a_saved_drafter_drafts_the_same(tmp_path):
    drafter, tokens = medusa(dataclasses.replace(LEARNED, draft_vocab_size=VOCAB // 2)), own_text()
    overfit(drafter, batch_of(drafter.target, (-1,), tokens), steps=40)
    selfdraft.save_drafter(drafter, tmp_path / "heads")
    loaded = selfdraft.load_drafter(tmp_path / "heads", tiny("llama"))
    before, after = (watch(each, Plan(HEADS, 3, 9), tokens).rounds for each in (drafter, loaded))
    assert len(before) == len(after)
    for (*_, mine), (*_, theirs) in zip(before, after, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.parents, theirs.parents)
    assert torch.equal(loaded.rank_hits, drafter.rank_hits)


def test_half_precision_heads_serve_a_full_precision_target_and_the_reverse():
    tokens = own_text()
    stats_of(tiny("llama"), medusa().to(torch.bfloat16), tokens, Plan(HEADS, 2, 5))
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    drafter = Medusa(MedusaConfig(heads=HEADS), Target(model))
    assert selfdraft.generate(model, tokens, drafter=drafter, max_new_tokens=6).shape[1] == tokens.shape[1] + 6
    drafter(batch_of(Target(model), (-1,), tokens)).total.backward()


def test_heads_of_another_target_are_refused():
    with pytest.raises(ValueError, match="hidden states of size 64, and the target's have 16"):
        wider = copy.copy(Target(tiny("llama")))
        wider.hidden_size = 16
        medusa().check(wider)
    with pytest.raises(ValueError, match="another model object"):
        medusa().check(Target(copy.deepcopy(tiny("llama"))))


@pytest.mark.parametrize("wrong", [-1, VOCAB, 5])
def test_a_bad_draft_vocabulary_is_refused(wrong):
    drafter = medusa(MedusaConfig(draft_vocab_size=40))
    drafter.check(drafter.target)
    drafter.ids[7] = wrong  # outside, or there already
    with pytest.raises(ValueError, match="draft_tokens"):
        drafter.check(drafter.target)


def test_heads_without_layers_are_refused():
    with pytest.raises(ValueError, match="at least one head"):
        medusa(MedusaConfig(heads=0))

"""Growing and pruning a tree: equal to the slow form of EAGLE-2's expansion, and valid whatever the scores."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft import Plan
from selfdraft.drafters.growth import SIGMA, grow, prune
from selfdraft.sampling import Noise
from tests.trees import path_of

VOCAB = 6


def scores_of(path: tuple[int, ...], seed: int, row: int) -> torch.Tensor:
    """Any scores, a function of the path: what a drafter would say after it."""
    generator = torch.Generator().manual_seed(hash((*path, seed, row)) % 2**31)
    return 2 * torch.randn(VOCAB, generator=generator)


def grown(plan: Plan, seed: int, rows: int, ids: torch.Tensor | None):
    """`grow` over these scores. The step rebuilds each node's path from what it is told, as a drafter would."""
    names = list(range(VOCAB)) if ids is None else ids.tolist()
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]

    depths = itertools.count(1)

    def step(tokens, parents):
        depth = next(depths)
        for row in range(rows):
            above = paths[row]
            paths[row] = [(*above[p], t) for t, p in zip(tokens[row].tolist(), parents[row].tolist(), strict=True)]
            assert all(len(path) == depth for path in paths[row])
        return torch.stack([torch.stack([scores_of(path, seed, row) for path in paths[row]]) for row in range(rows)])

    root = torch.full((rows,), 77)
    first = torch.stack([scores_of((), seed, row) for row in range(rows)])
    greedy = Noise(torch.arange(rows), temperature=0.0)
    return grow(root, first.unsqueeze(1), ids, plan, step, greedy, torch.arange(rows)), names


def slow_growth(plan: Plan, seed: int, row: int, names: list[int]) -> set[tuple[int, ...]]:
    """The paths that EAGLE-2 keeps: expand the likeliest `width` per level, then keep the likeliest `nodes` of all."""
    width = min(plan.width, VOCAB)
    everything: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(plan.depth):
        children = []
        for log, path in level:
            logs = (scores_of(path, seed, row) / SIGMA).log_softmax(-1).tolist()
            best = sorted(range(VOCAB), key=lambda x, logs=logs: -logs[x])[:width]
            children += [(log + logs[x], (*path, names[x])) for x in best]
        everything += children
        level = sorted(children, reverse=True)[:width]
    return {path for _, path in sorted(everything, reverse=True)[: plan.nodes]}


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 40), st.integers(0, 10**6), st.booleans())
def test_growth_equals_the_slow_expansion(depth, width, nodes, seed, renamed):
    plan = Plan(depth, width, nodes)
    ids = torch.tensor([5, 10, 11, 40, 41, 99]) if renamed else None
    tree, names = grown(plan, seed, rows=2, ids=ids)
    assert tree.tokens.shape[1] <= plan.nodes + 1
    for row in range(2):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        assert tokens[0] == 77 and parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
        paths = [tuple(tokens[each] for each in path_of(parents, node)[1:]) for node in range(1, len(tokens))]
        assert len(set(paths)) == len(paths), "siblings differ"
        assert max(len(path) for path in paths) <= depth
        assert set(paths) == slow_growth(plan, seed, row, names)


def test_a_chain_is_a_chain_of_the_best_tokens():
    tree, _ = grown(Plan(4), seed=1, rows=1, ids=None)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    path: tuple[int, ...] = ()
    for token in tree.tokens[0, 1:].tolist():
        assert token == int(scores_of(path, 1, 0).argmax())
        path = (*path, token)


def drawn(plan: Plan, seed: int, rows: int, ids: torch.Tensor | None = None):
    """`grow` with noise of the drafter's own, over the same scores at T=0.8, and the path of every node."""
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]
    names = list(range(VOCAB)) if ids is None else ids.tolist()

    def step(tokens, parents):
        for row in range(rows):
            above = paths[row]
            paths[row] = [(*above[p], t) for t, p in zip(tokens[row].tolist(), parents[row].tolist(), strict=True)]
        return torch.stack([torch.stack([scores_of(path, seed, 0) for path in paths[row]]) for row in range(rows)])

    noise = Noise(torch.arange(rows), 0.8, draws=True)
    first = scores_of((), seed, 0).expand(rows, 1, -1)
    return grow(torch.full((rows,), 77), first, ids, plan, step, noise, torch.full((rows,), 9)), names


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 40), st.integers(0, 10**6), st.booleans())
def test_a_drawn_tree_says_what_it_was_drawn_from(depth, width, nodes, seed, renamed):
    plan = Plan(depth, width, nodes)
    ids = torch.tensor([5, 10, 11, 40, 41, 99]) if renamed else None
    tree, names = drawn(plan, seed, rows=2, ids=ids)
    count = tree.tokens.shape[1]
    assert depth <= count - 1 <= plan.nodes
    assert tree.parents[0].equal(tree.parents[1]), "the shape does not depend on what was drawn"
    assert tree.draft_probs.shape == (2, count, VOCAB) and tree.draft_ids is ids
    for row in range(2):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        paths = [tuple(tokens[each] for each in path_of(parents, node)[1:]) for node in range(count)]
        assert len(set(paths)) == count and max(map(len, paths)) == depth
        for node in range(count):
            children = [tokens[child] for child in range(1, count) if parents[child] == node]
            assert all(parent < child for child, parent in enumerate(parents))
            assert len(children) <= width and set(children) <= set(names)
            if children:
                expected = (scores_of(paths[node], seed, 0) / 0.8).softmax(-1)
                assert tree.draft_probs[row, node].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    if width == 1:
        assert tree.parents[0].tolist() == list(range(-1, depth)) and not tree.draft_probs[:, -1].any()


def test_the_children_of_a_node_are_draws_without_replacement_in_their_order():
    """Of the root and of a node of depth 1: 4,000 draws; 5 standard deviations, a false alarm in about 1e-5."""
    rows = 4000
    tree, _ = drawn(Plan(2, 2, 6), seed=1, rows=rows)
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 1, 2, 2]
    for node, first, given_that in ((0, 1, ()), (1, 3, (int(tree.tokens[:, 1].mode().values),))):
        chosen = tree.tokens if not given_that else tree.tokens[tree.tokens[:, 1] == given_that[0]]
        q = (scores_of(given_that, 1, 0) / 0.8).softmax(-1).tolist()
        for x, y in itertools.permutations(range(VOCAB), 2):
            expected = len(chosen) * q[x] * q[y] / (1 - q[x])
            count = int(((chosen[:, first] == x) & (chosen[:, first + 1] == y)).sum())
            assert abs(count - expected) < 5 * math.sqrt(expected) + 1, (node, x, y, count, expected)


@st.composite
def scored_trees(draw):
    """Parents before children, and a child no likelier than its parent; ties are common."""
    count = draw(st.integers(2, 14))
    parents, logs = [-1], [0.0]
    for index in range(1, count):
        parent = draw(st.integers(0, index - 1))
        parents.append(parent)
        logs.append(logs[parent] - draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, math.inf])))
    return parents, logs


@settings(deadline=None)
@given(scored_trees(), st.integers(1, 14))
def test_pruning_keeps_the_likeliest_nodes_and_their_parents(scored, nodes):
    parents, logs = scored
    tokens = torch.arange(100, 100 + len(parents)).unsqueeze(0)
    tree = prune(tokens, torch.tensor([parents]), torch.tensor([logs[1:]]), nodes)
    kept = [token - 100 for token in tree.tokens[0].tolist()]
    assert len(kept) == min(nodes, len(parents) - 1) + 1 and kept[0] == 0
    lost = set(range(len(parents))) - set(kept)
    assert not lost or min(logs[node] for node in kept) >= max(logs[node] for node in lost)
    for place, node in enumerate(kept[1:], start=1):
        assert kept[int(tree.parents[0, place])] == parents[node]
        assert int(tree.parents[0, place]) < place
    assert int(tree.parents[0, 0]) == -1


def test_a_width_beyond_the_vocabulary_is_cut_to_it():
    tree, _ = grown(Plan(2, 50), seed=3, rows=1, ids=None)
    assert tree.tokens.shape[1] == 1 + VOCAB + VOCAB**2


@pytest.mark.parametrize("depth", [1, 5])
def test_a_plan_of_few_nodes_is_kept(depth):
    tree, _ = grown(Plan(depth, 4, nodes=depth), seed=4, rows=3, ids=None)
    assert tree.tokens.shape == (3, depth + 1)

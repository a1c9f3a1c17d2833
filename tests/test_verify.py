"""The acceptance rule: exact by enumeration on small vocabularies, and equal to the slow obvious walk.

The target is a table of next-token probabilities for every prefix; the drafter's tree is any function of the prefix.
All outcomes of the target's picks are listed with their probabilities and put through the real `walk`, round after
round. The law of the emitted text must be the target's to rounding. The wrong rules below must miss it by far, which
shows that the measure can see a fault (the same list as in the literature's bug reports).
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from selfdraft.tree import DraftTree
from selfdraft.verify import walk
from tests.trees import batches, slow_walk

VOCAB, TOTAL = 3, 4
MODELS = range(12)  # random pairs of target and drafter
BOUND = 1e-12

Prefix = tuple[int, ...]
Table = Callable[[Prefix], np.ndarray]
Law = dict[Prefix, float]


@settings(deadline=None)
@given(batches(), st.data())
def test_walk_equals_the_slow_obvious_loop(batch, data):
    tokens, parents = batch
    rows, nodes = len(tokens), len(tokens[0])
    token = st.integers(0, 4)
    picks = [data.draw(st.lists(token, min_size=nodes, max_size=nodes)) for _ in range(rows)]
    max_depth = data.draw(st.integers(0, nodes))
    tree = DraftTree(torch.tensor(tokens), torch.tensor(parents))
    ours = walk(tree, torch.tensor(picks), max_depth)
    for row in range(rows):
        reference = slow_walk(tokens[row], parents[row], picks[row], max_depth)
        count = int(ours.accepted[row]) + 1
        assert ours.nodes[row, :count].tolist() == reference
        assert ours.picks[row, :count].tolist() == [picks[row][node] for node in reference]
        assert ours.nodes[row].max() < nodes
    assert ours.nodes.shape[1] == min(max_depth + 1, nodes)


@pytest.mark.parametrize("noise", ["independent", "of the position"])
@pytest.mark.parametrize("shape", ["chain", "top-2 tree", "ragged tree"])
@pytest.mark.parametrize("model", MODELS)
def test_the_law_of_the_text_is_the_targets(model, shape, noise):
    target, draft = table(model), table(100 + model)
    law = law_of_rounds(target, lambda prefix: drafted(draft, prefix, shape), noise)
    assert total_variation(law, law_of_text(target)) < BOUND


@pytest.mark.parametrize("shape", ["chain", "top-2 tree"])
@pytest.mark.parametrize("model", MODELS)
def test_the_law_of_the_text_is_the_processed_one_with_processors(model, shape):
    raw, draft = table(model), table(100 + model)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)])

    def processed(prefix: Prefix) -> np.ndarray:
        scores = warpers(torch.tensor([prefix or (0,)]), torch.tensor(raw(prefix)).log().unsqueeze(0))
        return scores.softmax(dim=-1)[0].numpy()

    def by_hand(prefix: Prefix) -> np.ndarray:
        powered = raw(prefix) ** (1 / 0.7)
        powered[powered.argmin()] = 0
        return powered / powered.sum()

    law = law_of_rounds(processed, lambda prefix: drafted(draft, prefix, shape), "of the position")
    assert total_variation(law, law_of_text(by_hand)) < BOUND
    assert total_variation(law, law_of_text(raw)) > 0.05


def test_a_drafter_that_knows_the_target_keeps_more_tokens_per_round():
    """The rule must not only be exact: what the target would have said is to be kept."""
    target = table(0)
    own = rounds_needed(target, lambda prefix: drafted(target, prefix, "top-2 tree"))
    other = rounds_needed(target, lambda prefix: drafted(table(100), prefix, "top-2 tree"))
    none = rounds_needed(target, lambda prefix: ([0], [-1]))
    assert own < other < none == pytest.approx(TOTAL)


# --- Wrong rules, which must be seen ----------------------------------------------------------------------------------


def test_each_path_with_picks_of_its_own_and_the_longest_wins_is_wrong():
    worst = 0.0
    for model in MODELS:
        target, draft = table(model), table(100 + model)
        worst = max(worst, total_variation(longest_of_two_paths(target, draft), law_of_text(target, 3)))
    assert worst > 0.1


def rejection(p: np.ndarray, draws: list[int], q: np.ndarray) -> np.ndarray:
    """The output law of the classical rule, tried on these draws as if they came from q without replacement."""
    law, left = np.zeros(VOCAB), 1.0
    for x in draws:
        accepted = min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0
        law[x] += left * accepted
        left *= 1 - accepted
        rest = np.maximum(p - q, 0)
        p = rest / rest.sum() if rest.sum() > 0 else p
        q = np.where(np.arange(VOCAB) == x, 0, q)
        q = q / q.sum() if q.sum() > 0 else q
    return law + left * p


def pairs(q: np.ndarray) -> Iterator[tuple[list[int], float]]:
    """Two draws from q without replacement, with their probability."""
    for x, y in itertools.permutations(range(VOCAB), 2):
        yield [x, y], q[x] * q[y] / (1 - q[x])


def tempered(q: np.ndarray) -> np.ndarray:
    return q**2 / (q**2).sum()


RULES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "right: one draw": lambda p, q: sum(q[x] * rejection(p, [x], q) for x in range(VOCAB)),
    "right: two draws": lambda p, q: sum(weight * rejection(p, xs, q) for xs, weight in pairs(q)),
    "argmax draft verified with softmax q": lambda p, q: rejection(p, [int(q.argmax())], q),
    "deterministic children verified as sampled": lambda p, q: rejection(p, (-q).argsort()[:2].tolist(), q),
    "sampled siblings reranked by their own score": lambda p, q: sum(
        weight * rejection(p, sorted(xs, key=lambda x: -q[x]), q) for xs, weight in pairs(q)
    ),
    "low-confidence sampled token dropped": lambda p, q: sum(
        q[x] * (rejection(p, [x], q) if q[x] > 0.3 else p) for x in range(VOCAB)
    ),
    "drawn with temperature, verified with raw q": lambda p, q: sum(
        tempered(q)[x] * rejection(p, [x], q) for x in range(VOCAB)
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_bound_tells_right_rules_from_wrong_ones(rule):
    """Next-token laws of the classical rule and of its well-known mistakes, by the same measure and bound."""
    errors = []
    for model in MODELS:
        p, q = table(model)(()), table(100 + model)(())
        errors.append(np.abs(RULES[rule](p, q) - p).sum() / 2)
    if rule.startswith("right"):
        assert max(errors) < BOUND
    else:
        assert max(errors) > 0.05


# --- Tables, laws and rounds ------------------------------------------------------------------------------------------


def table(seed: int) -> Table:
    """Random next-token probabilities, a fixed function of the prefix."""

    def probabilities(prefix: Prefix) -> np.ndarray:
        return np.random.default_rng([seed, *prefix, len(prefix)]).dirichlet(np.ones(VOCAB))

    return probabilities


def law_of_text(target: Table, total: int = TOTAL, start: Prefix = ()) -> Law:
    """The target's own law of a text of `total` tokens that begins with `start`."""
    law: Law = {start: 1.0}
    for _ in range(total - len(start)):
        law = {(*text, x): weight * target(text)[x] for text, weight in law.items() for x in range(VOCAB)}
    return law


def total_variation(one: Law, other: Law) -> float:
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other}) / 2


def drafted(draft: Table, prefix: Prefix, shape: str) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of depth 2, root included, from the drafter's best tokens."""
    tokens, parents = [prefix[-1] if prefix else 0], [-1]
    best = np.argsort(-draft(prefix)).tolist()
    if shape == "chain":
        first = best[0]
        return [*tokens, first, int(draft((*prefix, first)).argmax())], [-1, 0, 1]
    if shape == "ragged tree":  # an empty node, a wide level, and a second level below the last child only
        return [*tokens, 0, *best, int(draft((*prefix, best[2])).argmax())], [-1, -1, 0, 0, 0, 4]
    for x in best[:2]:
        tokens.append(x)
        parents.append(0)
    for place, x in enumerate(best[:2]):
        for y in np.argsort(-draft((*prefix, x))).tolist()[:2]:
            tokens.append(y)
            parents.append(1 + place)
    return tokens, parents


def outcomes(target: Table, prefix: Prefix, tokens: list[int], parents: list[int], noise: str) -> tuple[list, list]:
    """All picks of all nodes, and the probability of each outcome.

    Either every node has noise of its own, or the nodes of one depth share a uniform number that is turned into their
    picks through their distribution functions, which is noise that belongs to the position.
    """
    texts: list[Prefix] = [prefix]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append((*texts[parent], token) if parent >= 0 else (*prefix, token))
    laws = [target(text) for text in texts]
    if noise == "independent":
        every = np.indices([VOCAB] * len(tokens)).reshape(len(tokens), -1)
        weights = np.prod([law[picks] for law, picks in zip(laws, every, strict=True)], axis=0)
        return every.T.tolist(), weights.tolist()
    depths = [len(text) - len(prefix) for text in texts]
    levels = []
    for depth in range(max(depths) + 1):
        members = [node for node, each in enumerate(depths) if each == depth]
        edges = sorted({0.0, 1.0, *(min(1.0, edge) for node in members for edge in laws[node].cumsum()[:-1])})
        level = []
        for low, high in itertools.pairwise(edges):
            middle = (low + high) / 2
            level.append(({node: int((laws[node].cumsum()[:-1] <= middle).sum()) for node in members}, high - low))
        levels.append(level)
    picks, weights = [], []
    for parts in itertools.product(*levels):
        merged = {node: pick for part, _ in parts for node, pick in part.items()}
        picks.append([merged[node] for node in range(len(tokens))])
        weights.append(float(np.prod([weight for _, weight in parts])))
    return picks, weights


def one_round(target: Table, prefix: Prefix, tree: tuple[list[int], list[int]], noise: str) -> Law:
    """The law of what one round emits, by the real walk on every outcome."""
    picks, weights = outcomes(target, prefix, *tree, noise)
    draft = DraftTree(*(torch.tensor([part] * len(picks)) for part in tree))
    kept = walk(draft, torch.tensor(picks), max_depth=2)
    law: Law = defaultdict(float)
    for accepted, emitted, weight in zip(kept.accepted.tolist(), kept.picks.tolist(), weights, strict=True):
        law[tuple(emitted[: accepted + 1])] += weight
    return law


def law_of_rounds(target: Table, propose: Callable[[Prefix], tuple], noise: str) -> Law:
    """The law of the first TOTAL tokens of a text that is made round after round."""
    law: Law = defaultdict(float)
    waiting: Law = {(): 1.0}
    while waiting:
        following: Law = defaultdict(float)
        for prefix, weight in waiting.items():
            for emitted, chance in one_round(target, prefix, propose(prefix), noise).items():
                text = (*prefix, *emitted)
                (law if len(text) >= TOTAL else following)[text[:TOTAL]] += weight * chance
        waiting = following
    return law


def rounds_needed(target: Table, propose: Callable[[Prefix], tuple]) -> float:
    """Expected rounds until TOTAL tokens are there."""
    expected, waiting = 0.0, {(): 1.0}
    while waiting:
        following: Law = defaultdict(float)
        for prefix, weight in waiting.items():
            expected += weight
            for emitted, chance in one_round(target, prefix, propose(prefix), "independent").items():
                text = (*prefix, *emitted)
                if len(text) < TOTAL:
                    following[text] += weight * chance
        waiting = following
    return expected


def longest_of_two_paths(target: Table, draft: Table) -> Law:
    """WRONG: two candidate chains, each verified with picks of its own; the one that goes further is emitted."""
    laws = []
    for first in np.argsort(-draft(()))[:2].tolist():
        chain = [0, first, int(draft((first,)).argmax())], [-1, 0, 1]
        laws.append(one_round(target, (), chain, "independent"))
    law: Law = defaultdict(float)
    for (text, weight), (other, chance) in itertools.product(laws[0].items(), laws[1].items()):
        emitted = text if len(text) >= len(other) else other
        for rest, more in law_of_text(target, 3, emitted).items():
            law[rest] += weight * chance * more
    return law

"""The classical rules: exact by enumeration, wrong drafts and wrong rules that must be seen, and whole calls.

Target and drafter are tables of next-token probabilities for every prefix. All drafts are listed with the chance that
they are drawn, and all outcomes of the rule with the chances that the real rule gives; the real `picks` and `walk` make
text of them. The law of that text must be the target's to rounding.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import selfdraft
from selfdraft import Plan
from selfdraft.rejection import block, draft_noise, picks, recursive, up_to_the_last
from selfdraft.sampling import Noise
from selfdraft.tree import DraftTree
from selfdraft.verify import walk
from tests.contract.arms import GREEDY, LOOP, NEW, Case, arms, plain, seeded
from tests.contract.checks import same_tokens
from tests.models import row
from tests.scripted import Passing, noisy
from tests.test_rounds import reads
from tests.test_sampling import BOUND as SAMPLING_BOUND
from tests.test_sampling import distance, exact_joint, model, sampled_joint
from tests.test_verify import BOUND, MODELS, VOCAB, Law, Prefix, Table, law_of_text, table, total_variation

ARMS = arms()
SAMPLED = Case("llama", "sdpa", "T1", 3)
DRAWN = ["draft_model-trained", "eagle-trained", "medusa-trained", "noisy"]  # drafters that say what they draw from

Draft = tuple[list[int], list[int], list[Prefix | None] | None, float]
Rule = Callable[[DraftTree, Tensor], tuple[Tensor, Tensor]]


# --- The law of the text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chain", "block", "tree", "certain chain", "certain tree", "ragged tree"])
@pytest.mark.parametrize("seed", MODELS)
def test_the_law_of_one_round_is_the_targets(seed, kind):
    law = completed(table(seed), first_round(seed, kind), total=3)
    assert total_variation(law, law_of_text(table(seed), 3)) < BOUND


@pytest.mark.parametrize(("kind", "total"), [("chain", 4), ("block", 4), ("tree", 3), ("ragged tree", 3)])
def test_the_law_of_several_rounds_is_the_targets(kind, total):
    law = law_of_rounds(table(0), table(100), kind, total, rounds=total)
    assert total_variation(law, law_of_text(table(0), total)) < BOUND


@pytest.mark.parametrize("kind", ["chain", "block", "tree"])
def test_a_target_that_excludes_tokens_never_says_them(kind):
    def cut(prefix: Prefix) -> np.ndarray:
        p = table(3)(prefix)
        p[p.argmin()] = 0
        return p / p.sum()

    law = law_of_rounds(cut, table(103), kind, total=3, rounds=1)
    assert total_variation(law, law_of_text(cut, 3)) < BOUND
    assert all(law_of_text(cut, 3)[text] > 0 for text, weight in law.items() if weight > 0)


@pytest.mark.parametrize("kind", ["chain", "block", "tree"])
def test_a_reduced_draft_vocabulary_changes_nothing(kind):
    """The drafter knows tokens 2 and 0 only, in this order."""

    def half(prefix: Prefix) -> np.ndarray:
        q = table(107)(prefix)
        q[1] = 0
        return q / q.sum()

    law = law_of_rounds(table(7), half, kind, total=3, rounds=1, ids=[2, 0])
    assert total_variation(law, law_of_text(table(7), 3)) < BOUND


def test_tokens_per_round_are_ordered_as_in_the_literature():
    """Mean over the models. The block rule never keeps less than the token rule, and p = q keeps everything."""
    means = {kind: [expected_length(first_round(seed, kind)) for seed in MODELS] for kind in KINDS}
    assert all(one >= other - 1e-12 for one, other in zip(means["block"], means["chain"], strict=True))
    mean = {kind: float(np.mean(each)) for kind, each in means.items()}
    assert mean["certain chain"] < mean["chain"] < mean["block"] < mean["certain tree"] < mean["tree"]
    assert mean == pytest.approx(
        {
            "certain chain": 1.389,
            "chain": 1.964,
            "block": 2.008,
            "certain tree": 2.135,
            "tree": 2.432,
            "ragged tree": 1.958,
        },
        abs=5e-4,
    )
    for kind in ("chain", "block", "tree"):
        own = one_round(table(1), table(1), (), drawn_drafts(table(1), (), kind), kind)
        assert expected_length(own) == pytest.approx(3)


def test_one_token_is_accepted_as_often_as_can_be():
    for seed in MODELS:
        p, q = table(seed)(()), table(100 + seed)(())
        for rule in (recursive, block):
            chances, rest = one_level(rule, p, q)
            assert (torch.tensor(q) * chances[:, 1]).sum() == pytest.approx(np.minimum(p, q).sum())
            assert rest[0, 0].numpy() == pytest.approx(np.maximum(p - q, 0) / np.maximum(p - q, 0).sum())


def one_level(rule: Rule, p: np.ndarray, q: np.ndarray) -> tuple[Tensor, Tensor]:
    """What a rule makes of one drafted token, for every token."""
    count = len(p)
    tokens = torch.stack([torch.zeros(count, dtype=torch.long), torch.arange(count)], dim=1)
    parents = torch.tensor([[-1, 0]]).expand(count, -1)
    draft_probs = torch.stack([torch.tensor(q), torch.zeros(count)]).expand(count, -1, -1)
    return rule(DraftTree(tokens, parents, draft_probs), torch.tensor(p).expand(count, 2, -1))


def test_the_two_token_example():
    """The worked example of docs/verification.md: q = (.8, .2), p = (.3, .7)."""
    chances, rest = one_level(recursive, np.array([0.3, 0.7]), np.array([0.8, 0.2]))
    assert chances[:, 1].tolist() == pytest.approx([0.375, 1])
    assert rest[0, 0].tolist() == pytest.approx([0, 1])


# --- Wrong drafts and wrong rules, which must be seen -----------------------------------------------------------------


def argmax_with_softmax(draft: Table, prefix: Prefix, kind: str) -> list[Draft]:
    first = int(draft(prefix).argmax())
    return [([0, first], [-1, 0], [prefix, None], 1.0)]


def best_two_as_if_drawn(draft: Table, prefix: Prefix, kind: str) -> list[Draft]:
    return [([0, *(-draft(prefix)).argsort()[:2].tolist()], [-1, 0, 0], [prefix, None, None], 1.0)]


def reranked(draft: Table, prefix: Prefix, kind: str) -> list[Draft]:
    q = draft(prefix)
    return [
        ([0, *sorted(xs, key=lambda x: -q[x])], [-1, 0, 0], [prefix, None, None], weight) for xs, weight in sets(q, 2)
    ]


def unlikely_dropped(draft: Table, prefix: Prefix, kind: str) -> list[Draft]:
    q = draft(prefix)
    return [([0, x], [-1, 0 if q[x] > 0.3 else -1], [prefix, None], q[x]) for x in range(VOCAB)]


def drawn_with_temperature(draft: Table, prefix: Prefix, kind: str) -> list[Draft]:
    q = draft(prefix) ** 2 / (draft(prefix) ** 2).sum()
    return [([0, x], [-1, 0], [prefix, None], q[x]) for x in range(VOCAB)]


@pytest.mark.parametrize(
    "wrong", [argmax_with_softmax, best_two_as_if_drawn, reranked, unlikely_dropped, drawn_with_temperature]
)
def test_drafts_that_were_not_drawn_as_they_say_are_seen(wrong):
    errors = []
    for seed in MODELS:
        target, draft = table(seed), table(100 + seed)
        law = law_of_rounds(target, draft, "tree", total=2, rounds=1, drafts=wrong)
        errors.append(total_variation(law, law_of_text(target, 2)))
    assert max(errors) > 0.14


def unsubtracted(tree: DraftTree, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    return recursive(tree, target_probs)[0], target_probs


def unrenormalised(tree: DraftTree, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The first child of every node as it should be, the second against the same p and q."""
    alone = torch.where(torch.arange(tree.tokens.shape[1]) % 2 == 1, tree.parents, -1)
    other = torch.where(torch.arange(tree.tokens.shape[1]) % 2 == 0, tree.parents, -1)
    first, rest = recursive(DraftTree(tree.tokens, alone, tree.draft_probs), target_probs)
    second, _ = recursive(DraftTree(tree.tokens, other, tree.draft_probs), target_probs)
    return torch.where(alone >= 0, first, second), rest


@pytest.mark.parametrize(("wrong", "kind"), [(unsubtracted, "chain"), (unsubtracted, "tree"), (unrenormalised, "tree")])
def test_a_wrong_rule_is_seen(wrong, kind):
    errors = []
    for seed in MODELS:
        target, draft = table(seed), table(100 + seed)
        law = law_of_rounds(target, draft, kind, total=3, rounds=1, rule=wrong)
        errors.append(total_variation(law, law_of_text(target, 3)))
    assert max(errors) > 0.1


def test_drafts_that_come_back_are_wrong_for_blocks_and_right_for_tokens():
    """A block is refused for its later tokens too. If the next round drafts them again, that is a law of its own.

    The drafter draws token i of the text by one uniform number that belongs to the place, whatever the round.
    """
    errors: dict[str, float] = {"chain": 0.0, "block": 0.0}
    for kind, seed in itertools.product(errors, MODELS[:4]):
        target, draft = table(seed), table(100 + seed)
        law: Law = defaultdict(float)
        for cells, weight in drawn_by_place(draft, places=2):
            for text, chance in law_of_rounds(
                target, draft, kind, total=2, rounds=2, drafts=functools.partial(of_cells, cells=cells)
            ).items():
                law[text] += weight * chance
        errors[kind] = max(errors[kind], total_variation(law, law_of_text(target, 2)))
    assert errors["chain"] < BOUND
    assert errors["block"] > 0.005


# --- What the drafters draw -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("plan", [Plan(4), Plan(4, 3, 14)], ids=["chain", "tree"])
def test_drafted_text_is_the_same_for_a_seed_and_leaves_the_global_generator_alone(name, plan):
    settings = {"drafter": ARMS[name](SAMPLED), "plan": plan, "acceptance": "rejection", "max_new_tokens": NEW}
    before = torch.get_rng_state()
    texts = [selfdraft.generate(SAMPLED.model, **SAMPLED.inputs, **settings, **seeded("T1")) for _ in range(2)]
    assert torch.get_rng_state().equal(before)
    same_tokens(texts[0], texts[1])
    other = selfdraft.generate(SAMPLED.model, **SAMPLED.inputs, **settings, **seeded("T1", row=50))
    assert other.tolist() != texts[0].tolist()
    assert texts[0].tolist() != plain(SAMPLED).tolist(), "the text is not that of the coupled rule"


def test_every_round_draws_with_noise_of_its_own():
    """At the same positions, and unlike the target's: the drafts of a refused block do not come back."""
    positions, tokens = torch.tensor([[8]]), torch.arange(2000)
    noise = Noise(torch.tensor([3]), 1.0)
    series = [noise, draft_noise(noise, torch.tensor([6])), draft_noise(noise, torch.tensor([7]))]
    drawn = torch.stack([each.gumbel(positions, tokens).flatten() for each in series])
    # Of independent series of 2,000, a correlation beyond 0.11 is five standard deviations off.
    assert (drawn.corrcoef() - torch.eye(3)).abs().max() < 0.11
    assert series[1].draws and not noise.draws


@pytest.mark.parametrize("plan", [Plan(5), Plan(5, 3, 14)], ids=["chain", "tree"])
def test_a_drafter_that_is_the_target_is_always_accepted(plan):
    """p / q is 1 to rounding, so a refusal has a chance of about 1e-6 for each of the 200 tokens."""
    stats = generated(ARMS["copy"](SAMPLED), plan, max_new_tokens=67).stats
    assert stats.acceptance_by_depth == [1.0] * 5


@pytest.mark.parametrize("name", [*DRAWN, "ngram", "bigram", "script", "anti"])
@pytest.mark.parametrize("policy", ["T0.7-top_k", "top_p"])
def test_every_drafter_runs_and_nothing_is_said_that_the_policy_excludes(name, policy):
    case = Case("llama", "sdpa", policy, 3)
    ours = generated(ARMS[name](case), Plan(3, 3, 10), case, output_scores=True)
    assert ours.stats.rounds > 0 and len(ours.stats.acceptance_by_depth) <= 3
    time = case.inputs["input_ids"].shape[1]
    for token, scores in zip(ours.sequences[:, time:].unbind(dim=1), ours.scores, strict=True):
        assert scores.gather(1, token.unsqueeze(1)).isfinite().all()


@pytest.mark.parametrize("name", DRAWN)
def test_a_row_alone_gives_the_same_text_as_in_a_batch(name):
    """As long as the drafts have one shape: rows of a batch are asked for equally deep drafts until they end."""
    case = Case("llama", "sdpa", "T1", 3)
    drafter, plan = ARMS[name](case), Plan(2, 2, 6)
    ours = generated(drafter, plan, max_new_tokens=NEW).sequences
    for index in range(3):
        alone = selfdraft.generate(
            case.model,
            **row(case.inputs, index),
            drafter=drafter,
            plan=plan,
            acceptance="rejection",
            max_new_tokens=NEW,
            **seeded("T1", index),
        )
        # near the end a row may be asked for less than its batch
        same_tokens(ours[index : index + 1, -NEW : -NEW // 4], alone[:, -NEW : -NEW // 4])


def test_greedy_text_needs_no_classical_rule():
    case = Case("llama", "sdpa", "greedy", 3)
    for name in (*DRAWN, "ngram"):
        same_tokens(generated(ARMS[name](case), Plan(3, 2, 8), case).sequences, plain(case))


def test_what_is_not_honoured_is_refused_before_the_first_pass(monkeypatch):
    case = Case("llama", "sdpa", "T1", 1)
    monkeypatch.setattr(LOOP, "prefill", None)
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor"):
        generated(None, Plan(0), case, repetition_penalty=1.2)
    with pytest.raises(ValueError, match="'coupled'.*'rejection', not 'typical'"):
        selfdraft.generate(case.model, **case.inputs, acceptance="typical", max_new_tokens=2, **seeded("T1"))


@pytest.mark.parametrize("plan", [Plan(4), Plan(4, 3, 14)], ids=["chain", "tree"])
def test_a_round_reads_once(plan, monkeypatch):
    """Whatever is read per call, a longer text reads once more per round."""
    drafter, counted = ARMS["eagle-trained"](SAMPLED), []
    for new in (12, 24):
        with reads(monkeypatch) as mode:
            stats = generated(drafter, plan, max_new_tokens=new).stats
            counted.append((sum(mode.counts.values()), stats.rounds))
    (few, short), (many, long) = counted
    assert many - few <= (long - short), counted


def generated(drafter: Any, plan: Plan, case: Case = SAMPLED, **settings: Any) -> Any:
    wanted = {"max_new_tokens": NEW, **(GREEDY if case.policy == "greedy" else seeded(case.policy)), **settings}
    return selfdraft.generate(
        case.model,
        **case.inputs,
        drafter=drafter,
        plan=plan,
        acceptance="rejection",
        return_dict_in_generate=True,
        **wanted,
    )


# --- The law of generated text, by counting (see tests/test_sampling.py for the bound) --------------------------------


class Still(Noise):
    """Says that it draws, and takes the likeliest: an argmax draft that is verified with softmax q."""

    def gumbel(self, positions: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros(*positions.shape, len(tokens))


class Argmax(Passing):
    def propose(self, state, seen, root, plan, noise):
        return super().propose(state, seen, root, plan, Still(noise.seeds, noise.temperature, noise.draws))


@pytest.mark.parametrize(
    ("plan", "temperature", "top_k"),
    [
        pytest.param(Plan(3), 1.0, 0, id="block"),
        pytest.param(Plan(3, 3, 9), 0.7, 5, id="tree at T=0.7 with top-k"),
    ],
)
def test_sampled_text_follows_the_target(plan, temperature, top_k):
    joint = sampled_joint(noisy(model(), 0.1), plan, temperature, top_k, acceptance="rejection")
    assert distance(joint, exact_joint(temperature, top_k)) < SAMPLING_BOUND


def test_argmax_drafts_verified_with_softmax_are_seen():
    joint = sampled_joint(Argmax(noisy(model(), 0.1)), Plan(3), acceptance="rejection")
    assert distance(joint, exact_joint(1.0)) > 2 * SAMPLING_BOUND


# --- Drafts, rounds and laws ------------------------------------------------------------------------------------------


def sets(q: np.ndarray, count: int) -> list[tuple[list[int], float]]:
    """Draws from q without replacement, in order, with their chances."""
    drawn = []
    for xs in itertools.permutations(np.flatnonzero(q).tolist(), count):
        left, weight = 1.0, 1.0
        for x in xs:
            weight *= q[x] / left
            left -= q[x]
        drawn.append((list(xs), float(weight)))
    return drawn


def drawn_drafts(draft: Table, prefix: Prefix, kind: str) -> list[Draft]:
    """All drafts of depth 2: tokens, parents, the prefix whose q the children of each node come from, and the chance.

    The ragged tree has an empty node, and children below the second child of its root only.
    """
    drafts: list[Draft] = []
    if kind in ("chain", "block"):
        for xs, one in sets(draft(prefix), 1):
            for ys, two in sets(draft((*prefix, *xs)), 1):
                drafts.append(([0, *xs, *ys], [-1, 0, 1], [prefix, (*prefix, *xs), None], one * two))
    elif kind == "tree":
        for xs, one in sets(draft(prefix), 2):
            below = [sets(draft((*prefix, x)), 2) for x in xs]
            for (ys, two), (zs, three) in itertools.product(*below):
                laws = [prefix, (*prefix, xs[0]), (*prefix, xs[1]), None, None, None, None]
                drafts.append(([0, *xs, *ys, *zs], [-1, 0, 0, 1, 1, 2, 2], laws, one * two * three))
    elif kind == "ragged tree":
        for xs, one in sets(draft(prefix), 2):
            for ys, two in sets(draft((*prefix, xs[1])), 2):
                laws = [prefix, None, None, (*prefix, xs[1]), None, None]
                drafts.append(([0, xs[0], 0, xs[1], *ys], [-1, 0, -1, 0, 3, 3], laws, one * two))
    elif kind == "certain chain":
        first = int(draft(prefix).argmax())
        drafts.append(([0, first, int(draft((*prefix, first)).argmax())], [-1, 0, 1], None, 1.0))
    elif kind == "certain tree":
        xs = (-draft(prefix)).argsort()[:2].tolist()
        below = [(-draft((*prefix, x))).argsort()[:2].tolist() for x in xs]
        drafts.append(([0, *xs, *below[0], *below[1]], [-1, 0, 0, 1, 1, 2, 2], None, 1.0))
    return drafts


KINDS = ["chain", "block", "tree", "certain chain", "certain tree", "ragged tree"]


def drawn_by_place(draft: Table, places: int) -> list[tuple[tuple[float, ...], float]]:
    """Uniform numbers of every place, one for each cell between the steps of any distribution function at the place."""
    levels = []
    for place in range(places):
        laws = [draft(prefix).cumsum()[:-1] for prefix in itertools.product(range(VOCAB), repeat=place)]
        edges = sorted({0.0, 1.0, *(float(edge) for law in laws for edge in law)})
        levels.append([((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)])
    return [
        (tuple(u for u, _ in cells), float(np.prod([weight for _, weight in cells])))
        for cells in itertools.product(*levels)
    ]


def of_cells(draft: Table, prefix: Prefix, kind: str, cells: tuple[float, ...]) -> list[Draft]:
    """The chain that the uniform numbers of its places draw; no deeper than the text is wanted."""
    tokens, parents, laws, text = [0], [-1], [], prefix
    while len(text) < 2:
        laws.append(text)
        tokens.append(int((draft(text).cumsum()[:-1] <= cells[len(text)]).sum()))
        parents.append(len(tokens) - 2)
        text = (*text, tokens[-1])
    return [(tokens, parents, [*laws, None], 1.0)]


def one_round(
    target: Table,
    draft: Table,
    prefix: Prefix,
    drafts: list[Draft],
    kind: str,
    rule: Rule | None = None,
    ids: list[int] | None = None,
) -> Law:
    """The law of what one round emits: every draft and every outcome, through the real rule, picks and walk."""
    rule = rule or (block if kind == "block" else recursive)
    tokens = torch.tensor([each[0] for each in drafts])
    parents = torch.tensor([each[1] for each in drafts])
    count = tokens.shape[1]
    target_probs = torch.tensor(np.array([laws_of_nodes(target, prefix, *each[:2]) for each in drafts]))
    draft_probs = None
    if drafts[0][2] is not None:
        known = list(range(VOCAB)) if ids is None else ids
        none = np.zeros(len(known))
        rows = [[none if law is None else draft(law)[known] for law in laws] for _, _, laws, _ in drafts if laws]
        draft_probs = torch.tensor(np.array(rows))
    tree = DraftTree(tokens, parents, draft_probs, None if ids is None else torch.tensor(ids))
    chances, rest = rule(tree, target_probs)

    # Every pattern of accepted and refused nodes, and every token that may be drawn in the end.
    bits = torch.tensor(list(itertools.product([True, False], repeat=count - 1)))
    taken = torch.cat([torch.ones(len(bits), 1, dtype=torch.bool), bits], dim=1)
    draft_index, pattern, drawn = (
        part.flatten() for part in torch.meshgrid(*map(torch.arange, (len(drafts), len(bits), VOCAB)), indexing="ij")
    )
    chances, taken = chances[draft_index], taken[pattern]
    weights = torch.where(taken, chances, 1 - chances)[:, 1:].prod(dim=1)
    accepted = up_to_the_last(taken) if rule is block else taken
    repeated = DraftTree(tokens[draft_index], parents[draft_index])
    undrawn = walk(repeated, picks(repeated, accepted, torch.full_like(repeated.tokens, -1)), max_depth=2)
    end = undrawn.nodes.gather(1, undrawn.accepted.unsqueeze(1)).squeeze(1)
    chance_of_draft = torch.tensor([each[3] for each in drafts], dtype=torch.float64)
    weights = weights * rest[draft_index, end, drawn] * chance_of_draft[draft_index]
    kept = walk(repeated, picks(repeated, accepted, drawn.unsqueeze(1).expand(-1, count)), max_depth=2)
    if rule in (block, recursive):
        assert ((kept.accepted == undrawn.accepted) | (weights < 1e-15)).all(), "what was refused is not drawn after it"

    law: Law = defaultdict(float)
    code = (kept.picks * VOCAB ** torch.arange(kept.picks.shape[1])).where(
        torch.arange(kept.picks.shape[1]) <= kept.accepted.unsqueeze(1), 0
    )
    keys = code.sum(dim=1) * 3 + kept.accepted
    sums = torch.zeros(int(keys.max()) + 1, dtype=torch.float64).index_add(0, keys, weights)
    for key in keys.unique().tolist():
        value, length = key // 3, key % 3 + 1
        law[tuple(value // VOCAB**place % VOCAB for place in range(length))] += float(sums[key])
    return law


def laws_of_nodes(target: Table, prefix: Prefix, tokens: list[int], parents: list[int]) -> list[np.ndarray]:
    """The target's distribution after every node."""
    texts = [prefix]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append((*texts[parent], token) if parent >= 0 else prefix)
    return [target(text) for text in texts]


def law_of_rounds(
    target: Table,
    draft: Table,
    kind: str,
    total: int,
    rounds: int,
    drafts: Callable[[Table, Prefix, str], list[Draft]] = drawn_drafts,
    rule: Rule | None = None,
    ids: list[int] | None = None,
) -> Law:
    """The law of the first `total` tokens after so many rounds; what is missing then, the target says by itself."""
    target, draft = functools.cache(target), functools.cache(draft)
    law: Law = defaultdict(float)
    waiting: Law = {(): 1.0}
    for _ in range(rounds):
        following: Law = defaultdict(float)
        for prefix, weight in waiting.items():
            emitted = one_round(target, draft, prefix, drafts(draft, prefix, kind), kind, rule, ids)
            for more, chance in emitted.items():
                text = (*prefix, *more)
                (law if len(text) >= total else following)[text[:total]] += weight * chance
        waiting = following
    for text, weight in completed(target, waiting, total).items():
        law[text] += weight
    return law


def completed(target: Table, emitted: Law, total: int) -> Law:
    """The law of a text that begins with what was emitted and is the target's own from there on."""
    law: Law = defaultdict(float)
    for prefix, weight in emitted.items():
        for text, chance in law_of_text(target, total, prefix).items():
            law[text] += weight * chance
    return law


@functools.cache
def first_round(seed: int, kind: str) -> Law:
    target, draft = functools.cache(table(seed)), functools.cache(table(100 + seed))
    return one_round(target, draft, (), drawn_drafts(draft, (), kind), kind)


def expected_length(law: Law) -> float:
    return sum(weight * len(text) for text, weight in law.items())

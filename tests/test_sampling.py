"""The noise is Gumbel noise, independent over tokens, positions and seeds; the policy picks what it should.

All seeds are fixed, so a pass stays a pass. For another seed, each statistical test would raise a false alarm with a
chance of about 1e-6 (five standard deviations), unless another figure is given.
"""

import functools
import math
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import selfdraft
from selfdraft import Plan
from selfdraft.sampling import Noise, Policy
from tests.contract.arms import LOOP, NEW, Case, arms, plain
from tests.contract.checks import same_tokens
from tests.models import prompts
from tests.scripted import Passing, noisy

VOCAB = 16


def gumbel(seeds: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    """[seeds, positions, vocab]"""
    noise = Noise(torch.tensor(seeds), temperature=1.0)
    return noise.gumbel(torch.tensor([positions] * len(seeds)), torch.arange(vocab))


def uniform(values: torch.Tensor) -> torch.Tensor:
    """The distribution function of the standard Gumbel distribution, in float64."""
    return (-(-values.double()).exp()).exp()


def excess(counts: torch.Tensor) -> float:
    """Chi-square statistic of equal counts, in its own standard deviations above the mean."""
    expected = counts.sum() / counts.numel()
    degrees = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def joint_excess(one: torch.Tensor, other: torch.Tensor) -> float:
    """The same for the pairs of two series of uniform numbers, over 16 x 16 fields."""
    fields = (one * 16).long().clamp(max=15) * 16 + (other * 16).long().clamp(max=15)
    return excess(torch.bincount(fields.flatten(), minlength=256).double())


def test_the_noise_has_the_gumbel_distribution():
    u = uniform(gumbel(list(range(8)), list(range(100)), 1000)).flatten()
    assert abs(excess(torch.bincount((u * 256).long().clamp(max=255), minlength=256).double())) < 5


def test_the_upper_tail_of_the_noise_is_right():
    """The largest values decide the sample: their counts are Poisson, compared at 5 standard deviations."""
    values = gumbel(list(range(20)), list(range(100)), 2000).flatten()
    assert values.isfinite().all()
    for level in (8.0, 10.0, 12.0):
        expected = len(values) * -math.expm1(-math.exp(-level))
        assert abs(int((values > level).sum()) - expected) < 5 * math.sqrt(expected)


def test_the_noise_is_independent_over_neighbouring_tokens_positions_and_seeds():
    u = uniform(gumbel(list(range(41)), list(range(101)), 101))
    assert abs(joint_excess(u[:, :, 1:], u[:, :, :-1])) < 5
    assert abs(joint_excess(u[:, 1:], u[:, :-1])) < 5
    assert abs(joint_excess(u[1:], u[:-1])) < 5
    # A higher seed and an earlier position do not make up for each other.
    assert abs(joint_excess(u[1:, :-1], u[:-1, 1:])) < 5


def test_the_measure_of_independence_sees_noise_that_is_shared():
    u = uniform(gumbel([1], list(range(100)), 1000))
    assert joint_excess(u, u) > 100


def test_the_noise_is_a_function_of_seed_position_and_token_alone():
    whole = gumbel([3, 4, 900], [5, 6, 7, 8], 50)
    noise = Noise(torch.tensor([4]), temperature=1.0)
    assert noise.gumbel(torch.tensor([[7]]), torch.tensor([11, 49]))[0, 0].tolist() == whole[1, 2, [11, 49]].tolist()
    again = gumbel([900, 4], [8, 5], 50)
    assert again[0, 0].equal(whole[2, 3]) and again[1, 1].equal(whole[1, 0])


def test_a_score_is_the_scaled_logit_and_the_noise():
    logits, positions = torch.randn(2, 3, 6), torch.tensor([[4, 5, 5], [9, 8, 7]])
    ids = torch.tensor([0, 3, 4, 7, 8, 15])
    noise = Noise(torch.tensor([1, 2]), temperature=0.5)
    expected = logits / 0.5 + noise.gumbel(positions, ids)
    assert torch.allclose(noise.score(logits, positions, ids), expected)
    assert noise.score(logits.bfloat16(), positions, ids).dtype == torch.float32
    assert noise.silent().score(logits, positions, ids).equal(logits)


def test_the_policy_picks_per_node_what_a_slow_loop_picks():
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    logits, depths, lengths = torch.randn(2, 4, 20), torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]]), torch.tensor([7, 3])
    noise = Noise(torch.tensor([11, 12]), temperature=0.7)
    ours = Policy(processors, noise).pick(logits, depths, lengths, max_depth=3)
    for row in range(2):
        for node in range(4):
            scores = processors(torch.zeros(1, 1), logits[row, node : node + 1])
            position = lengths[row] + depths[row, node] + 1
            one = Noise(torch.tensor([11 + row]), 0.7).gumbel(position.view(1, 1), torch.arange(20))[0]
            assert ours[row, node] == (scores + one).argmax()
    greedy = Policy(LogitsProcessorList(), noise.silent()).pick(logits, depths, lengths, max_depth=3)
    assert greedy.equal(logits.argmax(-1))


# --- The law of generated text ----------------------------------------------------------------------------------------

N, ROWS = 8000, 1000  # texts in all, and in one call
BOUND = 0.05


@functools.cache
def model() -> PreTrainedModel:
    """Smaller than the other tiny models, since it writes thousands of texts."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.7,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return LlamaForCausalLM(config).eval()


def prompt() -> torch.Tensor:
    return prompts((5,), seed=3, vocab=VOCAB)["input_ids"]


@torch.no_grad()
def exact_joint(temperature: float, top_k: int = 0) -> torch.Tensor:
    """The law of the second and third new token, [VOCAB, VOCAB], by passes over all their prefixes."""

    def law(ids: torch.Tensor) -> torch.Tensor:
        logits = model()(input_ids=ids, use_cache=False).logits[:, -1].double() / temperature
        if top_k:
            logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        return logits.softmax(dim=-1)

    tokens = torch.arange(VOCAB).unsqueeze(1)
    first = law(prompt())[0]
    pairs = torch.cat([prompt().expand(VOCAB, -1), tokens], dim=1)
    second = law(pairs)
    triples = torch.cat([pairs.repeat_interleave(VOCAB, dim=0), tokens.repeat(VOCAB, 1)], dim=1)
    third = law(triples).view(VOCAB, VOCAB, VOCAB)
    return torch.einsum("a,ab,abc->bc", first, second, third)


def sampled_joint(
    drafter: Any, plan: Plan, temperature: float = 1.0, top_k: int = 0, seed: int = 10**6, **kwargs: Any
) -> torch.Tensor:
    """The same from N texts of generate(): the prefill gives the first token, and the rounds those that count."""
    settings = {
        "plan": plan,
        "max_new_tokens": 4,
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k,
    } | kwargs
    parts = [
        selfdraft.generate(model(), prompt().expand(ROWS, -1), drafter=drafter, seed=seed + first, **settings)
        for first in range(0, N, ROWS)
    ]
    ids = torch.cat(parts)
    pairs = ids[:, -3] * VOCAB + ids[:, -2]
    return torch.bincount(pairs, minlength=VOCAB**2).view(VOCAB, VOCAB) / N


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Total variation."""
    return float((one - other).abs().sum() / 2)


class Certain(Passing):
    """A draft model that looks at no noise: its drafts are its own best tokens, the point masses of the literature."""

    def propose(self, state, seen, root, plan, noise):
        return super().propose(state, seen, root, plan, noise.silent())


@pytest.mark.parametrize(
    ("certain", "plan", "temperature"),
    [
        pytest.param(False, Plan(3, 3), 1.0, id="tree"),
        pytest.param(False, Plan(3), 0.3, id="chain at T=0.3"),
        pytest.param(True, Plan(3), 1.0, id="chain of argmax drafts"),
    ],
)
def test_sampled_text_follows_the_target_whatever_drafts(certain, plan, temperature):
    drafter = noisy(model(), 0.1)
    joint = sampled_joint(Certain(drafter) if certain else drafter, plan, temperature)
    assert distance(joint, exact_joint(temperature)) < BOUND


def test_sampled_text_follows_the_processed_target():
    joint = sampled_joint(noisy(model(), 0.1), Plan(3, 2), temperature=1.0, top_k=3)
    assert distance(joint, exact_joint(1.0, top_k=3)) < BOUND
    assert distance(joint, exact_joint(1.0)) > BOUND  # a control: had the processor been lost, it would be seen


def test_the_bound_is_above_the_error_of_sampling_itself():
    """The 99th percentile of the distance of N true samples: what a right program may show."""
    exact = exact_joint(1.0).flatten()
    counts = torch.multinomial(exact, 200 * N, replacement=True).view(200, N)
    distances = [distance(torch.bincount(each, minlength=VOCAB**2) / N, exact) for each in counts]
    assert sorted(distances)[197] < 0.9 * BOUND


def test_noise_that_does_not_belong_to_the_position_is_seen(monkeypatch):
    """A control: the same noise at every position ties the tokens of a text together."""
    whole = Noise.gumbel
    monkeypatch.setattr(Noise, "gumbel", lambda self, positions, tokens: whole(self, positions * 0, tokens))
    joint = sampled_joint(noisy(model(), 0.1), Plan(3))
    assert distance(joint, exact_joint(1.0)) > BOUND


def test_one_seed_for_all_rows_is_seen(monkeypatch):
    """A control: rows that share their noise are one sample and not many."""
    monkeypatch.setattr(LOOP, "row_seeds", lambda seed, batch, device: torch.full((batch,), 7))
    joint = sampled_joint(noisy(model(), 0.1), Plan(3))
    assert distance(joint, exact_joint(1.0)) > BOUND


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_temperature_is_greedy_and_nothing_overflows(temperature, dtype):
    case = Case("llama", "sdpa", "greedy", 3)
    drafter = noisy(case.model, 0.05).to(dtype)
    settings = {"drafter": drafter, "plan": Plan(3, 2), "max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": 4}
    same_tokens(selfdraft.generate(case.model, **case.inputs, temperature=temperature, **settings), plain(case))


def test_the_shared_noise_is_worth_having():
    """With the target's noise, a drafter that is nearly the target is accepted far more often than without."""
    case = Case("llama", "sdpa", "T1", 3)
    drafter = arms()["noisy"](case)
    rates = []
    for each in (drafter, Certain(drafter)):
        ours = selfdraft.generate(
            case.model,
            **case.inputs,
            drafter=each,
            plan=Plan(3),
            seed=1,
            max_new_tokens=100,
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
        )
        rates.append(ours.stats.tokens_per_round)
    assert rates[0] > rates[1] + 0.2

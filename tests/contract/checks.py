"""What the contract asks, as functions: the tests call them, and `tests/seeded_faults.py` shows that they can fail."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import selfdraft
from selfdraft import Plan
from selfdraft.drafters.base import Drafter
from selfdraft.metrics import Stats
from selfdraft.sampling import Noise
from tests.contract.arms import GREEDY, NEW, POLICIES, SEED, Case, plain, seeded
from tests.models import row


def equals_plain(case: Case, drafter: Drafter, plan: Plan) -> Stats:
    """The drafted text is the plain text, token for token."""
    ours = selfdraft.generate(
        case.model,
        **case.inputs,
        drafter=drafter,
        plan=plan,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **seeded(case.policy),
    )
    same_tokens(ours.sequences, plain(case))
    return ours.stats


def plain_equals_transformers(case: Case) -> None:
    """Greedy decoding without a drafter gives transformers' own text."""
    reference = case.model.generate(**case.inputs, max_new_tokens=NEW, **GREEDY)
    same_tokens(selfdraft.generate(case.model, **case.inputs, max_new_tokens=NEW, **GREEDY), reference)


def plain_equals_slow_loop(case: Case) -> None:
    """Sampling without a drafter gives what the definition says: one full pass per token, processors, noise, argmax."""
    ours = selfdraft.generate(case.model, **case.inputs, max_new_tokens=NEW, **seeded(case.policy))
    for index in range(case.batch):
        reference = slow_sample(case.model, row(case.inputs, index)["input_ids"], POLICIES[case.policy], SEED + index)
        same_tokens(ours[index : index + 1, -NEW:], reference[:, -NEW:])


def rows_equal_single_runs(case: Case, drafter: Drafter | None = None, plan: Plan | None = None) -> None:
    """Row b of a batch is what the row gives by itself, with seed + b."""
    settings: dict[str, Any] = {"drafter": drafter, "plan": plan, "max_new_tokens": NEW}
    ours = selfdraft.generate(case.model, **case.inputs, **settings, **seeded(case.policy))
    for index in range(case.batch):
        alone = selfdraft.generate(case.model, **row(case.inputs, index), **settings, **seeded(case.policy, index))
        same_tokens(ours[index : index + 1, -NEW:], alone[:, -NEW:])


def copy_is_always_accepted(case: Case, drafter: Drafter, plan: Plan) -> None:
    """A drafter that is the target loses nothing, at any depth: its own cache and positions are exact."""
    stats = equals_plain(case, drafter, plan)
    assert len(stats.acceptance_by_depth) == plan.depth, stats
    assert stats.acceptance_by_depth == [1.0] * plan.depth, stats


def same_tokens(ours: Tensor, reference: Tensor) -> None:
    """Equal, or an AssertionError that shows both texts."""
    assert ours.tolist() == reference.tolist()


@torch.no_grad()
def slow_sample(model: Any, ids: Tensor, policy: dict[str, Any], seed: int) -> Tensor:
    """Sampling by definition, without a cache: argmax(processed logits + the noise of the position)."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(policy["temperature"])])
    if policy.get("top_k"):
        processors.append(TopKLogitsWarper(policy["top_k"]))
    if "top_p" in policy:
        processors.append(TopPLogitsWarper(policy["top_p"]))
    if "min_p" in policy:
        processors.append(MinPLogitsWarper(policy["min_p"]))
    noise = Noise(torch.tensor([seed]), policy["temperature"])
    for position in range(ids.shape[1], ids.shape[1] + NEW):
        logits = processors(ids, model(input_ids=ids, use_cache=False).logits[:, -1].float())
        gumbel = noise.gumbel(torch.tensor([[position]]), torch.arange(logits.shape[-1]))[:, 0]
        ids = torch.cat([ids, (logits + gumbel).argmax(dim=-1, keepdim=True)], dim=1)
    return ids

"""One read per round, and shapes that follow from the plan alone: what makes the loop fit for a GPU, shown on the CPU.

A read is whatever makes the host wait for the device. Some go through torch's dispatcher, where a mode sees them; the
others are methods of Tensor, which are counted as they are called.
"""

import inspect
from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import selfdraft
from selfdraft import Plan
from selfdraft.target import Target
from tests.contract.arms import GREEDY, NEW, Case, arms, seeded
from tests.models import FAMILIES, prompts

ARMS = arms()
METHODS = ["tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"]
OPERATORS = {
    "_local_scalar_dense",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_dim",
    "_unique2",
    "repeat_interleave",  # with a tensor of repeats, whose sum must be known
    "allclose",
}


class Reads(TorchDispatchMode):
    """Counts the operators whose result the host must see."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in (args[1] if name == "index" else [])
        )
        data_dependent = name == "repeat_interleave" and "Tensor" in func._overloadname
        if by_mask or (name in OPERATORS and (name != "repeat_interleave" or data_dependent)):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def reads(monkeypatch):
    """The reads of the block, by name."""
    with monkeypatch.context() as patch, Reads() as mode:
        inside = []
        for name in METHODS:
            whole = getattr(Tensor, name)

            def counted(self, *args, name=name, whole=whole, **kwargs):
                # `item()` of `__bool__`, and the operator below a method, are the same read.
                if inside:
                    return whole(self, *args, **kwargs)
                inside.append(name)
                before = mode.counts.copy()
                try:
                    return whole(self, *args, **kwargs)
                finally:
                    inside.pop()
                    mode.counts = before
                    mode.counts[name] += 1

            patch.setattr(Tensor, name, counted)
        yield mode


def rounds_and_reads(monkeypatch, case: Case, drafter: Any, plan: Plan, new: int) -> tuple[int, Counter]:
    with reads(monkeypatch) as mode:
        ours = selfdraft.generate(
            case.model,
            **case.inputs,
            drafter=drafter,
            plan=plan,
            max_new_tokens=new,
            return_dict_in_generate=True,
            **seeded(case.policy),
        )
    return ours.stats.rounds, mode.counts


@pytest.mark.parametrize("plan", [Plan(3), Plan(3, 3, 9)], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", ["greedy", "T0.7-top_k"])
@pytest.mark.parametrize("name", ["plain", *(name for name in ARMS if name not in ("anti", "script"))])
def test_a_round_reads_once_from_the_device(name, policy, plan, monkeypatch):
    """Every read of a long call that a short one does not have belongs to a round; there is one `tolist` for each."""
    case = Case("llama", "sdpa", policy, 1)
    drafter = None if name == "plain" else ARMS[name](case)
    short_rounds, short = rounds_and_reads(monkeypatch, case, drafter, plan, new=8)
    long_rounds, long = rounds_and_reads(monkeypatch, case, drafter, plan, new=NEW)
    assert long_rounds > short_rounds
    assert long - short == {"tolist": long_rounds - short_rounds}
    assert not short - long


@pytest.mark.parametrize("plan", [Plan(3), Plan(3, 3, 9)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", [None, "anti", "copy", "medusa-untrained", "eagle-trained"])
def test_a_round_is_one_pass_of_the_target_and_the_prompt_another(name, plan, monkeypatch):
    case = Case("llama", "sdpa", "greedy", 1)
    drafter, passes = None if name is None else ARMS[name](case), []
    forward = type(case.model).forward
    monkeypatch.setattr(case.model, "forward", lambda *args, **kw: passes.append(1) or forward(case.model, *args, **kw))
    monkeypatch.setattr(case.model.forward, "__signature__", inspect.signature(forward), raising=False)
    settings = {"max_new_tokens": NEW, "return_dict_in_generate": True, **GREEDY}
    output = selfdraft.generate(case.model, **case.inputs, drafter=drafter, plan=plan, **settings)
    assert len(passes) == output.stats.rounds + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_reads_for_itself(family, monkeypatch):
    """With a pad token and no mask, some models look into the text for padding."""
    case = Case(family, "", "greedy", 1)
    monkeypatch.setattr(case.model.config, "pad_token_id", 0)
    for drafter, plan in ((None, Plan(0)), (ARMS["noisy"](case), Plan(3, 3, 9))):
        short_rounds, short = rounds_and_reads(monkeypatch, case, drafter, plan, new=8)
        long_rounds, long = rounds_and_reads(monkeypatch, case, drafter, plan, new=NEW)
        assert long - short == {"tolist": long_rounds - short_rounds}


def test_the_count_sees_every_kind_of_read(monkeypatch):
    """A control: what a careless drafter would write is counted, each as one read."""
    values = torch.arange(4)
    careless = {
        "item": lambda: values.sum().item(),
        "tolist": lambda: values.tolist(),
        "__bool__": lambda: bool((values > 2).any()),
        "__int__": lambda: int(values.max()),
        "__index__": lambda: list(range(10))[values[1]],
        "nonzero": lambda: (values > 2).nonzero(),
        "index": lambda: values[values > 2],
        "masked_select": lambda: values.masked_select(values > 2),
        "equal": lambda: values.equal(values),
        "repeat_interleave": lambda: values.repeat_interleave(values),
    }
    for name, act in careless.items():
        with reads(monkeypatch) as mode:
            act()
        assert mode.counts == {name: 1}, name


@pytest.mark.parametrize("plan", [Plan(3), Plan(3, 3, 9)], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", ["greedy", "T1"])
@pytest.mark.parametrize("name", [name for name in ARMS if name not in ("anti", "script")])
def test_the_shapes_of_a_round_depend_on_the_plan_alone(name, policy, plan, monkeypatch):
    """Two prompts with other tokens and other lengths: the same shapes, until the end of the text cuts the plan."""
    case = Case("llama", "sdpa", policy, 1)
    drafter = ARMS[name](case)
    seen = []
    for seed, length in ((1, 7), (2, 11)):
        shapes = []
        whole = Target.score

        def score(self, tokens, positions, visible, *args, shapes=shapes, whole=whole, **kwargs):
            shapes.append((tuple(tokens.shape), tuple(positions.shape), tuple(visible.shape)))
            return whole(self, tokens, positions, visible, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Target, "score", score)
            inputs = prompts((length,), seed=seed)
            settings = {"drafter": drafter, "plan": plan, "max_new_tokens": NEW, **seeded(policy)}
            selfdraft.generate(case.model, **inputs, **settings)
        widest = max(tokens[1] for tokens, _, _ in shapes[3:])
        seen.append({each for each in shapes[3:] if each[0][1] == widest})
    assert seen[0] == seen[1]
    assert len(seen[0]) == 1

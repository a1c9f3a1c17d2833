"""Every drafter that there is, made for a given target: found by listing the packages, and the scripted ones."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import selfdraft
import selfdraft.drafters
from selfdraft import Plan
from selfdraft.drafters.base import Drafter, FeatureBatch
from selfdraft.target import Target
from tests.models import VOCAB, prompts, tiny
from tests.scripted import Anti, Script, copy_of, noisy, texts_of

LOOP = importlib.import_module("selfdraft.generate")  # the module: `selfdraft.generate` is the function of its name
NEWCOMERS = Path(__file__).parent / "newcomers"
LENGTHS = {1: (7,), 3: (3, 9, 14)}  # prompt lengths by batch size
NEW = 24  # new tokens: with the prompts, more than the window of the sliding families
SEED = 5

GREEDY: dict[str, Any] = {"do_sample": False}
POLICIES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "T1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "T0.7-top_k": {"do_sample": True, "temperature": 0.7, "top_k": 10},
    "top_p": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9},
    "min_p": {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_p": 0.05},
}
CHAIN, TREE = Plan(depth=4), Plan(depth=4, width=3, nodes=14)
PLANS = {"chain": CHAIN, "tree": TREE}
# Fields of a drafter's config that would be too large for a model of 64 numbers per token; all others are the defaults.
SMALL: dict[str, dict[str, Any]] = {
    "draft_model": {
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    },
}


@dataclass(frozen=True)
class Case:
    """One decoding job: whom, how and how many. Its prompts and its plain text follow from it."""

    family: str
    attention: str
    policy: str
    batch: int

    @property
    def model(self) -> PreTrainedModel:
        return tiny(self.family, self.attention)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return prompts(LENGTHS[self.batch])


def seeded(policy: str, row: int = 0) -> dict[str, Any]:
    """The arguments of a policy, with the seed of a row where it samples."""
    wanted = POLICIES[policy]
    return {**wanted, "seed": SEED + row} if wanted["do_sample"] else wanted


@functools.cache
def plain(case: Case) -> Tensor:
    """The reference: transformers' own text when greedy, selfdraft's without a drafter when sampling."""
    if case.policy == "greedy":
        return case.model.generate(**case.inputs, max_new_tokens=NEW, **GREEDY)
    return selfdraft.generate(case.model, **case.inputs, max_new_tokens=NEW, **seeded(case.policy))


def modules() -> dict[str, Any]:
    """The drafter modules of `selfdraft.drafters`, and of the tests' own folder, by name."""
    folders = [*selfdraft.drafters.__path__, str(NEWCOMERS)]
    found = {}
    for info in pkgutil.iter_modules(folders):
        package = "selfdraft.drafters" if info.module_finder.path != str(NEWCOMERS) else "tests.contract.newcomers"
        module = importlib.import_module(f"{package}.{info.name}")
        if hasattr(module, "drafter_class"):
            found[info.name] = module.drafter_class
    return found


Build = Callable[[Case], Drafter]


def arms() -> dict[str, Build]:
    """How to make each drafter for a case. A module with weights comes twice: as it begins, and shortly trained."""
    found: dict[str, Build] = {}
    for name, kind in modules().items():
        if hasattr(kind, "for_target"):
            found[name] = lambda case, kind=kind: kind.for_target(Target(case.model))
        else:
            found[f"{name}-untrained"] = lambda case, name=name: untrained(name, case.family, case.attention)
            found[f"{name}-trained"] = lambda case, name=name: trained(name, case.family, case.attention)
    found["copy"] = lambda case: copied(case.family, case.attention)
    found["noisy"] = lambda case: moved(case.family, case.attention)
    found["anti"] = lambda case: Anti(texts_of(case.inputs, plain(case)), case.model.config.vocab_size)
    found["script"] = lambda case: Script(
        texts_of(case.inputs, plain(case)), [3, 0, 1, 4, 2], case.model.config.vocab_size
    )
    return found


@functools.cache
def untrained(name: str, family: str, attention: str) -> Drafter:
    return made(name, Target(tiny(family, attention))).eval()


@functools.cache
def trained(name: str, family: str, attention: str) -> Drafter:
    """Trained for a second on the target's own answers to the prompts of the tests."""
    target = Target(tiny(family, attention))
    drafter = made(name, target)
    train(drafter, own_answers(target, drafter.feature_layers), steps=40)
    return drafter.eval()


def made(name: str, target: Target) -> Any:
    """The drafter of a module as its config makes it, with the same random weights in every process."""
    kind = modules()[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind(kind.config_class(**SMALL.get(name, {})), target)


def train(drafter: Any, batch: FeatureBatch, steps: int) -> list[float]:
    """The training step of the trainer, and no more; the loss of each step."""
    counts = torch.bincount(batch.tokens[batch.trained], minlength=int(drafter.target.vocab_size))
    drafter.train().start(counts)
    optimizer = torch.optim.AdamW([each for each in drafter.parameters() if each.requires_grad], lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = drafter(batch)
        mean = loss.total / loss.count
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses


@torch.no_grad()
def own_answers(target: Target, layers: tuple[int, ...], vocab: int = VOCAB) -> FeatureBatch:
    """A training batch of the target's greedy answers, right-padded, prompts untrained."""
    inputs = prompts(LENGTHS[3], vocab=vocab)
    texts = texts_of(inputs, target.model.generate(**inputs, max_new_tokens=NEW, **GREEDY))
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    places = torch.arange(tokens.shape[1])
    lengths = torch.tensor([len(text) for text in texts]).unsqueeze(1)
    attention = places < lengths
    trained = attention & (places >= lengths - NEW)
    return FeatureBatch(tokens, trained, attention, *target.encode(tokens, layers))


@functools.cache
def copied(family: str, attention: str) -> Drafter:
    return copy_of(tiny(family, attention))


@functools.cache
def moved(family: str, attention: str) -> Drafter:
    return noisy(tiny(family, attention), 0.05)

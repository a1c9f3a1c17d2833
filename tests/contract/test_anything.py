"""Whatever is asked of it, selfdraft gives the plain text, or both raise: random arguments, drafters, trees, batches.

`SELFDRAFT_EXAMPLES=20000 pytest tests/contract/test_anything.py` tries more of them.
"""

import functools
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, PreTrainedModel, WatermarkingConfig

import selfdraft
from selfdraft import Plan
from selfdraft.drafters.ngram import Ngram
from selfdraft.target import Target
from selfdraft.tree import DraftTree
from tests.contract.arms import made, own_answers, train
from tests.contract.checks import same_tokens
from tests.contract.test_arguments import letters
from tests.models import prompts
from tests.scripted import copy_of, noisy

EXAMPLES = int(os.environ.get("SELFDRAFT_EXAMPLES", 2000))
PARTS = 4  # so that several processes share them
VOCAB = 24


@functools.cache
def model() -> PreTrainedModel:
    """One layer and few tokens, so that random drafts are often right and texts often repeat."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        config = AutoConfig.for_model(
            "llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


class Thicket:
    """Random trees of random tokens: empty nodes, and nodes below them, included."""

    feature_layers: tuple[int, ...] = ()
    plan = Plan(depth=3, width=3)

    def check(self, target: Target) -> None:
        """Fits any target."""

    def begin(self, batch_size: int) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def propose(self, state, seen, root, plan, noise) -> DraftTree:
        shape = len(root), plan.nodes + 1
        tokens = torch.randint(VOCAB, shape, generator=state)
        tokens[:, 0] = root
        # Some parents are -1. No chain of parents is longer than the plan allows.
        parents = (torch.rand(shape, generator=state) * torch.arange(shape[1]) - 0.3).floor().long()
        parents[:, 0] = -1
        depths = torch.zeros_like(tokens)
        for node in range(1, shape[1]):
            above = depths.gather(1, parents[:, node : node + 1].clamp(min=0)).squeeze(1)
            parents[:, node] = torch.where(above < plan.depth, parents[:, node], 0)
            depths[:, node] = torch.where(parents[:, node] > 0, above, 0) + 1
        return DraftTree(tokens, parents)


@functools.cache
def drafters() -> dict[str, Any]:
    target = Target(model())
    found = {"copy": copy_of(model()), "noisy": noisy(model(), 0.05), "ngram": Ngram(), "thicket": Thicket()}
    for name in ("eagle", "medusa"):
        drafter = made(name, target)
        train(drafter, own_answers(target, drafter.feature_layers, VOCAB), steps=15)
        found[name] = drafter.eval()
    return found


class Turning(LogitsProcessor):
    """Keeps a state: every call moves the scores on by one more token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls, dims=-1)


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    return [(int(ids[-1]) * 5 + row + len(ids) + 3 * i) % VOCAB for i in range(6)]


TOKEN = st.integers(1, VOCAB - 1)
WORD = st.lists(TOKEN, min_size=1, max_size=2)
# Each is made anew for every call, for some of them keep a state.
OPTIONS: dict[str, st.SearchStrategy] = {
    "repetition_penalty": st.sampled_from([1.3, 0.8]),
    "encoder_repetition_penalty": st.just(1.4),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 2),
    "bad_words_ids": st.lists(WORD, min_size=1, max_size=3),
    "sequence_bias": st.lists(st.tuples(WORD, st.sampled_from([-4.0, 4.0])).map(list), min_size=1, max_size=2),
    "suppress_tokens": st.lists(TOKEN, min_size=1, max_size=4, unique=True),
    "begin_suppress_tokens": st.lists(TOKEN, min_size=1, max_size=4, unique=True),
    "forced_eos_token_id": TOKEN,
    "forced_bos_token_id": TOKEN,
    "min_new_tokens": st.integers(1, 9),
    "min_length": st.integers(1, 12),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 4), st.sampled_from([1.2, 2.0])),
    "eos_token_id": st.one_of(TOKEN, st.lists(TOKEN, min_size=1, max_size=4, unique=True)),
    "stop_strings": st.lists(st.text(st.characters(min_codepoint=1, max_codepoint=VOCAB - 1), min_size=1, max_size=2),
                             min_size=1, max_size=2),
    "prefix_allowed_tokens_fn": st.just(allowed),
    "logits_processor": st.just([Turning]),
    "watermarking_config": st.just({"bias": 3.0}),
    "renormalize_logits": st.just(True),
    "num_return_sequences": st.integers(2, 3),
    "num_beams": st.integers(1, 2),
    "use_cache": st.booleans(),
}  # fmt: skip
SAMPLING = st.one_of(
    st.just({"do_sample": False}),
    st.fixed_dictionaries(
        {
            "do_sample": st.just(True),
            "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.5]),
            "top_k": st.sampled_from([0, 4]),
        },
        optional={
            "top_p": st.just(0.8),
            "min_p": st.just(0.1),
            "typical_p": st.just(0.7),
            "epsilon_cutoff": st.just(0.02),
        },
    ),
)
PLANS = st.builds(Plan, depth=st.integers(1, 6), width=st.integers(1, 4), nodes=st.integers(0, 14))


@st.composite
def options(draw) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3, unique=True))
    return {name: draw(OPTIONS[name]) for name in names} | draw(SAMPLING) | {"max_new_tokens": draw(st.integers(1, 10))}


def fresh(wanted: dict[str, Any]) -> dict[str, Any]:
    made = dict(wanted)
    if "logits_processor" in made:
        made["logits_processor"] = [each() for each in made["logits_processor"]]
    if "watermarking_config" in made:
        made["watermarking_config"] = WatermarkingConfig(**made["watermarking_config"])
    if "stop_strings" in made:
        made["tokenizer"] = letters()
    return made


def outcome(call, **arguments) -> torch.Tensor | type:
    """The text, or that it raises."""
    try:
        return call(**arguments)
    except (ValueError, RuntimeError) as error:
        return type(error)


def check(wanted, lengths, prompt_seed, name, plan) -> None:
    inputs = prompts(tuple(lengths), seed=prompt_seed, vocab=VOCAB)
    if wanted["do_sample"]:
        reference = outcome(selfdraft.generate, model=model(), **inputs, seed=prompt_seed, **fresh(wanted))
    else:
        reference = outcome(model().generate, **inputs, **fresh(wanted))
    drafter = drafters()[name]
    ours = outcome(
        selfdraft.generate, model=model(), **inputs, seed=prompt_seed, drafter=drafter, plan=plan, **fresh(wanted)
    )
    if wanted.get("num_beams") == 2:
        assert ours is ValueError
    elif isinstance(reference, type):
        assert isinstance(ours, type), "transformers raises, and selfdraft does not"
    else:
        assert not isinstance(ours, type), "selfdraft raises, and transformers does not"
        same_tokens(ours, reference)


@pytest.mark.parametrize("part", range(PARTS))
def test_any_call_gives_the_plain_text_or_both_raise(part):
    drawn = given(
        options(),
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
        st.integers(0, 3),
        st.sampled_from(["copy", "noisy", "ngram", "thicket", "eagle", "medusa"]),
        PLANS,
    )
    limits = settings(
        max_examples=EXAMPLES // PARTS, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    seed(part)(limits(drawn(check)))()

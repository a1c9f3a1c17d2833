"""`width="fixed"`: passes of one shape round alike, so that texts agree in bfloat16 whatever drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import selfdraft
from selfdraft import Plan
from tests.contract.arms import GREEDY, LENGTHS, Case, arms
from tests.models import VOCAB, prompts, tiny
from tests.scripted import Script, noisy, texts_of

NEW = 32
ASSETS = Path(__file__).parents[2] / "assets" / "smollm2-135m"


def rough(family: str):
    """The tiny model of a family in bfloat16, where most passes of different shapes round differently."""
    model = tiny(family)
    copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    copy.load_state_dict(model.state_dict())
    copy.generation_config.pad_token_id = 0
    return copy


def logits_of(model, **wanted) -> tuple[list, torch.Tensor]:
    """The text, and the logits [tokens, batch, vocab] that its tokens were picked from."""
    output = selfdraft.generate(model, **wanted, return_dict_in_generate=True, output_logits=True)
    return output.sequences.tolist(), torch.stack(output.logits)


@pytest.mark.parametrize("policy", [GREEDY, {"do_sample": True, "top_k": 0, "seed": 3}], ids=["greedy", "T1"])
@pytest.mark.parametrize(("family", "batch"), [("llama", 1), ("gemma2", 3), ("gpt2", 3)])
def test_every_logit_in_bfloat16_is_the_same_whatever_drafts(family, batch, policy):
    model = rough(family)
    wanted: dict[str, Any] = {**prompts(LENGTHS[batch]), "max_new_tokens": NEW, "width": "fixed", **policy}
    text, logits = logits_of(model, **wanted)
    script = Script(texts_of(wanted, torch.tensor(text)), [5, 0, 7, 1, 3], VOCAB)
    for drafter, plan in ((script, Plan(9)), (script, Plan(3, 3)), (noisy(model, 0.05), None)):
        drafted_text, drafted_logits = logits_of(model, **wanted, drafter=drafter, plan=plan)
        assert drafted_text == text and drafted_logits.equal(logits)


def test_the_real_target_gives_the_same_logits_with_it_and_others_without(smollm2):
    """Small models round alike in passes of most shapes, so the control needs one of a usual size."""
    model, tokenizer = smollm2
    drafter = selfdraft.load_drafter(ASSETS / "eagle3", model)
    ids = tokenizer("The three largest rivers of Europe are", return_tensors="pt")["input_ids"].to(model.device)
    for width, is_same in (("fixed", True), (None, False)):
        wanted: dict[str, Any] = {"inputs": ids, "max_new_tokens": NEW, "width": width, **GREEDY}
        text, logits = logits_of(model, **wanted)
        for chosen in (drafter, "ngram"):
            drafted_text, drafted_logits = logits_of(model, **wanted, drafter=chosen)
            assert drafted_logits.equal(logits) == is_same
            assert drafted_text == text or not is_same


def test_every_pass_after_the_prompt_is_as_wide():
    case, shapes = Case("llama", "sdpa", "greedy", 3), set()
    eagle = arms()["eagle-trained"](case)
    hook = case.model.register_forward_pre_hook(
        lambda module, args, kwargs: (
            shapes.add((kwargs["input_ids"].shape[1], kwargs["attention_mask"].shape[-1]))
            if kwargs["attention_mask"] is not None and kwargs["input_ids"].shape[1] < 14
            else None
        ),
        with_kwargs=True,
    )
    try:
        for drafter in (None, "ngram", eagle):
            selfdraft.generate(case.model, **case.inputs, drafter=drafter, width="fixed", max_new_tokens=40, **GREEDY)
    finally:
        hook.remove()
    assert len(shapes) == 1


def test_another_width_is_refused():
    case = Case("llama", "sdpa", "greedy", 1)
    with pytest.raises(ValueError, match="width is 'fixed' or None, not 'wide'"):
        selfdraft.generate(case.model, **case.inputs, width="wide", max_new_tokens=4, **GREEDY)

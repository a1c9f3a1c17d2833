"""Medusa-2: heads and an adapter of the target learn together, continue exactly, and decode as the tuned target."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from selfdraft import generate, load_drafter
from selfdraft.target import Target
from tests.test_train import ALONE, ROOT, assert_same_training, records, start_two, stop_in_step, train

sys.path.insert(0, str(ROOT / "train"))
import checkpoints  # noqa: E402
import data  # noqa: E402
import heads  # noqa: E402
import tuning  # noqa: E402
from recipe import Tune  # noqa: E402

pytestmark = pytest.mark.usefixtures("trainer")

TARGET = "configs/targets/tiny_llama.json"


def tune(output: Path, *more: str) -> Path:
    return train(output, "--threads", "1", *more, recipe="tiny_medusa2")


def fresh() -> Any:
    return heads.load_target(TARGET)[0].requires_grad_(False).eval()


def adapter_in(output: Path, step: int) -> dict[str, torch.Tensor]:
    weights = load_file(output / "checkpoints" / f"step-{step}" / "model.safetensors")
    return {name: weight for name, weight in weights.items() if name.startswith("adapter.")}


def test_an_answer_learnt_by_heart_is_decoded_exactly_as_the_tuned_target_says_it(tmp_path):
    """The answer is one that the target itself would not give, so that both have something to learn."""
    row = json.loads((ROOT / "tests/data/tiny_train.jsonl").read_text().splitlines()[0])
    row["response_ids"].reverse()
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    rates = ["--optim.lr", "1e-2", "--optim.matrix_lr", "2e-2", "--tune.lr", "1e-2", "--mixed_precision", "no"]
    given = ["--data.train", str(tmp_path / "one.jsonl"), "--max_steps", "80", *rates]
    folder = tune(tmp_path / "run", *ALONE, *given) / "drafter"
    last = records(tmp_path / "run")[-1]
    assert last["lm_loss"] < 0.1 and last["accuracy_3"] == 1

    prompt, options = torch.tensor([row["prompt_ids"]]), {"max_new_tokens": 21, "do_sample": False}
    model = fresh()
    assert model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() != row["response_ids"]
    tuned = PeftModel.from_pretrained(model, str(folder / "adapter"))
    reference = tuned.generate(input_ids=prompt, **options)
    assert reference[0, prompt.shape[1] :].tolist() == row["response_ids"]
    drafter: Any = load_drafter(folder, tuned)
    ours: Any = generate(tuned, prompt, drafter=drafter, plan=drafter.plan, return_dict_in_generate=True, **options)
    assert torch.equal(ours.sequences, reference)
    assert ours.stats.tokens_per_round > 3


def test_the_warm_up_is_a_medusa_1_training_and_leaves_the_adapter_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "KEPT_CHECKPOINTS", 6)
    short = [*ALONE, "--max_steps", "6", "--save_every", "1", "--optim.weight_decay", "0.1"]
    ours = tune(tmp_path / "ours", *short, "--tune.warmup_ratio", "0.5", "--tune.ramp_ratio", "0")
    reference = train(tmp_path / "reference", *short, recipe="tiny_medusa")
    assert [line["loss"] for line in records(ours)[:3]] == [line["loss"] for line in records(reference)[:3]]
    assert ["lm_loss" in line for line in records(ours)] == 3 * [False] + 3 * [True]
    before, warm, after = (adapter_in(ours, step) for step in (1, 3, 6))
    assert all(not weight.any() for name, weight in before.items() if "lora_B" in name)
    assert all(torch.equal(warm[name], before[name]) for name in before)
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_lambda_waits_for_the_warm_up_and_then_rises_in_a_line():
    joint = tuning.Joint(nn.Linear(1, 1), None, nn.Module(), Tune(rank=4, warmup_ratio=0.25, ramp_ratio=0.5), 8)
    weights = []
    for step in range(8):
        joint.begin(step)
        weights.append(joint.heads_weight)
    assert weights[:2] == [None, None]
    assert weights[2:] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2, 0.2])


# --- The joint loss ---------------------------------------------------------------------------------------------------


@pytest.fixture
def learning() -> tuple[tuning.Joint, PeftModel, data.Conversations]:
    """Heads and adapter in the joint stage, both with random weights: fresh ones hide half of each other's gradient."""
    recipe, config = heads.parse_recipe(["--config", "configs/tiny_medusa2.yaml"])
    torch.manual_seed(0)
    model = fresh()
    tuned = tuning.add_adapter(model, recipe.tune)
    target = Target(model)
    read = data.read_conversations(recipe.data.train, 64, target.vocab_size)
    drafter = heads.drafter_class(recipe.drafter)(config, target).eval()  # hit rates are not what this is about
    drafter.start(read.answer_counts(target.vocab_size))
    joint = tuning.Joint(drafter, target, tuned, dataclasses.replace(recipe.tune, heads_weight=0.7), 10)
    with torch.no_grad():
        for weight in joint.parameters():
            weight.normal_(0, 0.05)
    joint.begin(9)
    return joint, tuned, read


def gradients(joint: tuning.Joint, batches: list, packed: bool = False) -> dict[str, torch.Tensor]:
    AcceleratorState._reset_state(True)
    accelerator = heads.Accelerator(mixed_precision="no", cpu=True)
    joint.zero_grad()
    values = heads.accumulate_gradients(
        accelerator, accelerator.prepare(joint), batches, partial(joint.read, packed=packed)
    )
    assert values["count"] > 0
    return {name: weight.grad.clone() for name, weight in joint.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], what: str) -> None:
    """float32 sums in another order differ by about 1e-6 of the largest entry; another loss by percents."""
    assert ours.keys() == reference.keys()
    for name, gradient in ours.items():
        scale = reference[name].abs().max().item()
        assert scale > 0, name
        error = (gradient - reference[name]).abs().max().item()
        assert error < 1e-4 * scale, (what, name, error, scale)


def test_the_gradient_of_the_joint_loss_is_that_of_its_formula(learning):
    """Against the slow way: all logits of peft's own forward pass, the target's words detached, a loop over places."""
    joint, tuned, read = learning
    tokens, trained, attention = data.collate(read, np.arange(3))
    ours = gradients(joint, [(tokens, trained, attention)])

    joint.zero_grad()
    output = tuned(input_ids=tokens, attention_mask=attention.long(), output_hidden_states=True)
    drafter, hidden = joint.drafter, output.hidden_states[-1]
    head, ids = tuned.get_output_embeddings().weight, drafter.ids
    words = output.logits.detach()[..., ids].softmax(-1)
    language, of_heads = torch.zeros(()), torch.zeros(())
    for row, place in (trained & attention).nonzero().tolist():
        label = tokens[row, place]
        language = language + cross_entropy(output.logits[row, place - 1], label)
        for depth in range(drafter.config.heads):
            if label in ids and place - 2 - depth >= 0:
                logits = head[ids] @ drafter.heads[depth](hidden[row, place - 2 - depth])
                loss = -(words[row, place - 1] * logits.log_softmax(-1)).sum()
                of_heads = of_heads + drafter.config.decay**depth * loss
    ((language + 0.7 * of_heads) / trained.sum()).backward()
    reference = {name: weight.grad for name, weight in joint.named_parameters()}
    assert sum("lora_A" in name for name in reference) == 28 and any("heads" in name for name in reference)
    assert_close(ours, reference, "formula")


def test_the_joint_gradient_does_not_depend_on_accumulation_padding_or_packing(learning):
    joint, _, read = learning
    eight = np.argsort(read.lengths)[::6]
    reference = gradients(joint, [data.collate(read, eight)])
    padded = tuple(nn.functional.pad(part, (0, 50)) for part in data.collate(read, eight))
    layouts = {
        "2x4": [data.collate(read, part) for part in np.split(eight, 2)],
        "8x1": [data.collate(read, part) for part in np.split(eight, 8)],
        "with an empty batch": [data.collate(read, eight), data.collate(read, eight[:0])],
        "padded": [padded],
    }
    for layout, batches in layouts.items():
        assert_close(gradients(joint, batches), reference, layout)
    assert_close(gradients(joint, layouts["2x4"], packed=True), reference, "packed")
    heads.recompute_activations(joint.lend().model)
    assert_close(gradients(joint, layouts["2x4"]), reference, "computed again")


# --- What is kept -----------------------------------------------------------------------------------------------------


def test_a_tuned_training_resumes_exactly(tmp_path, monkeypatch):
    """Stopped in the joint stage, after an evaluation has had the target with another adapter for a while."""
    short = ["--max_steps", "10", "--save_every", "3", "--eval.every", "5", "--eval.max_new_tokens", "4"]
    straight = tune(tmp_path / "straight", *short)
    with monkeypatch.context() as patch:
        stop_in_step(8, patch)
        with pytest.raises(SystemExit):
            tune(tmp_path / "stopped", *short)
    assert (tmp_path / "stopped" / "checkpoints" / "step-6").exists()
    torch.manual_seed(1234)
    assert_same_training(tune(tmp_path / "stopped", *short), straight)
    adapters = [run / "drafter" / "adapter" / "adapter_model.safetensors" for run in (straight, tmp_path / "stopped")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_an_evaluation_measures_the_heads_with_the_adapter_that_was_saved(tmp_path, monkeypatch):
    plain, seen = heads.evaluate, []

    def evaluate(drafter, target, held_out, recipe):
        document = json.loads((tmp_path / "latest" / "config.json").read_text())
        seen.append((Target(target.model).adapter, document["selfdraft"]["target"]["adapter"], drafter.target.adapter))
        names = {name for layer in target.layers for name in layer.self_attn.q_proj.active_adapters}
        assert names == {"saved"}
        return plain(drafter, target, held_out, recipe)

    monkeypatch.setattr(heads, "evaluate", evaluate)
    tune(tmp_path, "--eval.every", "10")
    assert len(seen) == 2 and all(len(set(each)) == 1 for each in seen)
    assert seen[0] != seen[1], "the adapter has moved on"
    measured = [line for line in records(tmp_path) if "tokens_per_round" in line]
    assert all(line["validation_lm_loss"] > 0 for line in measured)


def test_a_training_can_start_from_tuned_heads_and_their_adapter(tmp_path):
    first = tune(tmp_path / "first", *ALONE, "--max_steps", "3") / "drafter"
    still = ["--max_steps", "1", "--optim.lr", "0", "--optim.matrix_lr", "0", "--tune.lr", "0", *ALONE]
    second = tune(tmp_path / "second", *still, "--start_from", str(first)) / "drafter"
    before, after = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (first, second))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert any(weight.any() for name, weight in after.items() if "lora_B" in name)
    for name, value, wanted in (
        ("rank", "8", "rank 8, alpha 16"),
        ("alpha", "8", "rank 4, alpha 8"),
        ("modules", "[q_proj]", r"modules \['q_proj'\]"),
    ):
        with pytest.raises(ValueError, match=f"has rank 4, alpha 16, .* and the recipe .*{wanted}"):
            tune(tmp_path / "other", *still, "--start_from", str(first), f"--tune.{name}", value)
    with pytest.raises(ValueError, match="trained along with an adapter of its target.*has none active"):
        train(tmp_path / "other", *ALONE, "--start_from", str(first), recipe="tiny_medusa")


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["--features.cache", "features"], "keeps hidden states, and --tune.rank changes them"),
        (["--compile", "true"], "--compile is for a target that is only read"),
        (["--tune.rank", "0", "--tune.lr", "1e-3"], "set --tune.rank too"),
        (["--tune.rank", "-1"], "the rank is 0 or more"),
        (["--tune.warmup_ratio", "1"], "the warm-up less than all of them"),
        (["--tune.heads_weight", "0"], "heads without a weight learn nothing"),
        (["--tune.modules", "[q_proj,lm_head]"], "the embedding or the vocabulary projection"),
        (["--tune.modules", "[nothing]"], "nothing"),
    ],
)
def test_settings_that_cannot_go_together_are_refused_before_the_first_step(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        tune(tmp_path, *settings)
    assert not list(tmp_path.iterdir())


def test_other_drafters_and_sharded_trainings_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="trained along with medusa only, not with hydra"):
        train(tmp_path, "--tune.rank", "4", recipe="tiny_hydra")
    monkeypatch.setattr(heads.Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ValueError, match="the adapter is not shared out.*configs/accelerate/ddp.yaml"):
        tune(tmp_path)


def test_a_target_that_has_an_adapter_is_refused(tmp_path, monkeypatch):
    model = fresh()
    tuning.add_adapter(model, Tune(rank=4))
    monkeypatch.setattr(heads, "load_target", lambda *_: (model, None))
    with pytest.raises(ValueError, match="has an adapter already; merge it"):
        tune(tmp_path)


# --- Two processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_tune_like_one(tmp_path):
    more = ["--mixed_precision", "no", "--max_steps", "6", "--eval.every", "3", "--eval.max_new_tokens", "4"]
    more += ["--data.forward_tokens", "96", "--threads", "1"]
    one = tune(tmp_path / "one", *more)
    process = start_two(tmp_path / "two", "ddp", *more, recipe="tiny_medusa2")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    steps = [[line for line in records(run) if "loss" in line] for run in (tmp_path / "two", one)]
    assert len(steps[0]) == 6
    for ours, reference in zip(*steps, strict=True):
        assert ours["trained"] == reference["trained"]
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(reference["gradient_norm"], rel=1e-3)

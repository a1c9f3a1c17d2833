"""The trainer: a stopped training continues exactly, gradients do not depend on how a step is cut, nothing is lost."""

import dataclasses
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "train"))
import checkpoints  # noqa: E402
import data  # noqa: E402
import guards  # noqa: E402
import heads  # noqa: E402
import recipe as recipe_module  # noqa: E402
import zero  # noqa: E402

from selfdraft import Plan, generate, load_drafter  # noqa: E402
from selfdraft.drafters.base import FeatureBatch, LossSum  # noqa: E402
from selfdraft.metrics import Stats  # noqa: E402
from selfdraft.target import Target  # noqa: E402

pytestmark = pytest.mark.usefixtures("trainer")

TINY = sorted(path.stem for path in (ROOT / "configs").glob("tiny_*.yaml"))
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
ALONE = ["--data.validation", "", "--threads", "1"]  # no evaluation


@dataclass(frozen=True)
class ToyConfig:
    """A drafter for these tests."""

    dropout: float = 0.5
    """Makes the loss use torch's global random state."""
    nan_at: int = -1
    """The call of `loss` from which on it is not a number."""
    nan_calls: int = 1
    """For so many calls."""


class Toy(nn.Module):
    """Predicts the next token from the last hidden state. Has a weight that the loss can be made to forget."""

    config_class = ToyConfig
    feature_layers = (-1,)
    forgotten = False

    def __init__(self, config, target):
        super().__init__()
        self.config, self.lent, self.calls = config, [target], 0
        self.inner = nn.Linear(target.hidden_size, target.hidden_size)
        self.forgettable = nn.Linear(1, 1)

    @property
    def target(self):
        return self.lent[0]

    plan = Plan(1)

    def check(self, target):
        pass

    def start(self, answer_counts):
        pass

    def forward(self, batch: FeatureBatch) -> LossSum:
        hidden = nn.functional.dropout(self.inner(batch.features[:, :-1].float()), self.config.dropout, self.training)
        logits = hidden @ self.target.model.get_input_embeddings().weight.float().T
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:], reduction="none")
        total = (losses * batch.trained[:, 1:]).sum()
        if not self.forgotten:
            total = total + 0 * self.forgettable(torch.ones(1)).sum()
        if self.config.nan_at <= self.calls < self.config.nan_at + self.config.nan_calls:
            total = total * float("nan")
        self.calls += 1
        return LossSum(total, batch.trained[:, 1:].sum())

    loss = forward


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(heads, "drafter_class", lambda kind: Toy)
    monkeypatch.setattr(recipe_module, "drafter_class", lambda kind: Toy)
    monkeypatch.setattr(recipe_module, "trainable_kinds", lambda: ["toy"])


def train(output: Path, *more: str, recipe: str = "tiny_eagle3") -> Path:
    AcceleratorState._reset_state(True)
    heads.main(["--config", f"configs/{recipe}.yaml", "--output_dir", str(output), *more])
    return output


def train_toy(output: Path, *more: str) -> Path:
    AcceleratorState._reset_state(True)
    keys = {
        "drafter": "toy",
        "target": "configs/targets/tiny_llama.json",
        "data.train": "tests/data/tiny_train.jsonl",
        "data.step_tokens": 256,
        "data.forward_tokens": 128,
        "optim.matrix_lr": 1e-3,
        "max_steps": 20,
        "save_every": 5,
        "threads": 1,
        "output_dir": output,
    }
    heads.main([f"--{key}={value}" for key, value in keys.items()] + list(more))
    return output


def stop_in_step(number: int, monkeypatch) -> None:
    """Ctrl-C while step `number` is logged."""
    plain = heads.log

    def log(accelerator, output, step, values):
        if step == number:
            raise KeyboardInterrupt
        plain(accelerator, output, step, values)

    monkeypatch.setattr(heads, "log", log)


def records(output: Path) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_training(ours: Path, reference: Path) -> None:
    """Bit for bit: losses of all steps, weights, optimizers, and the drafter for use."""
    assert records(ours) == records(reference)
    newest = heads.newest_checkpoint(reference / "checkpoints").name
    assert heads.newest_checkpoint(ours / "checkpoints").name == newest
    for file in ("drafter/model.safetensors", f"checkpoints/{newest}/model.safetensors"):
        assert (ours / file).read_bytes() == (reference / file).read_bytes()
    mine, theirs = (torch.load(run / "checkpoints" / newest / "optimizers.pt") for run in (ours, reference))
    assert mine["state"].keys() == theirs["state"].keys() and mine["state"]
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)


@pytest.mark.parametrize("recipe", TINY)
def test_tiny_recipe_trains_a_drafter_that_loads_and_learns(tmp_path, recipe):
    output = train(tmp_path / "run", "--threads", "1", recipe=recipe)
    steps = [line for line in records(output) if "loss" in line]
    evaluations = [line for line in records(output) if "tokens_per_round" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert [line["step"] for line in evaluations] == [10, 20]
    assert sum(line["loss"] for line in steps[-5:]) < sum(line["loss"] for line in steps[:5])
    assert evaluations[-1]["tokens_per_round"] >= 1
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-15", "step-20"]
    model, _ = heads.load_target("configs/targets/tiny_llama.json")
    if (output / "drafter" / "adapter").exists():
        model = PeftModel.from_pretrained(model, str(output / "drafter" / "adapter"))
    loaded = load_drafter(output / "drafter", model)
    saved = load_file(output / "drafter" / "model.safetensors")
    assert saved.keys() == loaded.state_dict().keys()
    trainable = sum(weight.numel() for weight in loaded.parameters())
    assert (output / "drafter" / "model.safetensors").stat().st_size < 4 * trainable * 1.01 + 16384


def test_training_killed_in_the_middle_and_started_again_equals_a_straight_one(tmp_path):
    """SIGKILL to the real command, through accelerate launch, at some moment after the second checkpoint."""
    straight = train(tmp_path / "straight", "--max_steps", "60", "--threads", "1")
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "accelerate.commands.launch", "train/heads.py", "--output_dir", str(killed)]
    command += ["--config", "configs/tiny_eagle3.yaml", "--max_steps", "60", "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while not (killed / "checkpoints" / "step-10").exists():
            assert process.poll() is None
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    reached = heads.newest_checkpoint(killed / "checkpoints").name
    assert reached != "step-60", "the training was over before it was killed"
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"resuming after step {reached.removeprefix('step-')} from" in again.stdout
    assert_same_training(killed, straight)


def test_resume_is_exact_with_random_numbers_in_use_and_in_the_second_epoch(tmp_path, toy, monkeypatch, capsys):
    straight = train_toy(tmp_path / "straight")
    assert len(data.plan_epoch(np.full(48, 28), 256, 0, 0)) < 8  # so step 8 is in the second epoch
    with monkeypatch.context() as patch:
        stop_in_step(8, patch)
        with pytest.raises(SystemExit) as stopped:
            train_toy(tmp_path / "stopped")
    assert stopped.value.code == 130
    assert "the newest checkpoint is of step 5; give the same command again" in capsys.readouterr().out
    torch.manual_seed(1234)
    assert_same_training(train_toy(tmp_path / "stopped"), straight)


def test_resume_is_exact_for_a_drafter_that_draws_noise(tmp_path, monkeypatch):
    short = [*ALONE, "--max_steps", "10"]
    straight = train(tmp_path / "straight", *short, recipe="tiny_eagle1")
    quiet = train(tmp_path / "quiet", *short, "--model.noise", "0", recipe="tiny_eagle1")
    assert [line["loss"] for line in records(quiet)] != [line["loss"] for line in records(straight)]
    with monkeypatch.context() as patch:
        stop_in_step(8, patch)
        with pytest.raises(SystemExit):
            train(tmp_path / "stopped", *short, recipe="tiny_eagle1")
    torch.manual_seed(1234)
    assert_same_training(train(tmp_path / "stopped", *short, recipe="tiny_eagle1"), straight)


def test_start_is_called_once_and_not_on_resume(tmp_path, toy, monkeypatch):
    calls = []
    monkeypatch.setattr(Toy, "start", lambda self, answer_counts: calls.append(answer_counts))
    with monkeypatch.context() as patch:
        stop_in_step(8, patch)
        with pytest.raises(SystemExit):
            train_toy(tmp_path)
    train_toy(tmp_path)
    (counts,) = calls
    assert counts.shape == (128,) and counts.sum() == 1099  # the trained tokens of the tiny data


@pytest.mark.parametrize("recipe", TINY)
def test_a_training_can_start_from_a_drafter(tmp_path, recipe):
    first = train(tmp_path / "first", *ALONE, "--max_steps", "2", recipe=recipe) / "drafter"
    still = ["--max_steps", "1", "--optim.lr", "0", "--optim.matrix_lr", "0"]
    second = train(tmp_path / "second", *ALONE, *still, "--start_from", str(first), recipe=recipe) / "drafter"
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before if name != "rank_hits")  # hit rates move on


def test_an_eagle_drafter_grows(tmp_path):
    """More layers and draft tokens: what was learnt is kept, and the new ones add next to nothing at first."""
    small = train(tmp_path / "small", *ALONE) / "drafter"
    larger = ["--model.layers", "2", "--model.draft_vocab_size", "120", "--start_from", str(small)]
    still = ["--max_steps", "1", "--optim.lr", "0", "--optim.matrix_lr", "0"]
    large = train(tmp_path / "large", *ALONE, *still, *larger) / "drafter"
    model = heads.load_target("configs/targets/tiny_llama.json")[0].eval()
    before, after = load_drafter(small, model), load_drafter(large, model)
    kept = torch.isin(after.ids, before.ids)
    assert kept.sum() == len(before.ids) == 96 and len(after.ids) == 120
    assert torch.equal(after.lm_head.weight[kept], before.lm_head.weight)
    rows = Target(model).head_weight()
    moved = rows[after.ids[~kept]] @ torch.linalg.lstsq(rows[before.ids], before.lm_head.weight).solution
    torch.testing.assert_close(after.lm_head.weight[~kept], moved)
    hidden = torch.randn(1, 7, model.config.hidden_size)
    attended = torch.randn(1, after.config.num_heads, 7, after.config.head_dim)
    assert torch.equal(after.stack[1].finish(hidden, attended), hidden)


def test_a_drafter_of_another_kind_or_shape_is_no_start(tmp_path):
    first = str(train(tmp_path / "first", *ALONE, "--max_steps", "1") / "drafter")
    with pytest.raises(ValueError, match="is a drafter of class Eagle, and the recipe trains a Medusa"):
        train(tmp_path / "other", *ALONE, "--start_from", first, recipe="tiny_medusa")
    with pytest.raises(ValueError, match="does not fit the settings under `model`.*lm_head"):
        train(tmp_path / "other", *ALONE, "--start_from", first, "--model.draft_vocab_size", "16")
    assert not (tmp_path / "other").exists()


def test_finished_training_started_again_says_so_and_changes_nothing(tmp_path, toy, capsys):
    train_toy(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    train_toy(tmp_path)
    assert "this training is finished (20 steps)" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_other_settings_do_not_continue_a_training(tmp_path, toy):
    train_toy(tmp_path)
    with pytest.raises(ValueError, match="belongs to another training .optim.lr was 0.001 and is now 0.01."):
        train_toy(tmp_path, "--optim.lr", "0.01")
    with pytest.raises(ValueError, match="data.content was .* and is now"):
        train_toy(tmp_path, "--data.train", "tests/data/tiny_validation.jsonl")


def test_another_target_under_the_same_name_does_not_continue_a_training(tmp_path, toy):
    """And the same one under another name does. A tuned target is another one, whatever it leaves as it was."""
    shutil.copy(ROOT / "configs" / "targets" / "tiny_llama.json", tmp_path / "target.json")
    train_toy(tmp_path / "out", "--max_steps", "7", "--target", str(tmp_path / "target.json"))
    train_toy(tmp_path / "out", "--max_steps", "7")
    changed = json.loads((tmp_path / "target.json").read_text()) | {"initializer_range": 0.2}
    (tmp_path / "target.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="belongs to another training .target.fingerprint was"):
        train_toy(tmp_path / "out", "--max_steps", "7", "--target", str(tmp_path / "target.json"))
    model = heads.load_target("configs/targets/tiny_llama.json")[0]
    before = checkpoints.sample_of(model)
    model.model.layers[1].self_attn.q_proj.weight.data += 1e-3
    assert checkpoints.sample_of(model) != before


def test_a_drafter_remembers_how_the_texts_of_its_training_began(tmp_path):
    """As far as the prompts are alike, and no further than the shortest: answers are not the user's to begin with."""
    rows = [{"prompt_ids": [1, 5, ending], "response_ids": list(range(10, 30))} for ending in (3, 4)]
    for name, more in {"alike": [], "mixed": [1, 6], "short": [1]}.items():
        another = [{"prompt_ids": more, "response_ids": [5, 8]}] if more else []
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, [*rows, *another])))
        output = tmp_path / name
        train(output, "--data.train", str(tmp_path / f"{name}.jsonl"), "--max_steps", "1", *ALONE)
    model = heads.load_target("configs/targets/tiny_llama.json")[0].eval()
    assert load_drafter(tmp_path / "alike" / "drafter", model).opening == (1, 5)
    assert load_drafter(tmp_path / "mixed" / "drafter", model).opening == (1,)
    assert load_drafter(tmp_path / "short" / "drafter", model).opening == (1,)


def gradients(batches, drafter_and_target, packed: bool = False) -> dict[str, torch.Tensor]:
    drafter, target = drafter_and_target
    read = partial(heads.live_features, target, drafter.feature_layers, packed=packed)
    AcceleratorState._reset_state(True)
    accelerator = heads.Accelerator(mixed_precision="no", cpu=True)
    drafter.zero_grad()
    heads.accumulate_gradients(accelerator, accelerator.prepare(drafter), batches, read)
    return {name: weight.grad.clone() for name, weight in drafter.named_parameters()}


@pytest.mark.parametrize("recipe", TINY)
def test_gradient_does_not_depend_on_accumulation_padding_or_packing(recipe):
    """One batch of 8, 2 x 4, 8 x 1, an empty batch more, 50 columns of padding, all in one row. Sums in another order
    differ by about 1e-6 of the largest entry; a mean of means would be off by several percent."""
    wanted, config = heads.parse_recipe(["--config", f"configs/{recipe}.yaml"])
    if hasattr(config, "noise"):  # random numbers, which are others in every layout
        config = dataclasses.replace(config, noise=0.0)
    model, _ = heads.load_target(wanted.target)
    target = heads.Target(model)
    read = data.read_conversations(wanted.data.train, 64, target.vocab_size)
    torch.manual_seed(0)
    drafter = heads.drafter_class(wanted.drafter)(config, target)
    drafter.start(read.answer_counts(target.vocab_size))
    eight = np.argsort(read.lengths)[::6]  # of different lengths
    assert len(eight) == 8 and len(set(read.lengths[eight])) > 3

    def padded(indices):
        tokens, trained, attention = data.collate(read, indices)
        return tuple(nn.functional.pad(part, (0, 50)) for part in (tokens, trained, attention))

    layouts = {
        "2x4": [data.collate(read, part) for part in np.split(eight, 2)],
        "8x1": [data.collate(read, part) for part in np.split(eight, 8)],
        "with an empty batch": [data.collate(read, eight), data.collate(read, eight[:0])],
        "padded": [padded(eight)],
    }
    reference = gradients([data.collate(read, eight)], (drafter, target))
    assert any(gradient.abs().max() > 0 for gradient in reference.values())
    found = {layout: gradients(batches, (drafter, target)) for layout, batches in layouts.items()}
    found["packed"] = gradients(layouts["2x4"], (drafter, target), packed=True)
    found["packed, with an empty batch"] = gradients(layouts["with an empty batch"], (drafter, target), packed=True)
    for layout, gradients_there in found.items():
        for name, gradient in gradients_there.items():
            scale = reference[name].abs().max().item()
            close = torch.allclose(gradient, reference[name], rtol=1e-4, atol=1e-5 * scale)
            assert close, (layout, name, (gradient - reference[name]).abs().max().item(), scale)


@pytest.mark.parametrize("recipe", TINY)
def test_activations_computed_again_change_no_bit_and_are_not_kept(recipe):
    """Of the layers, that is: bytes saved for the backward pass shrink where there are layers to speak of."""
    wanted, config = heads.parse_recipe(["--config", f"configs/{recipe}.yaml"])
    model, _ = heads.load_target(wanted.target)
    target = heads.Target(model)
    read = data.read_conversations(wanted.data.train, 64, target.vocab_size)
    grads, kept = [], []
    for again in (False, True):
        torch.manual_seed(0)
        drafter = heads.drafter_class(wanted.drafter)(config, target).train()
        batch = heads.live_features(target, drafter.feature_layers, *data.collate(read, np.arange(8)))
        if again:
            heads.recompute_activations(drafter)
        sizes = []
        torch.manual_seed(1)  # for those that draw noise
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.nbytes) or x, lambda x: x):
            loss = drafter(batch)
        loss.total.backward()
        grads.append({name: weight.grad for name, weight in drafter.named_parameters()})
        kept.append(sum(sizes))
    assert all(torch.equal(grads[1][name], gradient) for name, gradient in grads[0].items())
    assert kept[1] < (0.7 if wanted.drafter in {"eagle", "draft_model"} else 1) * kept[0], kept


def test_a_target_whose_conversations_see_each_other_in_a_row_is_not_packed(tmp_path, monkeypatch):
    packed = train(tmp_path / "packed", *ALONE, "--max_steps", "3", "--data.packing", "true")
    plain = train(tmp_path / "plain", *ALONE, "--max_steps", "3")
    for (name, ours), theirs in zip(
        load_file(packed / "drafter/model.safetensors").items(),
        load_file(plain / "drafter/model.safetensors").values(),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)
    encode = Target.encode
    monkeypatch.setattr(Target, "encode", lambda self, tokens, layers, positions=None: encode(self, tokens, layers))
    with pytest.raises(ValueError, match="data.packing does not work with this target .llama."):
        train(tmp_path / "other", *ALONE, "--data.packing", "true")
    with pytest.raises(ValueError, match="leave one of them out"):
        train(tmp_path / "other", *ALONE, "--data.packing", "true", "--features.cache", str(tmp_path / "cache"))


def launch_environment(config: str) -> dict[str, str]:
    """The variables by which `accelerate launch` tells a script what a file of configs/accelerate says."""
    arguments = ["--config_file", f"configs/accelerate/{config}.yaml", "train/heads.py"]
    parsed, file, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
    if parsed.use_deepspeed:
        parsed.main_process_port = 0  # any free one
        parsed.deepspeed_fields_from_accelerate_config = ",".join(file.deepspeed_config)
        given = prepare_deepspeed_cmd_env(parsed)[1]
    else:
        given = prepare_multi_gpu_env(parsed)
    return {name: value for name, value in given.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def start_two(output: Path, config: str, *more: str, recipe: str = "tiny_eagle3", script: str = "") -> subprocess.Popen:
    """On CPUs, where `accelerate launch` itself would start one process, and knows neither FSDP nor DeepSpeed."""
    script = script or {"fsdp2": "tests/fsdp_on_cpu.py", "zero2": "tests/zero_on_cpu.py"}.get(config, "train/heads.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", script]
    command += ["--config", f"configs/{recipe}.yaml", "--output_dir", str(output), *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | launch_environment(config) | {"ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2", pytest.param("zero2", marks=NEEDS_DEEPSPEED)])
def test_two_processes_train_like_one_and_resume_exactly(tmp_path, config):
    """Gradients are summed over both, also where a step takes several passes; what is saved is whole and saved once."""
    more = ["--mixed_precision", "no", "--max_steps", "6", "--save_every", "2", "--data.forward_tokens", "96", *ALONE]
    more += ["--optim.matrix_lr", "0"] if config == "zero2" else []
    one = train(tmp_path / "one", *more)
    two, killed = tmp_path / "two", tmp_path / "killed"
    straight = start_two(two, config, *more)
    said = straight.communicate(timeout=300)[0]
    assert straight.returncode == 0, said
    for ours, reference in zip(records(two), records(one), strict=True):
        assert ours["trained"] == reference["trained"]
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(reference["gradient_norm"], rel=1e-3)
    files = ["model.safetensors", "optimizers.pt", "random_0.pt", "random_1.pt", "state.json"]
    assert sorted(path.name for path in (two / "checkpoints" / "step-6").iterdir()) == files
    ours, reference = (load_file(run / "drafter" / "model.safetensors") for run in (two, one))
    assert {name: value.shape for name, value in ours.items()} == {name: v.shape for name, v in reference.items()}
    for name, value in ours.items():
        torch.testing.assert_close(value.float(), reference[name].float(), rtol=1e-2, atol=1e-3)

    with start_two(killed, config, *more) as process:
        while not (killed / "checkpoints" / "step-2").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
    assert heads.newest_checkpoint(killed / "checkpoints").name != "step-6", "over before it was killed"
    again = start_two(killed, config, *more)
    said = again.communicate(timeout=300)[0]
    assert again.returncode == 0 and "resuming after step" in said, said
    assert_same_training(killed, two)


@pytest.mark.slow
@pytest.mark.parametrize("patience", [None, 3])
def test_a_process_that_prepares_for_longer_is_waited_for(tmp_path, monkeypatch, patience):
    """With seven conversations, so that steps do not fill both processes; and not, if the limit is set shorter."""
    rows = (ROOT / "tests" / "data" / "tiny_train.jsonl").read_text().splitlines()[:7]
    (tmp_path / "seven.jsonl").write_text("\n".join(rows))
    monkeypatch.setenv("SECONDS", "8")
    if patience:
        monkeypatch.setenv("PATIENCE", str(patience))
    more = ["--data.train", str(tmp_path / "seven.jsonl"), "--max_steps", "3", *ALONE]
    process = start_two(tmp_path / "out", "ddp", *more, script="tests/slow_on_cpu.py")
    said = process.communicate(timeout=300)[0]
    if patience:
        assert process.returncode != 0 and "imed out" in said, said
    else:
        assert process.returncode == 0 and said.count("done:") == 1, said
        assert [each["step"] for each in records(tmp_path / "out")] == [1, 2, 3]
        states = sorted(path.name for path in (tmp_path / "out" / "checkpoints" / "step-3").glob("random_*"))
        assert states == ["random_0.pt", "random_1.pt"]


def test_a_step_without_a_finite_gradient_changes_nothing(tmp_path, toy):
    one_pass = ["--data.forward_tokens", "10000", "--save_every", "1", "--max_steps", "5"]
    train_toy(tmp_path, "--model.nan_at", "4", "--optim.weight_decay", "0.1", *one_pass)
    before, after = (load_file(tmp_path / "checkpoints" / f"step-{n}" / "model.safetensors") for n in (4, 5))
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert math.isfinite(records(tmp_path)[-2]["loss"])
    assert math.isnan(records(tmp_path)[-1]["loss"])  # reported as it is


def test_a_training_that_stays_without_finite_gradients_ends(tmp_path, toy):
    with pytest.raises(ValueError, match="10 steps in a row had no finite gradient.*newest checkpoint is of step 15"):
        train_toy(tmp_path, "--model.nan_at", "6", "--model.nan_calls", "100", "--data.forward_tokens", "10000")
    assert records(tmp_path)[-1]["step"] == 15


def write_pairs(file: Path, *sizes: tuple[int, int]) -> str:
    rows = [{"prompt_ids": [*range(3, 3 + prompt)], "response_ids": [*range(40, 40 + said)]} for prompt, said in sizes]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("recipe", TINY)
def test_the_shortest_and_the_longest_answers_train_together(tmp_path, recipe):
    """Answers of no, one and many tokens; prompts of no and one; each conversation a step of its own, and then all."""
    file = write_pairs(tmp_path / "rows.jsonl", (5, 0), (5, 1), (1, 1), (1, 2), (0, 3), (0, 2), (3, 90), (2, 12))
    for name, step_tokens in (("alone", "1"), ("together", "500")):
        more = ["--data.train", file, "--data.validation", file, "--data.step_tokens", step_tokens, "--max_steps", "7"]
        more += ["--activation_checkpointing", "true", "--eval.every", "7"]
        output = train(tmp_path / name, *more, "--threads", "1", recipe=recipe)
        steps = [line for line in records(output) if "loss" in line]
        assert len(steps) == 7 and all(math.isfinite(line["loss"]) for line in steps)
        assert records(output)[-1]["tokens_per_round"] >= 1


def test_a_step_without_a_token_to_learn_changes_nothing(tmp_path):
    """Not even by weight decay; and a training of such steps says why it ends."""
    file = write_pairs(tmp_path / "rows.jsonl", *[(1, 1)] * 4)
    more = [*ALONE, "--data.train", file, "--optim.weight_decay", "0.1", "--save_every", "1", "--max_steps", "12"]
    with pytest.raises(ValueError, match="or no token that the drafter can learn from .*of 0 tokens"):
        train(tmp_path / "run", *more, recipe="tiny_hydra")
    first, last = (load_file(tmp_path / "run" / "checkpoints" / f"step-{n}" / "model.safetensors") for n in (8, 9))
    assert any(weight.any() for weight in first.values())
    torch.testing.assert_close(first, last, rtol=0, atol=0)
    model = heads.load_target("configs/targets/tiny_llama.json")[0]
    wanted, config = heads.parse_recipe(["--config", "configs/tiny_hydra.yaml"])
    fresh = heads.drafter_class(wanted.drafter)(config, Target(model)).state_dict()
    name = "heads.0.0.res_connection.weight"
    assert torch.equal(last[name], fresh[name])


@pytest.mark.parametrize("which", ["target", "draft model"])
def test_conversations_beyond_learned_positions_are_refused_before_the_first_step(tmp_path, which):
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16}
    (tmp_path / "gpt2.json").write_text(json.dumps(gpt2 | {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}))
    more = ["--target", str(tmp_path / "gpt2.json")] if which == "target" else ["--model.model", json.dumps(gpt2)]
    recipe = "tiny_eagle3" if which == "target" else "tiny_draft"
    message = f"a conversation has .* tokens, and the {which} has positions for 16; set --data.max_length 16"
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", *ALONE, *more, recipe=recipe)
    assert not (tmp_path / "run").exists()
    train(tmp_path / "run", *ALONE, *more, "--data.max_length", "16", "--max_steps", "1", recipe=recipe)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--model.feature_layers", "[1, 9]"], "feature_layers .* do not exist in 4 layers"),
        (["--model.feature_layers", "[-9]"], "feature_layers .* do not exist in 4 layers"),
        (["--model.depth", "0"], "model.depth is 0, so the drafter would draft nothing"),
        (["--model.width", "0"], "a plan needs"),
    ],
)
def test_a_drafter_that_cannot_draft_is_refused_before_the_first_step(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", *settings)
    assert not (tmp_path / "run").exists()


def test_a_drafter_of_other_feature_layers_is_no_start(tmp_path):
    first = train(tmp_path / "first", *ALONE, "--max_steps", "1", "--model.feature_layers", "[0, 2, 3]") / "drafter"
    other = ["--start_from", str(first), "--model.feature_layers", "[1, 2, 4]"]
    with pytest.raises(
        ValueError, match=r"reads the target's layers \(0, 2, 3\).*set --model.feature_layers to \[0, 2, 3"
    ):
        train(tmp_path / "second", *ALONE, *other)


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '{"model_type": "llama", "hidden_size": 65}'])
def test_a_target_config_that_describes_nothing_is_named(tmp_path, content):
    (tmp_path / "target.json").write_text(content)
    with pytest.raises(ValueError, match="the target '.*target.json' could not be loaded: ."):
        heads.load_target(str(tmp_path / "target.json"))


@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "optimizers.pt", "random_0.pt"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(tmp_path, toy, file):
    straight = train_toy(tmp_path / "straight", "--max_steps", "10")
    damaged = train_toy(tmp_path / "damaged", "--max_steps", "10")
    shutil.copytree(damaged / "checkpoints" / "step-5", damaged / "checkpoints" / "step-5-mine")
    newest = damaged / "checkpoints" / "step-10"
    (newest / "state.json").write_text((newest / "state.json").read_text().replace('"step": 10', '"step": 9'))
    (newest / file).write_bytes(b"half of it")
    with pytest.raises(ValueError, match="step-10 cannot be read .*; delete it, and the same command continues"):
        train_toy(damaged, "--max_steps", "10")
    shutil.rmtree(newest)
    assert_same_training(train_toy(damaged, "--max_steps", "10"), straight)
    assert (damaged / "checkpoints" / "step-5-mine").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, toy, monkeypatch):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="could not write .*there is no earlier checkpoint"):
            train_toy(output)
    plain = json.dumps

    def dumps(value, *args, **kwargs):
        if isinstance(value, dict) and value.get("step") == 8 and "loss" in value:
            raise OSError(28, "No space left on device")
        return plain(value, *args, **kwargs)

    monkeypatch.setattr("journal.json.dumps", dumps)
    with pytest.raises(ValueError, match="could not write .*metrics.jsonl .*No space left.*step-5 is whole"):
        train_toy(tmp_path / "run")


def test_processes_wait_for_the_one_that_prepares_data_or_measures(tmp_path, toy, monkeypatch):
    """As long as that takes: half an hour, the default of a collective, is soon over."""
    made, plain = [], heads.Accelerator
    monkeypatch.setattr(heads, "Accelerator", lambda **settings: made.append(settings) or plain(**settings))
    train_toy(tmp_path, "--max_steps", "1")
    (handler,) = made[0]["kwargs_handlers"]
    assert handler.timeout.total_seconds() >= 6 * 3600


def test_a_weight_that_the_loss_forgets_is_named(tmp_path, toy, monkeypatch):
    monkeypatch.setattr(Toy, "forgotten", True)
    with pytest.raises(ValueError, match="does not depend on these weights.*forgettable.weight, forgettable.bias"):
        train_toy(tmp_path)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path, toy, monkeypatch):
    """The limit on the size of a file stands for the full disk: the kernel refuses the write in the middle."""
    straight = train_toy(tmp_path / "straight")
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_in_step(8, patch)
        with pytest.raises(SystemExit):
            train_toy(stopped)
    before = {path: path.read_bytes() for path in (stopped / "checkpoints").rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(ValueError, match="could not write .*step-10.*step-5 is whole: the same command continues"):
            train_toy(stopped)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert before == {path: path.read_bytes() for path in (stopped / "checkpoints").rglob("*") if path.is_file()}
    assert_same_training(train_toy(stopped), straight)


def test_what_a_kill_during_a_save_leaves_is_not_taken_for_a_checkpoint(tmp_path, toy, monkeypatch):
    straight = train_toy(tmp_path / "straight")
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        # As SIGKILL would: the files are written, nothing after that happens, not even the tidying up.
        patch.setattr(checkpoints, "flush_to_disk", lambda folder: os.kill(os.getpid(), signal.SIGKILL))
        child = os.fork()
        if child == 0:
            patch.setattr(sys, "stdout", open(os.devnull, "w"))
            try:
                train_toy(killed)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path.name for path in (killed / "checkpoints").iterdir()] == [".partial-5"]
    assert_same_training(train_toy(killed), straight)
    assert not list((killed / "checkpoints").glob(".partial-*"))


@pytest.mark.slow
def test_a_training_that_is_killed_at_twenty_random_moments_ends_as_if_it_had_not_been(tmp_path, toy):
    """Every kill finds a training that resumes, and a drafter and checkpoints that are whole."""
    straight = train_toy(tmp_path / "straight", "--save_every", "1", "--eval.every", "2")
    moments, killed = random.Random(7), tmp_path / "killed"
    reached, kills = [0], 0

    def newest() -> int:
        checkpoint = checkpoints.newest_checkpoint(killed / "checkpoints")
        return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))

    while kills < 20:
        child = os.fork()
        if child == 0:
            sys.stdout = open(os.devnull, "w")
            tqdm.set_lock(threading.RLock())  # its own: the parent waits for ever for one that dies with a child
            try:
                train_toy(killed, "--save_every", "1", "--eval.every", "2")
                os._exit(0)
            finally:
                os._exit(1)
        # The moment is one of the run's first steps, or of the time before them, however fast the machine is.
        step, gone = newest() + moments.randrange(5), 0
        while newest() < step and not gone:
            time.sleep(0.005)
            gone, status = os.waitpid(child, os.WNOHANG)
        if not gone:
            time.sleep(moments.uniform(0, 0.2))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), "what a kill left behind did not resume"
        kills += code == -signal.SIGKILL
        reached.append(newest())
        if reached[-1] == 20:
            shutil.rmtree(killed)
    assert len(set(reached)) > 5, "the moments were not spread over the training"
    assert_same_training(train_toy(killed, "--save_every", "1", "--eval.every", "2"), straight)


def test_what_was_saved_is_measured_and_the_best_is_kept(tmp_path, monkeypatch):
    """Three evaluations, the second of which is the best: it is the drafter, also after a resume."""
    scores, weights = iter([1.2, 1.9, 1.5]), []

    def evaluate(drafter, target, held_out, recipe):
        assert not drafter.training and next(drafter.parameters()).dtype == target.dtype
        weights.append({name: value.clone() for name, value in drafter.state_dict().items()})
        return {"tokens_per_round": next(scores)}

    monkeypatch.setattr(heads, "evaluate", evaluate)
    more = ["--max_steps", "15", "--eval.every", "5", "--save_every", "5", "--threads", "1"]
    with monkeypatch.context() as patch:
        stop_in_step(12, patch)
        with pytest.raises(SystemExit):
            train(tmp_path, *more)
    train(tmp_path, *more)
    kept, last = (load_file(tmp_path / name / "model.safetensors") for name in ("drafter", "latest"))
    assert all(torch.equal(kept[name], weights[1][name]) for name in kept)
    assert all(torch.equal(last[name], weights[2][name]) for name in last)
    assert any(not torch.equal(weights[1][name], weights[2][name]) for name in kept)


def test_an_evaluation_answers_greedily_and_sampled_with_the_drafters_own_plans(tmp_path):
    train(tmp_path, "--eval.every", "20", "--max_steps", "20", "--threads", "1")
    measured = records(tmp_path)[-1]
    assert measured["step"] == 20 and "loss" not in measured
    model = heads.load_target("configs/targets/tiny_llama.json")[0].eval()
    drafter = load_drafter(tmp_path / "drafter", model)
    held_out = data.read_conversations("tests/data/tiny_validation.jsonl", 2048, model.config.vocab_size)
    assert drafter.plan != drafter.sampling_plan
    for suffix, settings in {"": {"do_sample": False}, "_T1": {"do_sample": True, "top_k": 0}}.items():
        total, plan = Stats(), drafter.sampling_plan if suffix else drafter.plan
        for index in range(4):
            settings |= {"seed": index, "max_new_tokens": 16, "return_dict_in_generate": True, "plan": plan}
            total.add(generate(model, held_out.prompt(index).unsqueeze(0), drafter=drafter, **settings).stats)
        assert measured[f"tokens_per_round{suffix}"] == pytest.approx(total.tokens_per_round)
        assert measured[f"acceptance_1{suffix}"] == pytest.approx(total.acceptance_by_depth[0])


def test_features_that_are_not_the_models_own_are_refused_before_the_first_step(tmp_path, monkeypatch):
    plain = Target.encode
    shifted = {
        r"hidden_states\[1\]": lambda self, tokens, layers: plain(self, tokens, tuple(layer - 1 for layer in layers)),
        r"hidden_states\[-1\]": lambda self, *given: (plain(self, *given)[0], plain(self, given[0], (-2,))[0]),
    }
    for name, encode in shifted.items():
        with monkeypatch.context() as patch:
            patch.setattr(Target, "encode", encode)
            with pytest.raises(ValueError, match=f"{name}.*differ by"):
                train(tmp_path, *ALONE, recipe="tiny_eagle3")
    project = Target.project
    monkeypatch.setattr(Target, "project", lambda self, *given: 1.1 * project(self, *given))
    with pytest.raises(ValueError, match="logits: they differ by"):
        train(tmp_path, *ALONE, recipe="tiny_eagle3")
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("recipe", TINY)
def test_the_probe_lets_a_sound_training_through_and_changes_nothing(tmp_path, recipe, capsys):
    more = [*ALONE, "--max_steps", "2"]
    straight, probed = (
        train(tmp_path / name, *more, "--probe", str(name == "probed"), recipe=recipe)
        for name in ("straight", "probed")
    )
    assert "probe: one answer learnt by heart" in capsys.readouterr().out
    assert records(probed) == records(straight)


def test_the_probe_tells_training_that_sees_other_things_from_training_that_does_not_learn(tmp_path, monkeypatch):
    plain = guards.live_features

    def other(target, layers, tokens, trained, attention):
        batch = plain(target, layers, tokens, trained, attention)
        return replace(batch, features=batch.features.roll(1, dims=1))

    with monkeypatch.context() as patch:
        patch.setattr(guards, "live_features", other)
        with pytest.raises(ValueError, match="see different things"):
            train(tmp_path, *ALONE, "--probe", "true")
    with pytest.raises(ValueError, match="does not learn"):
        train(tmp_path, *ALONE, "--probe", "true", "--optim.lr", "1e-9", "--optim.matrix_lr", "1e-9")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_folder_says_how_it_came_about(tmp_path, toy, monkeypatch):
    with monkeypatch.context() as patch:
        stop_in_step(8, patch)
        with pytest.raises(SystemExit):
            train_toy(tmp_path)
    train_toy(tmp_path)
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 5]
    assert starts[0]["versions"]["torch"] == torch.__version__ and starts[0]["command"] == sys.argv
    whole = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert whole["max_steps"] == 20 and whole["model"] == {"dropout": 0.5, "nan_at": -1, "nan_calls": 1}


def test_tensorboard_gets_every_step(tmp_path, toy):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_toy(tmp_path, "--log_with", "tensorboard")
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = [(event.step, event.value) for event in read.Scalars("loss")]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in records(tmp_path)]


def test_wandb_gets_every_step_in_one_run(tmp_path, toy, monkeypatch):
    """Offline, with the calls of accelerate's tracker recorded: a resume reports into the same run."""
    wandb = pytest.importorskip("wandb")
    runs, steps = [], []

    class Run:
        def log(self, values, step=None, **kwargs):
            steps.append((step, values["loss"]))

        def finish(self):
            pass

    monkeypatch.setattr(wandb, "init", lambda **kwargs: runs.append(kwargs) or Run())
    monkeypatch.setattr(wandb, "config", dict(), raising=False)
    with monkeypatch.context() as patch:
        stop_in_step(8, patch)
        with pytest.raises(SystemExit):
            train_toy(tmp_path, "--log_with", "wandb")
    train_toy(tmp_path, "--log_with", "wandb")
    assert [step for step, _ in steps] == [*range(1, 8), *range(6, 21)]
    assert runs[0]["id"] == runs[1]["id"] and runs[1]["resume"] == "allow"


def test_muon_under_deepspeed_is_refused_with_what_does_the_same(tmp_path, toy, monkeypatch):
    monkeypatch.setattr(heads.Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="--optim.matrix_lr 0.*configs/accelerate/fsdp2.yaml"):
        train_toy(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": 0}, "zero_stage 1 or 2, not 0"),
        ({"stage": 3}, "zero_stage 1 or 2, not 3"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "offloading"),
    ],
)
def test_what_deepspeed_would_do_wrong_is_refused(settings, said):
    wanted, _ = heads.parse_recipe(["--config", "configs/tiny_eagle3.yaml", "--optim.matrix_lr", "0"])

    def check(settings):
        plugin = SimpleNamespace(deepspeed_config={"zero_optimization": settings})
        zero.check(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), wanted)

    check({"stage": 1})
    check({"stage": 2, "offload_optimizer": {"device": "none", "nvme_path": None}})
    with pytest.raises(ValueError, match=f"{said}.*configs/accelerate/fsdp2.yaml"):
        check(settings)


def test_missing_wandb_is_one_clear_error(tmp_path, toy, monkeypatch):
    monkeypatch.setattr(heads.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        train_toy(tmp_path, "--log_with", "wandb")


def test_the_optimizer_follows_the_schedule(tmp_path, toy):
    train_toy(tmp_path, "--optim.lr", "2e-3", "--optim.warmup_ratio", "0.1")
    wanted = [2e-3 * heads.learning_rate_scale(step, 20, 0.1) for step in range(20)]
    assert [line["lr"] for line in records(tmp_path)] == pytest.approx(wanted)


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    scales = [heads.learning_rate_scale(step, 100, 0.1) for step in range(100)]
    assert scales[:10] == sorted(scales[:10]) and scales[10:] == sorted(scales[10:], reverse=True)
    assert 0 < scales[0] < 0.1 and scales[10] == 1 and scales[-1] == pytest.approx(0.1, abs=0.001)


def test_threads_are_all_cores_unless_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    accelerator = heads.Accelerator(cpu=True)
    cores = len(os.sched_getaffinity(0))
    cases = [  # --threads, OMP_NUM_THREADS, under accelerate launch -> threads set
        (0, None, False, [cores]),
        (0, "1", True, [cores]),  # the launcher's own default
        (0, "1", False, []),
        (0, "3", True, []),
        (1, "1", True, [1]),
    ]
    for threads, variable, launched, wanted in cases:
        for name, value in (("OMP_NUM_THREADS", variable), ("ACCELERATE_MIXED_PRECISION", "no" if launched else None)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        asked.clear()
        heads.use_cores(threads, accelerator)
        assert asked == wanted

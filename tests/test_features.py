"""Features from disk: equal to live ones, computed once, found by content, whole after a kill, as small as promised."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from filelock import FileLock
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "train"))
import data  # noqa: E402
import features  # noqa: E402
import heads  # noqa: E402
from features import FeatureCache, live_features  # noqa: E402

pytestmark = pytest.mark.usefixtures("trainer")

TINY = sorted(path.stem for path in (ROOT / "configs").glob("tiny_*.yaml"))
LAYERS = (1, 2, -1)


@pytest.fixture
def target() -> heads.Target:
    model, _ = heads.load_target("configs/targets/tiny_llama.json")
    return heads.Target(model.requires_grad_(False).eval())


@pytest.fixture
def conversations() -> data.Conversations:
    return data.read_conversations("tests/data/tiny_train.jsonl", 64, 128)


@pytest.fixture
def forwards(target, monkeypatch) -> list[int]:
    """Tokens of every pass through the target's layers."""
    passes: list[int] = []
    plain = target.model.base_model.forward

    def forward(*args, **kwargs):
        passes.append(kwargs["input_ids"].numel())
        return plain(*args, **kwargs)

    monkeypatch.setattr(target.model.base_model, "forward", forward)
    return passes


def steps_of(conversations: data.Conversations, processes: int = 1) -> list[list[list[np.ndarray]]]:
    plan = data.plan_epoch(conversations.lengths, 256, 0, 0)
    return [data.share_step(step, conversations.lengths, 128, processes) for step in plan]


def build(cache: FeatureCache, conversations: data.Conversations, say=lambda text: None) -> FeatureCache:
    AcceleratorState._reset_state(True)
    cache.build(conversations, steps_of(conversations), Accelerator(cpu=True), say)
    return cache


def chosen(conversations: data.Conversations, indices: list[int]) -> data.Conversations:
    parts = ([each[i] for i in indices] for each in (conversations.tokens, conversations.trained))
    return data.Conversations(*parts, 0, 0)


def files_of(cache: FeatureCache) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in cache.folder.glob("*.safetensors")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", TINY)
def test_losses_and_gradients_from_the_cache_are_those_of_live_features(tmp_path, target, conversations, recipe, dtype):
    target = heads.Target(target.model.to(dtype))
    wanted, config = heads.parse_recipe(["--config", f"configs/{recipe}.yaml"])
    drafter = heads.drafter_class(wanted.drafter)(config, target)
    drafter.start(conversations.answer_counts(target.vocab_size))
    cache = build(FeatureCache(tmp_path, target, drafter.feature_layers), conversations)
    batches = [batch for step in steps_of(conversations) for batch in step[0]][:8]
    assert any(len(set(conversations.lengths[batch])) > 1 for batch in batches), "nothing is padded"

    def learn(seen):
        torch.manual_seed(0)  # some drafters put noise on what they see
        drafter.zero_grad()
        loss = drafter.loss(seen)
        loss.total.backward()
        return loss, {name: weight.grad for name, weight in drafter.named_parameters()}

    for batch in batches:
        tensors = data.collate(conversations, batch)
        reference, wanted_gradients = learn(live_features(target, drafter.feature_layers, *tensors))
        ours, gradients = learn(cache.read(*tensors))
        assert ours.total == reference.total and ours.count == reference.count and ours.count > 0
        assert ours.metrics == reference.metrics
        for name, gradient in gradients.items():
            assert torch.equal(gradient, wanted_gradients[name]), name


@pytest.mark.parametrize("layers", [(), (-1,), (4,), (0, 2, 3), (3, 1), (2, -1), (-2, 4, 2)])
def test_any_choice_of_layers_is_kept_once_and_given_back_in_order(tmp_path, target, conversations, layers):
    cache = build(FeatureCache(tmp_path, target, layers), conversations)
    for batch in steps_of(conversations)[0][0]:
        tensors = data.collate(conversations, batch)
        ours, reference = cache.read(*tensors), live_features(target, layers, *tensors)
        real = reference.attention
        assert ours.features.shape == reference.features.shape and ours.features.dtype == reference.features.dtype
        assert torch.equal(ours.features[real], reference.features[real])
        assert torch.equal(ours.hidden[real], reference.hidden[real])
    (file, *_) = cache.folder.glob("*.safetensors")
    kept = {name for name in load_file(file) if name.isdigit()}
    assert kept == {str(layer % 5) for layer in (*layers, 4)}


def test_a_layer_that_the_target_has_not_is_refused(tmp_path, target):
    for layers in ((5,), (-6,)):
        with pytest.raises(ValueError, match="do not all exist in a target of 4 layers"):
            FeatureCache(tmp_path, target, layers)


def test_features_are_found_by_content_in_any_order_selection_and_batch(tmp_path, target, conversations, forwards):
    cache = build(FeatureCache(tmp_path, target, LAYERS), conversations)
    few = chosen(conversations, [40, 3, 17])
    forwards.clear()
    again = build(FeatureCache(tmp_path, target, LAYERS), few)
    assert forwards == []
    tensors = data.collate(few, np.array([2, 0, 1]))
    ours, reference = again.read(*tensors), live_features(target, LAYERS, *tensors)
    # In another batch than the one of the build, float32 sums may come in another order.
    torch.testing.assert_close(ours.hidden[ours.attention], reference.hidden[ours.attention], rtol=0, atol=1e-4)
    for row, index in enumerate([17, 40, 3]):
        alone = cache.read(*data.collate(conversations, np.array([index])))
        assert torch.equal(alone.features[0], ours.features[row, : alone.features.shape[1]])


def test_a_second_build_computes_nothing_and_leaves_the_files_alone(tmp_path, target, conversations, forwards):
    cache, said = build(FeatureCache(tmp_path, target, LAYERS), conversations), []
    assert sum(forwards) >= conversations.lengths.sum()
    before = {file: file.stat().st_mtime_ns for file in cache.folder.glob("*.safetensors")}
    forwards.clear()
    build(FeatureCache(tmp_path, target, LAYERS), conversations, said.append)
    assert forwards == [] and said == [f"features: everything is in {cache.folder}"]
    assert before == {file: file.stat().st_mtime_ns for file in cache.folder.glob("*.safetensors")}


def test_whatever_changes_the_features_makes_them_anew(tmp_path, target, conversations, forwards):
    """One weight deep in the target, which its embedding does not tell; its config; layers; dtypes; text; mask."""
    first = build(FeatureCache(tmp_path, target, LAYERS), conversations)

    def assert_computed(conversations=conversations, target=target, layers=LAYERS, dtype="target", folders=True):
        forwards.clear()
        cache = build(FeatureCache(tmp_path, target, layers, dtype), conversations)
        assert forwards and (cache.folder != first.folder) == folders
        forwards.clear()
        build(FeatureCache(tmp_path, target, layers, dtype), conversations)
        assert forwards == []

    assert_computed(layers=(1, 3, -1))
    assert_computed(dtype="bfloat16")
    assert_computed(dtype="float8")
    assert_computed(data.read_conversations("tests/data/tiny_train.jsonl", 20, 128), folders=False)
    masks = [trained.copy() for trained in conversations.trained]
    masks[7][-1] ^= True
    assert_computed(data.Conversations(conversations.tokens, masks, 0, 0), folders=False)
    weight = target.layers[2].mlp.down_proj.weight.data
    weight[3, 5] += 0.1
    assert_computed()
    weight[3, 5] -= 0.1
    target.config.rms_norm_eps *= 2
    assert_computed()
    target.config.rms_norm_eps /= 2
    assert_computed(target=heads.Target(target.model.to(torch.bfloat16)))


def test_only_what_is_new_is_computed(tmp_path, target, conversations, forwards):
    build(FeatureCache(tmp_path, target, LAYERS), chosen(conversations, list(range(40))))
    forwards.clear()
    build(FeatureCache(tmp_path, target, LAYERS), conversations)
    new = conversations.lengths[40:]
    assert new.sum() <= sum(forwards) <= len(new) * new.max()


def test_equal_conversations_are_kept_once(tmp_path, target, conversations, forwards):
    cache = build(FeatureCache(tmp_path, target, LAYERS), chosen(conversations, [5, 5, 9, 5, 9]))
    lengths = torch.cat([load_file(file)["lengths"] for file in cache.folder.glob("*.safetensors")])
    assert sorted(lengths.tolist()) == sorted(conversations.lengths[[5, 9]].tolist())


def test_bytes_on_disk_are_those_of_the_hidden_states_and_five_percent(tmp_path, target):
    random = np.random.default_rng(0)
    trained = np.arange(50) >= 20
    four = data.Conversations([random.integers(3, 128, 50) for _ in range(4)], [trained] * 4, 0, 0)
    target = heads.Target(target.model.to(torch.bfloat16))
    cache = build(FeatureCache(tmp_path, target, LAYERS), four)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    size = 4 * 50 * 3 * target.hidden_size * 2
    assert cache.bytes_per_token * 200 == size and size < written <= size * 1.05
    half = build(FeatureCache(tmp_path / "half", target, LAYERS, "float8"), four)
    assert half.bytes_per_token == 3 * (target.hidden_size + 4)


def test_size_is_said_first_and_a_disk_that_is_too_small_is_refused(
    tmp_path, target, conversations, forwards, monkeypatch
):
    size = conversations.lengths.sum() * 3 * 64 * 4
    usage, said = shutil.disk_usage(tmp_path), []
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage._replace(free=int(size)))
    with pytest.raises(ValueError, match="features take 0.00 GB, and the disk of .* has 0.00 GB free; make room"):
        build(FeatureCache(tmp_path, target, LAYERS), conversations, said.append)
    assert forwards == [] and not list(tmp_path.rglob("*.safetensors"))
    (line,) = said
    count = f"48 conversations, {conversations.lengths.sum():,} tokens, layers 1, 2, 4 in float32"
    assert line.startswith(f"features: {count}: {size / 1e9:.3f} GB for {tmp_path}")
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: usage._replace(free=int(size * 1.02)))
    build(FeatureCache(tmp_path, target, LAYERS), conversations, said.append)
    assert "tokens/s, 0.0 minutes left" in said[-1]


def test_a_build_that_was_killed_goes_on_with_the_same_bytes(tmp_path, target, conversations, forwards, monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 200_000)
    straight = build(FeatureCache(tmp_path / "straight", target, LAYERS), conversations)
    assert len(files_of(straight)) == 5
    cost = sum(forwards)
    killed = FeatureCache(tmp_path / "killed", target, LAYERS)
    child = os.fork()
    if child == 0:
        plain, calls = os.fsync, []

        def fsync(handle):
            calls.append(handle)
            plain(handle) if len(calls) < 3 else os.kill(os.getpid(), signal.SIGKILL)

        features.os.fsync = fsync
        try:
            build(killed, conversations)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before = {file: file.stat().st_mtime_ns for file in killed.folder.glob("*.safetensors")}
    assert len(before) == 2 and list(killed.folder.glob(".*.partial"))
    (killed.folder / ".other.safetensors.partial").write_bytes(b"of a build with other data")
    forwards.clear()
    build(killed, conversations)
    assert 0 < sum(forwards) < 0.75 * cost
    assert files_of(killed) == files_of(straight)
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    assert not list(killed.folder.glob(".*.partial"))


def test_of_two_trainings_one_computes_and_the_other_waits(tmp_path, target, conversations, forwards):
    cache = FeatureCache(tmp_path, target, LAYERS)
    cache.folder.mkdir()
    said: list[tuple[str, int]] = []
    with FileLock(cache.folder / ".lock") as lock:

        def say(text: str) -> None:
            said.append((text, len(forwards)))
            lock.release()

        build(cache, conversations, say)
    assert said[0] == (f"features: waiting for another training that computes some in {cache.folder}", 0)
    assert len(said) > 1 and forwards


def test_a_damaged_file_is_named(tmp_path, target, conversations):
    cache = build(FeatureCache(tmp_path, target, LAYERS), conversations)
    (file,) = cache.folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{file} cannot be read .*; delete it"):
        build(FeatureCache(tmp_path, target, LAYERS), conversations)


def test_a_disk_that_fills_up_while_building_is_one_clear_error_and_the_build_goes_on_later(
    tmp_path, target, conversations, forwards, monkeypatch
):
    monkeypatch.setattr(features, "SHARD_BYTES", 200_000)
    plain, written = features.save_file, []

    def save_file(tensors, file):
        written.append(file)
        if len(written) == 3:
            file.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        plain(tensors, file)

    with monkeypatch.context() as patch:
        patch.setattr(features, "save_file", save_file)
        with pytest.raises(ValueError, match="could not write .*No space left.*GB are free.*same command continues"):
            build(FeatureCache(tmp_path, target, LAYERS), conversations)
    assert not list(tmp_path.rglob("*.partial")) and len(list(tmp_path.rglob("*.safetensors"))) == 2
    before = sum(forwards)
    cache = build(FeatureCache(tmp_path, target, LAYERS), conversations)
    assert sum(forwards) - before < before
    assert files_of(cache) == files_of(build(FeatureCache(tmp_path / "straight", target, LAYERS), conversations))


def test_a_disk_without_room_for_a_line_is_one_clear_error(tmp_path, target, conversations, forwards, monkeypatch):
    def write_text(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(ValueError, match="features cannot be kept in .*No space left.*set --features.cache"):
        build(FeatureCache(tmp_path, target, LAYERS), conversations)
    assert forwards == []


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path, target, conversations):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="features cannot be kept in .*file.*set --features.cache"):
        build(FeatureCache(tmp_path / "file", target, LAYERS), conversations)


def test_a_conversation_that_was_not_built_is_an_error_and_not_zeros(tmp_path, target, conversations):
    cache = build(FeatureCache(tmp_path, target, LAYERS), chosen(conversations, [1, 2]))
    with pytest.raises(ValueError, match="lacks a conversation of"):
        cache.read(*data.collate(conversations, np.array([1, 3])))


def test_a_process_without_work_gets_features_too(tmp_path, target, conversations):
    cache = build(FeatureCache(tmp_path, target, LAYERS), conversations)
    seen = cache.read(*data.collate(conversations, np.array([], dtype=np.int64)))
    assert seen.features.shape == (1, 2, 3 * 64) and not seen.trained.any()


def test_reading_maps_the_file_and_touches_its_own_rows_only(tmp_path, target):
    """A file of 64 MB, of which one conversation needs 5 kB."""
    cache = FeatureCache(tmp_path, target, ())
    cache.folder.mkdir()
    tokens, trained = np.arange(20), np.arange(20) >= 10
    rows = 250_000
    tensors = {"4": torch.zeros(rows, 64), "lengths": torch.tensor([rows - 20, 20])}
    tensors["4"][-20:] = torch.arange(20).unsqueeze(1)
    digests = [bytes(16), features.digest_of(tokens, trained)]
    tensors["digests"] = torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)
    features.save_whole(tensors, cache.folder / "one.safetensors")
    del tensors

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache.scan()
    seen = cache.read(*data.collate(data.Conversations([tokens], [trained], 0, 0), np.array([0])))
    assert resident() - before < 8e6
    assert torch.equal(seen.hidden[0, :, 0], torch.arange(20.0))


def test_float8_keeps_every_value_to_a_sixteenth(tmp_path, target, conversations):
    """e4m3 has 3 bits of mantissa: half a step is 1/16 of the value, down to 2 ** -14 of the token's largest one."""
    cache = build(FeatureCache(tmp_path, target, LAYERS, "float8"), conversations)
    tensors = data.collate(conversations, np.arange(8))
    ours, reference = cache.read(*tensors), live_features(target, LAYERS, *tensors)
    for mine, theirs in zip(ours.features.split(64, -1), reference.features.split(64, -1), strict=True):
        error, most = (mine - theirs)[ours.attention].abs(), theirs[ours.attention].abs()
        assert (error <= most / 16 + most.amax(-1, keepdim=True) * 2**-14).all()
        assert error.max() > 0
    state = torch.tensor([[0.0, 0.0], [1e30, -1e30], [1e-30, 0.0]])
    values, scale = features.as_float8(state)
    torch.testing.assert_close(values.float() * scale, state, rtol=1e-6, atol=0)
    assert values.float().amax(dim=1).tolist() == [0, 448, 448]


# --- In a training ----------------------------------------------------------------------------------------------------


def train(output: Path, *more: str, recipe: str = "tiny_eagle3") -> list[dict]:
    AcceleratorState._reset_state(True)
    short = ["--max_steps", "5", "--threads", "1", "--data.validation", ""]
    heads.main(["--config", f"configs/{recipe}.yaml", "--output_dir", str(output), *short, *more])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_the_script_that_measures_finds_the_same_losses(capsys):
    script = runpy.run_path(str(ROOT / "scripts" / "cached_features"))
    options = ["--conversations", "30", "--steps", "2", "--threads", "1"]
    assert script["main"](["--config", "configs/tiny_eagle3.yaml", *options]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    figures = {name.strip(): [float(value) for value in values] for name, *values in rows}
    assert list(figures) == ["live", "cached, target", "cached, float8"]
    assert figures["live"][1::2] == [1, 1, 0] and figures["cached, target"][4] == 0
    assert 0 < figures["cached, float8"][4] < 0.05


@pytest.mark.parametrize("recipe", [each for each in TINY if each != "tiny_medusa2"])  # its features change
def test_training_from_the_cache_equals_a_live_one(tmp_path, recipe):
    live = train(tmp_path / "live", recipe=recipe)
    cached = train(tmp_path / "cached", "--features.cache", str(tmp_path / "cache"), recipe=recipe)
    assert len(live) == 5 and cached == live
    weights = "drafter/model.safetensors"
    assert (tmp_path / "cached" / weights).read_bytes() == (tmp_path / "live" / weights).read_bytes()


def test_training_from_a_complete_cache_runs_no_layer_of_the_target(tmp_path, monkeypatch):
    first = train(tmp_path / "first", "--features.cache", str(tmp_path / "cache"))

    def forward(*args, **kwargs):
        raise AssertionError("the target's layers were run")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaModel.forward", forward)
    monkeypatch.setattr(heads, "check_features", lambda *_: None)  # looks at the target once, before the first step
    assert train(tmp_path / "second", "--features.cache", str(tmp_path / "cache")) == first
    with pytest.raises(AssertionError, match="layers were run"):
        train(tmp_path / "live")


def test_a_live_training_continues_from_the_cache_and_the_other_way_round(tmp_path, monkeypatch):
    live = train(tmp_path / "live")
    plain, cached = heads.log, ["--features.cache", str(tmp_path / "cache")]

    def log(accelerator, output, step, values):
        if step == 4:
            raise KeyboardInterrupt
        plain(accelerator, output, step, values)

    for name, before, after in (("first", [], cached), ("second", cached, [])):
        with monkeypatch.context() as patch:
            patch.setattr(heads, "log", log)
            with pytest.raises(SystemExit):
                train(tmp_path / name, "--save_every", "2", *before)
        assert train(tmp_path / name, "--save_every", "2", *after) == live


def test_ctrl_c_while_building_says_how_to_go_on(tmp_path, target, conversations, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    said: list[str] = []
    monkeypatch.setattr(features, "live_features", interrupted)
    with pytest.raises(SystemExit) as stopped:
        build(FeatureCache(tmp_path, target, LAYERS), conversations, said.append)
    assert stopped.value.code == 130 and "the same command goes on" in said[-1]


def test_only_the_conversations_of_the_training_are_computed(tmp_path, conversations):
    train(tmp_path / "run", "--max_steps", "1", "--features.cache", str(tmp_path / "cache"))
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    assert 0 < len(load_file(file)["lengths"]) < len(conversations) / 2


def test_two_processes_build_one_cache_that_one_process_reads(tmp_path, monkeypatch):
    more = ["--mixed_precision", "no", "--max_steps", "2", "--optim.lr", "1e-6", "--optim.matrix_lr", "0"]
    more += ["--features.cache", str(tmp_path / "cache"), "--threads", "1", "--data.validation", ""]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "train/heads.py"]
    command += ["--config", "configs/tiny_eagle3.yaml", "--output_dir", str(tmp_path / "two"), *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}
    subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True)
    files = list((tmp_path / "cache").rglob("*.safetensors"))
    digests = [bytes(row) for file in files for row in load_file(file)["digests"].numpy()]
    assert len(files) == 2 and len(set(digests)) == len(digests)
    monkeypatch.setattr(features, "live_features", None)  # nothing is left to be computed
    one = train(tmp_path / "one", *more)
    two = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for ours, reference in zip(two, one, strict=True):
        assert ours["trained"] == reference["trained"]
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4)


def test_a_training_does_not_continue_with_features_of_another_dtype(tmp_path):
    train(tmp_path / "run", "--max_steps", "1", "--features.cache", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="features was target and is now float8"):
        more = ["--features.cache", str(tmp_path / "cache"), "--features.dtype", "float8"]
        train(tmp_path / "run", "--max_steps", "1", *more)


def test_a_dtype_without_a_cache_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--features.dtype float8 is how features are kept; set --features.cache too"):
        train(tmp_path, "--features.dtype", "float8")

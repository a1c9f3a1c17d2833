"""Saving and loading: what comes back is what was saved, and what does not fit is refused by name."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import selfdraft
from selfdraft import checkpoint, compare, load_drafter, save_drafter
from selfdraft.drafters.eagle import Eagle, EagleConfig
from selfdraft.target import Target
from tests.contract.arms import GREEDY, NEW, NEWCOMERS, Case, arms, made, modules, plain
from tests.contract.checks import equals_plain, same_tokens
from tests.models import tiny
from tests.test_doctor import chat_tokenizer

ARMS = arms()
CASE = Case("llama", "sdpa", "greedy", 3)
WITH_WEIGHTS = [name for name, kind in modules().items() if not hasattr(kind, "for_target")]


def eagle(**settings: Any) -> Eagle:
    return Eagle(EagleConfig(**settings), Target(CASE.model)).eval()


@pytest.fixture
def saved(tmp_path) -> Path:
    save_drafter(eagle(), tmp_path / "heads")
    return tmp_path / "heads"


def rewrite(folder: Path, change) -> None:
    """Changes the tensors of a saved drafter in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# --- There and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_drafter_comes_back_as_it_was_saved(name, tmp_path):
    drafter = ARMS[f"{name}-trained"](CASE)
    save_drafter(drafter, tmp_path / "heads")
    again = load_drafter(tmp_path / "heads", CASE.model)
    assert type(again) is type(drafter) and again.config == drafter.config and again.plan == drafter.plan
    weights, loaded = drafter.state_dict(), again.state_dict()
    assert set(weights) == set(loaded)
    assert all(loaded[key].equal(weights[key]) and loaded[key].dtype == weights[key].dtype for key in weights)
    before, after = (equals_plain(CASE, each, drafter.plan) for each in (drafter, again))
    assert (before.drafted, before.accepted) == (after.drafted, after.accepted)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_the_file_holds_the_drafter_and_nothing_of_the_target(name, tmp_path):
    """CK3: at most the trained numbers, the maps of the vocabulary, and a header."""
    drafter = made(name, Target(CASE.model))
    save_drafter(drafter, tmp_path / "heads")
    assert sorted(each.name for each in (tmp_path / "heads").iterdir()) == ["config.json", "model.safetensors"]
    own = sum(each.numel() * each.element_size() for each in drafter.state_dict().values())
    trained = sum(each.numel() * each.element_size() for each in drafter.parameters())
    assert own - trained < 0.05 * trained
    assert (tmp_path / "heads" / "model.safetensors").stat().st_size < 1.01 * own + 8192


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_drafter_is_built_without_memory_in_the_shapes_of_its_config(name):
    """As big frameworks build a model before its weights are there, or shared out."""
    drafter = ARMS[f"{name}-trained"](CASE)
    with init_empty_weights():
        empty = type(drafter)(drafter.config, Target(CASE.model))
    shapes = {key: value.shape for key, value in empty.state_dict().items()}
    assert shapes == {key: value.shape for key, value in drafter.state_dict().items()}
    assert all(value.is_meta for value in empty.parameters()) and all(shape.numel() for shape in shapes.values())


@pytest.mark.parametrize("name", ["feature_layers", "rope_theta"])
def test_what_a_config_does_not_say_is_guessed_with_a_warning(name, saved):
    """A drafter that was trained on other layers than the default ones would be accepted next to never."""
    document = json.loads((saved / "config.json").read_text())
    value = document["selfdraft"]["config"].pop(name)
    assert value, "what was settled when the drafter was made is written down"
    (saved / "config.json").write_text(json.dumps(document))
    with pytest.warns(UserWarning, match=f"does not say what the drafter was trained with.*{name}"):
        load_drafter(saved, CASE.model)


def test_the_dtype_is_that_of_the_file(tmp_path):
    save_drafter(eagle().bfloat16(), tmp_path / "heads")
    again = load_drafter(tmp_path / "heads", CASE.model)
    assert {each.dtype for each in again.parameters()} == {torch.bfloat16}
    equals_plain(CASE, again, again.plan)


def test_a_path_is_a_drafter(saved):
    for source in (saved, str(saved)):
        ours = selfdraft.generate(CASE.model, **CASE.inputs, drafter=source, max_new_tokens=NEW, **GREEDY)
        same_tokens(ours, plain(CASE))


def test_a_plain_hugging_face_folder_is_a_draft_model(tmp_path):
    CASE.model.save_pretrained(tmp_path / "copy")
    drafter = load_drafter(tmp_path / "copy", CASE.model)
    stats = equals_plain(CASE, drafter, selfdraft.Plan(4))
    assert stats.acceptance_by_depth == [1.0] * 4


def test_a_separate_draft_model_is_saved_as_a_plain_hugging_face_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    drafter = ARMS["draft_model-trained"](CASE)
    save_drafter(drafter, tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    ids = CASE.inputs["input_ids"]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, drafter.model(ids).logits, atol=1e-5)


def test_everybody_may_read_what_was_saved(saved):
    assert saved.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in saved.iterdir()} == {0o644}


def test_saving_over_a_drafter_replaces_it(saved):
    other = eagle(draft_vocab_size=32)
    (saved / "stray.txt").write_text("not ours")
    save_drafter(other, saved)
    assert load_drafter(saved, CASE.model).config == other.config
    assert sorted(each.name for each in saved.parent.iterdir()) == ["heads"]


# --- What does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "right"), [("ngarm", "ngram"), ("n-gram", "ngram"), ("Ngram", "ngram")])
def test_an_unknown_name_is_refused_with_the_nearest_one(wrong, right):
    with pytest.raises(ValueError, match=f"'{wrong}'.*did you mean '{right}'"):
        selfdraft.generate(CASE.model, **CASE.inputs, drafter=wrong, max_new_tokens=2)


def test_a_newcomer_is_among_the_known_names(monkeypatch):
    with pytest.raises(ValueError, match="known: ngram$"):
        load_drafter("bigrem", CASE.model)
    monkeypatch.setattr(selfdraft.drafters, "__path__", [*selfdraft.drafters.__path__, str(NEWCOMERS)])
    with pytest.raises(ValueError, match="did you mean 'bigram'"):
        load_drafter("bigrem", CASE.model)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        load_drafter(tmp_path, CASE.model)


@pytest.mark.parametrize(
    "text", ["{}", '{"a": 1}', "", "{", "[]", '{"selfdraft": {}}', '{"selfdraft": {"drafter": "eagle"}}']
)
def test_a_config_that_describes_nothing_is_refused(text, saved):
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load_drafter(saved, CASE.model)


def change_config(folder: Path, change) -> None:
    document = json.loads((folder / "config.json").read_text())
    change(document["selfdraft"])
    (folder / "config.json").write_text(json.dumps(document))


def test_a_kind_of_drafter_that_does_not_exist_is_refused(saved):
    change_config(saved, lambda ours: ours.update(drafter="eagel"))
    with pytest.raises(ValueError, match="did you mean 'eagle'"):
        load_drafter(saved, CASE.model)


def test_a_config_field_of_another_version_is_refused_by_name(saved):
    change_config(saved, lambda ours: ours["config"].update(norm_twice=True))
    with pytest.raises(ValueError, match="norm_twice"):
        load_drafter(saved, CASE.model)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "missing norm.weight"),
        (lambda tensors: tensors.update(fc_bias=torch.zeros(3)), "unexpected fc_bias"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(3)}), r"norm.weight is \[3\] and should be \[64\]"),
        (lambda tensors: tensors["d2t"].add_(1), "d2t"),
        (lambda tensors: tensors["d2t"].sub_(1), "d2t"),
        (lambda tensors: tensors["d2t"][5:6].add_(1), "d2t"),
    ],
    ids=["missing", "unexpected", "misshapen", "map too high", "map too low", "map not one to one"],
)
def test_tensors_that_do_not_fit_are_named(change, match, saved):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=match):
        load_drafter(saved, CASE.model)


def test_a_file_that_was_cut_short_is_refused(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        load_drafter(saved, CASE.model)
    file.unlink()
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        load_drafter(saved, CASE.model)


def test_another_target_is_refused_with_what_differs(saved):
    for model, difference in (
        (tiny("llama", vocab=160), "vocab_size 128 against 160"),
        (tiny("qwen2"), "model_type llama against qwen2"),
        (other_target(hidden_size=32), "hidden_size 64 against 32"),
        (other_target(num_hidden_layers=5), "num_hidden_layers 4 against 5"),
        (other_target(), "fingerprint"),
    ):
        with pytest.raises(ValueError, match=f"trained for .*{difference}"):
            load_drafter(saved, model)


def test_a_variant_of_the_target_is_taken_when_asked_for(saved):
    """A fine-tuned target: the drafts fit less well, and the text is still its own."""
    model = other_target()
    with pytest.raises(ValueError, match="strict=False"):
        load_drafter(saved, model)
    drafter = load_drafter(saved, model, strict=False)
    reference = model.generate(**CASE.inputs, max_new_tokens=NEW, **GREEDY)
    same_tokens(selfdraft.generate(model, **CASE.inputs, drafter=drafter, max_new_tokens=NEW, **GREEDY), reference)
    with pytest.raises(ValueError, match="vocab_size"):
        load_drafter(saved, tiny("llama", vocab=160), strict=False)


def other_target(**settings: Any) -> Any:
    """llama again, of other weights or of another size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**CASE.model.config.to_dict(), "head_dim": 16, **settings})).eval()


def test_a_drafter_object_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        selfdraft.generate(other_target(), **CASE.inputs, drafter=eagle(), max_new_tokens=2, **GREEDY)


# --- Drafters that were trained along with an adapter -----------------------------------------------------------------


@pytest.fixture
def tuned(tmp_path) -> Path:
    """The folder of heads that were trained along with an adapter; beside it, in `base`, their target as it was."""
    tiny("llama").save_pretrained(tmp_path / "base")
    chat_tokenizer().save_pretrained(tmp_path / "base")
    model = adapted(base_in(tmp_path))
    save_drafter(made("medusa", Target(model)), tmp_path / "heads", chat_tokenizer(), model)
    return tmp_path / "heads"


def base_in(folder: Path, **settings: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", **settings).eval()
    model.generation_config.pad_token_id = 0
    return model


def adapted(model: Any, seed: int = 0, **settings: Any) -> Any:
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    return model


def test_heads_trained_along_with_an_adapter_are_loaded_with_it_and_refused_without(tuned):
    model = base_in(tuned.parent)
    untuned = model.generate(**CASE.inputs, max_new_tokens=NEW, **GREEDY)
    with pytest.raises(
        ValueError, match="the target has none active; load it: peft.PeftModel.from_pretrained.*--model"
    ):
        load_drafter(tuned, model)
    with pytest.raises(ValueError, match="has none active"):
        selfdraft.generate(model, **CASE.inputs, drafter=tuned, max_new_tokens=NEW, **GREEDY)
    model = PeftModel.from_pretrained(model, str(tuned / "adapter"))
    reference = model.generate(**CASE.inputs, max_new_tokens=NEW, **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = selfdraft.generate(model, **CASE.inputs, drafter=tuned, max_new_tokens=NEW, **GREEDY)
    same_tokens(ours, reference)
    assert ours.tolist() != untuned.tolist()
    with model.disable_adapter(), pytest.raises(ValueError, match="has none active"):
        load_drafter(tuned, model)


def test_the_adapter_is_known_by_its_weights_and_not_by_its_name(tuned):
    other = adapted(base_in(tuned.parent), seed=1)
    with pytest.raises(ValueError, match="the target has another one active"):
        load_drafter(tuned, other)
    other.load_adapter(str(tuned / "adapter"), "right")
    other.set_adapter("right")
    load_drafter(tuned, other)

    file = tuned / "adapter" / "adapter_model.safetensors"
    negated = {name: -weight if "lora_A" in name else weight for name, weight in load_file(file).items()}
    save_file(negated, file)
    with pytest.raises(ValueError, match="another one active"):
        load_drafter(tuned, PeftModel.from_pretrained(base_in(tuned.parent), str(tuned / "adapter")))


def test_the_adapter_is_the_same_in_another_dtype(tuned):
    model = PeftModel.from_pretrained(base_in(tuned.parent, dtype=torch.bfloat16), str(tuned / "adapter"))
    load_drafter(tuned, model)


def test_a_merged_adapter_is_known_until_it_is_unloaded_and_then_taken_when_asked_for(tuned):
    model = PeftModel.from_pretrained(base_in(tuned.parent), str(tuned / "adapter"))
    model.merge_adapter()
    drafter = load_drafter(tuned, model)
    reference = model.generate(**CASE.inputs, max_new_tokens=NEW, **GREEDY)
    same_tokens(selfdraft.generate(model, **CASE.inputs, drafter=drafter, max_new_tokens=NEW, **GREEDY), reference)
    model = model.merge_and_unload()
    with pytest.raises(ValueError, match="merged into is taken with load_drafter.*strict=False"):
        load_drafter(tuned, model)
    drafter = load_drafter(tuned, model, strict=False)
    reference = model.generate(**CASE.inputs, max_new_tokens=NEW, **GREEDY)
    with pytest.warns(UserWarning, match="made for the target with adapter"):
        same_tokens(selfdraft.generate(model, **CASE.inputs, drafter=drafter, max_new_tokens=NEW, **GREEDY), reference)


def test_the_commands_take_the_folder_of_the_adapter_as_the_model(tuned):
    """`--model heads/adapter`: transformers loads the target with it, and the tokenizer lies beside it."""
    model, tokenizer = compare.load_target(str(tuned / "adapter"), "float32")
    assert tokenizer.chat_template == chat_tokenizer().chat_template
    compare.load_drafters({"tuned": str(tuned)}, model)
    reference = PeftModel.from_pretrained(base_in(tuned.parent), str(tuned / "adapter"))
    ours = model.cpu().generate(**CASE.inputs, max_new_tokens=NEW, pad_token_id=0, **GREEDY)
    same_tokens(ours, reference.generate(**CASE.inputs, max_new_tokens=NEW, **GREEDY))
    with pytest.raises(ValueError, match="tuned: this drafter was trained along with an adapter"):
        compare.load_drafters({"tuned": str(tuned)}, base_in(tuned.parent))


# --- Texts of another kind --------------------------------------------------------------------------------------------


def test_a_text_that_begins_unlike_all_of_the_training_is_told_once_a_call(tmp_path):
    """A drafter of chats, given ids of a chat, the same with padding in front, raw text, and a chat with a second
    BOS."""
    drafter = eagle()
    drafter.opening = (1, 5)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path, CASE.model)
    settings = GREEDY | {"drafter": loaded, "max_new_tokens": 3}
    chat = torch.tensor([[1, 5, 9, 4]])
    padded = torch.nn.functional.pad(chat, (2, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selfdraft.generate(CASE.model, chat, **settings)
        selfdraft.generate(CASE.model, padded, attention_mask=(padded > 0).long(), **settings)
    for text in ([9, 4, 1, 5], [1, 1, 5, 9], [1]):
        with pytest.warns(UserWarning, match=r"trained on begin with the ids \[1, 5\].*apply_chat_template") as caught:
            ours = selfdraft.generate(CASE.model, torch.tensor([text]), **settings)
        assert len(caught) == 1
        same_tokens(ours, selfdraft.generate(CASE.model, torch.tensor([text]), max_new_tokens=3, **GREEDY))


# --- A list of drafters -----------------------------------------------------------------------------------------------


def test_the_first_of_a_list_that_fits_is_used_and_every_one_before_it_is_named(saved, tmp_path):
    save_drafter(Eagle(EagleConfig(), Target(other_target())), tmp_path / "theirs")
    wanted = [tmp_path / "nothing", str(tmp_path / "theirs"), saved, "ngram"]
    with pytest.warns(UserWarning) as caught:
        ours = selfdraft.generate(CASE.model, **CASE.inputs, drafter=wanted, max_new_tokens=NEW, **GREEDY)
        chosen = checkpoint.choose_drafter(wanted[2:], Target(CASE.model))
    messages = [str(each.message) for each in caught if "passed over" in str(each.message)]
    assert len(messages) == 2
    assert "nothing" in messages[0] and "theirs" in messages[1] and "fingerprint" in messages[1]
    same_tokens(ours, plain(CASE))
    assert isinstance(chosen, Eagle)


def test_a_list_whose_first_fits_warns_of_nothing(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wanted in ([saved, "ngram"], ["ngram", "nothing"], ("ngram",)):
            ours = selfdraft.generate(CASE.model, **CASE.inputs, drafter=wanted, max_new_tokens=NEW, **GREEDY)
            same_tokens(ours, plain(CASE))


def test_a_list_in_which_nothing_fits_is_refused_with_every_reason(tmp_path):
    with pytest.raises(ValueError, match="none of the drafters.*'ngarm'.*no config.json"):
        selfdraft.generate(CASE.model, **CASE.inputs, drafter=["ngarm", tmp_path], max_new_tokens=2)


# --- A save that fails ------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_save_that_fails_leaves_the_old_folder_whole_and_nothing_else(fault, saved, monkeypatch):
    before = contents(saved)

    def half(tensors, file, **kwargs):
        Path(file).write_bytes(b"half a file")
        raise fault

    monkeypatch.setattr(checkpoint, "save_file", half)
    with pytest.raises(type(fault)):
        save_drafter(eagle(draft_vocab_size=32), saved)
    assert contents(saved) == before
    assert [each.name for each in saved.parent.iterdir()] == ["heads"]
    with pytest.raises(type(fault)):
        save_drafter(eagle(), saved.parent / "new")
    assert not (saved.parent / "new").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from selfdraft import checkpoint, save_drafter
from selfdraft.drafters.eagle import Eagle, EagleConfig
from selfdraft.target import Target
from tests.models import tiny

def half(tensors, file, **kwargs):
    Path(file).write_bytes(b"half a file")
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint.save_file = half
save_drafter(Eagle(EagleConfig(draft_vocab_size=32), Target(tiny("llama"))), sys.argv[1])
"""


def test_a_save_that_is_killed_leaves_the_old_folder_whole(saved):
    before = contents(saved)
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(saved)], cwd=root, env=environment)
    assert ended.returncode == -signal.SIGKILL
    assert contents(saved) == before
    save_drafter(eagle(draft_vocab_size=32), saved)
    assert load_drafter(saved, CASE.model).config.draft_vocab_size == 32

"""A good drafter has no fault, and each of its broken copies has the one that it was given, named in words."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import selfdraft
from selfdraft import cli, doctor, evidence
from selfdraft.doctor import Finding, examine
from selfdraft.drafters.base import FeatureBatch
from selfdraft.drafters.eagle import Eagle, EagleConfig
from selfdraft.drafters.medusa import Medusa, MedusaConfig
from selfdraft.evidence import NEW_TOKENS, Exchange, read_exchanges
from selfdraft.target import Target
from tests.contract.arms import GREEDY, train
from tests.models import VOCAB, prompts, row, tiny
from tests.scripted import texts_of

LENGTHS = (5, 6, 7, 8, 9, 10, 11, 12)
TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}{% if add_generation_prompt %}w4 w5{% endif %}"
OTHER_TEMPLATE = TEMPLATE.replace("w4 w5", "w6")


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... whose ids are their numbers."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3", bos_token="w1")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Any:
    """A target, a drafter that has learnt its answers by heart, and these answers as data."""
    model, folder = tiny("llama"), tmp_path_factory.mktemp("home")
    target, tokenizer = Target(model), chat_tokenizer()
    asked = prompts(LENGTHS)
    asked["input_ids"][:, -2:] = torch.tensor([4, 5])  # as the template ends
    for index, length in enumerate(LENGTHS):
        asked["input_ids"][index, -length] = 1  # and as it begins
    texts = texts_of(asked, model.generate(**asked, max_new_tokens=NEW_TOKENS, **GREEDY))
    data = [Exchange(text[:length], text[length:]) for text, length in zip(texts, LENGTHS, strict=True)]

    drafter = Eagle(EagleConfig(draft_vocab_size=64, unroll=2), target)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    places, lengths = torch.arange(tokens.shape[1]), torch.tensor([len(text) for text in texts]).unsqueeze(1)
    attention, trained = places < lengths, (places < lengths) & (places >= lengths - NEW_TOKENS)
    with torch.no_grad():
        states = target.encode(tokens, drafter.feature_layers)
    train(drafter, FeatureBatch(tokens, trained, attention, *states), steps=120)
    selfdraft.save_drafter(drafter.eval(), folder / "good", tokenizer)

    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    rows = [{"prompt_ids": each.prompt, "response_ids": each.answer} for each in data]
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return SimpleNamespace(folder=folder, model=model, tokenizer=tokenizer, data=data, drafter=drafter)


@pytest.fixture
def copy(home, tmp_path) -> Path:
    """A copy of the good drafter, to be broken."""
    shutil.copytree(home.folder / "good", tmp_path / "drafter")
    return tmp_path / "drafter"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def reconfigure(folder: Path, change: Callable[[dict], Any]) -> None:
    document = json.loads((folder / "config.json").read_text())
    change(document["selfdraft"])
    (folder / "config.json").write_text(json.dumps(document))


def diagnose(home: Any, folder: Path, **changes: Any) -> list[Finding]:
    asked = {"model": home.model, "tokenizer": home.tokenizer, "data": home.data, **changes}
    return examine(folder, **asked)


def the_fault(findings: list[Finding]) -> Finding:
    """The one fault of a broken drafter, which has to say what to do."""
    faults = [each for each in findings if each.level == "fault"]
    assert [each.check for each in faults] == [each.check for each in faults][:1], faults
    assert faults, findings
    assert faults[0].remedy
    return faults[0]


def finding(findings: list[Finding], check: str) -> Finding:
    return next(each for each in findings if each.check == check)


def test_a_good_drafter_has_no_fault_and_no_warning(home):
    findings = diagnose(home, home.folder / "good")
    assert {each.level for each in findings} == {"ok"}, findings
    measured = finding(findings, "acceptance").figures["as_it_is"]
    output: Any = [
        selfdraft.generate(
            home.model,
            torch.tensor([each.prompt]),
            drafter=home.drafter,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            **GREEDY,
        ).stats
        for each in home.data
    ]
    for other in output[1:]:
        output[0].add(other)
    assert measured["tokens_per_round"] == output[0].tokens_per_round > 2
    assert measured["acceptance_by_depth"] == output[0].acceptance_by_depth


# --- Ten ways to break it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, -1])
def test_feature_layers_off_by_one_are_named(home, copy, step):
    right = list(home.drafter.feature_layers)
    reconfigure(copy, lambda ours: ours["config"].update(feature_layers=[each + step for each in right]))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "feature layers" and "off by one" in fault.meaning
    assert str(right) in fault.remedy


def test_one_feature_layer_off_by_one_is_named(home, copy):
    right = list(home.drafter.feature_layers)
    reconfigure(copy, lambda ours: ours["config"].update(feature_layers=[right[0], right[1] + 1]))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "feature layers" and str(right) in fault.remedy


def test_a_swapped_norm_flag_is_named(home, copy):
    reconfigure(copy, lambda ours: ours["config"].update(fc_norm=False))
    findings = diagnose(home, copy)
    fault = the_fault(findings)
    assert fault.check == "norm flag" and "fc_norm False, and the file has its weights" in fault.meaning
    figures = fault.figures
    assert figures["otherwise"]["top1_agreement"] > figures["given"]["top1_agreement"] + 0.2
    assert finding(findings, "acceptance").figures["mended"]["tokens_per_round"] > 2


def test_norm_weights_that_were_lost_are_named(home, copy):
    reconfigure(copy, lambda ours: ours["config"].update(fc_norm=False))
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("fc_norm")])
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "norm flag" and "the other way" in fault.meaning


def test_a_vocabulary_map_of_ids_where_offsets_belong_is_named(home, copy):
    rewrite(copy, lambda tensors: tensors["d2t"].add_(torch.arange(64)))
    findings = diagnose(home, copy)
    fault = the_fault(findings)
    assert fault.check == "vocabulary map" and "holds ids where offsets belong" in fault.meaning
    assert finding(findings, "acceptance").figures["mended"]["tokens_per_round"] > 2


def test_another_chat_template_is_named(home):
    fault = the_fault(diagnose(home, home.folder / "good", tokenizer=chat_tokenizer(OTHER_TEMPLATE), data=[]))
    assert fault.check == "chat template" and "another one than in training" in fault.meaning


def test_a_drafter_of_another_target_is_named(home, copy):
    torch.manual_seed(5)
    other = LlamaForCausalLM(home.model.config).eval()
    fault = the_fault(diagnose(home, copy, model=other, data=[]))
    assert fault.check == "target" and "another target" in fault.meaning and "fingerprint" in fault.meaning
    wider = tiny("llama", vocab=160)
    fault = the_fault(diagnose(home, copy, model=wider, data=[]))
    assert fault.check == "target" and "vocab_size 128 against 160" in fault.meaning


@pytest.mark.parametrize("change", [lambda c: c.pop("rope_theta"), lambda c: c.update(rope_theta=5e5)])
def test_a_rope_field_that_was_dropped_or_changed_is_named(home, copy, change):
    reconfigure(copy, lambda ours: change(ours["config"]))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "rope" and "rope_theta" in fault.meaning and "10000" in fault.remedy


def test_a_transposed_square_head_is_named(home, copy):
    rewrite(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].T}))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "square weights" and "the head lm_head.weight is transposed" in fault.meaning


def test_a_transposed_matrix_that_is_not_square_is_named_by_its_shape(home, copy):
    rewrite(copy, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].T}))
    findings = diagnose(home, copy)
    fault = the_fault(findings)
    assert fault.check == "weights" and "fc.weight is transposed: [128, 64] instead of [64, 128]" in fault.meaning
    assert finding(findings, "acceptance").figures["mended"]["tokens_per_round"] > 2


def test_a_transposed_head_that_is_not_square_is_named(home, tmp_path):
    selfdraft.save_drafter(Eagle(EagleConfig(draft_vocab_size=48), Target(home.model)), tmp_path / "drafter")
    rewrite(tmp_path / "drafter", lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].T}))
    assert "the head lm_head.weight is transposed" in the_fault(diagnose(home, tmp_path / "drafter")).meaning


@pytest.mark.parametrize(("length", "word"), [(0, "is empty"), (100, "is damaged"), (None, "is missing")])
def test_a_weights_file_that_cannot_be_read_is_named(home, copy, length, word):
    file = copy / "model.safetensors"
    if length is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:length])
    findings = diagnose(home, copy)
    fault = the_fault(findings)
    assert fault.check == "weights file" and f"the file model.safetensors {word}" in fault.meaning
    assert finding(findings, "target").level == finding(findings, "data").level == "ok"


def floats(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


BAD_DTYPES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "kept in int8": (lambda each: each.to(torch.int8), "their dtype, int8"),
    "kept in fp8": (lambda each: each.to(torch.float8_e4m3fn), "their dtype, float8_e4m3fn"),
    "rounded through int8": (lambda each: each.to(torch.int8).float(), "rounded away in a dtype of few bits"),
    "too large for fp16": (lambda each: (each * 1e6).half(), "of dtype float16 are inf or nan"),
}


@pytest.mark.parametrize("way", BAD_DTYPES)
def test_a_wrong_dtype_is_named(home, copy, way):
    change, words = BAD_DTYPES[way]
    rewrite(copy, lambda tensors: tensors.update({name: change(each) for name, each in floats(tensors).items()}))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "dtype and values" and words in fault.meaning


def test_eight_bits_are_a_warning_where_they_do_no_harm_and_a_fault_where_they_do(home, copy):
    def through_fp8(tensors, scale):
        changed = {name: (each * scale).to(torch.float8_e4m3fn).float() for name, each in floats(tensors).items()}
        tensors.update({name: each / scale for name, each in changed.items()})

    rewrite(copy, lambda tensors: through_fp8(tensors, 1.0))
    about = finding(diagnose(home, copy), "dtype and values")
    assert about.level == "warning" and "fp8" in about.meaning
    rewrite(copy, lambda tensors: tensors["lm_head.weight"].neg_())
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "dtype and values" and "no longer works" in fault.meaning


def test_a_missing_key_is_named(home, copy):
    rewrite(copy, lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "weights" and fault.meaning == "the key midlayer.mlp.up_proj.weight is missing"

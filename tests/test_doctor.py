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
from selfdraft.drafters.eagle1 import Eagle1, Eagle1Config
from selfdraft.drafters.medusa import Medusa, MedusaConfig
from selfdraft.evidence import Exchange, read_exchanges
from selfdraft.target import Target
from tests.contract.arms import GREEDY, NEW, train
from tests.models import VOCAB, prompts, tiny
from tests.scripted import texts_of

LENGTHS = (5, 6, 7, 8)
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
    asked["input_ids"][:, -3:] = torch.tensor([2, 4, 5])  # as the template ends
    for index, length in enumerate(LENGTHS):
        asked["input_ids"][index, -length] = 1  # and as it begins
    texts = texts_of(asked, model.generate(**asked, max_new_tokens=NEW, **GREEDY))
    data = [Exchange(text[:length], text[length:]) for text, length in zip(texts, LENGTHS, strict=True)]

    drafter = Eagle(EagleConfig(draft_vocab_size=64, unroll=2, depth=3, width=1, nodes=3), target)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    places, lengths = torch.arange(tokens.shape[1]), torch.tensor([len(text) for text in texts]).unsqueeze(1)
    attention, trained = places < lengths, (places < lengths) & (places >= lengths - NEW)
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
    asked = {"model": home.model, "tokenizer": home.tokenizer, "data": home.data, "new_tokens": NEW, **changes}
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
            max_new_tokens=NEW,
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


# --- Faults beyond the ten --------------------------------------------------------------------------------------------


def test_a_key_of_another_name_is_named_with_its_right_one(home, copy):
    rewrite(copy, lambda tensors: tensors.update({"layers.0.norm.weight": tensors.pop("norm.weight")}))
    findings = diagnose(home, copy)
    fault = the_fault(findings)
    assert "norm.weight is missing, and layers.0.norm.weight is probably what it is called here" in fault.meaning
    assert finding(findings, "acceptance").figures["mended"]["tokens_per_round"] > 1.5


def test_a_config_that_says_nothing_is_named(home, copy):
    (copy / "config.json").write_text("{")
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "config" and "not valid JSON" in fault.meaning


def test_an_unknown_config_field_is_named(home, copy):
    reconfigure(copy, lambda ours: ours["config"].update(norm_twice=True))
    assert "norm_twice" in the_fault(diagnose(home, copy)).meaning


def test_a_config_value_of_a_wrong_type_is_named(home, copy):
    reconfigure(copy, lambda ours: ours["config"].update(feature_layers=["1", "2"]))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "config fields" and "feature_layers ['1', '2']" in fault.meaning


def test_feature_layers_that_do_not_exist_are_named(home, copy):
    reconfigure(copy, lambda ours: ours["config"].update(feature_layers=[7, 9]))
    fault = the_fault(diagnose(home, copy))
    assert fault.check == "feature layers" and "do not exist in a target of 4 layers" in fault.meaning


def test_the_best_of_all_neighbours_is_proposed_when_one_is_clearly_better(home, monkeypatch):
    """Figures as of a real drafter: half of the way back is a steady gain, the whole way a larger one that varies."""
    seen = {
        (2, 3): evidence.Agreement(0.58, [5.3, 5.3, 5.3, 5.3]),
        (1, 2): evidence.Agreement(0.61, [5.3, 4.8, 5.3, 5.0]),
        (1, 3): evidence.Agreement(0.59, [5.20, 5.21, 5.20, 5.21]),
    }
    layers_of = lambda build: tuple(build.__self__.config["feature_layers"])  # noqa: E731
    monkeypatch.setattr(doctor, "agreement", lambda build, sample: seen.get(layers_of(build)))
    case = doctor.Case(Eagle, {"feature_layers": [2, 3]}, {}, Target(home.model))
    about, mended, _ = doctor.check_layers(case, seen[2, 3], None)
    assert about.level == "fault" and mended.config["feature_layers"] == (1, 2)
    del seen[1, 3]
    about, same, _ = doctor.check_layers(case, seen[2, 3], None)
    assert about.level == "ok" and same is case


def test_an_untrained_drafter_is_a_fault_that_no_other_check_explains(home, tmp_path):
    drafter = Eagle(EagleConfig(draft_vocab_size=64), Target(home.model))
    selfdraft.save_drafter(drafter, tmp_path / "drafter", home.tokenizer)
    fault = the_fault(diagnose(home, tmp_path / "drafter"))
    assert fault.check == "acceptance" and "no other check says why" in fault.meaning


def test_a_map_is_read_the_other_way_when_it_then_covers_more(home):
    """Both readings are valid here, so that only the target's own answers tell them apart; medusa keeps ids."""
    used = torch.tensor([token for each in home.data for token in each.answer]).bincount(minlength=VOCAB)
    chosen: list[int] = []
    for token in used.argsort(descending=True).tolist():  # no neighbours: else their offsets are the same
        if len(chosen) < 16 and not {token - 1, token + 1} & set(chosen):
            chosen.append(token)
    ids = torch.tensor(sorted(chosen))
    drafter = Medusa(MedusaConfig(heads=1, draft_vocab_size=16), Target(home.model))
    tensors = {**drafter.state_dict(), "draft_tokens": ids}
    case = doctor.Case(Medusa, {"heads": 1, "draft_vocab_size": 16}, tensors, Target(home.model))
    asked, answers = [each.prompt for each in home.data], [each.answer for each in home.data]
    sample = evidence.take_sample(case.target, (-1,), asked, answers)
    right, same = doctor.check_map(case, sample)
    assert right.level != "fault" and same is case
    swapped = replace(case, tensors={**tensors, "draft_tokens": ids - torch.arange(16)})
    wrong, mended = doctor.check_map(swapped, sample)
    assert wrong.level == "fault" and "holds offsets where ids belong" in wrong.meaning
    assert wrong.figures["coverage"] is not None
    assert mended.tensors["draft_tokens"].equal(ids)


# --- The text ---------------------------------------------------------------------------------------------------------


def test_data_of_another_template_is_named(home):
    assert doctor.check_template(home.tokenizer, None, home.data).level == "ok"
    cut = [replace(each, prompt=each.prompt[:-1]) for each in home.data]
    about = doctor.check_template(home.tokenizer, None, cut)
    assert about.level == "fault" and "100% of the prompts" in about.meaning
    messages = [{"role": "user", "content": "w9 w8"}]
    exact = Exchange([1, 9, 8, 2, 4, 5], [7], messages)
    assert doctor.check_template(home.tokenizer, None, [exact]).level == "ok"
    assert doctor.check_template(home.tokenizer, None, [replace(exact, prompt=[1, 9, 2, 4, 5])]).level == "fault"
    assert doctor.check_template(home.tokenizer, None, []).level == "skipped"


def test_a_doubled_bos_is_named(home):
    assert doctor.check_bos(home.tokenizer, {"bos": 1}, home.data).level == "ok"
    twice = [replace(each, prompt=[1, *each.prompt]) for each in home.data]
    assert "begin with 2 BOS tokens" in doctor.check_bos(home.tokenizer, None, twice).meaning
    assert "in training a chat began with 2" in doctor.check_bos(home.tokenizer, {"bos": 2}, []).meaning
    about = doctor.check_bos(chat_tokenizer("w1 " + TEMPLATE), None, [])
    assert about.level == "fault" and "BOS is doubled" in about.meaning


def test_answers_of_somebody_else_are_named(home):
    target = Target(home.model)
    about = doctor.check_data(target, home.data, home.data)
    assert about.level == "ok" and about.figures["greedy_share"] == 1.0
    sampled = []
    for seed, each in enumerate(home.data):
        options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": seed}
        text: Any = selfdraft.generate(home.model, torch.tensor([each.prompt]), max_new_tokens=NEW, **options)
        sampled.append(replace(each, answer=text[0, len(each.prompt) :].tolist()))
    about = doctor.check_data(target, sampled, sampled)
    assert about.level == "ok" and about.figures["greedy_share"] < 0.9
    random = [replace(each, answer=torch.randint(VOCAB, (NEW,)).tolist()) for each in home.data]
    about = doctor.check_data(target, random, random)
    assert about.level == "fault" and "not the target's own" in about.meaning
    about = doctor.check_data(target, [replace(home.data[0], answer=[VOCAB])], [])
    assert about.level == "fault" and "another tokenizer" in about.remedy


def test_data_is_read_as_training_reads_it(home, tmp_path):
    assert read_exchanges(home.folder / "data.jsonl", home.tokenizer) == home.data
    chat = {"messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w7 w8"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    (exchange,) = read_exchanges(tmp_path / "chat.jsonl", home.tokenizer)
    assert (exchange.prompt[:3], exchange.messages) == ([1, 9, 2], None)
    with pytest.raises(ValueError, match="no rows of `prompt_ids`"):
        read_exchanges(tmp_path / "chat.jsonl", chat_tokenizer(None))


# --- The command ------------------------------------------------------------------------------------------------------


def run(home: Any, folder: Path, *options: str) -> int:
    common = ["doctor", "--model", str(home.folder / "model"), "--dtype", "float32", "--drafter", str(folder)]
    return cli.main([*common, *options])


def test_the_command_says_what_it_found_and_fails_when_that_is_a_fault(home, copy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evidence, "NEW_TOKENS", NEW)  # what the drafter has learnt
    data = ["--data", str(home.folder / "data.jsonl")]
    assert run(home, home.folder / "good", *data, "--json", str(tmp_path / "out.json")) == 0
    assert "no fault was found" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["faults"] == [] and {each["level"] for each in written["findings"]} <= {"ok", "warning"}

    (copy / "model.safetensors").write_bytes(b"")
    assert run(home, copy, *data, "--json", str(tmp_path / "out.json")) == 1
    shown = capsys.readouterr().out
    assert "faults: weights file" in shown and "mend: copy the file again" in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["faults"] == ["weights file"]
    levels = {each["check"]: each["level"] for each in written["findings"]}
    assert levels["weights file"] == "fault" and levels["target"] == "ok"


def test_without_prompts_the_target_writes_them(home):
    target = Target(home.model)
    asked = evidence.own_prompts(target, home.tokenizer, count=2)
    assert all(each[0] == 1 and each[-3:] == [2, 4, 5] for each in asked) and asked[0] != asked[1]
    assert all(each[0] == 1 for each in evidence.own_prompts(target, None, count=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "./nothing"], 'there is no drafter "./nothing"'),
        (["--json", "nowhere/out.json"], "no folder nowhere"),
        (["--data", "nothing.jsonl"], "--data nothing.jsonl"),
        (["--prompts", "nothing.jsonl"], "no prompt file nothing.jsonl"),
    ],
)
def test_wrong_usage_is_said_in_one_line(home, capsys, options, message):
    assert run(home, home.folder / "good", *options) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert last.startswith("selfdraft: error: ") and message in last and out == ""


def test_a_drafter_has_to_be_given(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor"])
    assert stop.value.code == 2 and "drafter" in capsys.readouterr().err


def test_agreement_is_that_of_the_best_tokens_whatever_else_a_loss_measures(home):
    """EAGLE-1 also says how far its foretold states are off, which is no share of anything."""
    target = Target(tiny("llama"))
    drafter = Eagle1(Eagle1Config(noise=0.0), target).eval()
    parts = ([each.prompt for each in home.data], [each.answer for each in home.data])
    sample = evidence.take_sample(target, (-1,), *parts)
    shares = [drafter.loss(sample.row(index, (-1,))).metrics["accuracy_1"] for index in range(len(sample.tokens))]
    found = evidence.agreement(lambda: drafter, sample)
    assert found.top1 == pytest.approx(sum(float(hits) for hits, _ in shares) / sum(float(of) for _, of in shares))

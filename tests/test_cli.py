"""The command as a user meets it: a tiny model in a folder, a prompt file, and what comes back."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import selfdraft
from selfdraft import cli, compare, embedded
from selfdraft.drafters.medusa import Medusa, MedusaConfig
from selfdraft.target import Target
from tests.models import VOCAB, tiny

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a tiny chat model, two untrained drafters for it, and four prompts."""
    home = tmp_path_factory.mktemp("home")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3").save_pretrained(home / "model")
    tiny("llama").save_pretrained(home / "model")
    for name in ("one", "two"):
        drafter = Medusa(MedusaConfig(heads=2), Target(tiny("llama")))
        selfdraft.save_drafter(drafter, home / name / "drafter")
    rows = [{"turns": [f"w{10 + i} w{20 + i} w{30 + i}", "w1"], "task": "xy"[i % 2]} for i in range(4)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def run(home: Path, *options: str, tokens: int = 8) -> int:
    common = ["--model", str(home / "model"), "--prompts", str(home / "prompts.jsonl"), "--max-new-tokens", str(tokens)]
    return cli.main(["compare", *common, *options])


def test_compare_prints_its_tables_and_writes_its_figures(home, tmp_path, capsys):
    drafters = ["--drafters", "ngram", str(home / "one" / "drafter"), str(home / "two" / "drafter")]
    file = tmp_path / "out.json"
    assert run(home, *drafters, "--check", "--show-answer", "--dtype", "float32", "--json", str(file)) == 0
    figures = json.loads(file.read_text())
    names = ["transformers", "plain", "ngram", "one/drafter", "two/drafter"]
    assert [arm["name"] for arm in figures["arms"]] == names
    for arm in figures["arms"]:
        assert arm["new_tokens"] == 4 * 8
        assert arm["tokens_per_second"] == pytest.approx(arm["new_tokens"] / arm["seconds"])
        assert arm["speedup"] > 0 and arm["tokens_per_round"] >= 1
        assert set(arm["tasks"]) == {"x", "y"}
    assert len(figures["arms"][3]["acceptance_by_depth"]) == 2
    assert [arm["identical"] for arm in figures["check"]["arms"]] == [4] * 4
    settings = figures["settings"]
    assert (settings["num_prompts"], settings["max_new_tokens"], settings["dtype"]) == (4, 8, "float32")
    assert {"threads", "device", "torch", "transformers", "selfdraft", "commit", "date", "seed"} <= set(settings)
    out, err = capsys.readouterr()
    assert (
        f"model, float32, greedy, 4 of prompts.jsonl, at most 8 new tokens, 1 run(s) each; {settings['device']}" in out
    )
    for name in names[1:]:
        assert f"{name}: identical on 4/4 prompts" in out
    assert "w10 w20 w30" in out and "answer (" in out
    assert "20 of 20 answers" in err and "20 of 20" not in out


def test_compare_samples_limits_and_repeats_and_still_checks_greedily(home, tmp_path):
    file = tmp_path / "out.json"
    sampled = ["--temperature", "0.9", "--seed", "3", "--limit", "2", "--repeats", "2"]
    assert run(home, *sampled, "--check", "--json", str(file)) == 0
    figures = json.loads(file.read_text())
    assert [arm["identical"] for arm in figures["check"]["arms"]] == [2, 2]
    assert (figures["settings"]["temperature"], figures["settings"]["num_prompts"]) == (0.9, 2)
    assert [arm["name"] for arm in figures["arms"]] == ["transformers", "plain", "ngram"]
    assert [arm["new_tokens"] for arm in figures["arms"]] == [2 * 2 * 8] * 3
    assert "divergences" in figures["arms"][2] and "divergences" not in figures["arms"][0]


def test_check_fails_when_an_arm_leaves_the_targets_tokens(home, tmp_path, capsys, monkeypatch):
    """A drafting loop that says something else as its third new token."""
    right = selfdraft.generate

    def wrong(model, inputs, *, drafter, **options):
        output = right(model, inputs, drafter=drafter, **options)
        if drafter is not None:
            output.sequences[0, inputs.shape[1] + 2] ^= 1
        return output

    monkeypatch.setattr(selfdraft, "generate", wrong)
    file = tmp_path / "out.json"
    assert run(home, "--check", "--json", str(file)) == 1
    out = capsys.readouterr().out
    assert "plain: identical on 4/4 prompts" in out
    assert "ngram: identical on 0/4 prompts" in out
    assert "prompt 0, new token 2" in out
    assert "NOT a near-tie, so a bug: ngram" in out
    assert json.loads(file.read_text())["check"]["arms"][1]["identical"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "ngramm"], 'did you mean "ngram"?'),
        (["--drafters", "./nothing"], 'there is no drafter "./nothing"'),
        (["--prompts", "nothing.jsonl"], "no prompt file nothing.jsonl"),
        (["--json", "nowhere/out.json"], "no folder nowhere"),
        (["--model", "./nowhere"], 'cannot load the model "./nowhere"'),
        (["--max-new-tokens", "600"], "does not fit into the 512 positions"),
    ],
)
def test_what_the_user_has_to_change_is_said_in_one_line(home, capsys, options, message):
    assert run(home, *options) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert last.startswith("selfdraft: error: ") and message in last
    assert "Traceback" not in err and out == ""


def test_a_wrong_name_is_found_before_any_model_is_loaded(home, capsys, monkeypatch):
    monkeypatch.setattr(compare, "load_target", lambda *_: pytest.fail("the model was loaded"))
    assert run(home, "--drafters", "ngramm") == 2
    assert run(home, "--prompts", "nothing.jsonl") == 2


def test_a_drafter_for_another_target_is_named(home, tmp_path, capsys):
    other = Medusa(MedusaConfig(heads=2), Target(tiny("qwen2")))
    selfdraft.save_drafter(other, tmp_path / "foreign")
    assert run(home, "--drafters", str(tmp_path / "foreign")) == 2
    assert "selfdraft: error: foreign: this drafter was trained for" in capsys.readouterr().err


def test_errors_of_other_libraries_keep_their_traceback(home, monkeypatch):
    def broken(self, *args, **kwargs):
        return json.loads("{")

    monkeypatch.setattr(compare, "encode", broken)
    with pytest.raises(ValueError):
        run(home)


@pytest.mark.parametrize("options", [["--limit", "0"], ["--temperature", "-1"], ["--dtype", "int3"], ["--promts", "x"]])
def test_options_are_checked_before_anything_runs(home, options, capsys):
    with pytest.raises(SystemExit) as stop:
        run(home, *options)
    assert stop.value.code == 2
    assert options[0].strip("-") in capsys.readouterr().err


def test_ctrl_c_stops_with_one_line(home, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "measure", interrupted)
    assert run(home) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "selfdraft: stopped by Ctrl-C"


def test_help_and_version_answer(capsys):
    for argv, expected in [(["--version"], selfdraft.__version__), (["compare", "--help"], "--drafters")]:
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code in (0, None)
        assert expected in capsys.readouterr().out


def test_the_default_model_is_the_embedded_one():
    options = cli.compare_options().parse_args([])
    assert options.model == embedded.TARGET_NAME


def test_profile_script_accounts_for_the_whole_round(home, capsys):
    """The parts of the table add up to its last line, and nothing stays wrapped afterwards."""
    before = Target.score
    script = runpy.run_path(str(SCRIPTS / "profile_round"))
    common = ["--model", str(home / "model"), "--prompts", str(home / "prompts.jsonl"), "--dtype", "float32"]
    assert script["main"]([*common, "--drafter", str(home / "one" / "drafter"), "--max-new-tokens", "12"]) == 0
    assert Target.score is before
    rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line.strip().endswith("%")]
    milliseconds = {name.strip(): float(value) for name, value, _ in rows}
    whole, outside = milliseconds.pop("whole round"), milliseconds.pop("outside both forwards")
    assert {"target forward", "drafter forward", "masks", "walk", "keep", "pick", "host read"} <= set(milliseconds)
    assert sum(milliseconds.values()) == pytest.approx(whole, abs=0.1)
    assert whole - milliseconds["target forward"] - milliseconds["drafter forward"] == pytest.approx(outside, abs=0.1)


def test_shared_noise_script_draws_the_same_text_with_and_without_the_noise(home, tmp_path):
    """The drafter is a copy of the target: it is always right when it sees the noise, and not when it does not."""
    tiny("llama").save_pretrained(tmp_path / "copy")
    script = runpy.run_path(str(SCRIPTS / "shared_noise"))
    common = ["--model", str(home / "model"), "--prompts", str(home / "prompts.jsonl"), "--dtype", "float32"]
    options = ["--drafter", str(tmp_path / "copy"), "--max-new-tokens", "24", "--json", str(tmp_path / "out.json")]
    assert script["main"]([*common, *options, "--temperatures", "1.0"]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    for row, plan in zip(figures["rows"], ("tree", "chain"), strict=True):
        assert row["plan"].startswith(plan)
        assert (row["temperature"], row["prompts"], row["same_text"], row["better_prompts"]) == (1.0, 4, 4, 4)
        assert row["acceptance_by_depth"]["shared noise"] == [1.0] * len(row["acceptance_by_depth"]["shared noise"])
        one, other = row["tokens_per_round"]["shared noise"], row["tokens_per_round"]["top k of q"]
        assert row["gain"] == pytest.approx(one / other) and 1 < row["gain_from"] <= row["gain"] <= row["gain_to"]


def test_output_in_a_pipe_is_plain_text(home):
    """Run as a program, with its output captured."""
    command = [sys.executable, "-m", "selfdraft.cli", "compare", "--model", str(home / "model"), "--limit", "1"]
    command += ["--prompts", str(home / "prompts.jsonl"), "--max-new-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(selfdraft.__file__).parents[1], check=True)
    assert "tokens/round" in done.stdout and "\x1b" not in done.stdout
    assert "Traceback" not in done.stderr

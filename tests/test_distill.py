"""A corpus of the target's own answers: what is in it, that a stopped run goes on to the same rows, and training."""

import json
import sys
from pathlib import Path

import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import selfdraft
from selfdraft import cli, distill, interview, texts
from selfdraft.interview import Interviewer, Script, Seen
from selfdraft.texts import Text, seed_of, write
from tests.models import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("short_turns")

ROOT = Path(__file__).resolve().parent.parent
MARKERS = ["<unk>", "<system>", "<user>", "<assistant>", "<end>", "<tools>"]  # the last words of the vocabulary
TEMPLATE = (
    "{% if tools %}<tools> {{ tools[0]['name'] }} <end> {% endif %}"
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = VOCAB - 2
ENDS = [END, 7, 17, 27, 37, 47, 57]  # many, so that a random model comes to an end soon


def save_target(folder: Path, **options) -> Path:
    words = {f"w{index}": index for index in range(VOCAB - len(MARKERS))}
    words |= {marker: VOCAB - len(MARKERS) + number for number, marker in enumerate(MARKERS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"chat_template": TEMPLATE, "additional_special_tokens": MARKERS} | options
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **options).save_pretrained(folder)
    model = tiny("olmo")
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """The folder of a tiny chat model."""
    return save_target(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def target(home):
    return AutoModelForCausalLM.from_pretrained(home).eval(), AutoTokenizer.from_pretrained(home)


def run(home: Path, output: Path, *options: str) -> int:
    common = ["--model", str(home), "--dtype", "float32", "--max-new-tokens", "8", "--max-prompt-tokens", "200"]
    return cli.main(
        ["distill", "--output_dir", str(output), *common, "--batch-size", "4", "--temperatures", "0", "1", *options]
    )


def rows_of(output: Path) -> list[dict]:
    return [row for file in sorted(output.glob("train-*.parquet")) for row in parquet.read_table(file).to_pylist()]


def manifest_of(output: Path) -> dict:
    return json.loads((output / "distill.json").read_text())


def write_prompts(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def interviewer(target, scripts=None, turns=1, longest_prompt=300, system=None, temperatures=(0.0, 1.0), seed=0):
    options = {"batch_size": 4, "seed": seed, "max_new_tokens": 12, "source": "here", "drafter": None}
    given = {"scripts": scripts, "turns": turns, "longest_prompt": longest_prompt, "system": system}
    return Interviewer(*target, temperatures=temperatures, **given, **options)


def conversations(lead: Interviewer, count: int, seen: Seen | None = None):
    return lead.conversations(range(count), seen or Seen(), lambda share, tokens: None)


def corpus(home: Path, output: Path, *options: str) -> list[dict]:
    assert run(home, output, "--count", "20", *options) == 0
    return rows_of(output)


# --- What is written --------------------------------------------------------------------------------------------------


def test_without_prompts_the_target_writes_them_and_answers(home, target, tmp_path, capsys):
    rows = corpus(home, tmp_path / "out")
    counts, tokenizer = manifest_of(tmp_path / "out")["counts"], target[1]
    assert 5 < len(rows) == counts["answers"] <= 20 == counts["conversations"] == counts["user_turns"]
    for row in rows:
        (user, answer), prompt, said = row["messages"], row["prompt_ids"], row["response_ids"]
        assert (user["role"], answer["role"], row["source"]) == ("user", "assistant", "magpie")
        assert tokenizer.decode(prompt) == f"<user> {user['content']} <end> <assistant>"
        words = said[:-1] if row["finish"] == "stop" else said
        assert tokenizer.decode(words, skip_special_tokens=True) == answer["content"] != ""
        assert row["finish"] == ("stop" if said[-1] in ENDS else "length")
        assert len(said) == 8 or row["finish"] == "stop"
        assert not set(said[:-1]) & set(ENDS)
    assert {round(row["temperature"], 6) for row in rows} == {0.0, 1.0}
    assert {row["finish"] for row in rows} == {"stop", "length"}
    assert counts["answer_tokens"] == sum(len(row["response_ids"]) for row in rows)
    assert counts["cut_answers"] == sum(row["finish"] == "length" for row in rows)
    err = capsys.readouterr().err
    assert f"{len(rows)} answers in 20 conversations" in err and "tokens/s" in err
    assert f"{counts['unfinished_user_turns']} user's turns that did not end" in err


def test_the_corpus_names_its_target_tokenizer_template_settings_and_versions(home, tmp_path):
    corpus(home, tmp_path / "out", "--seed", "3")
    manifest = manifest_of(tmp_path / "out")
    assert manifest["target"]["model_type"] == "olmo" and len(manifest["target"]["fingerprint"]) == 16
    assert len(manifest["tokenizer"]) == len(manifest["chat_template"]) == 16
    assert manifest["settings"]["seed"] == 3 and manifest["settings"]["temperatures"] == [0.0, 1.0]
    assert manifest["versions"]["selfdraft"] == selfdraft.__version__ and manifest["shards"] == [3, 3]
    schema = parquet.read_schema(tmp_path / "out" / "train-00000.parquet")
    assert schema.names == ["messages", "prompt_ids", "response_ids", "temperature", "source", "finish"]
    assert str(schema.field("response_ids").type) == "list<element: uint16>"


def test_an_answer_is_what_generate_gives_for_its_seed_and_number(target):
    """Alone, in one piece: neither the other rows of a batch nor the stages show in float32."""
    model, tokenizer = target
    rows, _ = conversations(interviewer(target, [Script([f"w{i} w{i + 1}"]) for i in range(10, 30)], seed=5), 20)
    assert len(rows) > 12
    for row in rows:
        index = int(row["messages"][0]["content"].split()[0][1:]) - 10
        ids = tokenizer(f"<user> w{10 + index} w{11 + index} <end> <assistant>", return_tensors="pt")["input_ids"]
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0} if index % 2 else {}
        seed = seed_of(5, index, 0, "answer")
        alone = selfdraft.generate(model, ids, max_new_tokens=12, seed=seed, pad_token_id=0, **sampled)
        assert row["response_ids"] == alone[0, ids.shape[1] :].tolist()


def test_rows_of_messages_turns_and_prompts_give_the_same_conversations(tmp_path):
    other = {"role": "assistant", "content": "not the target's"}
    users = [{"role": "user", "content": "w1"}, other, {"role": "user", "content": "w2"}]
    kinds = {"messages": users, "turns": ["w1", "w2"], "prompt": "w1"}
    read = {}
    for name, value in kinds.items():
        read[name] = interview.read_scripts(write_prompts(tmp_path / f"{name}.jsonl", [{name: value}] * 2), "train")
    assert read["messages"] == read["turns"] == [Script(["w1", "w2"])] * 2
    assert read["prompt"] == [Script(["w1"])] * 2


def test_system_messages_and_tools_of_a_row_reach_the_template(home, tmp_path):
    system, user = {"role": "system", "content": "w8"}, {"role": "user", "content": "w9"}
    called = [user, {"role": "assistant", "content": "w4"}, {"role": "tool", "content": "w5"}, user]
    rows = [
        {"messages": [system, user], "tools": [{"name": "w6", "strict": None}]},
        {"messages": called, "tools": []},
    ]
    file = write_prompts(tmp_path / "asked.jsonl", rows)
    assert interview.read_scripts(file, "train") == [Script(["w9"], "w8", [{"name": "w6"}]), Script(["w9"])]
    assert run(home, tmp_path / "out", "--prompts", file, "--system", "w11", "--temperatures", "1") == 0
    tokenizer = AutoTokenizer.from_pretrained(home)
    assert [tokenizer.decode(row["prompt_ids"]) for row in rows_of(tmp_path / "out")] == [
        "<tools> w6 <end> <system> w8 <end> <user> w9 <end> <assistant>",
        "<system> w11 <end> <user> w9 <end> <assistant>",
    ]
    assert {row["source"] for row in rows_of(tmp_path / "out")} == {"asked"}


def test_tools_may_be_written_as_json(tmp_path):
    file = write_prompts(tmp_path / "asked.jsonl", [{"prompt": "w1", "tools": '[{"name": "w6"}]'}])
    assert interview.read_scripts(file, "train") == [Script(["w1"], None, [{"name": "w6"}])]


def test_further_turns_are_written_by_the_target_after_its_own_answers(target):
    """The script's second turn where it has one; each answer is a row, with all that was said before it."""
    scripts = [Script([f"w{i}", "w99"][: 1 + i // 2 % 2]) for i in range(10, 40)]
    lead = interviewer(target, scripts, turns=2)
    lead.end_ids |= set(range(60, 75))  # so that most answers are not cut
    rows, counts = conversations(lead, 30)
    first = {row["messages"][0]["content"]: row for row in rows if len(row["messages"]) == 2}
    second = [row for row in rows if len(row["messages"]) == 4]
    assert len(first) > 15 and 5 < len(second) < len(first) and counts["answers"] == len(rows)
    written = []
    for row in second:
        word, history = row["messages"][0]["content"], row["messages"][:2]
        assert history == first[word]["messages"] and first[word]["finish"] == "stop"
        said = row["messages"][2]["content"]
        if int(word[1:]) // 2 % 2:
            assert said == "w99"
        else:
            written.append(said)
        expected = f"<user> {word} <end> <assistant> {history[1]['content']} <end> <user> {said} <end> <assistant>"
        assert target[1].decode(row["prompt_ids"]) == expected
    assert len(set(written)) > 1
    ended = [row for row in first.values() if row["finish"] == "stop"]
    left_out = counts["unfinished_user_turns"] + counts["empty_answers"] + len(first) - 30
    assert len(second) + left_out == len(ended)
    assert [row["messages"][0] for row in rows] == sorted(
        (row["messages"][0] for row in rows), key=lambda message: int(message["content"][1:])
    )


def test_a_users_turn_may_end_with_plain_text(target, tmp_path):
    """As in templates that know no marker for it: here the two words `w50 w51`, of which neither is an end token."""
    template = TEMPLATE.replace(" <end> ", " w50 w51 ")
    lead = interviewer((target[0], AutoTokenizer.from_pretrained(save_target(tmp_path, chat_template=template))))
    ids, marker, ends = lead.opening(lead.begin(0))
    assert (lead.tokenizer.decode(ids), marker, ends) == ("<user>", "w50 w51", set())
    said = Text([], 0, 1.0, 9, [1, 2, 50, 51, 4], "length")
    assert lead.words(said, marker, lead.end_ids) == "w1 w2"
    said = Text([], 0, 1.0, 9, [1, 2, 50, 52], "length")
    assert lead.words(said, marker, lead.end_ids) == ""


def test_the_users_turn_ends_at_the_templates_marker_and_holds_no_other(target):
    lead = interviewer(target)
    ids, marker, ends = lead.opening(lead.begin(0))
    assert (lead.tokenizer.decode(ids), marker, ends) == ("<user>", "<end>", {END})
    assert lead.words(Text([], 0, 1.0, 9, [1, 2, END], "stop"), marker, ends) == "w1 w2"
    assert lead.words(Text([], 0, 1.0, 9, [1, END - 1, END], "stop"), marker, ends) == ""


# --- What is left out -------------------------------------------------------------------------------------------------


def test_prompts_that_come_again_are_answered_once(target):
    scripts = [Script([word]) for word in ["w1", "w2", "w1", "w3", "w2"]]
    lead = interviewer(target, scripts)
    lead.end_ids = set()  # so that no answer is empty
    rows, counts = conversations(lead, 5)
    assert [row["messages"][0]["content"] for row in rows] == ["w1", "w2", "w3"] and counts["same_prompts"] == 2
    seen = Seen()
    seen.add(rows[1])
    rows, counts = conversations(lead, 5, seen)
    assert [row["messages"][0]["content"] for row in rows] == ["w1", "w3"] and counts["same_prompts"] == 3


def test_the_same_answer_to_the_same_words_is_kept_once(target, monkeypatch):
    """Under two system messages the prompts differ."""

    def always_the_same(self, texts, **options):
        for text in texts:
            text.new, text.finish = [5, END], "stop"

    scripts = [Script(["w1"], "w8"), Script(["w1"], "w9"), Script(["w2"], "w9")]
    lead = interviewer(target, scripts)
    monkeypatch.setattr(lead, "write", always_the_same.__get__(lead))
    rows, counts = conversations(lead, 3)
    assert [row["messages"][0]["content"] + row["messages"][1]["content"] for row in rows] == ["w8w1", "w9w2"]
    assert counts["same_answers"] == 1


def test_long_prompts_and_empty_answers_are_left_out_and_counted(target, monkeypatch):
    def silent(self, texts, **options):
        for text in texts:
            text.new, text.finish = [END], "stop"

    scripts = [Script(["w1 " * 20]), Script(["w2"])]
    lead = interviewer(target, scripts, longest_prompt=20)
    rows, counts = conversations(lead, 2)
    assert [row["messages"][0]["content"] for row in rows] == ["w2"] and counts["too_long_prompts"] == 1
    monkeypatch.setattr(lead, "write", silent.__get__(lead))
    rows, counts = conversations(lead, 2)
    assert rows == [] and counts["empty_answers"] == 1


def test_a_corpus_without_an_answer_is_an_error(home, tmp_path, capsys):
    file = write_prompts(tmp_path / "asked.jsonl", [{"prompt": "w1 " * 300}])
    assert run(home, tmp_path / "out", "--prompts", file) == 2
    err = capsys.readouterr().err
    assert "1 prompts that were too long" in err and "holds no answer" in err


# --- Stopped and continued --------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def uninterrupted(home, tmp_path_factory) -> list[dict]:
    return corpus(home, tmp_path_factory.mktemp("whole") / "out", "--turns", "2")


@pytest.mark.parametrize(
    ("place", "shard"),
    [("before the file", 0), ("in the file", 1), ("before the rename", 2), ("before distill.json", 1)],
)
def test_a_killed_run_continues_to_the_same_rows(home, tmp_path, uninterrupted, monkeypatch, place, shard):
    output, name = tmp_path / "out", f"train-{shard:05d}.parquet"
    plain = Path.rename, parquet.write_table, distill.save_json

    def rename(path, new):
        if new.name == name and place == "before the rename":
            raise Killed
        return plain[0](path, new)

    def write_table(table, path):
        if place in ("before the file", "in the file") and name in path.name:
            if place == "in the file":
                path.write_bytes(b"PAR1 half of a f")
            raise Killed
        plain[1](table, path)

    def save_json(file, value):
        if place == "before distill.json" and value["shards"][0] == shard + 1:
            raise Killed
        plain[2](file, value)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", rename)
        broken.setattr(parquet, "write_table", write_table)
        broken.setattr(distill, "save_json", save_json)
        with pytest.raises(Killed):
            corpus(home, output, "--turns", "2")
    whole = shard + (place == "before distill.json")
    assert len(list(output.glob("train-*.parquet"))) == whole < 4
    assert corpus(home, output, "--turns", "2") == uninterrupted
    assert not list(output.glob(".*"))
    counts = manifest_of(output)["counts"]
    assert counts["answers"] == len(uninterrupted) and counts["conversations"] == 20


def test_a_finished_run_writes_nothing_more(home, tmp_path, uninterrupted, monkeypatch):
    assert corpus(home, tmp_path / "out", "--turns", "2") == uninterrupted
    monkeypatch.setattr(Interviewer, "conversations", lambda *_: pytest.fail("an answer was asked for"))
    assert corpus(home, tmp_path / "out", "--turns", "2") == uninterrupted


def test_another_seed_gives_other_rows(home, tmp_path, uninterrupted):
    other = corpus(home, tmp_path / "out", "--turns", "2", "--seed", "1")
    shared = [row for row in other if row["prompt_ids"] in [each["prompt_ids"] for each in uninterrupted]]
    assert len(shared) < len(other) / 4


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--seed", "1"], "seed was 0 and is now 1"),
        (["--temperatures", "0", "0.5"], "temperatures was [0.0, 1.0] and is now [0.0, 0.5]"),
        (["--max-new-tokens", "9"], "max_new_tokens was 8 and is now 9"),
        (["--system", "w1"], "system was None and is now 'w1'"),
        (["--count", "21"], "count was 20 and is now 21"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_by_name(home, tmp_path, capsys, options, difference):
    rows = corpus(home, tmp_path / "out")
    capsys.readouterr()
    assert run(home, tmp_path / "out", "--count", "20", *options) == 2
    assert difference in capsys.readouterr().err
    assert rows_of(tmp_path / "out") == rows


def test_another_target_template_or_file_of_prompts_is_refused(home, tmp_path, capsys):
    file = write_prompts(tmp_path / "asked.jsonl", [{"prompt": "w1"}])
    assert run(home, tmp_path / "out", "--prompts", file) == 0
    other = save_target(tmp_path / "other", chat_template=TEMPLATE.replace("<tools> ", "<tools>  "))
    assert run(other, tmp_path / "out", "--prompts", file) == 2
    assert "chat_template was '" in capsys.readouterr().err
    write_prompts(tmp_path / "asked.jsonl", [{"prompt": "w2"}])
    assert run(home, tmp_path / "out", "--prompts", file) == 2
    assert "holds another corpus (prompts was '" in capsys.readouterr().err


def test_files_of_somebody_else_are_left_alone(home, tmp_path, capsys):
    (tmp_path / "train-00000.parquet").write_bytes(b"precious")
    assert run(home, tmp_path, "--count", "4") == 2
    assert "are not ours" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000.parquet"]


# --- Many texts at once -----------------------------------------------------------------------------------------------


def some_texts() -> list[Text]:
    prompts = [list(range(60, 63 + 5 * (i % 4))) + [i] for i in range(11)]
    return [Text(prompt, seed_of(i), [0.0, 1.0][i % 2], 20 + i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_batches_stages_and_drafters_do_not_change_a_text(target, monkeypatch, drafter):
    whole = some_texts()
    for text in whole:
        write(target[0], [text], ENDS, batch_size=1)
    monkeypatch.setattr(texts, "STAGE", 7)
    ours = some_texts()
    drafts = None if drafter is None else selfdraft.load_drafter(drafter, target[0])
    write(target[0], ours, ENDS, batch_size=4, drafter=drafts)
    assert ours == whole
    assert {text.finish for text in ours} == {"stop", "length"}
    assert all(len(text.new) == text.limit for text in ours if text.finish == "length")


def test_texts_that_have_ended_leave_and_the_others_share_full_batches_of_similar_length(target, monkeypatch):
    monkeypatch.setattr(texts, "STAGE", 8)
    many = [Text([index % 50, 60, 61], seed_of(index), 1.0, 64) for index in range(40)]
    batches: list[list[int]] = []
    steps = []

    def show(batch, count):
        batches.append([text.length for text in batch])
        steps.append(count)

    write(target[0], many, ENDS, batch_size=8, show=show)
    lengths = [len(text.new) for text in many]
    assert sum(steps) == sum(lengths) and all(text.finish for text in many)
    stages = [sum(length > start for length in lengths) for start in range(0, 64, 8)]
    assert stages[0] == 40 > stages[-1] > 0
    assert len(batches) == sum(-(-unfinished // 8) for unfinished in stages)
    short, long = [Text([1] * 3, 0, 0.0, 4) for _ in range(3)], [Text([1] * 30, 0, 0.0, 4) for _ in range(3)]
    batches.clear()
    write(target[0], [text for pair in zip(short, long, strict=True) for text in pair], [], batch_size=3, show=show)
    assert batches == [[7] * 3, [34] * 3]


# --- What the user has to change --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say how many conversations, by --count"),
        (["--prompts", "nothing.jsonl"], "no data file at 'nothing.jsonl'"),
        (["--count", "4", "--drafter", "ngramm"], 'did you mean "ngram"?'),
        (["--count", "4", "--max-prompt-tokens", "505"], "does not fit into the 512 positions"),
    ],
)
def test_what_does_not_serve_is_said_before_anything_is_written(home, tmp_path, capsys, options, message):
    assert run(home, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [({"text": "w1"}, "has the columns text; --prompts reads"), ({"prompt": " "}, "row 0 has no user's turn")],
)
def test_rows_without_a_prompt_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        interview.read_scripts(write_prompts(tmp_path / "asked.jsonl", [row]), "train")


def test_a_base_model_answers_plain_text_and_nothing_that_needs_a_template(target, tmp_path):
    model, _ = target
    base = model, AutoTokenizer.from_pretrained(save_target(tmp_path, chat_template=None))
    rows, _ = conversations(interviewer(base, [Script(["w1 w2"])]), 1)
    assert rows[0]["prompt_ids"] == [1, 2]
    for wanted in ({"scripts": None}, {"scripts": [Script(["w1"])], "system": "w2"}, {"scripts": [Script(["w1"])] * 2}):
        wanted |= {"turns": 2} if len(wanted.get("scripts") or ()) == 2 else {}
        with pytest.raises(ValueError, match="has no chat template"):
            interviewer(base, **wanted)


def test_a_template_that_hides_the_user_cannot_write_prompts(target, tmp_path):
    hidden = save_target(tmp_path, chat_template="<user> {{ messages[-1]['content'] | upper }} <end> <assistant>")
    with pytest.raises(ValueError, match="does not show the user's words"):
        interviewer((target[0], AutoTokenizer.from_pretrained(hidden)))


def test_ctrl_c_keeps_the_shards_that_are_whole(home, tmp_path, capsys, monkeypatch):
    plain = Interviewer.conversations

    def interrupted(self, indices, *others):
        if indices.start > 0:
            raise KeyboardInterrupt
        return plain(self, indices, *others)

    monkeypatch.setattr(Interviewer, "conversations", interrupted)
    assert run(home, tmp_path / "out", "--count", "20") == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "selfdraft: stopped by Ctrl-C"
    assert [path.name for path in (tmp_path / "out").glob("*.parquet")] == ["train-00000.parquet"]


# --- Training ---------------------------------------------------------------------------------------------------------


def test_a_drafter_trains_on_the_corpus_as_it_is(home, tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "train"))
    import heads
    from accelerate.state import AcceleratorState

    monkeypatch.chdir(ROOT)
    corpus(home, tmp_path / "answers")
    AcceleratorState._reset_state(True)
    data = ["--data.train", str(tmp_path / "answers" / "train-*.parquet")]
    data += ["--data.validation", str(tmp_path / "answers" / "train-00000.parquet")]
    options = ["--target", str(home), "--output_dir", str(tmp_path / "run"), "--threads", "1"]
    heads.main(["--config", "configs/tiny_medusa.yaml", *data, *options])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 20 and losses[-1] < losses[0]
    assert [line["tokens_per_round"] >= 1 for line in lines if "tokens_per_round" in line] == [True, True]
    AcceleratorState._reset_state(True)

"""What is trained on: masks by template diff, counts of what is left out, clear errors, the order of the batches."""

import copy
import json
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "train"))
import data  # noqa: E402

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Says all that is known of who speaks.
SIGNED = CHATML.replace("}}\n{{", "}}{{ message['by'] | tojson if message['by'] is defined else '' }}\n{{")
# Drops the reasoning of earlier turns, as several reasoning models do.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONLY_ANSWERS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye 👋"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the two markers of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def trained_text(messages: list[dict], tokenizer) -> str:
    tokens, trained = data.chat_tokens(messages, tokenizer, {tokenizer.eos_token_id})
    return tokenizer.decode(tokens[trained])


def write_rows(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair(prompt: int, response: int) -> dict:
    return {"prompt_ids": list(range(1, prompt + 1)), "response_ids": list(range(50, 50 + response))}


def test_every_answer_and_its_end_marker_are_trained_and_nothing_else(tokenizer):
    assert trained_text(CHAT, tokenizer) == "hello you<|im_end|>bye 👋<|im_end|>"


def test_the_ids_are_those_of_the_rendered_chat(tokenizer):
    tokens, _ = data.chat_tokens(CHAT, tokenizer, {tokenizer.eos_token_id})
    assert tokens.tolist() == tokenizer.apply_chat_template(CHAT, return_dict=False)


def test_the_mask_starts_where_the_generation_prompt_ends(tokenizer):
    tokens, trained = data.chat_tokens(CHAT[:2], tokenizer, {tokenizer.eos_token_id})
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert tokens[: trained.argmax()].tolist() == prompt


def test_a_text_that_begins_with_the_templates_own_bos_has_one(tokenizer, monkeypatch):
    """As with llama: the template writes it, and so does the tokenizer when it is asked for a plain text."""
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    again = copy.deepcopy(tokenizer)
    again.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert again("hi")["input_ids"][0] == start
    tokens, trained = data.chat_tokens(CHAT, again, {again.eos_token_id})
    expected, mask = data.chat_tokens(CHAT, tokenizer, {tokenizer.eos_token_id})
    assert tokens.tolist() == expected.tolist() and trained.tolist() == mask.tolist()
    assert tokens[:2].tolist().count(start) == 1


def test_tools_and_turns_reach_the_template_as_they_were_written(tmp_path, tokenizer, monkeypatch):
    """In parquet the dictionaries of a column have each other's keys, with nothing in them."""
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools | tojson if tools else '' }}" + SIGNED)
    me, you = {"by": {"name": "me"}}, {"by": {"name": "you", "age": 7}}
    rows = [
        {"messages": [CHAT[0] | me, *CHAT[1:]], "tools": [{"name": "clock", "zone": "UTC"}]},
        {"messages": [CHAT[0] | you, *CHAT[1:]], "tools": [{"name": "dice", "sides": 6}]},
        {"messages": CHAT, "tools": None},
    ]
    ends = {tokenizer.eos_token_id}
    read = data.read_conversations(write_rows(tmp_path / "a.parquet", rows), 512, 300, tokenizer, ends)
    for tokens, trained, row in zip(read.tokens, read.trained, rows, strict=True):
        assert tokens.tolist() == tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False)
        assert tokenizer.decode(tokens[trained]) == "hello you<|im_end|>bye 👋<|im_end|>"
    as_text = [rows[0] | {"tools": json.dumps(rows[0]["tools"])}]
    again = data.read_conversations(write_rows(tmp_path / "b.jsonl", as_text), 512, 300, tokenizer, ends)
    assert again.tokens[0].tolist() == read.tokens[0].tolist()


def test_an_answer_to_nobody_and_one_without_words_are_not_trained(tokenizer):
    greeting = {"role": "assistant", "content": "welcome"}
    call = {"role": "assistant", "tool_calls": [{"name": "clock"}]}
    assert trained_text([greeting, *CHAT[:2]], tokenizer) == "hello you<|im_end|>"
    assert trained_text([{"role": "system", "content": "be brief"}, *CHAT[:2]], tokenizer) == "hello you<|im_end|>"
    render = tokenizer.chat_template.replace("message['content']", "message['content'] or ''")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = render
    assert trained_text([CHAT[0], call, *CHAT[2:]], tokenizer) == "bye 👋<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_ids": None, "response_ids": [4]}, "row 1: prompt_ids is None, and has to be a list of token ids"),
        ({"prompt_ids": [3], "response_ids": None}, "row 1: response_ids is None"),
        ({"prompt_ids": [3], "response_ids": [4, None]}, "row 1: response_ids is"),
        ({"prompt_ids": [3.5], "response_ids": [4]}, r"row \d: prompt_ids is \[.*and has to be a list of token ids"),
        ({"prompt_ids": [-3], "response_ids": [4]}, "holds the token id -3"),
    ],
)
def test_ids_that_are_none_are_refused_with_their_row(tmp_path, row, message):
    file = write_rows(tmp_path / "rows.jsonl", [pair(3, 2), row])
    with pytest.raises(ValueError, match=message):
        data.read_conversations(file, 64, 128)


@pytest.mark.parametrize(
    "ids", [{"prompt_ids": ["3"], "response_ids": ["4"]}, {"prompt_ids": "a", "response_ids": "b"}]
)
def test_text_and_nested_lists_are_no_ids(tmp_path, ids):
    for value in (ids, {"prompt_ids": [[3, 4]], "response_ids": [[5, 6]]}):
        with pytest.raises(ValueError, match="row 0: prompt_ids is .*has to be a list of token ids"):
            data.read_conversations(write_rows(tmp_path / "rows.jsonl", [value]), 64, 128)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "row 1: messages is None, and has to be a list of turns"),
        ([], r"row 1: messages is \[\]"),
        ([{"content": "hi"}], "row 1: messages is .*a list of turns with role and content"),
        ([{"role": "tool", "content": "5"}], "row 1: the target's chat template refuses the conversation: no tools"),
    ],
)
def test_chats_that_cannot_be_rendered_are_refused_with_their_row(tmp_path, tokenizer, monkeypatch, messages, message):
    refusing = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}, {"messages": messages}])
    with pytest.raises(ValueError, match=message):
        data.read_conversations(file, 64, 300, tokenizer)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"prompt_ids": [1, 2], "resp'),
        ("b.jsonl", b""),
        ("c.jsonl", b"hello\n"),
        ("d.parquet", b"PAR1 no"),
    ],
)
def test_a_file_that_does_not_parse_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} cannot be read as rows: ."):
        data.read_conversations(str(tmp_path / name), 64, 128)


def test_where_all_is_an_answer_the_first_token_is_the_prompt(tmp_path):
    read = data.read_conversations(write_rows(tmp_path / "rows.jsonl", [pair(0, 5)]), 64, 128)
    assert read.prompt(0).tolist() == [50]


def test_an_empty_answer_is_not_trained(tokenizer):
    silent = [CHAT[0], {"role": "assistant", "content": ""}]
    assert trained_text(silent, tokenizer) == ""
    assert trained_text([*silent, *CHAT], tokenizer) == "hello you<|im_end|>bye 👋<|im_end|>"


def test_a_turn_that_the_template_rewrites_later_is_not_trained(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", FORGETFUL)
    thoughtful = [CHAT[0], {"role": "assistant", "content": "hm</think>hello"}, *CHAT[2:]]
    assert trained_text(thoughtful[:2], tokenizer) == "hm</think>hello<|im_end|>"
    assert trained_text(thoughtful, tokenizer) == "bye 👋<|im_end|>"


def test_a_template_without_user_turns_is_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", ONLY_ANSWERS)
    with pytest.raises(ValueError, match="its user turns included.*\nhello you"):
        data.chat_tokens(CHAT[:2], tokenizer, {tokenizer.eos_token_id})


def test_real_template_agrees_with_the_ids_that_the_target_saw(smollm2):
    """A rendered chat must be the prompt that the target is given, followed by what it is trained to say."""
    model, tokenizer = smollm2
    tokens, trained = data.chat_tokens(CHAT[:2], tokenizer, {model.generation_config.eos_token_id})
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    answer = tokenizer("hello you<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokens[~trained].tolist()[: len(prompt)] == prompt
    assert tokens[trained].tolist() == answer
    assert tokenizer.decode(tokens[~trained][len(prompt) :]) == "\n"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_ids_are_taken_as_they_are_and_win_over_messages(tmp_path, name):
    file = write_rows(tmp_path / name, [pair(3, 2) | {"messages": CHAT}])
    read = data.read_conversations(file, max_length=64, vocab_size=128)
    assert read.tokens[0].tolist() == [1, 2, 3, 50, 51]
    assert read.trained[0].tolist() == [False, False, False, True, True]
    assert read.prompt(0).tolist() == [1, 2, 3]
    assert read.answer_counts(128).nonzero().flatten().tolist() == [50, 51]


def test_what_is_skipped_or_cut_is_counted(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [pair(3, 2), pair(3, 0), pair(20, 5), pair(3, 20)])
    read = data.read_conversations(file, max_length=16, vocab_size=128)
    assert [len(tokens) for tokens in read.tokens] == [5, 16]
    assert (read.skipped, read.truncated) == (2, 2)


def test_nothing_trained_is_an_error_that_shows_a_conversation(tmp_path, tokenizer):
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "only a question"}]}] * 3)
    with pytest.raises(ValueError, match="none of the 3 conversations(.|\n)*only a question"):
        data.read_conversations(file, max_length=64, vocab_size=300, tokenizer=tokenizer)


def test_no_template_no_columns_and_a_foreign_vocabulary_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        data.read_conversations(write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}]), max_length=64, vocab_size=300)
    with pytest.raises(ValueError, match="has the columns text; training reads 'messages'"):
        data.read_conversations(write_rows(tmp_path / "b.jsonl", [{"text": "hi"}]), max_length=64, vocab_size=300)
    with pytest.raises(ValueError, match="ids up to 51, but the target's vocabulary has 40"):
        data.read_conversations(write_rows(tmp_path / "c.jsonl", [pair(3, 2)]), max_length=64, vocab_size=40)


def test_a_missing_file_is_named_with_the_option_that_asked_for_it():
    with pytest.raises(ValueError, match="set the path with --data.validation"):
        data.read_conversations("nowhere.jsonl", 64, 128, split="validation")


@pytest.mark.parametrize("missing", ["nowhere/train-*.parquet", "nowhere.jsonl"])
def test_a_missing_file_is_named(missing):
    with pytest.raises(ValueError, match=f"no data file at '{missing}'".replace("*", r"\*")):
        data.open_rows(missing)


def test_a_glob_a_folder_and_a_list_mean_their_files(tmp_path):
    files = [write_rows(tmp_path / f"part-{number}.jsonl", [pair(number, 2)]) for number in (1, 2)]
    for source in (str(tmp_path / "part-*.jsonl"), str(tmp_path), files):
        assert [len(tokens) for tokens in data.read_conversations(source, 64, 128).tokens] == [3, 4]


lengths_of_conversations = st.lists(st.integers(2, 300), min_size=1, max_size=120).map(np.array)


@settings(max_examples=60, deadline=None)
@given(lengths_of_conversations, st.integers(16, 2000), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_visits_every_conversation_once_in_steps_of_about_the_asked_size(lengths, step_tokens, seed, epoch):
    steps = data.plan_epoch(lengths, step_tokens, seed, epoch)
    assert sorted(np.concatenate(steps)) == list(range(len(lengths)))
    assert all(lengths[step].sum() <= 1.5 * step_tokens + lengths.max() for step in steps)
    again = data.plan_epoch(lengths, step_tokens, seed, epoch)
    assert all((ours == reference).all() for ours, reference in zip(steps, again, strict=True))


def test_epochs_and_seeds_differ():
    lengths = np.arange(2, 202)  # 200! orders: equal ones would be no accident
    first, *others = (np.concatenate(data.plan_epoch(lengths, 512, *key)) for key in ((0, 0), (0, 1), (1, 0)))
    assert all((first != other).any() for other in others)


def test_conversations_of_a_step_are_of_similar_length():
    lengths = np.random.default_rng(0).integers(10, 500, size=5000)
    steps = data.plan_epoch(lengths, 4096, 0, 0)
    padded = sum(lengths[step].max() * len(step) for step in steps)
    assert padded < 1.05 * lengths.sum()


@settings(max_examples=60, deadline=None)
@given(lengths_of_conversations, st.integers(1, 2000), st.integers(1, 3))
def test_a_step_is_shared_out_whole_and_within_the_budget(lengths, forward_tokens, processes):
    shares = data.share_step(np.arange(len(lengths)), lengths, forward_tokens, processes)
    batches = [batch for share in shares for batch in share]
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1
    assert all(len(b) <= 1 or lengths[b].max() * len(b) <= forward_tokens for b in batches)


def test_padding_stands_on_the_right_and_is_marked(tmp_path):
    read = data.read_conversations(write_rows(tmp_path / "rows.jsonl", [pair(1, 1), pair(2, 2)]), 64, 128)
    tokens, trained, attention = data.collate(read, np.array([0, 1]))
    assert tokens.tolist() == [[1, 50, 0, 0], [1, 2, 50, 51]]
    assert trained.tolist() == [[False, True, False, False], [False, False, True, True]]
    assert attention.tolist() == [[True, True, False, False], [True] * 4]


def test_a_process_without_work_gets_untrained_tokens(tmp_path):
    read = data.read_conversations(write_rows(tmp_path / "rows.jsonl", [pair(1, 1)]), 64, 128)
    tokens, trained, attention = data.collate(read, np.array([], dtype=np.int64))
    assert tokens.shape == (1, 2) and not trained.any() and attention.all()

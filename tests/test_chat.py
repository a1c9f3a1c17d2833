"""`selfdraft generate` as a user meets it: a stream of whole characters, who said which token, a pipe, a chat."""

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import selfdraft
from selfdraft import chat, cli, compare, embedded
from selfdraft.chat import Answer, Conversation
from selfdraft.drafters.medusa import Medusa, MedusaConfig
from selfdraft.planner import Plan
from selfdraft.target import Target
from tests.models import tiny
from tests.scripted import Script

VOCAB = 300
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
EMOJI = "Sea 🌊🐙, 👩‍🚀 and 你好,\n\tnaïve."


def byte_level() -> PreTrainedTokenizerFast:
    """A token per byte, as GPT-2's tokenizer has it before any merge: an emoji is four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<pad>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As in Llama 2: a token per letter, "▁" for a space (one in front is not said), bytes for other letters."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij,"]
    tokens = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def streamed(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> list[str]:
    pieces: list[str] = []
    answer = Answer([], tokenizer, lambda text, drafted: pieces.append(text))
    answer.put(torch.tensor([[5, 6, 7]]))  # the prompt, which is not repeated
    for token in tokens:
        answer.put(torch.tensor([token]))
    answer.end()
    assert answer.text == "".join(pieces) and answer.tokens == tokens
    return pieces


# --- The stream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.sampled_from("aj ,\n🌊👩‍🚀你é")))
def test_the_stream_is_the_full_decode_in_pieces_of_whole_characters(name, text):
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer(text)["input_ids"]
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in piece or piece == "" for piece in pieces)


@given(tokens=st.lists(st.integers(0, 257)))
def test_bytes_that_are_no_text_and_special_tokens_are_streamed_as_they_are_decoded(tokens):
    """Ids 256 and 257 are special, and are not said."""
    expected = TOKENIZERS["byte_level"].decode(tokens, skip_special_tokens=True)
    assert "".join(streamed(TOKENIZERS["byte_level"], tokens)) == expected


def test_every_character_comes_with_its_last_token():
    pieces = streamed(byte_level(), byte_level()(EMOJI)["input_ids"])
    assert pieces == list(EMOJI)
    halves = byte_level()("🌊🐙")["input_ids"][:-1]
    assert streamed(byte_level(), halves) == ["🌊", "\ufffd"]


def test_who_said_which_token_is_told_with_the_text():
    """A drafter that is right for 2, 0 and 3 tokens in turn; each round ends with a token of the target's own."""
    model, tokenizer = tiny("llama", vocab=VOCAB), byte_level()
    text = selfdraft.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=40, do_sample=False)[0].tolist()
    said: list[tuple[str, bool]] = []
    answer = Answer([1, 2, 3], tokenizer, lambda text, drafted: said.append((text, drafted)))
    script = Script([text], [2, 0, 3], VOCAB, Plan(depth=5))
    answer.stream(model, drafter=script, max_new_tokens=19, do_sample=False)
    own, draft = False, True
    assert answer.drafted == [own, *[draft, draft, own, own, draft, draft, draft, own] * 2, draft, own]
    assert answer.tokens == text[3:22]
    assert answer.tokens_per_round == pytest.approx(answer.stats.tokens_per_round)
    assert "".join(text for text, _ in said) == answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert {drafted for _, drafted in said} == {own, draft}
    cut = Answer([1, 2, 3], tokenizer, lambda *_: None)
    cut.stream(model, drafter=script, max_new_tokens=19, do_sample=False, eos_token_id=text[5])
    assert cut.drafted == [own, draft, draft]
    assert cut.tokens_per_round == cut.stats.tokens_per_round == 2


def test_a_character_counts_as_drafted_when_all_of_its_tokens_were():
    said: list[tuple[str, bool]] = []
    answer = Answer([], byte_level(), lambda *piece: said.append(piece))
    for number, token in enumerate(byte_level()("🌊🐙")["input_ids"]):
        (answer.put if number == 2 else answer.put_drafted)(torch.tensor([token]))
    assert said == [("🌊", False), ("🐙", True)]


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A chat model, the same without a chat template, and a drafter for another model."""
    home = tmp_path_factory.mktemp("home")
    for name, template in (("model", TEMPLATE), ("base", None)):
        tokenizer = byte_level()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(home / name)
        tiny("llama", vocab=VOCAB).save_pretrained(home / name)
    selfdraft.save_drafter(Medusa(MedusaConfig(heads=2), Target(tiny("qwen2"))), home / "foreign")
    return home


def run(home: Path, *options: str, model: str = "model", tokens: int = 24) -> int:
    common = ["--model", str(home / model), "--dtype", "float32", "--max-new-tokens", str(tokens)]
    return cli.main(["generate", *common, *options])


def expected(prompt: str, tokens: int = 24, **options) -> list[int]:
    """The new tokens of transformers' own generate."""
    ids = torch.tensor([byte_level()(prompt)["input_ids"]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False} | options
    return tiny("llama", vocab=VOCAB).generate(ids, **settings)[0, ids.shape[1] :].tolist()


def decoded(tokens: list[int]) -> str:
    return byte_level().decode(tokens, skip_special_tokens=True)


class Terminal(io.StringIO):
    """A screen that remembers, or a keyboard."""

    def isatty(self) -> bool:
        return True


def typed(monkeypatch, *lines: str | type[BaseException]) -> list[str]:
    """Puts somebody at the keyboard; what is asked of them is remembered."""
    script, prompts = iter(lines), []

    def answer(prompt: str = "") -> str:
        prompts.append(prompt)
        line = next(script)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", answer)
    return prompts


def piped(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_the_answer_is_all_that_goes_to_the_standard_output(home, capsys):
    assert run(home, "--prompt", "Why 🌊?", "--show-drafted") == 0
    out, err = capsys.readouterr()
    assert out == decoded(expected("u:Why 🌊?\na:")) + "\n"
    assert "24 tokens in " in err and "tokens/s, " in err and "tokens per round, drafter ngram" in err
    assert "of 24 tokens (not coloured, because the output is not a terminal)" in err


def test_on_a_terminal_drafted_text_is_coloured_on_request(home, capsys, monkeypatch):
    for options in ([], ["--show-drafted"]):
        monkeypatch.setattr(sys, "stdout", Terminal())
        drafter = str(home / "base")  # the model itself, so every draft is kept
        assert run(home, "--prompt", "Once", "--drafter", drafter, *options, model="base") == 0
        screen = sys.stdout.getvalue()
        assert ("\x1b[32m" in screen) == bool(options)
        assert re.sub(r"\x1b\[\d+m", "", screen) == decoded(expected("Once")) + "\n"
    legend = re.search(
        r"drafted: (\d+) of 24 tokens \(green\); the others are the target's own", capsys.readouterr().err
    )
    assert 12 < int(legend[1]) < 24


def test_json_tells_everything_about_the_answer(home, tmp_path, capsys):
    file = tmp_path / "out.json"
    options = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "5", "--system", "s", "--drafter", "none"]
    assert run(home, "--prompt", "Why?", *options, "--json", str(file)) == 0
    figures = json.loads(file.read_text())
    assert {name: figures[name] for name in ("prompt", "system", "temperature", "top_p", "seed", "drafter")} == {
        "prompt": "Why?",
        "system": "s",
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 5,
        "drafter": "none",
    }
    assert figures["prompt_ids"] == byte_level()("s:s\nu:Why?\na:")["input_ids"]
    assert figures["text"] == decoded(figures["token_ids"]) == capsys.readouterr().out.removesuffix("\n")
    assert figures["drafted"] == [False] * 24
    assert (figures["new_tokens"], figures["rounds"], figures["tokens_per_round"]) == (24, 23, 1.0)
    assert figures["tokens_per_second"] == pytest.approx(24 / figures["seconds"])

    assert run(home, "--prompt", "Why?", *options[:-1], "ngram", "--json", str(file)) == 0
    drafted = json.loads(file.read_text())
    assert drafted["token_ids"] == figures["token_ids"], "a drafter changes nothing but the speed"


def test_a_prompt_comes_through_a_pipe(home, capsys, monkeypatch):
    piped(monkeypatch, "Why\n🌊?\n".encode())
    assert run(home) == 0
    assert capsys.readouterr().out == decoded(expected("u:Why\n🌊?\na:")) + "\n"


def test_a_base_model_goes_on_with_the_plain_text(home, capsys):
    assert run(home, "--prompt", "  Once", model="base") == 0
    assert capsys.readouterr().out == decoded(expected("  Once")) + "\n"


def test_without_a_temperature_the_models_own_generation_config_counts():
    model = tiny("llama", vocab=VOCAB)
    assert "do_sample" not in chat.decoding_options(model, 8, None, None)
    assert chat.decoding_options(model, 8, 0.0, None)["do_sample"] is False
    assert chat.decoding_options(model, 8, 0.7, 0.9)["top_p"] == 0.9


def test_of_several_drafters_the_first_that_fits_drafts(home, capsys):
    assert run(home, "--prompt", "Why?", "--drafter", str(home / "foreign"), "ngram") == 0
    err = capsys.readouterr().err
    assert f"passed over drafter {home / 'foreign'}: this drafter was trained for" in err and "drafter ngram" in err
    assert run(home, "--prompt", "Why?", "--drafter", str(home / "foreign")) == 2
    assert "selfdraft: error: " in capsys.readouterr().err


def test_the_default_model_is_drafted_for_by_the_shipped_eagle3(monkeypatch):
    assert list(chat.wanted_drafters(None, embedded.TARGET_NAME)) == ["eagle3", "ngram"]
    assert list(chat.wanted_drafters(None, "some/model")) == ["ngram"]
    monkeypatch.setattr(compare, "ASSETS", Path("nowhere"))
    assert list(chat.wanted_drafters(None, embedded.TARGET_NAME)) == ["ngram"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "ngramm"], 'did you mean "ngram"?'),
        (["--drafter", "./nothing"], 'there is no drafter "./nothing"'),
        (["--json", "nowhere/out.json"], "no folder nowhere"),
        (["--json", "assets"], "--json assets: this is a folder"),
        (["--model", "./nowhere"], 'cannot load the model "./nowhere"'),
        (["--model", "docs"], 'cannot load the model "docs"'),
        (["--seed", "9" * 20, "--temperature", "1"], "64 bits"),
        (["--max-new-tokens", "600"], "does not fit into the 512 positions"),
        (["--top-p", "0.9"], "--top-p 0.9 is about sampling, and decoding is greedy: add --temperature"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "\udcff"], "the prompt is not UTF-8 text"),
    ],
)
def test_what_the_user_has_to_change_is_said_in_one_line(home, capsys, options, message):
    assert run(home, "--prompt", "Why?", *options) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert last.startswith("selfdraft: error: ") and message in last
    assert "Traceback" not in err and out == ""


def test_a_chat_is_not_written_to_one_json_file(home, tmp_path, capsys, monkeypatch):
    typed(monkeypatch)
    assert run(home, "--json", str(tmp_path / "out.json")) == 2
    assert "--json holds one answer, and this is a chat" in capsys.readouterr().err


def test_help_tells_how_to_begin(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "--help"])
    assert stop.value.code == 0
    assert 'Example: selfdraft generate --prompt "Why is the sky blue?"' in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_pipe_without_text_is_named(home, capsys, monkeypatch, content):
    piped(monkeypatch, content)
    assert run(home) == 2
    assert re.search("the prompt is (empty|not UTF-8 text)", capsys.readouterr().err)


def test_a_system_message_needs_a_chat_template_that_takes_it(home, capsys):
    assert run(home, "--prompt", "Why?", "--system", "s", model="base") == 2
    assert "has no chat template" in capsys.readouterr().err
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    conversation = Conversation(tiny("llama", vocab=VOCAB), tokenizer, None, {"max_new_tokens": 4}, 0, "s")
    with pytest.raises(ValueError, match="chat template .* refuses the conversation: no system role"):
        conversation.ask("Why?", lambda *_: None)


@pytest.mark.parametrize("options", [["--temperature", "-1"], ["--top-p", "1.5"], ["--max-new-tokens", "0"]])
def test_options_are_checked_before_anything_runs(home, options, capsys):
    with pytest.raises(SystemExit) as stop:
        run(home, *options)
    assert stop.value.code == 2
    assert options[0].strip("-") in capsys.readouterr().err


@pytest.fixture
def pipe():
    """Both ends of a pipe: bytes are read, text is written."""
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "w", encoding="utf-8") as writer:
        yield reader, writer


def test_a_pipe_gets_utf8_and_no_colours(home, monkeypatch, pipe):
    reader, writer = pipe
    monkeypatch.setattr(sys, "stdout", writer)
    piped(monkeypatch, EMOJI.encode())
    assert run(home, "--show-drafted", model="base") == 0
    writer.close()
    written = reader.read()
    assert written.decode() == decoded(expected(EMOJI)) + "\n" and b"\x1b" not in written


def test_a_reader_that_leaves_early_is_no_error(home, capsys, monkeypatch, pipe):
    reader, writer = pipe
    monkeypatch.setattr(sys, "stdout", writer)
    reader.close()
    assert run(home, "--prompt", "Why?") == 141
    writer.write("what Python flushes at its exit")
    writer.close()
    assert "error" not in capsys.readouterr().err


# --- The chat ---------------------------------------------------------------------------------------------------------


def test_a_chat_remembers_its_turns_and_ends_with_exit(home, capsys, monkeypatch):
    read: list[str] = []
    ids_of = compare.conversation_ids

    def remembered(tokenizer, messages):
        read.append("|".join(message["content"] for message in messages))
        return ids_of(tokenizer, messages)

    monkeypatch.setattr(chat, "conversation_ids", remembered)
    typed(monkeypatch, "One?", "  ", "Two?", "/exit")
    assert run(home, "--system", "s", tokens=8) == 0
    out, err = capsys.readouterr()
    first = decoded(expected("s:s\nu:One?\na:", tokens=8))
    assert read == ["s|One?", f"s|One?|{first}|Two?"]
    assert out == first + "\n" + decoded(expected(f"s:s\nu:One?\na:{first}\nu:Two?\na:", tokens=8)) + "\n"
    assert err.count("8 tokens in ") == 2 and "Ctrl-C stops an answer" in err


def test_ctrl_d_leaves_a_chat_and_ctrl_c_at_its_prompt_as_well(home, capsys, monkeypatch):
    typed(monkeypatch, EOFError)
    assert run(home) == 0
    typed(monkeypatch, KeyboardInterrupt)
    assert run(home) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "selfdraft: stopped by Ctrl-C"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_prompt_of_a_chat_is_not_among_the_answers(home, capsys, monkeypatch, on_terminal):
    if on_terminal:
        monkeypatch.setattr(sys, "stdout", Terminal())
    prompts = typed(monkeypatch, "/exit")
    assert run(home) == 0
    assert prompts == (["> "] if on_terminal else [""])
    assert ("> " in capsys.readouterr().err) != on_terminal


def interrupted_writer(after: int):
    """Says `after` pieces, and is interrupted by Ctrl-C once."""
    pieces: list[str] = []

    def say(text: str, drafted: bool) -> None:
        pieces.append(text)
        if len(pieces) == after:
            raise KeyboardInterrupt

    return say, pieces


def test_ctrl_c_ends_an_answer_and_not_the_conversation():
    model, tokenizer = tiny("llama", vocab=VOCAB), byte_level()
    tokenizer.chat_template = TEMPLATE
    conversation = Conversation(model, tokenizer, None, {"max_new_tokens": 24, "do_sample": False}, 0)
    say, pieces = interrupted_writer(after=3)
    answer = conversation.ask("One?", say)
    assert answer.stopped and len(answer.tokens) < 24
    assert "".join(pieces) == answer.text == decoded(answer.tokens)
    assert chat.summary(answer, "none").startswith(f"stopped by Ctrl-C: {len(answer.tokens)} tokens in ")
    assert [message["content"] for message in conversation.messages] == ["One?", answer.text]
    after = conversation.ask("Two?", lambda *_: None)
    assert after.tokens == expected(f"u:One?\na:{answer.text}\nu:Two?\na:")


def test_a_question_whose_answer_had_not_begun_is_forgotten(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(selfdraft, "generate", interrupted)
    conversation = Conversation(tiny("llama", vocab=VOCAB), byte_level(), None, {"max_new_tokens": 8}, 0)
    answer = conversation.ask("One?", lambda *_: None)
    assert conversation.messages == []
    assert chat.summary(answer, "none").startswith("stopped by Ctrl-C: 0 tokens in ")


def test_ctrl_c_in_the_only_answer_ends_the_command(home, capsys, monkeypatch):
    say, pieces = interrupted_writer(after=2)
    monkeypatch.setattr(chat, "writer", lambda *_, **__: say)
    assert run(home, "--prompt", "Why?") == 130
    assert pieces[-1] == "\n"
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-2].startswith("stopped by Ctrl-C: ") and lines[-1] == "selfdraft: stopped by Ctrl-C"

"""Answers of a vLLM server: the corpus is the one that the model writes itself, and what does not serve is said."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfdraft import server as serving
from selfdraft.texts import Text, write
from tests.models import VOCAB
from tests.test_distill import ENDS, manifest_of, rows_of, run, save_target

pytestmark = pytest.mark.usefixtures("short_turns")

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
NEUTRAL |= {"frequency_penalty": 0.0, "ignore_eos": True, "return_token_ids": True, "model": "tiny"}


class Vllm(ThreadingHTTPServer):
    """Answers as vLLM's protocol says, with what the model of the tests would write itself."""

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.lock, self.asked = model, threading.Lock(), []
        self.longest, self.dies_after = 512, 10**9
        self.change = lambda choice: choice  # what another server does to an answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def complete(self, body: dict) -> dict:
        assert all(body[key] == value for key, value in NEUTRAL.items()), body
        text = Text(body["prompt"], body["seed"], body["temperature"], body["max_tokens"])
        with self.lock:
            self.asked.append(body)
            write(self.model, [text], body["stop_token_ids"], batch_size=1)
        choice = {"index": 0, "text": "", "token_ids": text.new, "finish_reason": text.finish}
        return {"choices": [self.change(choice)]}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        models = {"object": "list", "data": [{"id": "tiny", "max_model_len": self.server.longest}]}
        self.answer({"/v1/models": models, "/version": {"version": "0.32.0"}}[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(self.server.asked) >= self.server.dies_after:
            self.answer({"error": {"message": "EngineCore encountered an issue"}}, status=500)
        else:
            assert self.path == "/v1/completions"
            self.answer(self.server.complete(body))

    def answer(self, value: dict, status: int = 200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a tiny chat model."""
    return save_target(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def model(home):
    return AutoModelForCausalLM.from_pretrained(home).eval()


@pytest.fixture
def vllm(model):
    server = Vllm(model)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def through(vllm, home, output, *options) -> int:
    return run(home, output, "--count", "20", "--turns", "2", "--engine", "vllm", "--server", vllm.url, *options)


def test_a_server_writes_the_corpus_that_the_model_would_write(home, vllm, tmp_path, capsys):
    """Ids go in and come out, every text has its own seed and temperature, and what a server finishes first does not
    matter."""
    assert run(home, tmp_path / "own", "--count", "20", "--turns", "2") == 0
    assert through(vllm, home, tmp_path / "served") == 0
    assert rows_of(tmp_path / "served") == rows_of(tmp_path / "own") != []
    own, served = manifest_of(tmp_path / "own"), manifest_of(tmp_path / "served")
    assert served["counts"] == own["counts"] and served["target"] == own["target"]
    assert served["versions"] == own["versions"] | {"vllm": "0.32.0"}
    assert served["settings"] == own["settings"] | {"engine": "vllm", "server": vllm.url}
    assert {tuple(body["stop_token_ids"]) for body in vllm.asked[1:]} == {tuple(sorted(ENDS))}
    assert f"by vLLM 0.32.0 at {vllm.url}" in capsys.readouterr().err


def test_as_many_texts_are_asked_for_at_once_as_the_batch_size_says(vllm):
    together, most, lock = 0, 0, threading.Barrier(3)

    def complete(body):
        nonlocal together, most
        with vllm.lock:
            together += 1
            most = max(most, together)
        lock.wait(timeout=20)
        with vllm.lock:
            together -= 1
        return {"choices": [{"token_ids": [5], "finish_reason": "stop"}]}

    vllm.complete = complete
    texts = [Text([1], index, 0.0, 4) for index in range(6)]
    shown = []
    serving.connect(vllm.url).write(texts, [5], requests=3, show=lambda batch, count: shown.append((batch, count)))
    assert most == 3 and [text.finish for text in texts] == ["stop"] * 6
    assert sorted(shown, key=lambda each: each[0][0].seed) == [([text], 1) for text in texts]


def test_a_server_that_dies_loses_one_shard_and_the_same_command_goes_on(home, vllm, tmp_path, capsys):
    assert through(vllm, home, tmp_path / "whole") == 0
    vllm.dies_after = (needed := len(vllm.asked)) + 2 * needed // 3
    assert through(vllm, home, tmp_path / "out") == 2
    assert "status 500" in (said := capsys.readouterr().err) and "EngineCore encountered an issue" in said
    begun = len(rows_of(tmp_path / "out"))
    assert 0 < begun < len(rows_of(tmp_path / "whole"))
    vllm.dies_after, before = 10**9, len(vllm.asked)
    assert through(vllm, home, tmp_path / "out") == 0
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole") and len(vllm.asked) - before < needed


def test_a_server_of_another_model_is_refused(home, vllm, tmp_path, capsys):
    for change in (lambda token: (token + 1) % VOCAB, lambda token: token + VOCAB):
        vllm.change = lambda choice, change=change: choice | {"token_ids": [*map(change, choice["token_ids"])]}
        assert through(vllm, home, tmp_path / "out") == 2
        assert "serves 'tiny', which does not say what" in capsys.readouterr().err
        assert len(vllm.asked) > 0 and not (tmp_path / "out").exists()


def test_a_token_that_rounding_may_prefer_does_not_make_another_model(model, vllm, monkeypatch):
    """The last one is replaced by the runner-up, which is `gap` behind."""
    said = Text([1, 2, 3], 0, 0.0, serving.CHECKED)
    write(model, [said], [], batch_size=1)
    with torch.no_grad():
        (likeliest, second), (_, runner_up) = model(torch.tensor([said.prompt + said.new])).logits[0, -2].topk(2)
    vllm.change = lambda choice: choice | {"token_ids": [*choice["token_ids"][:-1], int(runner_up)]}
    server, gap = serving.connect(vllm.url), float(likeliest - second)
    monkeypatch.setattr(serving, "NEARLY", gap * 1.01)
    server.check(model, said.prompt)
    monkeypatch.setattr(serving, "NEARLY", gap * 0.99)
    with pytest.raises(ValueError, match="does not say what"):
        server.check(model, said.prompt)


def test_a_server_without_token_ids_or_an_answer_that_breaks_off_is_refused(vllm):
    server = serving.connect(vllm.url)
    vllm.change = lambda choice: {"text": choice["text"], "finish_reason": "stop"}
    with pytest.raises(ValueError, match="returns no token ids; vLLM does since 0.10.2"):
        server.write([Text([1, 2], 0, 0.0, 4)], (), requests=1)
    vllm.change = lambda choice: choice | {"token_ids": [1], "finish_reason": "abort"}
    with pytest.raises(ValueError, match="after 1 of 4 tokens, no end token .finish_reason 'abort'."):
        server.write([Text([1, 2], 0, 0.0, 4)], (), requests=1)


def test_an_answer_that_the_server_has_no_more_room_for_is_cut(vllm):
    vllm.change = lambda choice: choice | {"token_ids": [1, 2], "finish_reason": "length"}
    text = Text([1, 2], 0, 0.0, 4)
    serving.connect(vllm.url).write([text], (), requests=1)
    assert (text.new, text.finish) == ([1, 2], "length")


def test_the_engine_may_not_change_within_a_corpus_and_the_server_may(home, vllm, tmp_path, capsys):
    output = tmp_path / "out"
    assert run(home, output, "--count", "20", "--turns", "2") == 0
    assert through(vllm, home, output) == 2
    assert "engine was 'transformers' and is now 'vllm'" in capsys.readouterr().err
    manifest = manifest_of(output)
    del manifest["settings"]["engine"], manifest["settings"]["server"]  # as older versions wrote it
    (output / "distill.json").write_text(json.dumps(manifest))
    assert run(home, output, "--count", "20", "--turns", "2") == 0
    assert through(vllm, home, tmp_path / "served") == 0
    manifest = manifest_of(tmp_path / "served")
    manifest["settings"]["server"] = "http://elsewhere:8000/v1"
    (tmp_path / "served" / "distill.json").write_text(json.dumps(manifest))
    assert through(vllm, home, tmp_path / "served") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server", "http://127.0.0.1:9/v1"], "is for --engine vllm"),
        (["--engine", "vllm", "--server", "http://127.0.0.1:9/v1"], "no vLLM server answers at http://127.0.0.1:9/v1"),
        (["--engine", "vllm", "--drafter", "ngram"], "leave out --drafter"),
    ],
)
def test_what_does_not_serve_is_said_before_the_model_is_loaded(home, tmp_path, capsys, options, message):
    assert run(home, tmp_path / "out", "--count", "4", *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_server_without_room_for_what_is_asked_is_refused(home, vllm, tmp_path, capsys):
    """208 tokens for prompt and answer, and 192 for a user's turn behind them."""
    vllm.longest = 399
    assert through(vllm, home, tmp_path / "out") == 2
    said = "may become 400 tokens long, and the server at " + vllm.url + " has room for 399"
    assert said in capsys.readouterr().err and not vllm.asked
    vllm.longest = 400
    assert through(vllm, home, tmp_path / "out") == 0
    vllm.longest = 208
    assert through(vllm, home, tmp_path / "one", "--turns", "1") == 0

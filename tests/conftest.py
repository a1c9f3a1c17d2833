"""What every test gets: no network, few threads, a fixed seed, and on request the device and the real target."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfdraft import distill, interview

# The models are tiny: more threads only wait for each other, and with pytest-xdist there is a process for each core.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def trainer(monkeypatch):
    """For trainings in this process: in the repository, whose recipes name files from there; accelerate's state, of
    which a process has one, and the threads are put back."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    yield
    AcceleratorState._reset_state(True)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def short_turns():
    """Of the user, in a corpus that a model makes, and small shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interview, "USER_TOKENS", 12)
        patch.setattr(distill, "BATCHES_PER_SHARD", 1)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def smollm2(device):
    """The default target and its tokenizer: (model, tokenizer), in bf16. Do not change the model."""
    from selfdraft.embedded import embedded_target

    try:
        folder = embedded_target()
    except ValueError as error:
        pytest.skip(str(error))
    return AutoModelForCausalLM.from_pretrained(folder).to(device).eval(), AutoTokenizer.from_pretrained(folder)

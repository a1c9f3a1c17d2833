"""What every test gets: no network, few threads, a fixed seed, and on request the device and the real target."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# The models are tiny: more threads only wait for each other, and with pytest-xdist there is a process for each core.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


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

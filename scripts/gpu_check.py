"""What `scripts/gpu_check` runs: the tests on the GPU, then a short comparison there, then one table.

The comparison takes the embedded target with its shipped drafters, and a llama of the shape of an 8B model with random
weights: nothing useful is accepted there, but where the time of a round goes is real.
"""

import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from selfdraft import compare as measuring
from selfdraft import report
from selfdraft.drafters.base import Drafter
from selfdraft.drafters.eagle import Eagle, EagleConfig
from selfdraft.target import Target

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TEST_SECONDS = 240


def main() -> int:
    started = time.perf_counter()
    tests = run_tests()
    settings = measuring.Settings("smollm2-135m", measuring.SHIPPED_PROMPTS, 6, None, 0.0, 0, 64, "bfloat16", 1)
    model, tokenizer = measuring.load_target(settings.model, settings.dtype)
    drafters = measuring.load_drafters(measuring.drafter_sources(settings, note=print), model)
    prompts = measuring.encode(tokenizer, measuring.read_prompts(settings.prompts, settings.limit), model, 64)
    rows = {"smollm2-135m": timed(model, drafters, prompts, settings)}
    del model, drafters
    model = random_llama("cuda", LLAMA_8B)
    prompts = [torch.randint(3, 1000, (1, 64), device="cuda")] * 2
    rows["random 8B llama"] = timed(model, untrained(model), prompts, settings)
    show(rows, tests, time.perf_counter() - started)
    return 0 if tests == "passed" else 1


def run_tests() -> str:
    """The tests that use a GPU when there is one: those of the decoding loop."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/contract", "tests/test_rounds.py", "-k", "llama"]
    try:
        return "passed" if subprocess.run(command, timeout=TEST_SECONDS).returncode == 0 else "FAILED"
    except subprocess.TimeoutExpired:
        return f"not finished in {TEST_SECONDS} s"


def random_llama(device: str, shape: dict[str, int]) -> PreTrainedModel:
    """A llama of that shape whose weights are made where they stay."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None)).eval()
    finally:
        torch.set_default_dtype(default)


def untrained(model: PreTrainedModel) -> dict[str, Drafter]:
    """An EAGLE-3 drafter of the size that would be trained for the model."""
    target = Target(model)
    drafter = Eagle(EagleConfig(draft_vocab_size=min(32000, target.vocab_size)), target)
    return {"eagle3 (untrained)": drafter.to(target.device, target.dtype).eval()}


def timed(
    model: PreTrainedModel, drafters: dict[str, Drafter], prompts: list[torch.Tensor], settings: measuring.Settings
) -> list[dict]:
    answers = list(measuring.measure(model, drafters, prompts, settings))
    return report.arm_figures(answers, [measuring.Prompt("")] * len(prompts), drafters, {})


def show(rows: dict[str, list[dict]], tests: str, seconds: float) -> None:
    table = Table(title=f"{report.device_name(torch.device('cuda'))}, bf16, torch {torch.__version__}; tests {tests}")
    for heading in (
        "target",
        "arm",
        "tokens/s",
        "speed-up",
        "tokens/round",
        "draft ms",
        "verify ms",
        "other ms",
        "GiB",
    ):
        table.add_column(heading, justify="left" if heading in ("target", "arm") else "right")
    for target, arms in rows.items():
        for arm in arms:
            parts = [arm.get(f"{part}_ms_per_round") for part in ("draft", "verify", "other")]
            memory = arm["peak_memory_bytes"]
            table.add_row(
                target,
                arm["name"],
                f"{arm['tokens_per_second']:.1f}",
                f"{arm['speedup']:.2f}x",
                f"{arm['tokens_per_round']:.2f}",
                *("" if part is None else f"{part:.2f}" for part in parts),
                "" if memory is None else f"{memory / 2**30:.2f}",
            )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(f"{seconds:.0f} seconds in all")


if __name__ == "__main__":
    sys.exit(main())

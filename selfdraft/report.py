"""What `selfdraft compare` says about its runs: one dict of figures, which is the JSON file, and tables made of it."""

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

import selfdraft
from selfdraft.compare import PLAIN, REFERENCE, Answer, Divergence, Prompt, Settings
from selfdraft.doctor import Finding
from selfdraft.drafters.base import Drafter
from selfdraft.metrics import Stats
from selfdraft.planner import Plan
from selfdraft.theory import chain_speedup, expected_tokens_over_rounds, measured_alpha, round_speedup

DEPTHS_SHOWN = 5
LINE_SECONDS = 10  # between two lines of progress where the output is not a terminal
HEADINGS = (
    "tokens/s",
    "speed-up",
    "in total",
    "tokens/round",
    "accepted",
    "by depth",
    "draft",
    "verify",
    "other",
    "over plain",
    "predicted",
)


def describe_settings(settings: Settings, model: PreTrainedModel, num_prompts: int) -> dict[str, Any]:
    """Everything that another person needs to run the same comparison, and to judge whether it can be compared."""
    return {
        "model": settings.model,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": settings.dtype,
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "temperature": settings.temperature,
        "seed": settings.seed,
        "prompts": settings.prompts.name,
        "num_prompts": num_prompts,
        "limit": settings.limit,
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "selfdraft": selfdraft.__version__,
        "commit": git_commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name; for a CPU its model, where the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of this checkout, "-dirty" when files differ from it; None outside a git repository of our own."""
    root = Path(selfdraft.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def arm_figures(
    answers: Sequence[Answer],
    prompts: Sequence[Prompt],
    drafters: Mapping[str, Drafter],
    differences: Mapping[str, Sequence[Divergence]],
) -> list[dict[str, Any]]:
    """One dict of figures per arm: the two plain ones, then the drafters.

    `speedup` is the median over the prompts of (tokens/s of the arm) / (tokens/s of transformers), `speedup_total` the
    same ratio of all tokens over all seconds. Repeats of a prompt are added up first.
    """
    reference, plain = _of_arm(answers, REFERENCE), _of_arm(answers, PLAIN)
    tasks = dict.fromkeys(prompt.task for prompt in prompts if prompt.task is not None)
    arms = []
    for name in (REFERENCE, PLAIN, *drafters):
        own = _of_arm(answers, name)
        arm = {"name": name} | speed_figures(own, reference)
        arm["speedup_over_plain"] = speed_figures(own, plain)["speedup"]
        if name != REFERENCE:
            plan = drafters[name].plan if name in drafters else None
            arm |= round_figures(total_stats(own), total_stats(plain), plan)
        peaks = [answer.peak_bytes for answer in own if answer.peak_bytes is not None]
        arm["peak_memory_bytes"] = max(peaks, default=None)
        if name in differences:
            arm["diverging_prompts"] = len(differences[name])
            arm["divergences"] = [asdict(each) for each in differences[name]]
        arm["tasks"] = {
            task: speed_figures(_of_task(own, prompts, task), _of_task(reference, prompts, task)) for task in tasks
        }
        arms.append(arm)
    return arms


def _of_arm(answers: Iterable[Answer], name: str) -> list[Answer]:
    return [answer for answer in answers if answer.arm == name]


def _of_task(answers: Iterable[Answer], prompts: Sequence[Prompt], task: str) -> list[Answer]:
    return [answer for answer in answers if prompts[answer.prompt].task == task]


def speed_figures(own: Sequence[Answer], reference: Sequence[Answer]) -> dict[str, Any]:
    """Tokens, seconds and speed of one arm's answers, against the answers of another arm to the same prompts."""
    speeds, reference_speeds = _speed_by_prompt(own), _speed_by_prompt(reference)
    ratios = [speed / reference_speeds[prompt] for prompt, speed in speeds.items()]
    new_tokens, seconds = _totals(own)
    reference_tokens, reference_seconds = _totals(reference)
    stats = total_stats(own)
    return {
        "new_tokens": new_tokens,
        "seconds": seconds,
        "tokens_per_second": new_tokens / seconds,
        "speedup": statistics.median(ratios),
        "speedup_total": (new_tokens / seconds) / (reference_tokens / reference_seconds),
        # transformers' generate runs one pass per token; an answer of one token has no round at all
        "tokens_per_round": stats.tokens_per_round if stats.rounds else 1.0,
    }


def _speed_by_prompt(answers: Iterable[Answer]) -> dict[int, float]:
    by_prompt: dict[int, list[Answer]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt, []).append(answer)
    return {prompt: tokens / seconds for prompt, each in by_prompt.items() for tokens, seconds in [_totals(each)]}


def _totals(answers: Sequence[Answer]) -> tuple[int, float]:
    return sum(len(answer.tokens) for answer in answers), sum(answer.seconds for answer in answers)


def total_stats(answers: Iterable[Answer]) -> Stats:
    """The sum of the answers' counts and seconds; zeros for an arm that has none."""
    total = Stats()
    for answer in answers:
        if answer.stats is not None:
            total.add(answer.stats)
    return total


def round_figures(stats: Stats, plain: Stats, plan: Plan | None) -> dict[str, Any]:
    """What an arm's rounds were made of, and the speed-up over the plain arm that theory expects of them.

    For chains `predicted_speedup` is the formula of the literature (`theory.chain_speedup`) at the measured alpha,
    drafting time and plain pass; for trees, where that formula does not apply, tokens per round over the measured cost
    of a round in plain rounds. Neither counts the prefill. `plan` is None for the plain arm.
    """
    rounds = max(stats.rounds, 1)
    figures: dict[str, Any] = {
        "rounds": stats.rounds,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "acceptance_rate": stats.acceptance_rate,
        "prefill_seconds": stats.prefill_seconds,
        "draft_ms_per_round": 1000 * stats.draft_seconds / rounds,
        "verify_ms_per_round": 1000 * stats.verify_seconds / rounds,
        "other_ms_per_round": 1000 * stats.other_seconds / rounds,
    }
    if plan is None or not (stats.rounds and plain.rounds):
        return figures
    if plan.width == 1:
        alpha = measured_alpha(stats.drafted, stats.accepted)
        expected = expected_tokens_over_rounds(alpha or 0.0, stats.drafted, stats.rounds)
        predicted = chain_speedup(expected, stats.draft_seconds / stats.rounds, plain.verify_seconds / plain.rounds)
        return figures | {"alpha": alpha, "expected_tokens_per_round": expected, "predicted_speedup": predicted}
    predicted = round_speedup(stats.tokens_per_round, _round_seconds(stats), _round_seconds(plain))
    return figures | {"predicted_speedup": predicted}


def _round_seconds(stats: Stats) -> float:
    return (stats.total_seconds - stats.prefill_seconds) / stats.rounds


def with_progress(answers: Iterable[Answer], count: int, console: Console) -> list[Answer]:
    """All `count` answers; a bar tells which one came last and how long the rest will take, where the output is not a
    terminal a line now and then."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    done: list[Answer] = []
    began = last_line = time.perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("warming up", total=count)
        for answer in answers:
            done.append(answer)
            progress.update(bar, advance=1, description=f"prompt {answer.prompt + 1}, {answer.arm}")
            now = time.perf_counter()
            if not console.is_terminal and (now - last_line > LINE_SECONDS or len(done) == count):
                last_line = now
                left = (now - began) / len(done) * (count - len(done))
                console.print(f"{len(done)} of {count} answers, {left / 60:.1f} minutes left")
    return done


def heading(settings: Mapping[str, Any]) -> str:
    """One line that a table needs to mean anything: what ran, on what, how."""
    how = f"T={settings['temperature']:g}, seed {settings['seed']}" if settings["temperature"] else "greedy"
    commit = f" ({settings['commit']})" if settings["commit"] else ""
    return (
        f"{settings['model']}, {settings['dtype']}, {how}, {settings['num_prompts']} of {settings['prompts']}, at most "
        f"{settings['max_new_tokens']} new tokens, {settings['repeats']} run(s) each; {settings['device']}, "
        f"{settings['threads']} threads; selfdraft {settings['selfdraft']}{commit}, torch {settings['torch']}, "
        f"transformers {settings['transformers']}"
    )


def print_arms(arms: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The table of the arms, and one of the tasks when there is more than one."""
    table = Table(title="transformers' generate is 1.00x; draft, verify, other: ms per round", box=box.SIMPLE)
    table.add_column("arm")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for arm in arms:
        drafts = bool(arm.get("acceptance_by_depth"))
        table.add_row(
            arm["name"],
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['speedup']:.2f}x",
            f"{arm['speedup_total']:.2f}x",
            f"{arm['tokens_per_round']:.2f}",
            f"{arm['acceptance_rate']:.0%}" if drafts else "",
            _by_depth(arm["acceptance_by_depth"]) if drafts else "",
            *(f"{arm[f'{part}_ms_per_round']:.1f}" if "rounds" in arm else "" for part in ("draft", "verify", "other")),
            f"{arm['speedup_over_plain']:.2f}x",
            f"{arm['predicted_speedup']:.2f}x" if "predicted_speedup" in arm else "",
        )
    console.print(table)
    tasks = list(arms[0]["tasks"])
    if len(tasks) > 1:
        console.print(_task_table(arms, tasks))


def _by_depth(shares: Sequence[float]) -> str:
    shown = " ".join(f"{share:.2f}"[1:] if share < 0.995 else "1.0" for share in shares[:DEPTHS_SHOWN])
    return shown + (" ..." if len(shares) > DEPTHS_SHOWN else "")


def _task_table(arms: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> Table:
    table = Table(title="by task: speed-up (tokens per round)", box=box.SIMPLE)
    table.add_column("arm")
    for task in tasks:
        table.add_column(task, justify="right")
    for arm in arms[1:]:
        cells = (arm["tasks"][task] for task in tasks)
        table.add_row(arm["name"], *(f"{cell['speedup']:.2f}x ({cell['tokens_per_round']:.2f})" for cell in cells))
    return table


def remarks(arms: Sequence[Mapping[str, Any]], dtype: str, reference: str) -> list[str]:
    """What the table does not say by itself: who is slower than plain decoding, and where answers differ.

    `reference` is the arm that the answers were compared with.
    """
    lines = [
        "speed-up: median over the prompts, whole calls, prompt pass included. predicted: over the plain arm; "
        "for chains E / (1 + draft / plain pass) at the measured acceptance, for trees tokens/round over what a round "
        "costs."
    ]
    for arm in arms:
        if arm["speedup"] < 1:
            lines.append(f"{arm['name']} is SLOWER than transformers' generate here: {arm['speedup']:.2f}x")
    by_arm = {arm["name"]: arm["divergences"] for arm in arms if arm.get("divergences")}
    counts = ", ".join(f"{name} {len(found)}" for name, found in by_arm.items())
    gaps = [each["top2_gap"] for found in by_arm.values() for each in found]
    suspects = {name: [each for each in found if not each["is_near_tie"]] for name, found in by_arm.items()}
    if not by_arm:
        lines.append(f"in {dtype}, every arm gives the tokens of {reference} on every prompt")
    elif not any(suspects.values()):
        lines.append(
            f"in {dtype}, prompts whose answer leaves that of {reference}: {counts}; always at a near-tie, where "
            f"rounding decides (the target's two best scores there, in float32, are at most {max(gaps):.3f} apart)"
        )
    else:
        lines.append(f"in {dtype}, prompts whose answer leaves that of {reference}: {counts}")
    for name, found in suspects.items():
        lines += [f"NOT a near-tie, so a bug: {name}, {_place(each)}" for each in found[:1]]
    return lines


def _place(divergence: Mapping[str, Any]) -> str:
    return (
        f"prompt {divergence['prompt']}, new token {divergence['position']}: {divergence['token']} against "
        f"{divergence['reference_token']}; the target's two best are {divergence['top2_gap']:.3g} apart in float32"
    )


def check_figures(differences: Mapping[str, Sequence[Divergence]], num_prompts: int) -> dict[str, Any]:
    """The result of `--check` for the JSON file."""
    return {
        "num_prompts": num_prompts,
        "arms": [
            {"name": name, "identical": num_prompts - len(found), "divergences": [asdict(each) for each in found]}
            for name, found in differences.items()
        ],
    }


def check_lines(check: Mapping[str, Any], decode: Callable[..., Any]) -> list[str]:
    """The result of `--check`, a line per arm; below it the first divergence of an arm that failed."""
    lines = []
    for arm in check["arms"]:
        lines.append(f"{arm['name']}: identical on {arm['identical']}/{check['num_prompts']} prompts")
        for first in arm["divergences"][:1]:
            tokens = [each for each in (first["token"], first["reference_token"]) if each is not None]
            lines.append(f"    {_place(first)} ({' / '.join(repr(decode([token])) for token in tokens)})")
    return lines


def print_answer(
    prompt: Prompt,
    answers: Sequence[Answer],
    arms: Sequence[Mapping[str, Any]],
    decode: Callable[..., Any],
    console: Console,
) -> None:
    """The first prompt, and what the fastest arm of selfdraft answered."""
    fastest = max(arms[1:], key=lambda arm: arm["speedup"])["name"]
    answer = next(answer for answer in answers if answer.prompt == 0 and answer.arm == fastest)
    console.print("\nprompt:", prompt.text, sep="\n", markup=False, highlight=False)
    heading = f"\nanswer ({fastest}, {len(answer.tokens) / answer.seconds:.1f} tokens/s):"
    console.print(heading, decode(answer.tokens, skip_special_tokens=True), sep="\n", markup=False, highlight=False)


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """What `selfdraft doctor` found, a row per check, with the way to mend it below."""
    colours = {"fault": "red", "warning": "yellow", "ok": "green", "skipped": "dim"}
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for each in findings:
        words = each.meaning + (f"\nmend: {each.remedy}" if each.remedy else "")
        table.add_row(Text(each.level, style=colours[each.level]), Text(each.check), Text(words))
    console.print(table)


def print_lines(lines: Iterable[str], console: Console) -> None:
    """Plain lines: nothing in them is markup."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_json(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

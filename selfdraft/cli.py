"""The `selfdraft` command. A command is one function here: what it says, its options, and what it runs.

Libraries that take seconds to import (torch, transformers) are imported inside the commands, so that `--help` and
mistyped options answer at once.
"""

import os
import sys
import traceback
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveInt

from selfdraft import __version__


def main(argv: list[str] | None = None) -> int:
    """Runs one command; the exit status. 2 for what the user has to change, 130 for Ctrl-C, 141 for a closed pipe."""
    parser = ArgumentParser(
        prog="selfdraft",
        version=__version__,
        description="Lets a Hugging Face causal language model draft for itself, and keeps exactly what it would say.",
    )
    commands = parser.add_subcommands(metavar="COMMAND")
    commands.add_subcommand("compare", compare_options(), help="measure drafters against plain decoding, here")
    commands.add_subcommand("generate", generate_options(), help="answer a prompt, or chat")
    commands.add_subcommand("distill", distill_options(), help="make training data of the model's own answers")
    commands.add_subcommand("doctor", doctor_options(), help="say why a drafter is not accepted, and how to mend it")
    arguments = parser.parse_args(argv)
    try:
        run = {"compare": compare, "generate": generate, "distill": distill, "doctor": doctor}[arguments.subcommand]
        return run(arguments[arguments.subcommand])
    except BrokenPipeError:  # who reads the output has seen enough, as in `selfdraft ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its exit
        return 141  # what the shell says of a program that the closed pipe ends
    except (ValueError, OSError) as error:
        if not _is_ours(error):
            raise
        print(f"selfdraft: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("selfdraft: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _is_ours(error: BaseException) -> bool:
    """Whether selfdraft itself raised the error: then its text tells all, and a traceback would only hide it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").startswith("selfdraft")


def compare_options() -> ArgumentParser:
    """The options of `selfdraft compare`, and the text of its --help."""
    parser = ArgumentParser(
        description="Measures decoding with each drafter against transformers' own generate, on this machine: every "
        "prompt is answered by every arm in turn, and a table tells tokens per second, the speed-up, and where the "
        "time of a round went. The answers are compared on the way, because a drafter must not change them. "
        "Example: selfdraft compare --prompts questions.jsonl --limit 12 --json out.json"
    )
    parser.add_argument(
        "--prompts",
        type=Path | None,
        metavar="FILE.jsonl",
        help="a prompt a row: `prompt`, or `turns` of which the first is used; optional `task`. "
        "Without it: the questions that come with selfdraft",
    )
    parser.add_argument("--limit", type=PositiveInt | None, help="how many prompts, spread evenly over the tasks")
    add_model_options(parser)
    parser.add_argument(
        "--drafters",
        type=str,
        nargs="+",
        metavar="NAME_OR_PATH",
        help="ngram, a shipped drafter (draft_model, medusa, eagle3), or the folder of a trained one. "
        "Without it: all of these for the default model, ngram for others",
    )
    parser.add_argument("--temperature", type=NonNegativeFloat, default=0.0, help="0 is greedy, above it is sampling")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; prompt number i uses seed + i")
    parser.add_argument("--max-new-tokens", type=PositiveInt, default=128, help="longest answer, in tokens")
    parser.add_argument("--repeats", type=PositiveInt, default=1, help="how often every prompt is answered")
    parser.add_argument(
        "--check",
        action="store_true",
        help="answer all prompts once more, greedily and in float32, and fail (exit status 1) unless every arm gives "
        "the tokens of transformers' generate",
    )
    parser.add_argument("--show-answer", action="store_true", help="print the first prompt and its answer at the end")
    parser.add_argument("--json", type=Path | None, metavar="OUT.json", help="write all figures to this file")
    return parser


def generate_options() -> ArgumentParser:
    """The options of `selfdraft generate`, and the text of its --help."""
    parser = ArgumentParser(
        description="Answers a prompt, and streams the text as the model accepts it: some tokens at once, because they "
        "were drafted, and never another text than the model's own. The prompt is that of --prompt, or what comes in a "
        "pipe; without either, on a terminal, it is a chat, where Ctrl-C stops an answer and Ctrl-D or /exit leaves. "
        "The text goes to the standard output, the speed to the standard error. "
        'Example: selfdraft generate --prompt "Why is the sky blue?" --show-drafted',
    )
    parser.add_argument("--prompt", type=str, metavar="TEXT", help="a question; for a base model, text to go on with")
    add_model_options(parser)
    parser.add_argument(
        "--drafter",
        type=str,
        nargs="+",
        metavar="NAME_OR_PATH",
        help="ngram, a shipped drafter (draft_model, medusa, eagle3), the folder of a trained one, or none; of several "
        "the first that fits the model drafts. Without it: eagle3 for the default model, ngram for others",
    )
    parser.add_argument("--system", type=str, metavar="TEXT", help="the system message, which stands before a chat")
    parser.add_argument(
        "--temperature",
        type=NonNegativeFloat,
        help="0 is greedy, above it is sampling. Without it: as the model's own generation config has it",
    )
    parser.add_argument("--top-p", type=ClosedUnitInterval, help="sample among the likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; turn number i of a chat uses seed + i")
    parser.add_argument("--max-new-tokens", type=PositiveInt, default=512, help="longest answer, in tokens")
    parser.add_argument(
        "--show-drafted", action="store_true", help="colour what was drafted; the rest is the model's own"
    )
    parser.add_argument(
        "--json",
        type=Path | None,
        metavar="OUT.json",
        help="write prompt, answer, token ids, which of them were drafted, and all figures to this file",
    )
    return parser


def distill_options() -> ArgumentParser:
    """The options of `selfdraft distill`, and the text of its --help."""
    parser = ArgumentParser(
        description="Makes training data for a drafter: the model's own answers, to prompts of a file or to prompts "
        "that it writes itself through its chat template, so that no data set is needed. The result is a folder of "
        "parquet files that train/heads.py reads as they are. The same command goes on with a run that was stopped, "
        "and gives the same rows. Example: selfdraft distill --count 5000 --output_dir data/answers"
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the parquet files and distill.json")
    parser.add_argument(
        "--prompts",
        type=str | None,
        metavar="FILE|HUB_ID",
        help="parquet or JSONL file, or data set on the hub, with `messages`, `turns` or `prompt` in a row, and "
        "`tools` if there are any; answers in it are not used. Without it the model writes the prompts",
    )
    parser.add_argument("--split", type=str, default="train", help="of a data set on the hub")
    parser.add_argument(
        "--count", type=PositiveInt | None, help="how many conversations. Without it: as many as there are prompts"
    )
    add_model_options(parser)
    parser.add_argument("--system", type=str | None, metavar="TEXT", help="the system message, where a row has none")
    parser.add_argument(
        "--turns",
        type=PositiveInt,
        default=1,
        help="of the user, in a conversation: a row's own come first, and the model writes what is missing. Every "
        "answer is a row of the result",
    )
    parser.add_argument(
        "--temperatures",
        type=NonNegativeFloat,
        nargs="+",
        default=[0.0, 0.7, 1.0],
        metavar="T",
        help="of the answers; conversations take them in turn. 0 is greedy",
    )
    parser.add_argument("--max-new-tokens", type=PositiveInt, default=512, help="longest answer, in tokens")
    parser.add_argument(
        "--max-prompt-tokens", type=PositiveInt, default=1024, help="prompts that are longer are left out, and counted"
    )
    parser.add_argument("--batch-size", type=PositiveInt, default=32, help="texts that are written at once")
    parser.add_argument("--seed", type=int, default=0, help="fixes every conversation, together with its number")
    parser.add_argument(
        "--drafter",
        type=str | None,
        metavar="NAME_OR_PATH",
        help="drafts ahead, as in the other commands; in large batches it seldom pays. Without it: plain decoding",
    )
    parser.add_argument(
        "--engine",
        type=Literal["transformers", "vllm"],
        default="transformers",
        help="what writes: the model in this process, or a vLLM server, for many answers of large models. Then "
        "--batch-size texts are asked for at once; give it some hundreds",
    )
    parser.add_argument(
        "--server",
        type=str | None,
        metavar="URL",
        help="of --engine vllm. Without it: http://localhost:8000/v1, where `vllm serve MODEL` is",
    )
    return parser


def doctor_options() -> ArgumentParser:
    """The options of `selfdraft doctor`, and the text of its --help."""
    parser = ArgumentParser(
        description="Says why a drafter is not accepted, and how to mend it: whether it was made for this model, "
        "whether its weights and its config fit each other, whether it reads the layers, the vocabulary and the "
        "template that it was trained with, and what is accepted of it on a few prompts. Changes no file. The exit "
        "status is 1 when a fault was found. Example: selfdraft doctor --model your/model "
        "--drafter runs/eagle3/drafter --data answers.parquet"
    )
    add_model_options(parser)
    parser.add_argument(
        "--drafter",
        type=str,
        required=True,
        metavar="NAME_OR_PATH",
        help="the folder or hub id of a drafter, or a shipped one (draft_model, medusa, eagle3)",
    )
    parser.add_argument(
        "--data",
        type=Path | None,
        metavar="FILE",
        help="what the drafter was trained on, parquet or JSONL: rows of `messages`, or of `prompt_ids` and "
        "`response_ids`. Its first conversations are compared with the model's own answers and its template",
    )
    parser.add_argument(
        "--prompts",
        type=Path | None,
        metavar="FILE.jsonl",
        help="what acceptance is measured on, a `prompt` or `turns` a row. Without it: the prompts of --data; without "
        "both, the questions that come with selfdraft for the default model, and for others some of its own invention",
    )
    parser.add_argument("--json", type=Path | None, metavar="OUT.json", help="write all findings to this file")
    return parser


def add_model_options(parser: ArgumentParser) -> None:
    """Which model, and how it is held: the same for every command."""
    parser.add_argument("--model", type=str, default="smollm2-135m", help="folder or hub id of a causal language model")
    parser.add_argument(
        "--dtype", type=Literal["bfloat16", "float16", "float32"], default="bfloat16", help="of the model's weights"
    )


def compare(options: Namespace) -> int:
    """Measures, prints the tables, and checks when asked: 1 if the check finds a difference, else 0."""
    from rich.console import Console

    from selfdraft import compare as measuring
    from selfdraft import report

    page = Console() if sys.stdout.isatty() else Console(width=160)
    notes = Console(stderr=True)
    chosen = {field.name: options[field.name] for field in fields(measuring.Settings)}
    settings = measuring.Settings(**chosen | {"prompts": options.prompts or measuring.SHIPPED_PROMPTS})
    refuse_no_file(options.json)

    prompts = measuring.read_prompts(settings.prompts, settings.limit)
    sources = measuring.drafter_sources(settings, note=lambda text: report.print_lines([text], notes))
    model, tokenizer = measuring.load_target(settings.model, settings.dtype)
    drafters = measuring.load_drafters(sources, model)
    encoded = measuring.encode(tokenizer, prompts, model, settings.max_new_tokens)
    figures: dict[str, Any] = {"settings": report.describe_settings(settings, model, len(prompts))}
    steps = settings.repeats * len(encoded) * (len(drafters) + 2)
    answers = report.with_progress(measuring.measure(model, drafters, encoded, settings), steps, notes)

    model.float()  # the timing is over, and the target's own opinion of a divergence is asked in float32
    reference = measuring.REFERENCE if settings.temperature == 0 else measuring.PLAIN
    differences = measuring.divergences(answers, reference, encoded, model, settings)
    figures["arms"] = report.arm_figures(answers, prompts, drafters, differences)
    report.print_lines([report.heading(figures["settings"])], page)
    report.print_arms(figures["arms"], page)
    report.print_lines(report.remarks(figures["arms"], settings.dtype, reference), page)

    if options.check:
        exact = replace(settings, dtype="float32", temperature=0.0, repeats=1)
        drafters = measuring.load_drafters(sources, model)
        answers_again = measuring.measure(model, drafters, encoded, exact)
        checked = report.with_progress(answers_again, len(encoded) * (len(drafters) + 2), notes)
        differences = measuring.divergences(checked, measuring.REFERENCE, encoded, model, exact)
        figures["check"] = report.check_figures(differences, len(encoded))
        report.print_lines(report.check_lines(figures["check"], tokenizer.decode), page)
    if options.show_answer:
        report.print_answer(prompts[0], answers, figures["arms"], tokenizer.decode, page)
    if options.json is not None:
        report.write_json(figures, options.json)
    return 1 if options.check and any(differences.values()) else 0


def generate(options: Namespace) -> int:
    """Streams the answer to the prompt, or to everything that is asked in a chat, with a line of figures below each."""
    from rich.console import Console

    from selfdraft import chat, report
    from selfdraft import compare as measuring

    def note(text: str) -> None:
        report.print_lines([text], notes)

    notes = Console(stderr=True)
    prompt = chat.read_prompt(options.prompt)
    refuse_no_file(options.json)
    if prompt is None and options.json is not None:
        raise ValueError("--json holds one answer, and this is a chat: give the prompt by --prompt or in a pipe")
    sources = chat.wanted_drafters(options.drafter, options.model)
    model, tokenizer = measuring.load_target(options.model, options.dtype)
    name, drafter = chat.first_that_fits(sources, model, note)
    decoding = chat.decoding_options(model, options.max_new_tokens, options.temperature, options.top_p)
    conversation = chat.Conversation(model, tokenizer, drafter, decoding, options.seed, options.system)
    in_colour = options.show_drafted and sys.stdout.isatty()
    say = chat.writer(in_colour)

    if prompt is None:
        note(f"{options.model}, drafter {name}. Ctrl-C stops an answer, Ctrl-D or /exit leaves.")
    for question in chat.questions() if prompt is None else [prompt]:
        answer = conversation.ask(question, say)
        say("\n", False)
        note(chat.summary(answer, name))
        if options.show_drafted:
            note(chat.legend(answer, in_colour))
        if prompt is not None and answer.stopped:
            raise KeyboardInterrupt
        if options.json is not None:
            asked = {key: options[key] for key in ("model", "dtype", "system", "temperature", "top_p", "seed")}
            report.write_json(asked | {"drafter": name, "prompt": question} | answer.figures(), options.json)
    return 0


def distill(options: Namespace) -> int:
    """Writes the corpus, with progress and counts on the standard error."""
    from rich.console import Console

    from selfdraft import distill as distilling

    chosen = {field.name: options[field.name] for field in fields(distilling.Settings)}
    settings = distilling.Settings(**chosen | {"temperatures": tuple(options.temperatures)})
    distilling.distill(settings, options.output_dir, Console(stderr=True))
    return 0


def doctor(options: Namespace) -> int:
    """Prints one finding per check: 1 if one of them is a fault, else 0."""
    from rich.console import Console

    from selfdraft import compare as measuring
    from selfdraft import doctor as checks
    from selfdraft import embedded, evidence, report

    page = Console() if sys.stdout.isatty() else Console(width=160)
    refuse_no_file(options.json)
    source = measuring.drafter_source(options.drafter)
    file = options.prompts
    if file is None and options.data is None and options.model == embedded.TARGET_NAME:
        file = measuring.SHIPPED_PROMPTS
    asked = [] if file is None else measuring.read_prompts(file, evidence.NUM_PROMPTS)
    model, tokenizer = measuring.load_target(options.model, options.dtype)
    data = [] if options.data is None else evidence.read_exchanges(options.data, tokenizer)
    prompts = [ids[0].tolist() for ids in measuring.encode(tokenizer, asked, model, evidence.NEW_TOKENS)]

    findings = checks.examine(source, model, tokenizer, prompts, data, evidence.NEW_TOKENS)
    report.print_findings(findings, page)
    faults = [each.check for each in findings if each.level == "fault"]
    report.print_lines([f"faults: {', '.join(faults)}" if faults else "no fault was found"], page)
    if options.json is not None:
        about = {"model": options.model, "dtype": options.dtype, "drafter": options.drafter, "faults": faults}
        report.write_json(about | {"findings": [asdict(each) for each in findings]}, options.json)
    return 1 if faults else 0


def refuse_no_file(file: Path | None) -> None:
    """Found out before the work, not after it."""
    if file is not None and file.is_dir():
        raise ValueError(f"--json {file}: this is a folder; give the name of a file")
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"--json {file}: there is no folder {file.parent}; make it first")


if __name__ == "__main__":
    sys.exit(main())

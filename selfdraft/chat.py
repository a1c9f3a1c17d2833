"""What stands behind `selfdraft generate`: answers that stream as text, to one question or turn after turn."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import selfdraft
from selfdraft import embedded
from selfdraft.compare import (
    conversation_ids,
    drafter_source,
    known_drafters,
    load_drafters,
    refuse_too_long,
)
from selfdraft.drafters.base import Drafter
from selfdraft.metrics import Stats
from selfdraft.report import round_figures
from selfdraft.rows import end_tokens

NO_DRAFTER = "none"
DRAFTED_COLOUR, NO_COLOUR = "\x1b[32m", "\x1b[0m"  # green
INCOMPLETE = "\ufffd"  # what a decoder puts in place of a character whose last bytes are missing

Say = Callable[[str, bool], None]  # takes a piece of text, and whether it was drafted


# --- Before the model is loaded ---------------------------------------------------------------------------------------


def read_prompt(given: str | None) -> str | None:
    """The text of `--prompt`, or else of the pipe on standard input; None where somebody sits at a terminal.

    ValueError when it is empty or not text.
    """
    if given is None and sys.stdin.isatty():
        return None
    try:
        # Bytes on a command line that are no text have become lone surrogates, which no tokenizer takes.
        prompt = os.fsencode(given).decode() if given is not None else sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error}") from None
    if not prompt.strip():
        raise ValueError("the prompt is empty: give it by --prompt or in a pipe, or start a chat from a terminal")
    return prompt


def wanted_drafters(names: Sequence[str] | None, model_name: str) -> dict[str, str | None]:
    """Name -> what `load_drafter` takes, None for plain decoding, in order of preference. A typo is a ValueError."""
    if names is None:
        shipped = model_name == embedded.TARGET_NAME and "eagle3" in known_drafters()
        names = ["eagle3", "ngram"] if shipped else ["ngram"]
    return {name: None if name == NO_DRAFTER else drafter_source(name) for name in names}


# --- With it ----------------------------------------------------------------------------------------------------------


def first_that_fits(
    sources: dict[str, str | None], model: PreTrainedModel, note: Callable[[str], None]
) -> tuple[str, Drafter | None]:
    """The first drafter that loads and fits the model, and its name; a note says why those before it do not."""
    reasons = []
    for name, source in sources.items():
        try:
            drafter = None if source is None else load_drafters({name: source}, model)[name]
        except (ValueError, OSError) as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            note(f"passed over drafter {reason}")
        return name, drafter
    raise ValueError("; ".join(reasons))


def decoding_options(
    model: PreTrainedModel, max_new_tokens: int, temperature: float | None, top_p: float | None
) -> dict[str, Any]:
    """Arguments of `generate`; what is None is as the model's own generation config has it."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    options["pad_token_id"] = min(
        end_tokens(model.generation_config), default=0
    )  # a single row is never padded: this spares a warning
    if temperature is not None:
        options |= {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    if top_p is not None:
        if not options.get("do_sample", model.generation_config.do_sample):
            raise ValueError(f"--top-p {top_p:g} is about sampling, and decoding is greedy: add --temperature")
        options["top_p"] = top_p
    return options


class Conversation:
    """Turns of a user and the model. Without a chat template every question stands alone, as plain text."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None,
        options: dict[str, Any],
        seed: int,
        system: str | None = None,
    ):
        if system is not None and not tokenizer.chat_template:
            raise ValueError("--system: the tokenizer of this model has no chat template, so there is no place for it")
        self.model, self.tokenizer, self.drafter = model, tokenizer, drafter
        self.options, self.seed = options, seed
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, question: str, say: Say) -> "Answer":
        """Hands the answer to `say` piece by piece, and remembers both. Turn i is sampled with `seed` + i.

        Ctrl-C ends the answer, not the conversation; nothing is remembered of one that had not begun. ValueError
        when the conversation does not suit the chat template or does not fit into the model.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        try:
            ids = conversation_ids(self.tokenizer, messages)
        except TemplateError as error:
            raise ValueError(f"the chat template of this model refuses the conversation: {error}") from None
        refuse_too_long("the conversation", len(ids), self.model, self.options["max_new_tokens"])
        answer = Answer(ids, self.tokenizer, say)
        answer.stream(self.model, drafter=self.drafter, seed=self.seed + len(self.messages) // 2, **self.options)
        if answer.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


class Answer:
    """The streamer of one answer, and afterwards all that is known of it.

    Text goes to `say` as soon as its characters are complete: an emoji may take several tokens. It counts as drafted
    when all of its tokens were.
    """

    def __init__(self, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase, say: Say):
        self.prompt_ids = prompt_ids
        self.decode: Callable[[list[int]], str] = partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self.say = say
        self.text = ""
        self.tokens: list[int] = []
        self.drafted: list[bool] = []  # for each token, whether it was drafted or is the target's own
        self.seconds = 0.0
        self.stats: Stats | None = None  # None for an answer that was stopped
        self.told = 0  # tokens whose text has been handed on
        self.context = 0  # the tokens from here to `told` are decoded again, because they decide about a space

    def stream(self, model: PreTrainedModel, **options: Any) -> None:
        """Decodes, with this object as the streamer, to the end or until Ctrl-C."""
        ids = torch.tensor([self.prompt_ids], device=model.device)
        began = time.perf_counter()
        try:
            output: Any = selfdraft.generate(
                model,
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=self,
                return_dict_in_generate=True,
                **options,
            )
            self.stats = output.stats
        except KeyboardInterrupt:
            pass  # what has been said so far is the answer
        self.seconds = time.perf_counter() - began

    def put(self, value: Tensor) -> None:
        """The prompt, int64 [1, time], which is not repeated, or a token that is the target's own, int64 [1]."""
        if value.ndim == 1:
            self.add(int(value), drafted=False)

    def put_drafted(self, value: Tensor) -> None:
        """A token, int64 [1], that was drafted and that the target would have said too."""
        self.add(int(value), drafted=True)

    def end(self) -> None:
        """Hands on what is left, be it half a character."""
        self.tell(self.untold())

    def add(self, token: int, drafted: bool) -> None:
        self.tokens.append(token)
        self.drafted.append(drafted)
        text = self.untold()
        if not text.endswith(INCOMPLETE):
            self.tell(text)

    def untold(self) -> str:
        """The text of the tokens that `say` has not been given."""
        before = self.decode(self.tokens[self.context : self.told])
        return self.decode(self.tokens[self.context :])[len(before) :]

    def tell(self, text: str) -> None:
        if text:
            drafted = all(self.drafted[self.told :])
            self.text += text
            self.context, self.told = self.told, len(self.tokens)
            self.say(text, drafted)

    @property
    def stopped(self) -> bool:
        return self.stats is None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """As in `Stats`, and known of a stopped answer too: a round ends with a token of the target's own, or with
        the text."""
        rounds = self.drafted[1:].count(False) + self.drafted[-1:].count(True)
        return (len(self.tokens) - 1) / rounds if rounds else 0.0

    def figures(self) -> dict[str, Any]:
        """Everything for the JSON file. Only of an answer that came to its end."""
        assert self.stats is not None
        return {
            "text": self.text,
            "prompt_ids": self.prompt_ids,
            "token_ids": self.tokens,
            "drafted": self.drafted,
            "new_tokens": len(self.tokens),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_round": self.tokens_per_round,
        } | round_figures(self.stats, Stats(), None)


# --- On the terminal --------------------------------------------------------------------------------------------------


def writer(in_colour: bool) -> Say:
    """Writes every piece of text at once to the standard output, the drafted ones in colour if that is wanted."""

    def say(text: str, drafted: bool) -> None:
        print(f"{DRAFTED_COLOUR}{text}{NO_COLOUR}" if drafted and in_colour else text, end="", flush=True)

    return say


def questions() -> Iterator[str]:
    """What is typed, line by line, until Ctrl-D or /exit."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history; imported here because it may write to the terminal
    while True:
        if not sys.stdout.isatty():  # there goes nothing but the answers
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = input("> " if sys.stdout.isatty() else "")
        except (EOFError, KeyboardInterrupt) as end:
            print(file=sys.stderr)  # the cursor is still behind the prompt
            if isinstance(end, KeyboardInterrupt):
                raise
            return
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line


def summary(answer: Answer, drafter: str) -> str:
    """What is said below an answer."""
    stopped = "stopped by Ctrl-C: " if answer.stopped else ""
    return (
        f"{stopped}{len(answer.tokens)} tokens in {answer.seconds:.1f} s, {answer.tokens_per_second:.1f} tokens/s, "
        f"{answer.tokens_per_round:.2f} tokens per round, drafter {drafter}"
    )


def legend(answer: Answer, in_colour: bool) -> str:
    """What the colours mean."""
    colour = "green" if in_colour else "not coloured, because the output is not a terminal"
    count = sum(answer.drafted)
    return f"drafted: {count} of {len(answer.tokens)} tokens ({colour}); the others are the target's own"

"""Conversations with the target: the user's turns are those of a file, or the target writes them too.

Its chat template, cut where the user's turn begins, makes a chat model go on as the user (Xu et al. 2024, "Magpie",
arXiv 2406.08464). Conversation number i is a function of the seed, the settings and i.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfdraft.compare import conversation_ids
from selfdraft.datafiles import open_rows, tools_of
from selfdraft.drafters.base import Drafter
from selfdraft.rows import end_tokens
from selfdraft.server import Server
from selfdraft.texts import Text, seed_of, write

SELF_WRITTEN = "magpie"  # the source of conversations whose first prompt the target wrote
USER_TOKENS = 192  # longest turn that the target writes as the user; of SmolLM2's, 1 in 100 is longer than 140
PLACE_OF_THE_USER = "selfdraft-words-of-the-user"  # stands in the rendered template where they go

Row = dict[str, Any]
Show = Callable[[float, int], None]  # the share of the work that is done, in [0, 1], and the tokens since the last call


@dataclass(frozen=True)
class Script:
    """What a row of a file of prompts gives to a conversation."""

    turns: list[str] = field(default_factory=list)  # of the user
    system: str | None = None
    tools: list[Any] | None = None


@dataclass
class Talk:
    """A conversation in the making."""

    index: int
    script: Script
    messages: list[dict[str, str]]
    going: bool = True  # whether another turn may follow


class Seen:
    """The prompts, and the answers to a user's words, that a corpus has already."""

    def __init__(self, before: "Seen | None" = None):
        self.keys: set[bytes] = set()
        self.before = before

    def is_new(self, *what: Any) -> bool:
        """Whether this comes for the first time; remembers it."""
        key = hashlib.sha256(repr(what).encode()).digest()[:16]
        if key in self.keys or (self.before is not None and key in self.before.keys):
            return False
        self.keys.add(key)
        return True

    def add(self, row: Row) -> None:
        self.is_new(row["prompt_ids"])
        self.is_new(row["messages"][-2]["content"], row["response_ids"])


class Interviewer:
    """Leads conversations with one target. ValueError when its chat template cannot serve what is asked for.

    Args:
        scripts: what the users say; with None, the target writes that too.
        system: the system message where the script has none.
        turns: of the user, in a conversation; what the script lacks is written by the target.
        temperatures: conversation i is answered at number `i % len(temperatures)`.
        source: of the rows.
        server: writes instead of the model, where there is one; then `batch_size` texts are asked for at once.
        longest_prompt: in tokens; a conversation ends before a longer one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None,
        scripts: Sequence[Script] | None,
        system: str | None,
        turns: int,
        temperatures: Sequence[float],
        source: str,
        longest_prompt: int,
        max_new_tokens: int,
        batch_size: int,
        seed: int,
        server: Server | None = None,
    ):
        self.tokenizer, self.scripts, self.source, self.seed = tokenizer, scripts, source, seed
        self.system, self.turns, self.temperatures = system, turns, temperatures
        self.longest_prompt, self.max_new_tokens = longest_prompt, max_new_tokens
        self.end_ids = set(end_tokens(model.generation_config)) or {tokenizer.eos_token_id} - {None}
        self.write: Callable[..., None] = partial(write, model, batch_size=batch_size, drafter=drafter)
        if server is not None:
            self.write = partial(server.write, requests=batch_size)
        by_itself = scripts is None or any(len(script.turns) < turns for script in scripts)
        needs_template = by_itself or turns > 1 or system is not None
        needs_template |= any(script.tools or script.system for script in scripts or ())
        if needs_template and not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer of this model has no chat template, so there is no place for a user's turn that the "
                "model writes, a system message, tools or a second turn; give --prompts with a plain text a row, or "
                "use an instruction-tuned model"
            )
        if by_itself:
            self.opening(Talk(0, Script(), self.system_messages(Script())))

    def conversations(self, indices: range, seen: Seen, show: Show) -> tuple[list[Row], Counter[str]]:
        """The rows of these conversations, one per answer, and counts of what was asked, answered and left out.

        Left out is what `seen` has already, or an earlier one of these rows. `seen` is not changed.
        """
        talks = [self.begin(index) for index in indices]
        rows: list[tuple[int, int, Row]] = []
        counts = Counter(conversations=len(talks))
        new = Seen(seen)
        for turn in range(self.turns):
            asked = [talk for talk in talks if talk.going]
            self.let_users_speak(asked, turn, counts, partial(show, turn / self.turns))
            asked = [talk for talk in asked if talk.going]
            prompts = {talk.index: self.prompt_ids(talk) for talk in asked}
            for talk in asked:
                talk.going = self.accepts(prompts[talk.index], new, counts)
            asked = [talk for talk in asked if talk.going]
            texts = [self.text(talk, turn, prompts[talk.index]) for talk in asked]
            self.write(texts, end_ids=self.end_ids, show=self.share_of(texts, turn, show))
            for talk, text in zip(asked, texts, strict=True):
                row = self.row(talk, text)
                talk.going = text.finish == "stop"
                if self.keeps(row, new, counts):
                    rows.append((talk.index, turn, row))
                else:
                    talk.going = False
        return [row for *_, row in sorted(rows, key=lambda each: each[:2])], counts

    # --- The user ------------------------------------------------------------------------------------------------

    def begin(self, index: int) -> Talk:
        script = Script() if self.scripts is None else self.scripts[index]
        return Talk(index, script, self.system_messages(script))

    def system_messages(self, script: Script) -> list[dict[str, str]]:
        system = self.system if script.system is None else script.system
        return [] if system is None else [{"role": "system", "content": system}]

    def let_users_speak(self, talks: list[Talk], turn: int, counts: Counter[str], show: Callable[[int], None]) -> None:
        """Adds the user's turn to every conversation. One that the target does not end is dropped, and its
        conversation ends."""
        texts: dict[int, Text] = {}
        markers: dict[int, str] = {}
        ends = set(self.end_ids)
        for talk in talks:
            if turn < len(talk.script.turns):
                talk.messages.append({"role": "user", "content": talk.script.turns[turn]})
                continue
            ids, markers[talk.index], marker_ids = self.opening(talk)
            ends |= marker_ids
            texts[talk.index] = Text(ids, seed_of(self.seed, talk.index, turn, "user"), 1.0, USER_TOKENS)
        self.write(list(texts.values()), end_ids=ends, show=lambda batch, count: show(count))
        for talk in talks:
            if talk.index in texts:
                counts["user_turns"] += 1
                counts["user_tokens"] += len(texts[talk.index].new)
                words = self.words(texts[talk.index], markers[talk.index], ends)
                if words:
                    talk.messages.append({"role": "user", "content": words})
                else:
                    counts["unfinished_user_turns"] += 1
                    talk.going = False

    def opening(self, talk: Talk) -> tuple[list[int], str, set[int]]:
        """The ids up to where the words of the user's next turn begin; the text that follows them in the template,
        and the id that it begins with, if that is a marker."""
        asked = [*talk.messages, {"role": "user", "content": PLACE_OF_THE_USER}]
        try:
            text: Any = self.tokenizer.apply_chat_template(asked, tools=talk.script.tools, tokenize=False)
        except TemplateError as error:
            raise ValueError(f"the chat template of this model refuses the conversation: {error}") from None
        if text.count(PLACE_OF_THE_USER) != 1:
            raise ValueError(
                "the chat template of this model does not show the user's words as they are, so that the model cannot "
                "be made to write them; give --prompts"
            )
        before, after = text.split(PLACE_OF_THE_USER)
        # A space at the end would be a token of its own, and most words begin with theirs.
        ids = self.tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
        following = self.tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        return ids, after.strip(), set(following) & set(self.tokenizer.added_tokens_decoder)

    def words(self, text: Text, marker: str, ends: set[int]) -> str:
        """What the target has said as the user, without the marker; nothing when it did not come to an end."""
        ended = text.finish == "stop"
        ids = text.new[:-1] if ended else text.new
        said = self.tokenizer.decode(ids, skip_special_tokens=True)
        if marker and marker in said:  # of a template whose marker is plain text
            said, ended = said.split(marker)[0], True
        return said.strip() if ended and not set(ids) & set(self.tokenizer.all_special_ids) else ""

    # --- The target ----------------------------------------------------------------------------------------------

    def prompt_ids(self, talk: Talk) -> list[int]:
        try:
            return conversation_ids(self.tokenizer, talk.messages, talk.script.tools)
        except TemplateError as error:
            raise ValueError(f"the chat template of this model refuses conversation {talk.index}: {error}") from None

    def accepts(self, prompt: list[int], new: Seen, counts: Counter[str]) -> bool:
        """Whether the prompt is to be answered: it is neither too long nor the same as an earlier one."""
        if len(prompt) > self.longest_prompt:
            counts["too_long_prompts"] += 1
        elif not new.is_new(prompt):
            counts["same_prompts"] += 1
        else:
            return True
        return False

    def text(self, talk: Talk, turn: int, prompt: list[int]) -> Text:
        temperature = self.temperatures[talk.index % len(self.temperatures)]
        return Text(prompt, seed_of(self.seed, talk.index, turn, "answer"), temperature, self.max_new_tokens)

    def row(self, talk: Talk, text: Text) -> Row:
        """The answer, which the conversation now ends with, as a row of training data."""
        said = self.tokenizer.decode(text.new[: -1 if text.finish == "stop" else None], skip_special_tokens=True)
        talk.messages.append({"role": "assistant", "content": said})
        return {
            "messages": list(talk.messages),
            "prompt_ids": text.prompt,
            "response_ids": text.new,
            "temperature": text.temperature,
            "source": self.source,
            "finish": text.finish,
        }

    def keeps(self, row: Row, new: Seen, counts: Counter[str]) -> bool:
        """Whether the answer is of use: it has words, and is not what was said to the same words before."""
        if not row["messages"][-1]["content"].strip():
            counts["empty_answers"] += 1
        elif not new.is_new(row["messages"][-2]["content"], row["response_ids"]):
            counts["same_answers"] += 1
        else:
            counts.update(answers=1, prompt_tokens=len(row["prompt_ids"]), answer_tokens=len(row["response_ids"]))
            counts["cut_answers"] += row["finish"] == "length"
            return True
        return False

    def share_of(self, texts: list[Text], turn: int, show: Show) -> Callable[[list[Text], int], None]:
        """Tells how far the answers of this turn have come."""

        def wrote(batch: list[Text], count: int) -> None:
            finished = sum(text.finish is not None for text in texts)
            show((turn + finished / len(texts)) / self.turns, count)

        return wrote


def read_scripts(source: str, split: str) -> list[Script]:
    """The conversations' scripts in a data file, or on the hub: rows of `messages`, `turns` or `prompt`, and `tools`.

    Of `messages`, the turns of the user and a system message in front are used, up to the first message of a tool;
    the assistant's are for the target to say. ValueError for rows that hold no text, with their number.
    """
    rows = open_rows(source, split, "--prompts")
    columns = [name for name in ("messages", "turns", "prompt") if name in rows.column_names]
    if not columns:
        raise ValueError(
            f"{source} has the columns {', '.join(sorted(rows.column_names))}; --prompts reads 'messages', 'turns' or "
            "'prompt'"
        )
    kept = columns[:1] + ["tools"] * ("tools" in rows.column_names)
    scripts = [_script(row, f"{source}, row {number}") for number, row in enumerate(rows.select_columns(kept))]
    if not scripts:
        raise ValueError(f"{source} holds no rows")
    return scripts


def _script(row: Row, where: str) -> Script:
    system = None
    if "messages" in row:
        turns: list[Any] = []
        for message in row["messages"] or []:
            if message["role"] == "tool":
                break
            if message["role"] == "system" and not turns:
                system = message["content"]
            if message["role"] == "user":
                turns.append(message["content"])
    else:
        turns = [row["prompt"]] if "prompt" in row else list(row["turns"] or [])
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where} has no user's turn, or an empty one: {turns!r}; give it text or remove the row")
    return Script(turns, system, tools_of(row, where))

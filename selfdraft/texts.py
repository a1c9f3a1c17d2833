"""Many texts at once: batches of similar length, in which no text waits long for another one.

The noise of sampling belongs to a text's seed and to the position, so a text may be left at any token and be gone on
with in another batch: it is the same text (in bfloat16 as far as rounding lets it be).
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

import selfdraft
from selfdraft.drafters.base import Drafter

# New tokens after which the texts that have ended leave, and the others are sorted into full batches anew. That costs
# another pass over what each of them says so far: see docs/distill.md for what was measured.
STAGE = 256


@dataclass
class Text:
    """What the target is given, and what it has said since."""

    prompt: list[int]
    seed: int
    temperature: float  # 0 is greedy
    limit: int  # new tokens at most
    new: list[int] = field(default_factory=list)  # with the end token, if the text came to it
    finish: str | None = None  # "stop" at an end token, "length" at the limit

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.new)

    def add(self, tokens: list[int], ends: Collection[int]) -> None:
        """Goes on with these tokens, up to the first of `ends` or the limit."""
        tokens = tokens[: self.limit - len(self.new)]
        end = next((place for place, token in enumerate(tokens) if token in ends), None)
        self.new += tokens if end is None else tokens[: end + 1]
        if end is not None:
            self.finish = "stop"
        elif len(self.new) == self.limit:
            self.finish = "length"


def seed_of(*key: Any) -> int:
    """A seed for the text that these values name, 0..2**62: a hash, so that the texts of a corpus share no noise."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8]) >> 2


def write(
    model: PreTrainedModel,
    texts: Sequence[Text],
    end_ids: Collection[int],
    batch_size: int,
    drafter: Drafter | None = None,
    show: Callable[[list[Text], int], None] = lambda batch, count: None,
) -> None:
    """Has the target finish all texts, `batch_size` at a time; `show` is given every batch after its pass,
    and how many tokens that added.

    What the batches are depends on the texts alone. Only the temperature shapes the distribution: what the model's
    own generation config may say of top-k, top-p or penalties is off.
    """
    while unfinished := [text for text in texts if text.finish is None]:
        for temperature in sorted({text.temperature for text in unfinished}):
            same = [text for text in unfinished if text.temperature == temperature]
            same.sort(key=lambda text: text.length)  # so that little is padding; stable
            for first in range(0, len(same), batch_size):
                batch = same[first : first + batch_size]
                before = sum(len(text.new) for text in batch)
                go_on(model, batch, sorted(end_ids), drafter)
                show(batch, sum(len(text.new) for text in batch) - before)


def go_on(model: PreTrainedModel, batch: list[Text], end_ids: list[int], drafter: Drafter | None) -> None:
    """At most STAGE new tokens for every text of one temperature."""
    ids, mask = left_padded([text.prompt + text.new for text in batch], model.device)
    options: dict[str, Any] = {"do_sample": False}
    if batch[0].temperature > 0:
        options = {"do_sample": True, "temperature": batch[0].temperature, "top_k": 0, "top_p": 1.0}
    said: Any = selfdraft.generate(
        model,
        ids,
        attention_mask=mask,
        drafter=drafter,
        seed=[text.seed for text in batch],
        max_new_tokens=min(STAGE, max(text.limit - len(text.new) for text in batch)),
        eos_token_id=end_ids or None,
        pad_token_id=min(end_ids, default=0),
        repetition_penalty=1.0,
        **options,
    )
    ends = set(end_ids)
    for text, tokens in zip(batch, said[:, ids.shape[1] :].tolist(), strict=True):
        text.add(tokens, ends)


def left_padded(
    rows: Sequence[list[int]], device: torch.device
) -> tuple[Int[Tensor, "batch time"], Int[Tensor, "batch time"]]:
    """The rows as one tensor of ids, and the mask that says where they are."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask

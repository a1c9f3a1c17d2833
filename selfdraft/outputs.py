"""What a call returns beside the tokens: one entry per new token, collected while rows advance by different steps."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from selfdraft.metrics import Stats
from selfdraft.rows import Prompt
from selfdraft.verify import Walk


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: transformers' own output, and `stats`.

    `sequences` is int64 [batch, time]: the prompt as given, then the new tokens, padded on the right. `scores` and
    `logits` have one float32 [batch, vocab] per new token, `hidden_states` one tuple over the layers (embeddings
    first) of [batch, 1, hidden] per new token, the first one [batch, prompt, hidden]. Entries of a row past its end
    are zeros. `attentions` and the cache are None.
    """

    # transformers' own annotations of these say that there is one entry.
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    hidden_states: tuple[tuple[Tensor, ...], ...] | None = None
    stats: Stats | None = None  # rounds, acceptance and seconds of the call


class Record:
    """Collects what the config asks for, round by round."""

    def __init__(self, config: GenerationConfig, num_layers: int):
        wanted = bool(config.return_dict_in_generate)
        self.wants_scores = wanted and bool(config.output_scores)
        self.wants_logits = wanted and bool(config.output_logits)
        self.layers = tuple(range(num_layers + 1)) if wanted and config.output_hidden_states else ()
        self.prompt_states: Tensor | None = None
        self.emitted: list[list[int]] = []  # per round, how many tokens each row got
        self.parts: dict[str, list[Tensor]] = {}

    def shown(self, scores: Tensor | None) -> Tensor | None:
        """The scores, if they are asked for: stopping criteria see what is returned, as in transformers."""
        return scores if self.wants_scores else None

    def start(
        self, prompt: Prompt, path: Walk, logits: Tensor, states: Float[Tensor, "batch time states"] | None
    ) -> None:
        """What the prefill gave: the first token of every row, and the hidden states of the prompt."""
        self.prompt_states = None if states is None else prompt.as_given(states)
        self.add([1] * len(logits), path, logits, None if states is None else states[:, -1:])

    def add(
        self,
        emitted: list[int],
        path: Walk,
        logits: Float[Tensor, "batch nodes vocab"],
        states: Float[Tensor, "batch nodes states"] | None,
    ) -> None:
        """One round: row b got its first `emitted[b]` steps of the path."""
        self.emitted.append(list(emitted))
        given = {
            "logits": path.along(logits).float() if self.wants_logits else None,
            "scores": self.shown(path.scores),
            "states": None if states is None else path.along(states),
        }
        for name, part in given.items():
            if part is not None:
                self.parts.setdefault(name, []).append(part)

    def per_token(self, name: str, count: int) -> tuple[Tensor, ...] | None:
        """[batch, ...] for every new token."""
        parts = self.parts.get(name)
        if parts is None:
            return None
        rows = [
            torch.cat([part[row, : counts[row]] for part, counts in zip(parts, self.emitted, strict=True)])
            for row in range(len(parts[0]))
        ]
        return pad_sequence(rows, batch_first=True).unbind(dim=1)[:count]

    def output(self, sequences: Tensor, stats: Stats, count: int) -> GenerateOutput:
        """All of it, for the `count` new tokens that `sequences` has."""
        states = self.per_token("states", count)
        return GenerateOutput(
            sequences=sequences,
            scores=self.per_token("scores", count),
            logits=self.per_token("logits", count),
            hidden_states=None if states is None else self.hidden_states(states),
            stats=stats,
        )

    def hidden_states(self, states: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
        """The layers of each entry apart, and the whole prompt as the first entry."""
        assert self.prompt_states is not None
        entries = [self.prompt_states, *(state.unsqueeze(1) for state in states[1:])]
        return tuple(entry.chunk(len(self.layers), dim=-1) for entry in entries)

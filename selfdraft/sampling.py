"""From logits to tokens: the position-keyed noise, and the policy that picks the target's own token.

Gumbel-max: argmax(log p + G) with independent standard Gumbel G is a sample from p. Here G is a pure function of the
row's seed, the position of the token and the token id. So the sampled text depends on target, prompt and seed alone,
and a drafter that looks at the same G guesses what the target is going to sample.
"""

from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList

# Odd constants of the splitmix64 generator (Steele et al. 2014), as signed 64-bit integers.
_STEP = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def _mix(bits: Tensor) -> Tensor:
    """Scramble 64-bit integers, in place: every input bit reaches every output bit."""
    bits ^= bits >> 30
    bits *= _MIX_1
    bits ^= bits >> 27
    bits *= _MIX_2
    bits ^= bits >> 31
    return bits


class Noise:
    """The Gumbel noise of a call: one seed per row, and the temperature that the target samples at.

    `temperature == 0` means greedy decoding: there is no noise. With `draws`, the noise is the drafter's own and not
    the target's: the top k of `score` are draws from `probs`, without replacement and in this order (Kool et al. 2019,
    arXiv 1903.06059), and the classical rules need them as they are, with nothing left out or reordered by its value.
    """

    def __init__(self, seeds: Int[Tensor, " batch"], temperature: float, draws: bool = False):
        self.seeds = seeds
        self.temperature = temperature
        self.draws = draws

    def silent(self) -> "Noise":
        """The same without noise: what a drafter would see that does not share it."""
        return Noise(self.seeds, 0.0)

    def stream(self, number: int, lengths: Int[Tensor, " batch"], draws: bool = False) -> "Noise":
        """Noise that is independent of this one, of other streams, and of the rounds whose root stands elsewhere."""
        rows = _mix(self.seeds.to(lengths.device) * _STEP + number)
        return Noise(_mix(rows + lengths * _STEP), self.temperature, draws)

    def gumbel(
        self, positions: Int[Tensor, "batch time"], tokens: Int[Tensor, " vocab"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Standard Gumbel noise (float32) of every token in `tokens` at every position of every row."""
        return self.uniform(positions, tokens).neg_().log1p_().neg_().log_().neg_()

    def uniform(
        self, positions: Int[Tensor, "batch time"], tokens: Int[Tensor, " vocab"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Numbers strictly between 0 and 1 (float32), which the Gumbel noise is made from: near 0 where it is large."""
        row = _mix(self.seeds.to(positions.device) * _STEP + _STEP).unsqueeze(1)
        key = _mix(row + positions * _STEP).unsqueeze(-1)
        bits = _mix(key + (tokens + 1) * _STEP)
        # The 63 lower bits as a float keep 24 significant bits however small the number is, so the upper tail of the
        # noise, which decides the sample, is as fine as float32 allows. The bounds keep the noise finite.
        return (bits & 0x7FFFFFFFFFFFFFFF).float().mul_(2.0**-63).clamp_(2.0**-63, 1 - 2.0**-24)

    def score(
        self,
        logits: Float[Tensor, "batch time vocab"],
        positions: Int[Tensor, "batch time_or_one"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> Float[Tensor, "batch time vocab"]:
        """How strongly a drafter with these logits expects each token, the target's noise included; float32.

        `logits / T + gumbel(position, token)` when sampling, the logits when greedy: the log-probabilities up to a
        constant per position. The top k are the candidates. `positions` are those of the tokens being drafted, one
        per row where all are the same; `tokens` are the ids that the last axis stands for (0..vocab-1 when None).
        """
        if self.temperature == 0:
            return logits.float()
        ids = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
        return torch.add(self.gumbel(positions, ids), logits, alpha=1 / self.temperature)

    def probs(self, logits: Float[Tensor, "*shape vocab"]) -> Float[Tensor, "*shape vocab"]:
        """The distribution that the first of the top k of `score` is a draw from, if the noise is not known."""
        return (logits.float() / self.temperature).softmax(dim=-1)


# transformers' processors that look at the scores of one position alone: they mean the same on every node of a tree.
_SCORES_ONLY = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
# Those that look at the text as well, and at nothing that an earlier call left behind.
_OF_THE_TEXT = {
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
}


def is_transformers_own(thing: object, names: set[str]) -> bool:
    """Whether `thing` is of a class of transformers' `generation` package with one of these names."""
    kind = type(thing)
    return kind.__name__ in names and kind.__module__.startswith("transformers.generation.")


def drawn(scores: Float[Tensor, "*shape vocab"]) -> Int[Tensor, "*shape"]:
    """The best token of noisy scores, or -1 where there is none: all are minus infinity, or one is not a number."""
    most, token = scores.max(dim=-1)
    return torch.where(most > float("-inf"), token, -1)


class Policy:
    """Picks the target's own next token from its logits, greedy or sampled.

    Args:
        processors: of transformers or the user's own.
        noise: of the call; its temperature says whether it samples.
        stops: token ids that end the text. A processor that keeps a state is not called after them.
    """

    def __init__(self, processors: LogitsProcessorList, noise: Noise, stops: Collection[int] = ()):
        self.processors = processors
        self.noise = noise
        self.stops = stops
        known = _SCORES_ONLY | _OF_THE_TEXT
        # A processor that is not known may count its calls: it gets those of plain decoding, no more and no fewer.
        self.keeps_state = any(not is_transformers_own(each, known) for each in processors)
        self.reads_text = any(not is_transformers_own(each, _SCORES_ONLY) for each in processors)

    def pick(
        self,
        logits: Float[Tensor, "batch nodes vocab"],
        depths: Int[Tensor, "batch nodes"],
        lengths: Int[Tensor, " batch"],
        max_depth: int,
    ) -> Int[Tensor, "batch nodes"]:
        """The target's token after every node: argmax(processed logits + noise), or plain argmax when greedy.

        For a policy that does not read the text. A node of depth d stands at position `lengths + d`, so its
        successor's noise is that of `lengths + d + 1`. Noise is drawn once per depth (0..max_depth) and shared by the
        nodes of that depth.
        """
        if self.noise.temperature == 0 and not self.processors:
            return logits.max(dim=-1).indices  # faster than argmax, and the first of equals like it
        batch, nodes, vocab = logits.shape
        scores = self.process(logits.reshape(-1, vocab), None)
        if self.noise.temperature == 0:
            return scores.argmax(dim=-1).view(batch, nodes)
        steps = torch.arange(1, max_depth + 2, device=logits.device)
        noise = self.noise.gumbel(lengths.unsqueeze(1) + steps, torch.arange(vocab, device=logits.device))
        rows = torch.arange(batch, device=logits.device).unsqueeze(1)
        noise = noise[rows, depths.clamp(max=max_depth)]
        return drawn(scores.view(batch, nodes, vocab) + noise)

    def pick_next(
        self,
        logits: Float[Tensor, "batch vocab"],
        text: Int[Tensor, "batch time"] | None,
        positions: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch vocab"], Int[Tensor, " batch"]]:
        """The processed logits after a text, and the target's token from them. `positions` are those of that token."""
        scores = self.process(logits, text)
        if self.noise.temperature == 0:
            return scores, scores.argmax(dim=-1)
        noise = self.noise.gumbel(positions.unsqueeze(1), torch.arange(logits.shape[-1], device=logits.device))
        return scores, drawn(scores + noise.squeeze(1))

    def process(
        self, logits: Float[Tensor, "rows vocab"], text: Int[Tensor, "rows time"] | None
    ) -> Float[Tensor, "rows vocab"]:
        """The logits in float32, through all processors; those that look at the scores only need no text."""
        if text is None:
            text = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
        return self.processors(text, logits.to(torch.float32, copy=True))

    def ends(self, token: Int[Tensor, " batch"]) -> bool:
        """Whether the text of every row ends with this token. Reads from the device."""
        return all(each in self.stops for each in token.tolist())

"""From logits to tokens: the position-keyed noise, and the policy that picks the target's own token.

Gumbel-max: argmax(log p + G) with independent standard Gumbel G is a sample from p. Here G is a pure function of the
row's seed, the position of the token and the token id. So the sampled text depends on target, prompt and seed alone,
and a drafter that looks at the same G guesses what the target is going to sample.
"""

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

    `temperature == 0` means greedy decoding: there is no noise.
    """

    def __init__(self, seeds: Int[Tensor, " batch"], temperature: float):
        self.seeds = seeds
        self.temperature = temperature

    def silent(self) -> "Noise":
        """The same without noise: what a drafter would see that does not share it."""
        return Noise(self.seeds, 0.0)

    def gumbel(
        self, positions: Int[Tensor, "batch time"], tokens: Int[Tensor, " vocab"]
    ) -> Float[Tensor, "batch time vocab"]:
        """Standard Gumbel noise (float32) of every token in `tokens` at every position of every row."""
        row = _mix(self.seeds.to(positions.device) * _STEP + _STEP).unsqueeze(1)
        key = _mix(row + positions * _STEP).unsqueeze(-1)
        bits = _mix(key + (tokens + 1) * _STEP)
        # The 63 lower bits as a float keep 24 significant bits however small the number is, so the upper tail of the
        # noise, which decides the sample, is as fine as float32 allows. The bounds keep the noise finite.
        uniform = (bits & 0x7FFFFFFFFFFFFFFF).float().mul_(2.0**-63).clamp_(2.0**-63, 1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()

    def score(
        self,
        logits: Float[Tensor, "batch time vocab"],
        positions: Int[Tensor, "batch time"],
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> Float[Tensor, "batch time vocab"]:
        """How strongly a drafter with these logits expects each token, the target's noise included; float32.

        `logits / T + gumbel(position, token)` when sampling, the logits when greedy: the log-probabilities up to a
        constant per position. The top k are the candidates. `positions` are those of the tokens being drafted;
        `tokens` are the ids that the last axis stands for (all of 0..vocab-1 when None).
        """
        if self.temperature == 0:
            return logits.float()
        ids = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
        return self.gumbel(positions, ids).add_(logits, alpha=1 / self.temperature)


class Policy:
    """Picks the target's own next token from its logits, greedy or sampled."""

    def __init__(self, processors: LogitsProcessorList, noise: Noise):
        self.processors = processors
        self.noise = noise

    def pick(
        self,
        logits: Float[Tensor, "batch nodes vocab"],
        depths: Int[Tensor, "batch nodes"],
        lengths: Int[Tensor, " batch"],
        max_depth: int,
    ) -> Int[Tensor, "batch nodes"]:
        """The target's token after every node: argmax(processed logits + noise), or plain argmax when greedy.

        A node of depth d stands at position `lengths + d`, so its successor's noise is that of `lengths + d + 1`.
        Noise is drawn once per depth (0..max_depth) and shared by the nodes of that depth.
        """
        if self.noise.temperature == 0 and not self.processors:
            return logits.max(dim=-1).indices  # faster than argmax, and the first of equals like it
        batch, nodes, vocab = logits.shape
        scores = logits.reshape(-1, vocab).float()
        if self.processors:
            # The processors admitted by generate() look at the scores alone; the ids are there for the signature.
            scores = self.processors(torch.zeros(batch * nodes, 1, dtype=torch.long, device=logits.device), scores)
        if self.noise.temperature == 0:
            return scores.argmax(dim=-1).view(batch, nodes)
        steps = torch.arange(1, max_depth + 2, device=logits.device)
        noise = self.noise.gumbel(lengths.unsqueeze(1) + steps, torch.arange(vocab, device=logits.device))
        rows = torch.arange(batch, device=logits.device).unsqueeze(1)
        noise = noise[rows, depths.clamp(max=max_depth)]
        return (scores.view(batch, nodes, vocab) + noise).argmax(dim=-1)

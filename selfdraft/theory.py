"""What drafting should give: the formulas of the literature, to stand beside what was measured."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor


def acceptance_chance(
    target_probs: Float[Tensor, "*batch vocab"], draft_probs: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """alpha = E_{x~q}[min(1, p(x) / q(x))] = sum_x min(p, q): the most that any rule can accept of one sampled draft.

    Leviathan et al. 2023 (arXiv 2211.17192), section 3.
    """
    return target_probs.minimum(draft_probs).sum(dim=-1)


def measured_alpha(drafted: Sequence[int], accepted: Sequence[int]) -> float | None:
    """The chance that a draft which is put to the test is accepted; None when nothing was drafted.

    `drafted[d-1]` and `accepted[d-1]` count the rounds that drafted, and kept, at least d tokens. Depth d is tested
    when it was drafted and the token before it was kept. This is the most likely alpha if the chance is the same at
    every depth.
    """
    kept_before = [drafted[0], *accepted[:-1]] if drafted else []
    tested = sum(min(pair) for pair in zip(drafted, kept_before, strict=True))
    return sum(accepted) / tested if tested else None


def expected_tokens_per_round(alpha: float, depth: int) -> float:
    """New tokens per round of a chain of `depth` drafts, of which each is accepted with chance `alpha`.

    1 + alpha + ... + alpha^depth = (1 - alpha^(depth + 1)) / (1 - alpha): the target's own token, and every draft that
    is reached and accepted. Leviathan et al. 2023 (arXiv 2211.17192), equation 1, which takes the drafts as
    independent and equally good at every depth.
    """
    if not 0 <= alpha <= 1 or depth < 0:
        raise ValueError(f"alpha is a chance in [0, 1] and depth a count, not alpha={alpha} and depth={depth}")
    return sum(alpha**d for d in range(depth + 1))


def expected_tokens_over_rounds(alpha: float, drafted: Sequence[int], rounds: int) -> float:
    """The mean of `expected_tokens_per_round` when the rounds drafted chains of different lengths, or none.

    `drafted[d-1]` counts the rounds that drafted at least d tokens, out of `rounds`.
    """
    reached = [rounds, *drafted, 0]
    exactly = [here - deeper for here, deeper in zip(reached, reached[1:], strict=False)]
    return sum(n * expected_tokens_per_round(alpha, depth) for depth, n in enumerate(exactly)) / rounds


def chain_speedup(tokens_per_round: float, draft_seconds: float, pass_seconds: float) -> float:
    """How many times faster than plain decoding a chain is: E / (1 + gamma * T_q / T_p).

    `draft_seconds` is what a round's whole draft takes (gamma * T_q), `pass_seconds` one pass of the target over one
    token (T_p). Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8. It assumes that a pass over all the drafts costs
    what a pass over one token does, and that a round is nothing but drafting and that pass; on a CPU neither holds.
    """
    return tokens_per_round / (1 + draft_seconds / pass_seconds)


def round_speedup(tokens_per_round: float, round_seconds: float, plain_seconds: float) -> float:
    """How many times faster than plain decoding rounds of this yield and length are; a plain round yields one token.

    Bare accounting: it fits trees as well as chains, and assumes nothing about the cost of a wide pass.
    """
    return tokens_per_round * plain_seconds / round_seconds

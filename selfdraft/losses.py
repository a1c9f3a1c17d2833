"""Training losses over a vocabulary: pure functions of the drafter's logits, with formula, gradient and source.

`vocabulary_loss` fuses them with the projection onto the vocabulary and works through the positions in chunks: the
logits of all positions, and their gradient, never exist at once, and each chunk stays in the processor's cache.

In the formulas p is the target's distribution and q the drafter's; alpha = sum_v min(p_v, q_v) is how often a token
drawn from q is accepted by the classical rule (Leviathan et al. 2023, arXiv 2211.17192, section 3).
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 512  # positions whose logits exist at once

Loss = Literal["soft", "hard", "reverse_kl", "total_variation", "log_acceptance", "lk"]

Logits = Float[Tensor, "positions vocab"]
Labels = Int[Tensor, " positions"]
Sum = Float[Tensor, ""]


def check_loss(loss: str, decay: float = 1.0) -> None:
    """ValueError for a loss that does not exist, or a `decay` under which later heads or steps would learn nothing."""
    if loss not in LOSSES:
        raise ValueError(f"loss is '{loss}'; known: {', '.join(get_args(Loss))}")
    if not 0 < decay <= 1:
        raise ValueError(
            f"decay is {decay}: head or step i counts decay ** i, so it must be above 0, or all but the first learn "
            "nothing, and at most 1"
        )


def vocabulary_loss(
    loss: str,
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "vocab hidden"],
    target_probs: Float[Tensor, "places vocab"],
    target_best: Int[Tensor, " places"],
    labels: Labels,
    at: Labels | None = None,
) -> tuple[Sum, Int[Tensor, ""]]:
    """The loss of that name of `softmax(hidden @ head.T)`, summed over the positions, in nats where it has a unit; and
    at how many positions the drafter's best token is the target's (`target_best`).

    `target_probs` is p, and `labels` are the answer's own tokens, which `hard` alone looks at; both over the same
    vocabulary as `head`. `at` says where in `target_probs` and `target_best` the positions stand, when those hold more
    than they need or another order. Logits are float32 from bf16 products under autocast. Gradients reach `hidden` and
    `head`.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    return _VocabularyLoss.apply(LOSSES[loss], hidden, head, target_probs, target_best, labels, at)


def score_eagerly(loss, total, hits, logits, probs, best, labels, at):
    """The sums with those of a chunk added, and the gradient of its logits, in their dtype."""
    if at is not None:
        probs, best = probs[at], best[at]
    dtype, logits = logits.dtype, logits.float()
    most = logits.amax(dim=1, keepdim=True)
    hits = hits + (logits.gather(1, best.unsqueeze(1)) == most).sum()
    total, gradient = loss(total, logits.sub_(most), probs.float(), labels)
    return total, hits, gradient.to(dtype)


score_chunk = score_eagerly


def compile_losses() -> None:
    """Lets `torch.compile` fuse what every chunk goes through, from here on: half the time of a loss on a CPU."""
    global score_chunk
    score_chunk = torch.compile(score_eagerly, dynamic=True)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, hidden, head, target_probs, target_best, labels, at):
        weight = head.detach().to(hidden.dtype)
        total = torch.zeros((), device=hidden.device)
        hits = torch.zeros((), dtype=torch.long, device=hidden.device)
        _, needs_hidden, needs_head = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if needs_head else None
        for first in range(0, len(hidden), CHUNK):
            rows = slice(first, first + CHUNK)
            theirs = (target_probs[rows], target_best[rows]) if at is None else (target_probs, target_best)
            seen = (hidden[rows] @ weight.T, *theirs, labels[rows], None if at is None else at[rows])
            total, hits, gradient = score_chunk(loss, total, hits, *seen)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ weight
            if grad_head is not None:
                grad_head += gradient.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx, grad_total, _):
        grad_hidden, grad_head = ctx.saved_tensors
        scaled_hidden = None if grad_hidden is None else grad_hidden * grad_total.to(grad_hidden.dtype)
        scaled_head = None if grad_head is None else grad_head * grad_total
        return None, scaled_hidden, scaled_head, None, None, None, None


# --- The losses -------------------------------------------------------------------------------------------------------
# Each takes the sum so far, the logits of a chunk less their largest (which it may overwrite), p and the answer's own
# tokens, and returns the new sum and the gradient of the logits.


def soft_cross_entropy(total: Sum, logits: Logits, p: Logits, labels: Labels) -> tuple[Sum, Logits]:
    """-sum_v p_v log q_v, with the gradient q - p.

    Differs from the forward KL(p || q) by the entropy of p, which the drafter cannot change. EAGLE-3 (arXiv
    2503.01840), section 3.1; knowledge distillation of Hinton et al. 2015.
    """
    total = total - (p * logits).sum()
    exp = logits.exp_()
    normaliser = exp.sum(dim=1, keepdim=True)
    return total + normaliser.log().sum(), exp.div_(normaliser).sub_(p)


def hard_cross_entropy(total: Sum, logits: Logits, p: Logits, labels: Labels) -> tuple[Sum, Logits]:
    """-log q_y of the answer's own token y, with the gradient q - 1[v = y]. Medusa-1 (arXiv 2401.10774), 2.2.1."""
    log_q = logits.log_softmax(dim=1)
    wanted = labels.unsqueeze(1)
    gradient = log_q.exp().scatter_add_(1, wanted, torch.full_like(log_q[:, :1], -1))
    return total - log_q.gather(1, wanted).sum(), gradient


def reverse_kl(total: Sum, logits: Logits, p: Logits, labels: Labels) -> tuple[Sum, Logits]:
    """KL(q || p) = sum_v q_v (log q_v - log p_v), with the gradient q_v (log q_v - log p_v - KL).

    Looks for one of the target's modes instead of covering them all. MiniLLM (Gu et al. 2023, arXiv 2306.08543).
    A probability of 0 counts as the smallest number of its dtype.
    """
    log_q = logits.log_softmax(dim=1)
    ratio = log_q - p.clamp(min=torch.finfo(p.dtype).tiny).log()
    q = log_q.exp_()
    divergence = (q * ratio).sum(dim=1, keepdim=True)
    return total + divergence.sum(), q.mul_(ratio.sub_(divergence))


def total_variation(total: Sum, logits: Logits, p: Logits, labels: Labels) -> tuple[Sum, Logits]:
    """1 - alpha, with the gradient of `overlap` turned round. DistillSpec (Zhou et al. 2023, arXiv 2310.08461)."""
    alpha, gradient = overlap(logits.softmax(dim=1), p)
    return total + (1 - alpha).sum(), gradient.neg_()


def log_acceptance(total: Sum, logits: Logits, p: Logits, labels: Labels) -> tuple[Sum, Logits]:
    """-log alpha: the total variation's direction, as steep as it needs to be where alpha is small.

    LK losses (arXiv 2602.23881). No entry of the gradient is larger than 1; an alpha of 0 has the gradient 0.
    """
    alpha, gradient = overlap(logits.softmax(dim=1), p)
    alpha = alpha.clamp(min=torch.finfo(p.dtype).tiny)
    return total - alpha.log().sum(), gradient.div_(alpha).neg_()


def lk(total: Sum, logits: Logits, p: Logits, labels: Labels) -> tuple[Sum, Logits]:
    """w KL(p || q) + (1 - w) (1 - alpha) with w = exp(-3 alpha), which is taken for a constant.

    From KL while the drafter is poor to the total variation as it gets better. LK losses (arXiv 2602.23881).
    """
    log_q = logits.log_softmax(dim=1)
    q = log_q.exp()
    alpha, gradient = overlap(q, p)
    weight = (-3 * alpha).exp()
    divergence = (torch.xlogy(p, p) - p * log_q).sum(dim=1, keepdim=True)
    value = weight * divergence + (1 - weight) * (1 - alpha)
    return total + value.sum(), q.sub_(p).mul_(weight).sub_(gradient.mul_(1 - weight))


def overlap(q: Logits, p: Logits) -> tuple[Float[Tensor, "positions one"], Logits]:
    """alpha = sum_v min(p_v, q_v), and its gradient by the logits: q_v (1[q_v < p_v] - sum_u q_u 1[q_u < p_u])."""
    alpha = torch.minimum(p, q).sum(dim=1, keepdim=True)
    below = torch.where(q < p, q, 0)
    return alpha, below - q * below.sum(dim=1, keepdim=True)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "soft": soft_cross_entropy,
    "hard": hard_cross_entropy,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "log_acceptance": log_acceptance,
    "lk": lk,
}

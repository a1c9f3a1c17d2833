"""Training losses: pure functions of hidden states or logits, with formula and source.

The losses over a vocabulary are fused with the projection onto it and work through the positions in chunks: the
logits of all positions, and their gradient, never exist at once, and each chunk stays in the processor's cache.
"""

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 512  # positions whose logits exist at once


def soft_cross_entropy(
    hidden: Float[Tensor, "positions hidden"],
    head: Float[Tensor, "vocab hidden"],
    target_probs: Float[Tensor, "positions vocab"],
    target_best: Tensor,
) -> tuple[Float[Tensor, ""], Tensor]:
    """Cross entropy of `softmax(hidden @ head.T)` under the target's distribution: -sum_v p_v log q_v, summed over
    the positions, in nats; and at how many positions the drafter's best token is the target's (`target_best`).

    Differs from KL(p || q) by the entropy of p, which the drafter cannot change. EAGLE-3 (arXiv 2503.01840),
    section 3.1; knowledge distillation of Hinton et al. 2015. Logits are float32 from bf16 products under autocast.
    Gradients reach `hidden` and `head`; the gradient of the logits is q - p.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    return _SoftCrossEntropy.apply(hidden, head, target_probs, target_best)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, target_probs, target_best):
        weight = head.detach().to(hidden.dtype)
        total = torch.zeros((), device=hidden.device)
        hits = torch.zeros((), dtype=torch.long, device=hidden.device)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if needs_head else None
        for first in range(0, len(hidden), CHUNK):
            rows = slice(first, first + CHUNK)
            logits = (hidden[rows] @ weight.T).float()
            most = logits.amax(dim=1, keepdim=True)
            hits += (logits.gather(1, target_best[rows].unsqueeze(1)) == most).sum()
            probs = target_probs[rows].float()
            logits -= most
            total -= (probs * logits).sum()
            exp = logits.exp_()
            normaliser = exp.sum(dim=1, keepdim=True)
            total += normaliser.log().sum()
            if needs_hidden or needs_head:
                gradient = exp.div_(normaliser).sub_(probs).to(hidden.dtype)
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
        return scaled_hidden, scaled_head, None, None

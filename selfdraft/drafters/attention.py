"""Attention of a training pass: one softmax over entries that all queries share and over each query's own ones."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# What torch's attention runs on a CPU. Unlike that, it tells the sums of its softmaxes.
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_jointly(
    queries: Float[Tensor, "batch heads places dim"],
    keys: Float[Tensor, "batch heads time dim"],
    values: Float[Tensor, "batch heads time dim"],
    mask: Float[Tensor, "batch 1 places time"],
    own_keys: Float[Tensor, "batch heads own places dim"],
    own_values: Float[Tensor, "batch heads own places dim"],
) -> Float[Tensor, "batch heads places dim"]:
    """softmax([q k + mask, q k_own]) [v, v_own] with q divided by sqrt(dim): `mask` is added to the scores of shared
    entries, all own ones count.

    On a CPU no scores of [places, time] are kept for the backward pass, or written out at all.
    """
    attend = _Jointly.apply if queries.device.type == "cpu" else attend_plainly
    return attend(queries, keys, values, mask, own_keys, own_values)


def attend_plainly(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own_keys: Tensor, own_values: Tensor
) -> Tensor:
    """The same, in so many words."""
    queries = queries * queries.shape[-1] ** -0.5
    shared = queries @ keys.transpose(2, 3) + mask
    own = (queries.unsqueeze(2) * own_keys).sum(-1).transpose(2, 3)
    weights = torch.cat([shared, own.to(shared.dtype)], dim=-1).softmax(dim=-1).to(values.dtype)
    shared, own = weights.split([keys.shape[2], own_keys.shape[2]], dim=-1)
    return shared @ values + (own.transpose(2, 3).unsqueeze(-1) * own_values).sum(2)


class _Jointly(torch.autograd.Function):
    """The kernel's result is the softmax's over the shared entries alone. Their part in the joint one is e^(their
    log-sum - the joint log-sum); and with the joint result and log-sum, the kernel's backward pass gives the joint
    gradients, since it knows the weights as e^(score - log-sum), and the normalisation by the product of the result
    and its gradient (Dao et al. 2022, arXiv 2205.14135, appendix B.2)."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        attended, log_sum = _kernel(queries, keys, values, attn_mask=mask)
        scores = (queries.unsqueeze(2) * own_keys).sum(-1).to(log_sum.dtype) * queries.shape[-1] ** -0.5
        joint = torch.cat([log_sum.unsqueeze(2), scores], dim=2).logsumexp(2)
        weights = (scores - joint.unsqueeze(2)).exp().to(values.dtype)
        attended = attended * (log_sum - joint).exp().to(values.dtype).unsqueeze(-1)
        attended = attended + (weights.unsqueeze(-1) * own_values).sum(2)
        ctx.save_for_backward(queries, keys, values, mask, own_keys, own_values, attended, joint, weights)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        queries, keys, values, mask, own_keys, own_values, attended, joint, weights = ctx.saved_tensors
        of_queries, of_keys, of_values = _kernel_backward(
            gradient, queries, keys, values, attended, joint, 0.0, False, attn_mask=mask
        )
        mean = (gradient * attended).sum(-1)
        of_weights = (gradient.unsqueeze(2) * own_values).sum(-1) - mean.unsqueeze(2)
        of_scores = (weights * of_weights * queries.shape[-1] ** -0.5).unsqueeze(-1)
        of_queries = of_queries + (of_scores * own_keys).sum(2)
        of_own_keys = of_scores * queries.unsqueeze(2)
        of_own_values = weights.unsqueeze(-1) * gradient.unsqueeze(2)
        return of_queries, of_keys, of_values, None, of_own_keys, of_own_values

"""The attention of a training pass: the kernel's way against the same in so many words."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from selfdraft.drafters.attention import attend_jointly, attend_plainly
from selfdraft.target import additive_mask

SHAPES = [  # batch, heads, places, time, size of a head, own entries
    (2, 4, 7, 9, 16, 1),
    (3, 2, 40, 70, 32, 3),
    (1, 3, 1, 5, 8, 2),
    (2, 9, 600, 700, 64, 2),  # more than one block of the kernel
]


def inputs(batch: int, heads: int, places: int, time: int, size: int, own: int) -> list[Tensor]:
    """Queries at some places of a text, which see it up to there; the scores of some entries are far above others."""
    place = torch.stack([torch.randperm(time)[:places].sort().values for _ in range(batch)])
    mask = additive_mask(torch.arange(time).expand(batch, 1, -1) <= place.unsqueeze(2), torch.float32)
    text = [torch.randn(batch, heads, length, size).mul(2).requires_grad_() for length in (places, time, time)]
    mine = [torch.randn(batch, heads, own, places, size).mul(2).requires_grad_() for _ in range(2)]
    return [*text, mask, *mine]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_all_gradients_are_those_of_one_softmax(shape):
    given = inputs(*shape)
    learnt = [each for each in given if each.requires_grad]
    ours, plain = attend_jointly(*given), attend_plainly(*given)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    wanted = torch.randn_like(plain)
    for mine, theirs in zip(
        torch.autograd.grad(ours, learnt, wanted), torch.autograd.grad(plain, learnt, wanted), strict=True
    ):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


def test_no_scores_are_kept():
    """What a pass keeps grows with the text's length, and not with its square."""
    batch, heads, places, time = 2, 4, 120, 150
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        attend_jointly(*inputs(batch, heads, places, time, 8, 2))
    assert kept
    assert max(each.numel() for each in kept) < batch * heads * places * time
    kept.clear()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        attend_plainly(*inputs(batch, heads, places, time, 8, 2))
    assert max(each.numel() for each in kept) >= batch * heads * places * time

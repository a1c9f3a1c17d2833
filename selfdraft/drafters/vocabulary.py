"""The draft vocabulary: the most frequent answer tokens, which a small vocabulary projection is cut down to.

Ids are the target's token ids of every draft token, in ascending order; None stands for all of them.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def most_frequent(answer_counts: Int[Tensor, " vocab"], size: int) -> Int[Tensor, " draft_vocab"]:
    """The ids of the `size` tokens that answers use most."""
    return answer_counts.topk(size).indices.sort().values


def among(
    ids: Int[Tensor, " draft_vocab"] | None, tokens: Int[Tensor, "*shape"], vocab_size: int
) -> Bool[Tensor, "*shape"]:
    """Which of the target's tokens can be drafted."""
    if ids is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    known = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device)
    known[ids] = True
    return known[tokens]


def are_valid(ids: Int[Tensor, " draft_vocab"], vocab_size: int) -> bool:
    """Whether every id is one of the target's, and none comes twice. Reads from the device."""
    return bool(ids.min() >= 0 and ids.max() < vocab_size and len(ids.unique()) == len(ids))

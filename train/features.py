"""What the target thinks of a batch, computed on the spot."""

import torch
from torch import Tensor

from selfdraft.drafters.base import FeatureBatch
from selfdraft.target import Target


def live_features(
    target: Target, layers: tuple[int, ...], tokens: Tensor, trained: Tensor, attention: Tensor
) -> FeatureBatch:
    """The batch with the target's hidden states, in the target's own dtype and on its device, without gradients.

    `tokens`, `trained` and `attention` are `[batch, time]`, padded on the right: no token attends to one after it,
    so padding changes nothing, and neither does the number of conversations in a batch.
    """
    tokens, trained, attention = (part.to(target.device, non_blocking=True) for part in (tokens, trained, attention))
    with torch.no_grad():
        features, hidden = target.encode(tokens, layers)
    return FeatureBatch(tokens=tokens, trained=trained, attention=attention, features=features, hidden=hidden)

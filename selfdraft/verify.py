"""The lossless acceptance rule: walk the tree along the target's own picks."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from selfdraft.tree import DraftTree


@dataclass(frozen=True)
class Walk:
    """The kept path of every row: `nodes[:, 0]` is the root, then `accepted` drafted nodes, then filling."""

    nodes: Int[Tensor, "batch steps"]  # node indices; steps is the deepest path allowed + 1
    accepted: Int[Tensor, " batch"]  # drafted nodes on the path
    picks: Int[Tensor, "batch steps"]  # the target's token after each node of the path: what is emitted


def walk(
    tree: DraftTree,
    reach: Tensor,
    depths: Int[Tensor, "batch nodes"],
    picks: Int[Tensor, "batch nodes"],
    max_depth: int,
) -> Walk:
    """From the root to the child that equals the target's pick, and on, until the tree has no such child.

    The kept tokens are `picks[:, : accepted + 1]`: every accepted node equals the pick of its parent, and the pick
    after the last node comes on top. Since each pick is the target's own token given its prefix, the emitted text is
    the target's own, whatever was drafted. `reach` is `tree.ancestors()`, `depths` the nodes' depths. Device only.
    """
    if tree.tokens.shape[1] == 1:  # nothing was drafted
        return Walk(torch.zeros_like(picks), torch.zeros_like(picks[:, 0]), picks)
    parents = tree.parents.clamp(min=0)
    follows = tree.tokens == picks.gather(1, parents)
    follows = follows & (tree.parents >= 0) & (depths <= max_depth)
    follows[:, 0] = True
    # A node is reached when every node on its path follows its parent's pick.
    reached = (follows.unsqueeze(1) | ~reach).all(dim=2) & follows
    end = torch.where(reached, depths, -1).argmax(dim=1)
    count = tree.tokens.shape[1]
    on_path = reach[torch.arange(len(end), device=end.device), end]
    # Parents come before children, so a path in order of its indices is a path from the root down.
    index = torch.arange(count, device=end.device)
    nodes = torch.where(on_path, index, count).sort(dim=1).values[:, : max_depth + 1]
    nodes = torch.where(nodes < count, nodes, end.unsqueeze(1))
    return Walk(nodes, depths.gather(1, end.unsqueeze(1)).squeeze(1), picks.gather(1, nodes))

"""The lossless acceptance rule: walk the tree along the target's own picks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from selfdraft.sampling import Policy
from selfdraft.tree import DraftTree


@dataclass(frozen=True)
class Walk:
    """The kept path of every row: `nodes[:, 0]` is the root, then `accepted` drafted nodes, then filling."""

    nodes: Int[Tensor, "batch steps"]  # node indices; steps is the deepest path allowed + 1
    accepted: Int[Tensor, " batch"]  # drafted nodes on the path
    picks: Int[Tensor, "batch steps"]  # the target's token after each node of the path: what is emitted
    scores: Float[Tensor, "batch steps vocab"] | None = None  # the processed logits that each pick was made from

    def along(self, values: Float[Tensor, "batch nodes size"]) -> Float[Tensor, "batch steps size"]:
        """`values` of the nodes of the path."""
        return values.gather(1, self.nodes.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def walk(tree: DraftTree, picks: Int[Tensor, "batch nodes"], max_depth: int) -> Walk:
    """From the root to the child that equals the target's pick, and on, until the tree has no such child.

    The kept tokens are `picks[:, : accepted + 1]`: every accepted node equals the pick of its parent, and the pick
    after the last node comes on top. Since each pick is the target's own token given its prefix, the emitted text is
    the target's own, whatever was drafted. Device only.
    """
    if tree.tokens.shape[1] == 1:  # nothing was drafted
        return Walk(torch.zeros_like(picks), torch.zeros_like(picks[:, 0]), picks)
    reach, depths = tree.reach, tree.depths
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


def walk_in_order(
    tree: DraftTree,
    logits: Float[Tensor, "batch nodes vocab"],
    policy: Policy,
    lengths: Int[Tensor, " batch"],
    max_depth: int,
    going: Bool[Tensor, " batch"],
    text: Int[Tensor, "batch time"] | None,
) -> Walk:
    """The same walk, node after node, for a policy that looks at the text: picks are made on the path alone.

    Every pick is made from exactly the text that plain decoding has there, and in its order. With `text`, which ends
    with the root, all rows go equally far, as far as the shortest of the rows that `going` names: then processors see
    the whole batch in one call, as they do in plain decoding. With None the processors look at the scores only, and
    every row goes as far as it can. `lengths` is the position of the root.

    Device only, unless the processors read, or keep a state: then the walk stops as soon as plain decoding would make
    no further call.
    """
    rows = torch.arange(len(lengths), device=lengths.device)
    node, on_path = torch.zeros_like(lengths), torch.ones_like(going)
    accepted = torch.zeros_like(lengths)
    nodes, picks, kept_scores = [], [], []
    for step in range(max_depth + 1):
        scores, pick = policy.pick_next(logits[rows, node], text, lengths + step + 1)
        nodes.append(node)
        picks.append(pick)
        kept_scores.append(scores)
        if step == max_depth:
            break
        follows = (tree.parents == node.unsqueeze(1)) & (tree.tokens == pick.unsqueeze(1))
        on_path = on_path & follows.any(dim=1)
        if text is not None:
            on_path = (on_path | ~going).all().expand_as(on_path)
            text = torch.cat([text, pick.unsqueeze(1)], dim=1)
        if policy.keeps_state and (policy.ends(pick) or not on_path.any()):
            break  # the text ends with this pick, or the next one is for another round
        accepted = accepted + on_path
        node = torch.where(on_path, follows.int().argmax(dim=1), node)
    return Walk(torch.stack(nodes, 1), accepted, torch.stack(picks, 1), torch.stack(kept_scores, 1))

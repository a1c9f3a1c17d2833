"""Growing a tree level by level: the drafters that can be asked again about their own drafts share this."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from selfdraft.cache import SlotCache
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.tree import DraftTree, visible_slots

# The error scale of a drafter's logits: P(the target picks x) is close to softmax(logits / SIGMA)_x when greedy.
# Sampling divides the logits, and so their error, by the temperature, and the noise comes on top: there the scale of
# the sum is SIGMA / T. Measured on SmolLM2-135M with an EAGLE-3 head: 0.7 greedy, 1.1 at T = 0.7, 0.85 at T = 1.
SIGMA = 0.85

Step = Callable[[Tensor, Tensor], Tensor]


def grow(
    root: Int[Tensor, " batch"],
    logits: Float[Tensor, "batch one vocab"],
    ids: Int[Tensor, " vocab"] | None,
    plan: Plan,
    step: Step,
    noise: Noise,
    lengths: Int[Tensor, " batch"],
) -> DraftTree:
    """A tree by top-k expansion and a total budget (EAGLE-2, arXiv 2406.16858), all on the device.

    Every level expands the `plan.width` likeliest nodes of the one before, each by its `plan.width` best tokens; of
    all nodes seen, the `plan.nodes` likeliest stay. Likely is the product, along the path, of softmax(score / SIGMA),
    or of softmax(score T / SIGMA) when sampling.
    Where the noise is the drafter's own, `draw` makes the tree.

    Args:
        root: the newest decided token.
        logits: of the root's successors.
        ids: the token ids that the vocabulary axis stands for; None for 0, 1, 2, ...
        plan: depth, width and nodes.
        step: `step(tokens [batch, width], parents [batch, width]) -> logits [batch, width, vocab]`: the successors
            of the next level's nodes; `parents` index the nodes of the level before, 0 for the root.
        noise: as `propose` was given it.
        lengths: the position of the root; a node of depth d stands d places further on.
    """
    if noise.draws:
        return draw(root, logits, ids, plan, step, noise, lengths)
    batch, _, vocab = logits.shape
    width = min(plan.width, vocab)
    parents = torch.zeros(batch, width, dtype=torch.long, device=root.device)
    positions, sigma = lengths.unsqueeze(1) + 1, SIGMA / (noise.temperature or 1.0)
    scores = noise.score(logits, positions, ids)[:, 0]
    logs, best = (scores / sigma).log_softmax(dim=-1).topk(width)
    tokens = best if ids is None else ids[best]
    nodes = torch.arange(1, width + 1, device=root.device).expand(batch, -1)  # indices among all nodes seen
    all_tokens, all_parents, all_logs = [root.unsqueeze(1), tokens], [parents[:, :1] - 1, parents], [logs]
    for depth in range(1, plan.depth):
        scores = noise.score(step(tokens, parents), positions + depth, ids)
        child_logs, best = (scores / sigma).log_softmax(dim=-1).topk(width)
        child_logs = (logs.unsqueeze(2) + child_logs).flatten(1)
        children = (best if ids is None else ids[best]).flatten(1)
        all_tokens.append(children)
        all_parents.append(nodes.repeat_interleave(width, dim=1))
        all_logs.append(child_logs)
        logs, chosen = child_logs.topk(width)
        first = 1 + width + (depth - 1) * width**2
        tokens, parents, nodes = children.gather(1, chosen), chosen // width, first + chosen
    tree = prune(torch.cat(all_tokens, 1), torch.cat(all_parents, 1), torch.cat(all_logs, 1), plan.nodes)
    return replace(tree, is_chain=width == 1)


def draw(
    root: Int[Tensor, " batch"],
    logits: Float[Tensor, "batch one vocab"],
    ids: Int[Tensor, " vocab"] | None,
    plan: Plan,
    step: Step,
    noise: Noise,
    lengths: Int[Tensor, " batch"],
) -> DraftTree:
    """The same for the classical rules: every child is a draw without replacement from the drafter's distribution.

    To leave out a drawn token for what it is would change the law of those that stay, so here the shape follows from
    the plan alone: `plan.width` children of the root, then equally many nodes on every level, the earlier draws of
    earlier nodes first, since an earlier draw is tried before a later one.
    """
    batch, _, vocab = logits.shape
    width, steps = min(plan.width, vocab), plan.depth - 1
    first = min(width, plan.nodes - steps)
    room = (plan.nodes - first) // max(1, steps)
    # (a node of the level before, which of its draws): the children of a level.
    places = sorted(itertools.product(range(min(first, room)), range(width)), key=sum)[:room]
    above, nth = torch.tensor(places, dtype=torch.long, device=root.device).view(-1, 2).unbind(dim=1)
    expanded = 1 + max((node for node, _ in places), default=0)  # nodes of a level that have children
    parents = [torch.tensor([-1] + first * [0], device=root.device)]
    tokens, probs = [root.unsqueeze(1)], [noise.probs(logits)]
    positions = lengths.unsqueeze(1) + 1
    level = noise.score(logits, positions, ids).topk(width).indices[:, 0, :first]
    behind = torch.zeros(expanded, dtype=torch.long, device=root.device)
    for depth in range(1, plan.depth):
        tokens.append(level if ids is None else ids[level])
        logits = step(tokens[-1][:, :expanded], behind.expand(batch, -1))
        probs += [noise.probs(logits), logits.new_zeros(batch, level.shape[1] - expanded, vocab, dtype=torch.float32)]
        best = noise.score(logits, positions + depth, ids).topk(width).indices
        level, behind = best[:, above, nth], above[:expanded]
        parents.append(1 + above + (0 if depth == 1 else first + (depth - 2) * len(places)))
    tokens.append(level if ids is None else ids[level])
    probs.append(probs[0].new_zeros(batch, level.shape[1], vocab))
    all_parents = torch.cat(parents).expand(batch, -1)
    return DraftTree(torch.cat(tokens, 1), all_parents, torch.cat(probs, 1), ids, is_chain=width == 1)


def prune(
    tokens: Int[Tensor, "batch seen"],
    parents: Int[Tensor, "batch seen"],
    logs: Float[Tensor, "batch drafted"],
    nodes: int,
) -> DraftTree:
    """The root and the `nodes` likeliest drafted nodes. A parent is at least as likely as its children, and stands
    before them, so that a stable sort keeps every parent of a kept node."""
    if nodes >= logs.shape[1]:
        return DraftTree(tokens, parents)
    order = logs.sort(dim=1, descending=True, stable=True).indices[:, :nodes] + 1
    kept = torch.cat([torch.zeros_like(order[:, :1]), order.sort(dim=1).values], dim=1)
    places = torch.arange(nodes + 1, device=tokens.device).expand_as(kept)
    renumbered = torch.zeros_like(parents).scatter(1, kept, places)
    new_parents = renumbered.gather(1, parents.gather(1, kept).clamp(min=0))
    new_parents[:, 0] = -1
    return DraftTree(tokens.gather(1, kept), new_parents)


class Levels:
    """Where the nodes of a growing tree are put in the drafter's own cache, and what each of them sees.

    `lengths` are the entries that each row has committed there, and none has more than `longest`. The levels follow
    them one by one, all equally wide.
    """

    def __init__(self, cache: SlotCache, lengths: Int[Tensor, " batch"], longest: int):
        self.cache, self.lengths, self.longest = cache, lengths, longest
        self.count = 0
        self.own: Bool[Tensor, "batch nodes drafted"] | None = None  # the drafted entries on each node's path

    def next(
        self, parents: Int[Tensor, "batch nodes"]
    ) -> tuple[Int[Tensor, "batch nodes"], Bool[Tensor, "batch nodes width"], Int[Tensor, "batch width"]]:
        """Opens the cache for one more level; the depth-1 nodes are the first.

        Returns the nodes' positions (`lengths` for depth 1), what they see, and the position of every slot's entry.
        """
        nodes = parents.shape[1]
        own = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        if self.own is not None:
            above = self.own.gather(1, parents.unsqueeze(-1).expand(-1, -1, self.own.shape[-1]))
            own = torch.cat([above, own], dim=-1)
        lengths, before = self.lengths.unsqueeze(1), self.count * nodes
        slots = lengths + before + torch.arange(nodes, device=parents.device)
        width = self.cache.open(slots, self.longest + before + nodes)
        visible, drafted = visible_slots(self.lengths, own, width)
        positions = (lengths + self.count).expand(-1, nodes)
        self.own, self.count = own, self.count + 1
        return positions, visible, lengths + torch.minimum(drafted, drafted // nodes)

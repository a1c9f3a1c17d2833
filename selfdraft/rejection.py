"""The classical acceptance rules: drafted tokens that were drawn from the drafter's distribution are tried one by one.

A rule gives the chance that each drafted node is accepted when its turn comes, and what is left to draw from after a
node whose children were all refused. Together that is a pick after every node whose law is the target's own, and
`verify.walk` does the rest. Here p is the target's processed distribution at a node and q what its children were drawn
from; with `res(p, q) = max(p - q, 0)`, brought to a sum of 1. The proofs are in `docs/verification.md`.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from selfdraft.sampling import Noise, Policy
from selfdraft.tree import DraftTree
from selfdraft.verify import Walk, walk

_DRAFT, _ACCEPT, _REST = 1, 2, 3  # streams of noise: what drafts, what accepts, and what draws from the rest


def draft_noise(noise: Noise, lengths: Int[Tensor, " batch"]) -> Noise:
    """What a drafter draws with, in the round whose root stands at `lengths`.

    New in every round: `block` looks at drafted tokens behind the last one that it keeps, so they must not come back.
    """
    return noise.stream(_DRAFT, lengths, draws=True)


def rejects(acceptance: str, policy: Policy) -> bool:
    """Whether the classical rules decide. Greedy text needs none: its distribution is a point mass, the pick itself.

    ValueError for an unknown name, and for processors that look at the text: here all nodes are processed at once.
    """
    if acceptance not in ("coupled", "rejection"):
        raise ValueError(f"acceptance is 'coupled' (the default) or 'rejection', not {acceptance!r}")
    if acceptance == "coupled" or policy.noise.temperature == 0:
        return False
    if policy.reads_text:
        names = ", ".join(sorted({type(each).__name__ for each in policy.processors}))
        raise ValueError(
            f"acceptance='rejection' takes processors that look at the scores alone, and these are {names}; leave out "
            "those that look at the text, or take acceptance='coupled', which honours them all"
        )
    return True


def walk_by_rejection(
    tree: DraftTree,
    logits: Float[Tensor, "batch nodes vocab"],
    policy: Policy,
    lengths: Int[Tensor, " batch"],
    max_depth: int,
) -> Walk:
    """The path that the classical rules take: `block` for a chain, `recursive` for a tree and for certain drafts.

    `lengths` is the position of the root. Nodes of one depth share their noise: only one of them is on the path.
    Device only.
    """
    batch, nodes, vocab = logits.shape
    scores = policy.process(logits.reshape(-1, vocab), None).view(batch, nodes, vocab)
    index, ids = (torch.arange(count, device=logits.device) for count in (nodes, vocab))
    rows = torch.arange(batch, device=logits.device).unsqueeze(1)
    uniforms = policy.noise.stream(_ACCEPT, lengths).uniform(index.expand(batch, -1), ids[:1]).squeeze(-1)
    steps = torch.arange(1, max_depth + 2, device=logits.device)
    noise = policy.noise.stream(_REST, lengths).gumbel(lengths.unsqueeze(1) + steps, ids)

    if tree.is_chain and tree.draft_probs is not None:
        chances, rest = block(tree, scores.softmax(dim=-1))
        accepted = up_to_the_last(uniforms < chances)
    else:
        chances, rest = recursive(tree, scores.softmax(dim=-1))
        accepted = uniforms < chances
    draws = (rest.log() + noise[rows, tree.depths.clamp(max=max_depth)]).argmax(dim=-1)
    path = walk(tree, picks(tree, accepted, draws), max_depth)
    return replace(path, scores=path.along(scores))


def recursive(
    tree: DraftTree, target_probs: Float[Tensor, "batch nodes vocab"]
) -> tuple[Float[Tensor, "batch nodes"], Float[Tensor, "batch nodes vocab"]]:
    """Recursive rejection without replacement: the chance of every node, and what is left after every node.

    The children of a node are tried in the order in which they were drawn, each by min(1, p(x) / q(x)); a refusal
    leaves res(p, q) of p, and q without x. A chain has one child a node: that is the rule of Leviathan et al. 2023
    (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318); for trees SpecInfer (arXiv 2305.09781), and Jeon et al.
    2024 (arXiv 2402.14160) without replacement. A certain child is a draw from its point mass: it has the chance p(x),
    and a refusal leaves p without it.
    """
    rest, draft_probs = target_probs.clone(), over_vocabulary(tree, target_probs)
    chances = torch.ones_like(target_probs[..., 0])
    rows = torch.arange(len(rest), device=rest.device)
    for node in range(1, tree.tokens.shape[1]):
        parent, token = tree.parents[:, node].clamp(min=0), tree.tokens[:, node : node + 1]
        there = tree.parents[:, node : node + 1] >= 0
        p = rest[rows, parent]
        q = torch.zeros_like(p).scatter(1, token, 1.0) if draft_probs is None else draft_probs[rows, parent]
        chances[:, node] = torch.where(there, ratio(p.gather(1, token), q.gather(1, token)), 0).squeeze(1)
        rest[rows, parent] = torch.where(there, normalised((p - q).clamp(min=0), p), p)
        if draft_probs is not None:
            others = q.scatter(1, token, 0.0)
            draft_probs[rows, parent] = torch.where(there, normalised(others, others), q)
    return chances, rest


def block(
    tree: DraftTree, target_probs: Float[Tensor, "batch nodes vocab"]
) -> tuple[Float[Tensor, "batch nodes"], Float[Tensor, "batch nodes vocab"]]:
    """Block verification of a chain (Sun et al. 2024, arXiv 2403.10444): every node has its turn, the last one wins.

    P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i)). Node i has the chance m / (m + 1 - P_i), where m is the mass of
    max(P_i p - q, 0) at the node, and what is left after it is that, brought to a sum of 1. As q is zero at the last
    node, its chance is P_i and p is left. The path ends at the last node that is accepted, whatever became of those
    before it: see `up_to_the_last`.
    """
    draft_probs = over_vocabulary(tree, target_probs)
    assert draft_probs is not None, "a chain of certain drafts is for `recursive`"
    token = tree.tokens[:, 1:].unsqueeze(-1)
    ratios = target_probs[:, :-1].gather(2, token) / draft_probs[:, :-1].gather(2, token)
    running = [torch.ones_like(target_probs[:, 0, 0])]
    for each in ratios.squeeze(-1).nan_to_num(0.0).unbind(dim=1):
        running.append((running[-1] * each).clamp(max=1))
    reached = torch.stack(running, dim=1)
    rest = (reached.unsqueeze(-1) * target_probs - draft_probs).clamp(min=0)
    mass = rest.sum(dim=-1)
    # Where P is 1 and nothing is left, p equals q, and a later node that is accepted takes this one along.
    chances = torch.where(tree.is_node, ratio(mass, mass + 1 - reached), 0)
    return chances, normalised(rest, target_probs)


def up_to_the_last(accepted: Bool[Tensor, "batch nodes"]) -> Bool[Tensor, "batch nodes"]:
    """All nodes of a chain up to the last accepted one."""
    return accepted.flip(1).int().cummax(dim=1).values.flip(1).bool()


def picks(
    tree: DraftTree, accepted: Bool[Tensor, "batch nodes"], draws: Int[Tensor, "batch nodes"]
) -> Int[Tensor, "batch nodes"]:
    """The token after every node: that of its first accepted child, or where it has none, the draw."""
    index = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    kept = (tree.parents.unsqueeze(1) == index.unsqueeze(1)) & accepted.unsqueeze(1)
    first = tree.tokens.gather(1, kept.int().argmax(dim=2))
    return torch.where(kept.any(dim=2), first, draws)


def over_vocabulary(
    tree: DraftTree, target_probs: Float[Tensor, "batch nodes vocab"]
) -> Float[Tensor, "batch nodes vocab"] | None:
    """The tree's draft probabilities of the target's tokens, a copy; 0 for a token that could not be drafted."""
    if tree.draft_probs is None:
        return None
    vocab = target_probs.shape[-1]
    if tree.draft_ids is None:
        return pad(tree.draft_probs, (0, vocab - tree.draft_probs.shape[-1])).clone()
    return torch.zeros_like(target_probs).index_copy(2, tree.draft_ids, tree.draft_probs)


def ratio(p: Float[Tensor, "*shape"], q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """min(1, p / q); 0 where p is 0, so that a number above 0 never accepts what the target excludes."""
    return (p / q).nan_to_num(0.0).clamp(max=1)


def normalised(
    mass: Float[Tensor, "*shape vocab"], otherwise: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape vocab"]:
    """Brought to a sum of 1, or `otherwise` where nothing is there: a refusal that only rounding can have caused."""
    total = mass.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, mass / total, otherwise)

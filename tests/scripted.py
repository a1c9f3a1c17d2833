"""Drafters that make faults visible: what they draft is known beforehand, right or wrong.

`copy_of` agrees with the target always, `noisy` often, `Script` for prescribed runs, `Anti` never.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from selfdraft.drafters.base import Drafter, Observed
from selfdraft.drafters.draft_model import DraftModel
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target
from selfdraft.tree import DraftTree


def copy_of(model: PreTrainedModel) -> DraftModel:
    """A separate draft model that is the target once more: every draft must be accepted, greedy and sampled."""
    return DraftModel.from_model(copy.deepcopy(model), Target(model)).eval()


def noisy(model: PreTrainedModel, scale: float) -> DraftModel:
    """A draft model whose weights are the target's, each tensor moved by `scale` of its standard deviation."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in other.parameters():
            spread = weight.std() if weight.numel() > 1 else weight.abs()
            weight += scale * spread * torch.randn(weight.shape, generator=generator)
    return DraftModel.from_model(other, Target(model)).eval()


@dataclass
class Rounds:
    """How many rounds a call has had."""

    count: int = 0


class Script:
    """Knows the text beforehand, and drafts `runs[i]` right tokens in round i and wrong ones after them.

    A run of 0 drafts nothing at all: its nodes are empty. Row b is b runs ahead, so that the rows of a batch differ.
    With a width above 1, wrong siblings stand around every node, and the token that would be right next also hangs
    below a wrong sibling, where only a verifier that forgets the path would accept it.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[Sequence[int]], runs: Sequence[int], vocab: int, plan: Plan = Plan(depth=5)):
        longest = max(len(text) for text in texts)
        self.texts = torch.tensor([[*text, *[0] * (longest + 64 - len(text))] for text in texts])
        self.runs = torch.tensor(runs)
        self.vocab = vocab
        self.plan = plan

    def check(self, target: Target) -> None:
        """Fits any target."""

    def begin(self, batch_size: int) -> Rounds:
        return Rounds()

    def run(self, state: Rounds, depths: Int[Tensor, " depth"], rows: int) -> tuple[Tensor, Tensor]:
        """Which depths are right in this round, and which are there at all: bool [batch, depth] each."""
        runs = self.runs[(state.count + torch.arange(rows)) % len(self.runs)].unsqueeze(1)
        state.count += 1
        return depths <= runs, (runs > 0).expand(-1, len(depths))

    def propose(
        self, state: Rounds, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        depths = torch.arange(1, plan.depth + 1)
        truth = self.texts.gather(1, seen.lengths.unsqueeze(1) + depths)
        right, there = self.run(state, depths, len(root))
        width = max(1, min(plan.width, (plan.nodes + 1) // plan.depth - 1)) if plan.width > 1 else 1
        tokens, parents, above = [root.unsqueeze(1)], [torch.full_like(root, -1).unsqueeze(1)], 0
        for level in range(plan.depth):
            # The node that the path goes on from has another place among its siblings at every level.
            main, first = level % width, len(tokens)
            for place in range(width):
                off = (place - main) % width
                token = truth[:, level] + off + (0 if off else (~right[:, level]).long() * width)
                tokens.append((token % self.vocab).unsqueeze(1))
                parents.append(torch.where(there[:, level], above, -1).unsqueeze(1))
            if width > 1 and level + 1 < plan.depth:
                tokens.append(truth[:, level + 1 : level + 2])
                parents.append(torch.where(there[:, level], first + (main + 1) % width, -1).unsqueeze(1))
            above = first + main
        return DraftTree(torch.cat(tokens, dim=1), torch.cat(parents, dim=1))


class Anti(Script):
    """Knows the text beforehand, and drafts nothing but wrong tokens."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, plan: Plan = Plan(depth=5)):
        super().__init__(texts, [0], vocab, plan)

    def run(self, state: Rounds, depths: Int[Tensor, " depth"], rows: int) -> tuple[Tensor, Tensor]:
        wrong = torch.zeros(rows, len(depths), dtype=torch.bool)
        return wrong, ~wrong


class Passing:
    """Passes everything on to another drafter: what a test inherits from to look at a call, or to change it."""

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.feature_layers, self.plan = inner.feature_layers, inner.plan
        self.begin, self.check = inner.begin, inner.check

    def propose(self, state: Any, seen: Observed, root: Tensor, plan: Plan, noise: Noise) -> DraftTree:
        return self.inner.propose(state, seen, root, plan, noise)


def texts_of(inputs: dict[str, Tensor], sequences: Tensor) -> list[list[int]]:
    """The rows of a finished call as a script wants them: the prompt without its padding, and the new tokens."""
    time = inputs["input_ids"].shape[1]
    return [
        row[:time][mask.bool()].tolist() + row[time:].tolist()
        for row, mask in zip(sequences, inputs["attention_mask"], strict=True)
    ]

"""What the tests of single drafters share: a text of the target's own, and a look into the rounds of `generate`."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import selfdraft
from selfdraft import Plan
from selfdraft.drafters.base import Drafter, FeatureBatch, Observed
from selfdraft.sampling import Noise
from selfdraft.target import Target
from selfdraft.tree import DraftTree
from tests.models import prompts, tiny

PROMPT, ANSWER = 5, 20


def own_text(family: str = "llama", prompt: int = PROMPT, answer: int = ANSWER) -> Tensor:
    """A prompt and the target's greedy answer to it: int64 [1, time]."""
    return tiny(family).generate(**prompts((prompt,)), max_new_tokens=answer, do_sample=False)


def batch_of(
    target: Target, layers: tuple[int, ...], tokens: Tensor, prompt: int = PROMPT, pad: int = 0
) -> FeatureBatch:
    """A training batch in which everything after the first `prompt` tokens is an answer, and `pad` entries follow."""
    padded = nn.functional.pad(tokens, (0, pad))
    places = torch.arange(padded.shape[1]).expand_as(padded)
    attention = places < tokens.shape[1]
    with torch.no_grad():
        features, hidden = target.encode(padded, layers)
    return FeatureBatch(padded, attention & (places >= prompt), attention, features, hidden)


def overfit(drafter: Any, batch: FeatureBatch, steps: int, lr: float = 5e-3) -> dict[str, float]:
    """Learns one batch by heart; returns the metrics of the last step as means."""
    drafter.train().start(torch.bincount(batch.tokens[batch.trained], minlength=drafter.target.vocab_size))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    for _ in range(steps):
        loss = drafter(batch)
        (loss.total / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    drafter.eval()
    return {name: float(total / count) for name, (total, count) in loss.metrics.items()}


@dataclasses.dataclass
class Watched:
    """A drafter that shows what it was asked, and what it proposed, in every round."""

    drafter: Drafter
    rounds: list[tuple[Observed, Tensor, Plan, Noise, DraftTree]] = dataclasses.field(default_factory=list)
    states: list[Any] = dataclasses.field(default_factory=list)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers

    @property
    def plan(self) -> Plan:
        return self.drafter.plan

    def check(self, target: Target) -> None:
        self.drafter.check(target)

    def begin(self, batch_size: int) -> Any:
        self.states.append(self.drafter.begin(batch_size))
        return self.states[-1]

    def propose(self, state: Any, seen: Observed, root: Tensor, plan: Plan, noise: Noise) -> DraftTree:
        tree = self.drafter.propose(state, seen, root, plan, noise)
        self.rounds.append((seen, root, plan, noise, tree))
        return tree


class NoDeviceReads(TorchDispatchMode):
    """Fails where a tensor's content would have to be read by the host."""

    READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in self.READS, f"{name} waits for the device"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a boolean index waits"
        return func(*args, **(kwargs or {}))


def check_tree(tree: DraftTree, root: Tensor, plan: Plan, vocab: int) -> None:
    """All that DraftTree and Plan promise."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    assert tree.tokens[:, 0].tolist() == root.tolist()
    for row_tokens, row_parents in zip(tokens, parents, strict=True):
        assert row_parents[0] == -1
        assert len(row_tokens) - 1 <= plan.nodes
        depths, children = [0], {}
        for node, parent in enumerate(row_parents[1:], start=1):
            assert 0 <= parent < node
            depths.append(depths[parent] + 1)
            children.setdefault(parent, []).append(row_tokens[node])
        assert max(depths) <= plan.depth
        assert all(len(set(each)) == len(each) <= plan.width for each in children.values())
        assert all(0 <= token < vocab for token in row_tokens)


def stats_of(model: Any, drafter: Any, tokens: Tensor, plan: Plan, prompt: int = PROMPT) -> Any:
    """Drafted greedy decoding of a known text; an AssertionError when the text comes out differently."""
    output = selfdraft.generate(
        model,
        tokens[:, :prompt],
        drafter=drafter,
        plan=plan,
        max_new_tokens=tokens.shape[1] - prompt,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == tokens.tolist()
    return output.stats

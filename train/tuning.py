"""Medusa-2: the target learns along with its heads, by a LoRA adapter of peft.

Cai et al. 2024 (arXiv 2401.10774), section 2.2.2: L = L_lm + lambda * L_heads. The heads are trained first with the
target frozen; then both, the target slower than the heads, lambda small and rising, so that heads which know little yet
do not spoil the target. What is saved drafts for the tuned target, and is exact as that one.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from features import live_features
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from recipe import Optim, Recipe, Tune
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from selfdraft.checkpoint import ADAPTER, find_folder
from selfdraft.drafters.base import FeatureBatch, LossSum
from selfdraft.losses import CHUNK
from selfdraft.target import Target

DRAFTERS = ("medusa",)  # whose loss reaches the features, and takes the target's own words as given
SHARED_OUT = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def refuse_tuning(recipe: Recipe, distributed: DistributedType) -> None:
    """ValueError for what cannot go with an adapter that is trained."""
    if recipe.tune.rank == 0:
        if recipe.tune != Tune():
            raise ValueError("the settings under `tune` are those of an adapter; set --tune.rank too, to 32 say")
        return
    if recipe.drafter not in DRAFTERS:
        raise ValueError(
            f"--tune.rank {recipe.tune.rank}: the target is trained along with {', '.join(DRAFTERS)} only, "
            f"not with {recipe.drafter}; set it to 0"
        )
    if recipe.features.cache:
        raise ValueError("--features.cache keeps hidden states, and --tune.rank changes them; leave one out")
    if recipe.compile:
        raise ValueError("--compile is for a target that is only read, and --tune.rank trains it; leave one out")
    if distributed not in SHARED_OUT:
        raise ValueError(
            f"--tune.rank with {distributed.value}: the adapter is not shared out among processes; "
            "take --config_file configs/accelerate/ddp.yaml"
        )


def add_adapter(model: Any, tune: Tune, start_from: str = "") -> PeftModel:
    """The frozen `model` with a LoRA adapter in it that trains, and says nothing yet; or with that of the drafter
    `start_from`, if it has one. ValueError for layers that cannot have one."""
    if hasattr(model, "peft_config"):
        raise ValueError("the target has an adapter already; merge it (merge_and_unload) and save the model first")
    config = LoraConfig(r=tune.rank, lora_alpha=tune.alpha, target_modules=tune.modules, task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config)
    for lent in (model.get_input_embeddings(), model.get_output_embeddings()):
        if hasattr(lent, "base_layer"):
            raise ValueError(
                "--tune.modules names the embedding or the vocabulary projection, which drafters borrow as they are; "
                "leave it out"
            )
    folder = find_folder(start_from) / ADAPTER if start_from else Path()
    if start_from and folder.is_dir():
        ours, theirs = tuned.peft_config["default"], PeftConfig.from_pretrained(str(folder))
        shapes = [(each.r, each.lora_alpha, sorted(each.target_modules)) for each in (ours, theirs)]
        if shapes[0] != shapes[1]:
            wanted, given = (f"rank {rank}, alpha {alpha:g}, modules {modules}" for rank, alpha, modules in shapes)
            raise ValueError(f"{folder} has {given}, and the recipe {wanted}; set those under `tune` to the former")
        tuned.load_adapter(str(folder), "default", is_trainable=True)
    return tuned


class Joint(nn.Module):
    """Heads and adapter as one module, so that they are stepped, kept alike in all processes, saved and resumed
    together. The target itself is no part of it."""

    def __init__(self, drafter: Any, target: Target, tuned: PeftModel, tune: Tune, steps: int):
        super().__init__()
        self.drafter, self.lend, self.tune = drafter, lambda: target, tune
        weights = {name: weight for name, weight in tuned.named_parameters() if weight.requires_grad}
        self.adapter = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in weights.items()})
        self.steps = steps
        self.heads_weight: float | None = None

    def begin(self, step: int) -> None:
        """Sets lambda for step `step` (from 0): None while only the heads are trained, then up in a line."""
        done = step - int(self.tune.warmup_ratio * self.steps)
        rising = max(1, round(self.tune.ramp_ratio * self.steps))
        self.heads_weight = None if done < 0 else self.tune.heads_weight * min(1.0, (done + 1) / rising)

    def read(self, tokens: Tensor, trained: Tensor, attention: Tensor, packed: bool = False) -> FeatureBatch:
        """As `live_features`, and with gradients once the target is trained."""
        layers, learns = self.drafter.feature_layers, self.heads_weight is not None
        return live_features(self.lend(), layers, tokens, trained, attention, packed, differentiable=learns)

    def forward(self, batch: FeatureBatch) -> LossSum:
        heads = self.drafter(batch)
        if self.heads_weight is None:  # all weights get a gradient, as DDP and the trainer want it; these get zeros
            untouched = sum((weight.sum() for weight in self.adapter.values()), torch.zeros(()).to(heads.total))
            return replace(heads, total=heads.total + 0 * untouched)
        total, count = language_loss(self.lend(), batch)
        metrics = {"lm_loss": (total, count), "heads_loss": (heads.total, heads.count)} | heads.metrics
        return LossSum(total + self.heads_weight * heads.total, count, metrics)

    def optimizer(self, optim: Optim) -> torch.optim.Optimizer:
        """AdamW for the adapter; without weight decay, so that a gradient of zero leaves it as it is."""
        group = {"params": list(self.adapter.parameters()), "peak_lr": self.tune.lr}
        return torch.optim.AdamW([group], lr=self.tune.lr, betas=optim.betas, weight_decay=0.0)


def language_loss(target: Target, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
    """-log p of the answers' own tokens as the target says them, summed; and how many they are.

    Never holds the logits of more than 512 positions, and computes as the target is used: without autocast.
    """
    trained = batch.trained & batch.attention
    trained[:, 0] = False  # nothing stands before it
    rows, places = trained.nonzero(as_tuple=True)

    def surprise(hidden: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(target.project(hidden).float(), labels, reduction="sum")

    parts = zip(batch.hidden[rows, places - 1].split(CHUNK), batch.tokens[rows, places].split(CHUNK), strict=True)
    with torch.autocast(batch.hidden.device.type, enabled=False):
        losses = [checkpoint(surprise, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(losses).sum(), trained.sum()


@contextlib.contextmanager
def as_saved(tuned: PeftModel | None, folder: Path) -> Iterator[None]:
    """For a while the target has the adapter that lies beside the drafter in `folder`, not the one that is trained."""
    if tuned is None:
        yield
        return
    tuned.load_adapter(str(folder / ADAPTER), "saved")
    tuned.set_adapter("saved")
    try:
        yield
    finally:
        tuned.set_adapter("default")
        tuned.delete_adapter("saved")

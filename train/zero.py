"""DeepSpeed's ZeRO for the trainer: how its engine is set up, how it steps, and its optimizer states as whole tensors.

The engine clips and steps by itself, on a gradient that is the mean over the processes; the trainer wants the mean per
trained position. The engine divides by a loss scale before it does either, which is where that count goes in.
"""

from typing import Any

import torch
from accelerate import Accelerator
from recipe import Recipe
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def check(accelerator: Accelerator, recipe: Recipe) -> None:
    """ValueError for what this trainer cannot do under DeepSpeed."""
    elsewhere = "or share the drafter out with --config_file configs/accelerate/fsdp2.yaml"
    if recipe.optim.matrix_lr:
        raise ValueError(
            "DeepSpeed cuts matrices into pieces, and Muon, which the recipe asks for, needs them whole: give "
            f"--optim.matrix_lr 0, which leaves all weights to AdamW, {elsewhere}"
        )
    config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if config["stage"] not in (1, 2):
        raise ValueError(
            f"under DeepSpeed a drafter is trained with zero_stage 1 or 2, not {config['stage']}; {elsewhere}"
        )
    if any(config.get(key, {}).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param")):
        raise ValueError(f"a drafter is not trained with DeepSpeed's offloading; set both devices to none, {elsewhere}")


def prepare(
    accelerator: Accelerator, recipe: Recipe, drafter: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Any:
    """The engine. Weights stay float32 and `mixed_precision` is autocast, as without DeepSpeed."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = 1  # asked for, and used for nothing but a count of samples
    config["gradient_clipping"] = recipe.optim.clip
    config["bf16"] = config["fp16"] = {"enabled": False}
    # Safe modules are those whose gradients would be summed over the processes in bfloat16.
    autocast = {"enabled": recipe.mixed_precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []}
    config["torch_autocast"] = autocast
    return accelerator.prepare(drafter, *optimizers)[0]


def step(engine: Any, count: float, processes: int) -> float:
    """Divides the summed gradients by `count`, clips, and steps unless they are not finite; returns their norm."""
    if not count:  # nothing to learn from: the weights stay, although AdamW would go on
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
    engine.optimizer.loss_scale = max(1.0, count) / processes
    engine.step()
    engine.optimizer.loss_scale = 1.0  # which the next losses are multiplied by
    return float(engine.get_global_grad_norm())


def whole_moments(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """AdamW's state by the names of the weights; all processes must ask."""
    from deepspeed.utils import safe_get_full_optimizer_state

    states: dict[str, dict[str, Tensor]] = {}
    step = next((state["step"] for state in optimizer.state.values()), None)
    for name, weight in drafter.named_parameters():
        if weight.requires_grad and step is not None:  # there is no state before the first step
            states[name] = {key: safe_get_full_optimizer_state(weight, key).cpu() for key in MOMENTS} | {"step": step}
    return {"state": states, "param_groups": []}


def load_moments(engine: Any, drafter: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, Any]) -> None:
    """Puts back what `whole_moments` gave. DeepSpeed makes the state in its first step: here it is made before."""
    from deepspeed.utils import safe_set_full_optimizer_state

    if not moments["state"]:
        return
    step = next(iter(moments["state"].values()))["step"]
    for group in optimizer.param_groups:
        for share in group["params"]:
            optimizer.state[share] = {key: torch.zeros_like(share) for key in MOMENTS} | {"step": step.clone()}
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, weight in drafter.named_parameters():
        if weight.requires_grad:
            for key in MOMENTS:
                safe_set_full_optimizer_state(weight, moments["state"][name][key].to(weight.device), key)

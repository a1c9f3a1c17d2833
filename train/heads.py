"""Train a drafter for a target model.

    accelerate launch train/heads.py --config configs/eagle3_smollm2.yaml --output_dir runs/eagle3 --optim.lr 1e-3

`output_dir/drafter` is what `selfdraft.load_drafter` takes; `output_dir/checkpoints` is all that a resume needs, and
the same command resumes by itself; `output_dir/metrics.jsonl` has one line per step and one per evaluation.
Read from `main` downwards.
"""

import contextlib
import ctypes
import importlib.util
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zero
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, set_seed
from checkpoints import (
    fixed_settings,
    load_optimizers,
    load_weights,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    saving,
)
from data import Conversations, collate, plan_epoch, read_conversations, share_step
from features import FeatureCache, live_features
from guards import check_features, check_lengths, check_packing, describe_mask, probe
from huggingface_hub.errors import StrictDataclassError
from journal import best_so_far, console, describe, log, progress_bar, start_logging
from peft import PeftModel
from recipe import Optim, Recipe, parse_recipe
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from tuning import Joint, add_adapter, as_saved, language_loss, refuse_tuning

import selfdraft
from selfdraft.checkpoint import config_from_json, drafter_class, misfits
from selfdraft.drafters.base import FeatureBatch, LossSum, own_plan
from selfdraft.drafters.hydra import PathBlock
from selfdraft.drafters.layers import Layer
from selfdraft.drafters.medusa import ResidualBlock
from selfdraft.embedded import resolve
from selfdraft.losses import compile_losses
from selfdraft.metrics import Stats
from selfdraft.target import Target

BAD_STEPS = 10  # so many steps in a row without a finite gradient end the training
EVAL_ROWS = 8  # prompts of an evaluation that are answered at once
LONG = timedelta(days=1)


def main(arguments: list[str]) -> None:
    recipe, model_config = parse_recipe(arguments)
    if recipe.log_with != "none" and importlib.util.find_spec(recipe.log_with) is None:
        raise ValueError(f"--log_with {recipe.log_with} needs the package: pip install {recipe.log_with}")
    output = Path(recipe.output_dir)
    accelerator = Accelerator(
        mixed_precision=recipe.mixed_precision,
        log_with=None if recipe.log_with == "none" else recipe.log_with,
        project_dir=output,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONG)],  # one process may prepare or measure, the others wait
    )
    by_zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    if by_zero:
        zero.check(accelerator, recipe)
    refuse_tuning(recipe, accelerator.distributed_type)
    use_cores(recipe.threads, accelerator)
    say = console.print if accelerator.is_main_process else lambda *_: None
    set_seed(recipe.seed)  # all processes begin with the same weights

    # The target is only read: no gradients, its own dtype.
    model, tokenizer = load_target(recipe.target)
    model.requires_grad_(False).eval().to(accelerator.device)
    target = Target(model)
    if recipe.compile:
        for layer in target.layers:
            layer.compile(dynamic=True)
        compile_losses()

    # Data.
    with accelerator.main_process_first():
        read: dict[str, Any] = {"max_length": recipe.data.max_length, "vocab_size": target.vocab_size}
        read |= {"tokenizer": tokenizer, "end_ids": end_ids(model, tokenizer)}
        conversations = read_conversations(recipe.data.train, **read)
        held_out = None
        if recipe.data.validation:
            held_out = read_conversations(recipe.data.validation, split="validation", **read)
    lengths = conversations.lengths
    say(f"training data: {conversations.summary()}")
    say(describe_mask(conversations, tokenizer))
    plan = plan_steps(recipe, lengths)

    # The drafter, fresh or from the newest checkpoint.
    settings = fixed_settings(recipe, model_config, conversations, target)
    checkpoint = newest_checkpoint(output / "checkpoints")
    state = read_state(checkpoint, settings, accelerator.num_processes) if checkpoint else None
    done = state["step"] if state else 0
    if done == len(plan):
        say(f"this training is finished ({done} steps): {output / 'drafter'}; use another --output_dir to train anew")
        return
    kind = drafter_class(recipe.drafter)
    if state:  # `start` may have settled what the recipe left open
        model_config = config_from_json(kind, state["drafter_config"])
    tuned = None
    if recipe.tune.rank:  # from here on the target has an adapter, which learns as well
        tuned = add_adapter(model, recipe.tune, "" if state else recipe.start_from)
        target = Target(model)
    drafter = kind(model_config, target).to(accelerator.device, torch.float32)
    drafter.opening = conversations.opening
    if state is None:
        drafter.start(conversations.answer_counts(target.vocab_size).to(accelerator.device))
        if recipe.start_from:
            copy_weights(drafter, recipe.start_from, model)
    joint = Joint(drafter, target, tuned, recipe.tune, len(plan)) if tuned else None
    learner = joint or drafter  # all that is trained
    if checkpoint:
        load_weights(checkpoint, learner)
    drafter.check(target)
    check_lengths(target, drafter, conversations, held_out)
    if drafter.plan.depth < 1:
        raise ValueError("model.depth is 0, so the drafter would draft nothing; set it to 1 or more")
    trainable = sum(weight.numel() for weight in learner.parameters() if weight.requires_grad)
    what = f"{recipe.drafter} and an adapter of the target" if joint else recipe.drafter
    say(f"drafter: {what} with {trainable:,} weights; {len(plan):,} steps; {torch.get_num_threads()} threads")

    if not state:
        check_features(target, drafter.feature_layers, conversations)
        if recipe.data.packing:
            check_packing(target, conversations)
    if recipe.probe and not state:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                say(probe(drafter, target, conversations, partial(make_optimizers, recipe.optim, target.vocab_size)))

    read_target = joint.read if joint else partial(live_features, target, drafter.feature_layers)
    features_of: Callable[..., FeatureBatch] = partial(read_target, packed=recipe.data.packing)
    if recipe.features.cache:
        forward_tokens, processes = recipe.data.forward_tokens, accelerator.num_processes
        cache = FeatureCache(recipe.features.cache, target, drafter.feature_layers, recipe.features.dtype)
        steps = [share_step(step, lengths, forward_tokens, processes) for step in plan[done:]]
        cache.build(conversations, steps, accelerator, say)
        features_of = cache.read

    if recipe.activation_checkpointing:
        recompute_activations(drafter)
        if joint:
            recompute_activations(model)
    optimizers = make_optimizers(recipe.optim, target.vocab_size, drafter)
    if joint:
        optimizers.append(joint.optimizer(recipe.optim))
    # Sharded, the optimizers hold the shares from here on.
    if by_zero:
        model_to_train = zero.prepare(accelerator, recipe, drafter, optimizers)
    else:
        model_to_train = accelerator.prepare(learner, *optimizers)[0]
    if checkpoint:
        load_optimizers(checkpoint, accelerator, learner, optimizers)
        say(f"resuming after step {done} from {checkpoint}")
    start_logging(accelerator, recipe, model_config, output, done)
    best = best_so_far(output) if accelerator.is_main_process else 0.0

    # The training itself.
    drafter.train()
    bad_steps, newest, step = 0, done, done
    try:
        with progress_bar(len(plan), done, enabled=accelerator.is_main_process) as show:
            for step in range(done, len(plan)):
                started = time.perf_counter()
                scale = learning_rate_scale(step, len(plan), recipe.optim.warmup_ratio)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = group["peak_lr"] * scale

                if joint:
                    joint.begin(step)
                shares = share_step(plan[step], lengths, recipe.data.forward_tokens, accelerator.num_processes)
                batches = (collate(conversations, indices) for indices in shares[accelerator.process_index])
                values = accumulate_gradients(accelerator, model_to_train, list(batches), features_of)
                if by_zero:
                    norm = zero.step(model_to_train, values["count"], accelerator.num_processes)
                else:
                    norm = float(whole(nn.utils.clip_grad_norm_(learner.parameters(), recipe.optim.clip)))

                # A step that has nothing to learn from, or no finite gradient, leaves the weights as they are.
                usable = values["count"] > 0 and math.isfinite(norm)
                bad_steps = 0 if usable else bad_steps + 1
                if bad_steps == BAD_STEPS:
                    raise ValueError(
                        f"{BAD_STEPS} steps in a row had no finite gradient, or no token that the drafter can learn "
                        f"from (the last loss sum: {values['total']}, of {values['count']:.0f} tokens); lower "
                        f"--optim.lr, or look at the data; the newest checkpoint is of step {newest}"
                    )
                for optimizer in optimizers:
                    if usable and not by_zero:
                        optimizer.step()
                    optimizer.zero_grad()
                release_memory()

                tokens = int(lengths[plan[step]].sum())
                record = means_of(values) | {"lr": optimizers[0].param_groups[0]["lr"], "gradient_norm": norm}
                record |= {"trained": values["count"], "tokens": tokens, "seconds": time.perf_counter() - started}
                log(accelerator, output, step + 1, record)
                show(step + 1, record)
                at_end = step + 1 == len(plan)
                measures = (step + 1) % recipe.eval.every == 0 or at_end
                saves = (step + 1) % recipe.save_every == 0 or at_end
                weights = {}
                if measures or saves:
                    weights = {name: whole(weight) for name, weight in learner.state_dict().items()}
                if measures and accelerator.is_main_process:
                    own = drafter.state_dict() if joint else weights
                    given = (own, drafter, target, tuned, tokenizer, held_out, recipe, output)
                    measured = keep_if_best(*given, best)
                    release_memory()
                    if measured:
                        best = max(best, measured["tokens_per_round"])
                        log(accelerator, output, step + 1, measured)
                        say(f"step {step + 1}: " + describe(measured))
                accelerator.wait_for_everyone()
                if saves:
                    state = {"step": step + 1, "settings": settings, "processes": accelerator.num_processes}
                    state["drafter_config"] = asdict(drafter.config)
                    save_checkpoint(accelerator, output / "checkpoints", state, weights, learner, optimizers)
                    newest = step + 1
    except KeyboardInterrupt:
        say(
            f"\nstopped in step {step + 1}; the newest checkpoint is of step {newest}; "
            "give the same command again to continue from there"
        )
        raise SystemExit(130) from None
    accelerator.end_training()
    say(f"done: {output / 'drafter'}")


# ---------------------------------------------------------------------------------------------- target and machine


def release_memory() -> None:
    """Gives freed memory back. Batches differ in shape, and glibc keeps the holes: 10 GB after 160 steps of the EAGLE
    recipe, 2.3 GB once trimmed."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def use_cores(threads: int, accelerator: Accelerator) -> None:
    """Sets the CPU threads of this process.

    `accelerate launch` and torchrun give every process one thread unless OMP_NUM_THREADS says otherwise, and a child
    cannot tell that 1 from a wish; so a 1 under a launcher counts as nobody's wish, and `--threads 1` is one.
    """
    launched = not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ)
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if threads == 0 and (not wished or (launched and wished == "1")):
        threads = max(1, len(os.sched_getaffinity(0)) // accelerator.num_processes)
    if threads:
        torch.set_num_threads(threads)


def load_target(name: str) -> tuple[PreTrainedModel, Any]:
    """The model, in the dtype of its weights, and its tokenizer (None where it has none)."""
    if name.endswith(".json") and not Path(name).is_file():
        raise ValueError(f"there is no target config '{name}' (looked in {Path.cwd()})")
    try:
        if name.endswith(".json"):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                config = AutoConfig.for_model(**json.loads(Path(name).read_text()))
                return AutoModelForCausalLM.from_config(config), None
        folder = resolve(name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError, TypeError, StrictDataclassError) as problem:
        raise ValueError(f"the target '{name}' could not be loaded: {problem}") from problem
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return model, None


def end_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The ids at which the target stops."""
    found: set[Any] = set()
    for owner in (model.generation_config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list) else {ids}
    return found - {None}


# ---------------------------------------------------------------------------------------------- the pieces of a step


def plan_steps(recipe: Recipe, lengths: np.ndarray) -> list[np.ndarray]:
    """The conversations of every optimizer step of the training: whole epochs, or exactly `max_steps` of them."""
    steps: list[np.ndarray] = []
    for epoch in itertools.count():
        if len(steps) >= recipe.max_steps if recipe.max_steps else epoch == recipe.epochs:
            return steps[: recipe.max_steps or None]
        steps += plan_epoch(lengths, recipe.data.step_tokens, recipe.seed, epoch)
    raise AssertionError("unreachable")


def copy_weights(drafter: Any, source: str, model: PreTrainedModel) -> None:
    """Makes the started `drafter` equal to the one at `source`, which may be a smaller one if this kind can grow.

    ValueError when that is of another kind or shape.
    """
    loaded: Any = selfdraft.load_drafter(source, model)
    if type(loaded) is not type(drafter):
        raise ValueError(
            f"start_from '{source}' is a drafter of class {type(loaded).__name__}, and the recipe trains a "
            f"{type(drafter).__name__}; train it from scratch, or give a drafter of the same kind"
        )
    if loaded.feature_layers != drafter.feature_layers:
        raise ValueError(
            f"start_from '{source}' reads the target's layers {loaded.feature_layers}, and the recipe's drafter "
            f"{drafter.feature_layers}; set --model.feature_layers to {list(loaded.feature_layers)}"
        )
    weights = drafter.grown(loaded) if hasattr(drafter, "grown") else loaded.state_dict()
    faults = misfits(weights, drafter.state_dict())
    if faults:
        raise ValueError(f"start_from '{source}' does not fit the settings under `model`: {faults}")
    drafter.load_state_dict(weights)


def recompute_activations(model: nn.Module) -> None:
    """Has the layers of a drafter, or of the target, compute again in the backward pass what they would have kept."""
    for module in model.modules():
        if isinstance(module, (Layer, ResidualBlock, PathBlock, GradientCheckpointingLayer)):
            module.forward = partial(recomputed, module.forward, use_reentrant=False)  # type: ignore[method-assign]


def make_optimizers(optim: Optim, vocab_size: int, drafter: Any) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices when `matrix_lr` is set. Every group remembers its peak learning rate.

    Muon makes all directions of an update equally large, which suits a map between hidden states, and not a table with
    a row per token, most of which have no gradient in a step.
    """
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    vocabularies = {vocab_size, getattr(drafter.config, "draft_vocab_size", vocab_size)}
    matrices = [
        weight for weight in weights if optim.matrix_lr and weight.ndim == 2 and weight.shape[0] not in vocabularies
    ]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in weights if id(weight) not in chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay))
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=optim.matrix_lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def learning_rate_scale(step: int, steps: int, warmup_ratio: float) -> float:
    """The share of the peak learning rate in step `step` (from 0): up in a line, then down a cosine to 10 %.

    A pure function, so there is no scheduler whose state could be lost.
    """
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def accumulate_gradients(
    accelerator: Accelerator,
    model_to_train: Any,
    batches: list[tuple[Tensor, Tensor, Tensor]],
    features_of: Callable[..., FeatureBatch],
) -> dict[str, float]:
    """Leaves in every weight the gradient of the mean loss per trained position of this step; returns what was summed.

    The *sum* over the positions of each forward pass is differentiated, and divided once by the count over all passes
    of all processes. So the gradient depends on the conversations of the step alone, and not on how they are padded
    and shared out. `features_of` gives a batch its hidden states. DeepSpeed keeps shares of the summed gradients, and
    divides them in `zero.step`.

    Raises ValueError when a weight got no gradient: it would never learn, and DDP would wait for it.
    """
    drafter = accelerator.unwrap_model(model_to_train)
    by_zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        seen = features_of(*batch)
        last = number == len(batches)
        if by_zero:  # accelerate's way would step in the last backward pass
            model_to_train.set_gradient_accumulation_boundary(last)
            loss = model_to_train(seen)
            model_to_train.backward(loss.total)
        else:
            with contextlib.nullcontext() if last else accelerator.no_sync(model_to_train):
                loss = model_to_train(seen)
                accelerator.backward(loss.total)
        add_loss(sums, loss)
    sums = dict(zip(sums, accelerator.reduce(torch.stack([*sums.values()]), "sum"), strict=True))
    values = {name: value.item() for name, value in sums.items()}
    if by_zero:
        return values
    dead = [name for name, weight in drafter.named_parameters() if weight.requires_grad and weight.grad is None]
    if dead:
        raise ValueError(f"the loss does not depend on these weights of the drafter: {', '.join(dead)}")
    for weight in drafter.parameters():
        if weight.grad is not None:  # DDP has averaged over the processes
            weight.grad.mul_(accelerator.num_processes / sums["count"].clamp(min=1))
    return values


def add_loss(sums: dict[str, Tensor], loss: LossSum) -> None:
    """Adds total, count, and the sum and count of every metric."""
    parts = {"total": loss.total, "count": loss.count}
    for name, (total, count) in loss.metrics.items():
        parts |= {f"{name}/total": total, f"{name}/count": count}
    for name, part in parts.items():
        sums[name] = sums.get(name, torch.zeros_like(part, dtype=torch.float64)) + part.detach()


def means_of(values: dict[str, float]) -> dict[str, float]:
    """Loss and metrics per trained position."""
    names = [name.removesuffix("/total") for name in values if name.endswith("/total")]
    means = {"loss": values["total"] / max(1, values["count"])}
    return means | {name: values[f"{name}/total"] / max(1, values[f"{name}/count"]) for name in names}


# ---------------------------------------------------------------------------------------------- measuring


def whole(value: Any) -> Any:
    """The whole tensor, where each process holds a share of it; all processes must ask."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def keep_if_best(
    weights: dict[str, Tensor],
    drafter: Any,
    target: Target,
    tuned: PeftModel | None,
    tokenizer: Any,
    held_out: Conversations | None,
    recipe: Recipe,
    output: Path,
    best: float,
) -> dict[str, float]:
    """Saves the drafter as it will be used, in the target's dtype, and measures what was saved, adapter and all.

    It becomes `output/drafter` if it drafts at least as well as the `best` so far, or if nothing is measured; another
    one is left beside it as `output/latest`. Returns what was measured. Leaves all random states as they were.
    """
    with torch.random.fork_rng():
        target = Target(target.model)  # with the adapter of now
        twin = type(drafter)(drafter.config, target).to(target.device, target.dtype)
        twin.load_state_dict(weights)
        twin.opening = drafter.opening
        folder = output / ("drafter" if held_out is None else "latest")
        with saving(folder):
            selfdraft.save_drafter(twin, folder, tokenizer, tuned)
        if held_out is None:
            return {}
        with as_saved(tuned, folder):
            measured = evaluate(selfdraft.load_drafter(folder, target.model), target, held_out, recipe)
        if measured["tokens_per_round"] >= best:
            with saving(output / "drafter"):
                selfdraft.save_drafter(twin, output / "drafter", tokenizer, tuned)
            shutil.rmtree(folder)
        return measured


@torch.no_grad()
def evaluate(drafter: Any, target: Target, held_out: Conversations, recipe: Recipe) -> dict[str, float]:
    """Validation loss of a drafter as it was saved, and its tokens per round by the shipping `generate`."""
    prompts = recipe.eval.prompts
    few = np.arange(min(4 * prompts, len(held_out)))
    sums: dict[str, Tensor] = {}
    # Compiled layers would be compiled anew for the many shapes of decoding.
    with torch.compiler.set_stance("force_eager"):
        for indices in share_step(few, held_out.lengths, recipe.data.forward_tokens, 1)[0]:
            seen = live_features(target, drafter.feature_layers, *collate(held_out, indices))
            loss = drafter(seen)
            if recipe.tune.rank:  # what becomes of the target itself
                loss.metrics["lm_loss"] = language_loss(target, seen)
            add_loss(sums, loss)
        release_memory()
        values = means_of({name: value.item() for name, value in sums.items()})
        measured = {f"validation_{name}": value for name, value in values.items()}
        for temperature in (0.0, 1.0):
            suffix = f"_T{temperature:g}" if temperature else ""
            stats = answer(drafter, target, held_out, few[:prompts], temperature, recipe.eval.max_new_tokens)
            measured[f"tokens_per_round{suffix}"] = stats.tokens_per_round
            for depth, rate in enumerate(stats.acceptance_by_depth, start=1):
                measured[f"acceptance_{depth}{suffix}"] = rate
    return measured


def answer(
    drafter: Any, target: Target, held_out: Conversations, indices: np.ndarray, temperature: float, new: int
) -> Stats:
    """What happened while the target answered these prompts, a few at a time.

    The drafter drafts in every round: left to itself, `generate` would pause one that is of little use yet.
    """
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    total = Stats()
    for first in range(0, len(indices), EVAL_ROWS):
        prompts = [held_out.prompt(index) for index in indices[first : first + EVAL_ROWS]]
        time = max(map(len, prompts))
        ids = torch.stack([nn.functional.pad(prompt, (time - len(prompt), 0)) for prompt in prompts])
        mask = torch.stack([torch.arange(time) >= time - len(prompt) for prompt in prompts]).long()
        output: Any = selfdraft.generate(
            target.model,
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            drafter=drafter,
            plan=own_plan(drafter, temperature > 0),
            max_new_tokens=new,
            return_dict_in_generate=True,
            seed=first,
            **sampled,
        )
        total.add(output.stats)
    return total


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from problem

"""What is looked at before the first step: the causes of trainings whose loss falls and whose drafts nobody accepts."""

import copy
from typing import Any

import numpy as np
import torch
from data import Conversations, collate
from features import live_features

import selfdraft
from selfdraft.planner import Plan
from selfdraft.target import Target

TOLERANCE = {torch.float32: 1e-3}  # of the largest value; other dtypes 5e-2
PROBE_TOKENS = 40  # of the answer that the probe learns by heart
PROBE_STEPS = 1000  # at most; it ends when every depth is right at 95 % of the tokens
LEARNT = 0.9  # share of the tokens that the first depth must get right in training by then
ROUNDS = 0.3  # by how much its acceptance in decoding, which a dozen rounds decide, may be lower


def describe_mask(conversations: Conversations, tokenizer: Any) -> str:
    """The end of a prompt and the beginning of what is trained after it, for a reader's eye."""
    prompt, tokens = conversations.prompt(0).tolist(), conversations.tokens[0].tolist()
    before, after = prompt[-8:], tokens[len(prompt) : len(prompt) + 12]
    if tokenizer is None:
        return f"trained tokens begin so: ... {before} | {after} ..."
    return f"trained tokens begin so: ...{tokenizer.decode(before)!r} | {tokenizer.decode(after)!r}..."


@torch.no_grad()
def check_features(target: Target, layers: tuple[int, ...], conversations: Conversations) -> None:
    """ValueError unless the features of a training are the model's own hidden states, and its head makes its logits of
    the last ones: features taken a layer too early, or on the wrong side of a norm, train without complaint."""
    tokens = torch.from_numpy(conversations.tokens[0][:64]).unsqueeze(0).to(target.device)
    features, hidden = target.encode(tokens, layers)
    plain = target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    pairs = [("hidden_states[-1]", hidden, plain.hidden_states[-1]), ("logits", target.project(hidden), plain.logits)]
    if layers:
        parts = features.split(plain.hidden_states[-1].shape[-1], dim=-1)
        pairs += [
            (f"hidden_states[{layer}]", part, plain.hidden_states[layer])
            for layer, part in zip(layers, parts, strict=True)
        ]
    for name, ours, theirs in pairs:
        error, scale = (ours.float() - theirs.float()).abs().max().item(), theirs.float().abs().max().item()
        if error > TOLERANCE.get(target.dtype, 5e-2) * scale:
            raise ValueError(
                f"what a drafter would be trained on is not the model's own {name}: they differ by {error:.3g}, and "
                f"the largest value is {scale:.3g}; this kind of model ({target.config.model_type}) needs mending in "
                "selfdraft/target.py before anything can be trained for it"
            )


def check_lengths(target: Target, drafter: Any, *read: Conversations | None) -> None:
    """ValueError for a conversation longer than the target, or a draft model, has learned positions for."""
    longest = max(int(each.lengths.max()) for each in read if each is not None)
    limits = {"target": target.position_limit, "draft model": getattr(drafter, "position_limit", None)}
    for name, limit in limits.items():
        if limit is not None and longest > limit:
            raise ValueError(
                f"a conversation has {longest} tokens, and the {name} has positions for {limit}; "
                f"set --data.max_length {limit}"
            )


@torch.no_grad()
def check_packing(target: Target, conversations: Conversations) -> None:
    """ValueError when this target lets a conversation see the one before it in the same row."""
    batch = collate(conversations, np.arange(min(2, len(conversations))))
    apart, packed = live_features(target, (), *batch).hidden, live_features(target, (), *batch, packed=True).hidden
    kept = batch[2].to(target.device)
    error, scale = (apart - packed)[kept].abs().max().item(), apart[kept].abs().max().item()
    if error > TOLERANCE.get(target.dtype, 5e-2) * scale:
        raise ValueError(
            f"data.packing does not work with this target ({target.config.model_type}): a conversation's hidden states "
            f"change by {error:.3g} when another stands before it (the largest is {scale:.3g}); set it to false"
        )


def probe(drafter: Any, target: Target, conversations: Conversations, make_optimizers: Any) -> str:
    """Trains a copy of the drafter on one answer of the target until it knows it by heart, and decodes with it.

    ValueError when it is not learnt, or when what is learnt is not accepted in decoding. Returns a line for the log.
    Leaves the drafter and all random states as they were.
    """
    with torch.random.fork_rng():
        prompt = conversations.prompt(int(conversations.lengths.argmin())).unsqueeze(0).to(target.device)
        text: Any = selfdraft.generate(target.model, prompt, max_new_tokens=PROBE_TOKENS, do_sample=False)
        trained = (torch.arange(text.shape[1], device=text.device) >= prompt.shape[1]).unsqueeze(0)
        twin = copy.deepcopy(drafter)
        batch = live_features(target, twin.feature_layers, text, trained, torch.ones_like(trained))
        optimizers = make_optimizers(twin)
        twin.train()
        for _ in range(PROBE_STEPS):
            loss = twin(batch)
            (loss.total / loss.count).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            right = [(hits / count.clamp(min=1)).item() for hits, count in loss.accuracies]
            if min(right, default=0.0) >= 0.95:
                break
        plan = Plan(drafter.plan.depth)
        settings: dict[str, Any] = {"max_new_tokens": PROBE_TOKENS, "do_sample": False, "return_dict_in_generate": True}
        output: Any = selfdraft.generate(
            target.model, prompt, drafter=twin.eval().to(target.dtype), plan=plan, **settings
        )
    ids = getattr(drafter, "ids", None)
    share = 1.0 if ids is None else torch.isin(text[trained], ids).float().mean().item()
    rates = output.stats.acceptance_by_depth or [0.0]
    shown = ", ".join(f"{each:.2f}" for each in rates)
    if right and right[0] < LEARNT:
        raise ValueError(
            f"the probe failed: after {PROBE_STEPS} steps on a single answer of the target the drafter is right at "
            f"{right[0]:.0%} of its tokens: it does not learn; look at the learning rate and at the drafter's loss"
        )
    if right and rates[0] < share * right[0] - ROUNDS:
        raise ValueError(
            f"the probe failed: in training the drafter is right at {right[0]:.0%} of the {share:.0%} of one answer "
            f"that it can draft; in decoding, {rates[0]:.0%} of its first drafted tokens are accepted there (by depth: "
            f"{shown}): training and decoding see different things"
        )
    return f"probe: one answer learnt by heart, {share:.0%} of which it can draft; accepted by depth: {shown}"

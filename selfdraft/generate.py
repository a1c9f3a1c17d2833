"""Start here: the decoding loop. Draft a tree, score it in one pass, walk it, keep what the target would have said."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from selfdraft.arguments import refuse_arguments, refuse_inputs, value_of
from selfdraft.cache import SlotCache
from selfdraft.checkpoint import choose_drafter, warn_of_other_text
from selfdraft.drafters.base import Drafter, Observed, own_plan
from selfdraft.drafters.ngram import Ngram
from selfdraft.metrics import Stopwatch
from selfdraft.outputs import GenerateOutput, Record
from selfdraft.planner import Patience, Plan
from selfdraft.rejection import draft_noise, rejects, walk_by_rejection
from selfdraft.rows import Prompt, Rows, read_prompt
from selfdraft.sampling import Noise, Policy
from selfdraft.target import Target, prompt_parts
from selfdraft.tree import DraftTree, visible_slots
from selfdraft.verify import Walk, walk, walk_in_order

FIXED_WIDTH = 8  # tokens of every pass with `width="fixed"`: on most machines hardly slower than one token


def generate(
    model: torch.nn.Module,
    inputs: Tensor | None = None,
    *,
    drafter: Drafter | PreTrainedModel | str | Path | Sequence | None = None,
    plan: Plan | None = None,
    seed: SupportsIndex | Sequence[SupportsIndex] | None = None,
    acceptance: str = "coupled",
    width: str | None = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """`model.generate`, with the model's own output drafted ahead.

    Args:
        model: any `transformers` causal LM with plain attention, as it is or with an adapter of `peft` or compiled.
        inputs: int64 [batch, time], left-padded when ragged (then pass `attention_mask`, as to `model.generate`).
        drafter: a drafter, the path or hub id of one, the name "ngram", or None for plain decoding by the same
            loop. A list is an order of preference: the first that loads and fits the model drafts, and a warning
            says why each one before it does not.
        plan: the shape of every draft. With None it is the drafter's own, and drafting pauses while nothing that is
            drafted is kept.
        seed: fixes the sampling noise, one int per row or one int, in which case row b uses `seed + b`. The same
            seed gives the same tokens whatever drafts. With None, one integer is drawn from torch's global RNG.
        acceptance: "coupled" keeps the drafts that equal the target's own pick; "rejection" is the classical rule of
            accepting with min(1, p / q), block-wise for chains: the same distribution, but then the sampled text
            depends on the drafter too. See `docs/verification.md`.
        width: "fixed" pads every target pass after the prompt to FIXED_WIDTH tokens over a cache of one width, with
            a drafter or without, and drafts chains only. Then the passes of different drafters round alike, and their
            texts agree in bfloat16 as well. With None, passes are as wide as their trees.
        kwargs: every other argument of `model.generate`.

    Returns:
        int64 [batch, time], or a `GenerateOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: before the first forward pass, for what cannot be honoured exactly.
    """
    given = inputs if inputs is not None else kwargs.get("input_ids")
    if given is not None and (given.ndim != 2 or given.numel() == 0):
        raise ValueError(f"the prompt must be token ids [batch, time] with at least one token, not {list(given.shape)}")
    configs = kwargs.get("generation_config"), model.generation_config
    refuse_arguments(kwargs, *configs)
    Target(model)  # names a model that cannot be drafted for before transformers prepares anything
    assistant = kwargs.pop("assistant_model", None)
    if assistant is not None and drafter is not None:
        raise ValueError("assistant_model and drafter both say what drafts: pass one of them")
    # With a loop that is not its own, transformers loses the streamer and the tokenizer: both are bound here.
    loop = partial(decode, streamer=kwargs["streamer"]) if kwargs.get("streamer") is not None else decode
    strings, tokenizer = value_of("stop_strings", kwargs, *configs), kwargs.pop("tokenizer", None)
    if strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings are compared with decoded text: pass the `tokenizer` too")
        criterion = StopStringCriteria(tokenizer, strings)
        kwargs |= {"stop_strings": None, "stopping_criteria": [criterion, *(kwargs.get("stopping_criteria") or [])]}
    drafter = drafter if assistant is None else assistant
    kwargs |= {"drafter": drafter, "plan": plan, "seed": seed, "acceptance": acceptance, "width": width}
    return model.generate(inputs, custom_generate=loop, **kwargs)  # type: ignore[operator]


def decode(
    model: torch.nn.Module,
    input_ids: Int[Tensor, "batch time"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | PreTrainedModel | str | Path | Sequence | None = None,
    plan: Plan | None = None,
    seed: SupportsIndex | Sequence[SupportsIndex] | None = None,
    acceptance: str = "coupled",
    width: str | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """The loop behind `generate`, in the form that `model.generate(..., custom_generate=selfdraft.decode)` calls."""
    with ending(streamer):
        refuse_arguments({}, generation_config)
        refuse_inputs(input_ids, logits_processor, streamer, model_kwargs)
        target = Target(model)
        drafter = choose_drafter(looked_up(drafter, generation_config), target)
        warn_of_other_text(drafter, input_ids, model_kwargs.get("attention_mask"))
        patience = Patience() if plan is None else None
        if not isinstance(plan, Plan | None):
            raise ValueError(f"plan={plan!r} is no Plan: give Plan(depth, width, nodes), or None for the drafter's own")
        plan = plan or own_plan(drafter, generation_config.do_sample)

        prompt = read_prompt(input_ids.to(target.device), model_kwargs.get("attention_mask"))
        rows = Rows(input_ids, prompt, generation_config, stopping_criteria, streamer)
        record = Record(generation_config, target.num_layers)
        temperature = float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0
        seed = 0 if seed is None and temperature == 0 else seed  # nothing is drawn
        noise = Noise(row_seeds(seed, len(input_ids), target.device), temperature)
        policy = Policy(logits_processor, noise, rows.stops)
        by_rejection = rejects(acceptance, policy)
        # What looks at the text of the batch sees it as in plain decoding if all rows advance by the same steps; what
        # may count its calls, if they advance one by one.
        together = policy.reads_text or rows.one_by_one
        if rows.one_by_one or (policy.keeps_state and len(input_ids) > 1):
            plan = Plan(depth=0)
        if width not in (None, "fixed"):
            raise ValueError(f"width is 'fixed' or None, not {width!r}")
        if width is not None:
            plan = Plan(depth=min(plan.depth, FIXED_WIDTH - 1))
        in_order = policy.reads_text or record.wants_scores
        choose = partial(choose_path, policy=policy, by_rejection=by_rejection, in_order=in_order)
        clock = Stopwatch(target.device)

        whole = rows.max_length + FIXED_WIDTH
        capacity = min(rows.max_length, prompt.tokens.shape[1] + 1024) + plan.nodes + 1
        cache = SlotCache(capacity if width is None else whole)
        drafter = drafter if plan.depth > 0 else None
        state = drafter.begin(len(input_ids)) if drafter is not None else None
        drafts_from = drafter.feature_layers if drafter is not None else ()
        layers, drafts_width = (*drafts_from, *record.layers), len(drafts_from) * target.hidden_size
        if layers:
            target.refuse_odd_states()
        lengths = prompt.lengths
        logits, states = prefill(target, cache, prompt, layers)
        text = input_ids.to(target.device) if together else None
        path = choose(DraftTree.chain(prompt.tokens[:, -1:]), logits, lengths - 1, 0, rows.active, text)
        root = path.picks[:, 0]
        start = 0 if rows.common_length == prompt.tokens.shape[1] else None
        features, states = split(states, drafts_width)
        seen = Observed(prompt.tokens, prompt.positions, lengths, features, max(rows.lengths), start)
        rows.start(root.tolist(), record.shown(path.scores))
        record.start(prompt, path, logits, states)
        clock.lap("prefill")

        while not rows.finished:
            # 1. Draft. No deeper than what is still wanted: a round always adds one token of the target's own.
            current = plan.cut(rows.deepest(target.position_limit))
            asked = drafter if current.depth > 0 and (patience is None or patience.allows(rows.stats)) else None
            if asked is not None:
                drafts_by = draft_noise(noise, lengths) if by_rejection else noise
                tree = asked.propose(state, seen, root, current, drafts_by)
            else:
                tree = DraftTree.chain(root.unsqueeze(1))
            tree = tree if width is None else tree.filled(FIXED_WIDTH)
            clock.lap("draft")

            # 2. Score the whole tree in one pass of the target.
            nodes = tree.tokens.shape[1]
            start, end = rows.common_length, max(rows.lengths) + nodes
            if nodes == 1:  # nothing was drafted
                clock.lap("other")
                logits, states = target.read(tree.tokens, lengths.unsqueeze(1), end, start, cache, layers)
            else:
                slots = lengths.unsqueeze(1) + torch.arange(nodes, device=lengths.device)
                seen_slots = cache.open(slots, end, start) if width is None else cache.open(slots, whole)
                positions = lengths.unsqueeze(1) + tree.depths
                visible, slot_positions = tree_visibility(lengths, tree.reach, tree.depths, seen_slots)
                clock.lap("other")
                logits, states = target.score(tree.tokens, positions, visible, slot_positions, cache, layers)
            clock.lap("verify")

            # 3. Walk along the target's own picks, and keep the slots of that path.
            text = rows.sequences().to(target.device) if together else None
            reach = current.depth if asked is not None else 0
            path = choose(tree, logits, lengths, reach, rows.active, text)
            steps = torch.arange(path.nodes.shape[1], device=lengths.device)
            if not tree.is_chain:  # the nodes of a chain already lie where they belong
                cache.keep(lengths.unsqueeze(1) + path.nodes, lengths.unsqueeze(1) + steps)

            # 4. The one read of the round: how far the tree went, how far the walk went, and what to emit.
            drafted = torch.where(tree.is_node, tree.depths, 0).amax(dim=1)
            report = torch.cat([drafted.unsqueeze(1), path.accepted.unsqueeze(1), path.picks], dim=1).tolist()
            active = rows.advance(report, record.shown(path.scores))

            # 5. Unfinished rows move on; what they kept goes to the drafter.
            moved = torch.where(active, path.accepted + 1, 0)
            root = path.picks.gather(1, path.accepted.unsqueeze(1)).squeeze(1)
            features, states = split(states, drafts_width)
            features = None if features is None else path.along(features)
            record.add(rows.emitted, path, logits, states)
            kept = tree.tokens.gather(1, path.nodes)
            positions, lengths = lengths.unsqueeze(1) + steps, lengths + moved
            news = Observed(kept, positions, lengths, features, max(rows.lengths), start)
            seen = seen.then(news) if drafter is not None and asked is None else news
            clock.lap("other")

    sequences = rows.sequences()
    if not generation_config.return_dict_in_generate:
        return sequences
    return record.output(sequences, rows.stats_with(clock), rows.longest)


# --- Before the first forward pass ------------------------------------------------------------------------------------


def looked_up(drafter: Any, config: GenerationConfig) -> Any:
    """The drafter that transformers' `prompt_lookup_num_tokens` asks for, or the given one."""
    wanted = getattr(config, "prompt_lookup_num_tokens", None)
    if wanted is None:
        return drafter
    if drafter is not None:
        raise ValueError("prompt_lookup_num_tokens asks for the drafter 'ngram', and `drafter` for another: pass one")
    return Ngram(longest=config.max_matching_ngram_size or 2, plan=Plan(depth=wanted))


def row_seeds(seed: Any, batch: int, device: torch.device) -> Int[Tensor, " batch"]:
    """One seed per row: the given ones, or `seed + b`. Torch's global RNG is read only when `seed` is None."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    given = seed.tolist() if hasattr(seed, "tolist") else seed  # of numpy or torch
    try:
        seeds = (
            [index(each) for each in given] if hasattr(given, "__len__") else [index(given) + b for b in range(batch)]
        )
    except TypeError:
        raise ValueError(f"seed={seed!r}: a seed is a whole number; give one, or one per row") from None
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for a batch of {batch}: give one int, or one per row")
    if not all(-(2**63) <= each < 2**63 for each in seeds):
        raise ValueError(f"seed={seed!r}: a seed, that of the last row too, is a number of 64 bits")
    return torch.tensor(seeds, device=device)


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """Whoever listens to a streamer must not wait for ever: it ends with the call, well or not."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


# --- Target passes ----------------------------------------------------------------------------------------------------


def prefill(target: Target, cache: SlotCache, prompt: Prompt, layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Fills the cache with the prompt, in parts; logits [batch, 1, vocab] after its last token, and its features."""
    total = prompt.tokens.shape[1]
    uniform = min(prompt.host_lengths) == total
    features: list[Tensor] = []
    for part in prompt_parts(total):
        tokens, positions = prompt.tokens[:, part], prompt.positions[:, part]
        start = part.start if uniform else None
        logits, states = target.read(tokens, positions, total, start, cache, layers, logits_to_keep=1)
        if states is not None:
            features.append(states)
    return logits, torch.cat(features, dim=1) if features else None


def tree_visibility(
    lengths: Int[Tensor, " batch"],
    reach: Bool[Tensor, "batch nodes nodes"],
    depths: Int[Tensor, "batch nodes"],
    width: int,
) -> tuple[Bool[Tensor, "batch nodes width"], Int[Tensor, "batch width"]]:
    """Which slots each node attends to (all committed ones, and its own ancestors), and each slot's position."""
    visible, node = visible_slots(lengths, reach, width)
    in_tree = lengths.unsqueeze(1) + depths.gather(1, node.clamp(0, depths.shape[1] - 1))
    positions = torch.where(node < 0, torch.arange(width, device=lengths.device), in_tree)
    return visible, positions


# --- After them -------------------------------------------------------------------------------------------------------


def choose_path(
    tree: DraftTree,
    logits: Float[Tensor, "batch nodes vocab"],
    lengths: Int[Tensor, " batch"],
    max_depth: int,
    going: Bool[Tensor, " batch"],
    text: Int[Tensor, "batch time"] | None,
    policy: Policy,
    by_rejection: bool,
    in_order: bool,
) -> Walk:
    """The path that the target's own picks take: made for all nodes at once, or one after the other along the path;
    or the path of the classical rules."""
    if by_rejection:
        return walk_by_rejection(tree, logits, policy, lengths, max_depth)
    if in_order or text is not None:
        return walk_in_order(tree, logits, policy, lengths, max_depth, going, text)
    return walk(tree, policy.pick(logits, tree.depths, lengths, max_depth), max_depth)


def split(states: Tensor | None, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Of the hidden states that were asked for, the first `width` numbers for the drafter, the rest to be returned."""
    if states is None:
        return None, None
    features, rest = states[..., :width], states[..., width:]
    return features if width else None, rest if rest.shape[-1] else None

"""Start here: the decoding loop. Draft a tree, score it in one pass, walk it, keep what the target would have said."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import ModelOutput

from selfdraft.cache import SlotCache
from selfdraft.checkpoint import choose_drafter
from selfdraft.drafters.base import Drafter, Observed
from selfdraft.metrics import Stats, Stopwatch
from selfdraft.planner import Plan
from selfdraft.sampling import Noise, Policy
from selfdraft.target import Target, prompt_parts
from selfdraft.tree import DraftTree, visible_slots
from selfdraft.verify import walk

# The processors that look at the scores of one position alone, so that they mean the same on every node of a tree.
_SCORES_ONLY = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
# What transformers' generate hands over and the loop makes for itself.
_OWN_INPUTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}
_REFUSED_OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


@dataclass
class GenerateOutput(ModelOutput):
    """What `generate(return_dict_in_generate=True)` returns."""

    sequences: Tensor | None = (
        None  # int64 [batch, time]: the prompt as given, then the new tokens, padded on the right
    )
    stats: Stats | None = None  # rounds, acceptance and seconds of the call


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    drafter: Drafter | str | Path | Sequence | None = None,
    plan: Plan | None = None,
    seed: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """`model.generate`, with the model's own output drafted ahead.

    Args:
        model: any `transformers` causal LM with plain attention.
        inputs: int64 [batch, time], left-padded when ragged (then pass `attention_mask`, as to `model.generate`).
        drafter: a drafter, the path or hub id of one, the name "ngram", or None for plain decoding by the same
            loop. A list is an order of preference: the first that loads and fits the model drafts, and a warning
            says why each one before it does not.
        plan: the shape of the drafts; the drafter's own plan when None.
        seed: fixes the sampling noise, one int per row or one int, in which case row b uses `seed + b`. The same
            seed gives the same tokens whatever drafts. With None, one integer is drawn from torch's global RNG.
        kwargs: every other argument of `model.generate`.

    Returns:
        int64 [batch, time], or a `GenerateOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: before the first forward pass, for what cannot be honoured exactly.
    """
    given = inputs if inputs is not None else kwargs.get("input_ids")
    if given is not None and (given.ndim != 2 or given.numel() == 0):
        raise ValueError(f"the prompt must be token ids [batch, time] with at least one token, not {list(given.shape)}")
    refuse_beams(kwargs.get("generation_config") or model.generation_config, kwargs)
    if kwargs.get("assistant_model") is not None:  # transformers would drop it without a word
        raise ValueError("an assistant_model of transformers is not used here; pass what shall draft as `drafter`")
    Target(model)  # names a model that cannot be drafted for before transformers prepares anything
    # transformers passes only arguments that its own sampler lacks, and the sampler has `streamer`: bind it here.
    loop = partial(decode, streamer=kwargs["streamer"]) if kwargs.get("streamer") is not None else decode
    return model.generate(inputs, custom_generate=loop, drafter=drafter, plan=plan, seed=seed, **kwargs)


def decode(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch time"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | str | Path | Sequence | None = None,
    plan: Plan | None = None,
    seed: int | Sequence[int] | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """The loop behind `generate`, in the form that `model.generate(..., custom_generate=selfdraft.decode)` calls."""
    refuse(input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
    target = Target(model)
    drafter = choose_drafter(drafter, target)
    plan = plan or (drafter.plan if drafter is not None else Plan(depth=0))
    layers = drafter.feature_layers if drafter is not None else ()

    prompt = read_prompt(input_ids.to(target.device), model_kwargs.get("attention_mask"))
    rows = Rows(prompt, generation_config)
    temperature = float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0
    noise = Noise(row_seeds(seed, len(input_ids), target.device), temperature)
    policy = Policy(logits_processor, noise)
    clock = Stopwatch(target.device)

    cache = SlotCache(min(rows.max_length, prompt.tokens.shape[1] + 1024) + plan.nodes + 1)
    state = drafter.begin(len(input_ids)) if drafter is not None else None
    lengths = prompt.lengths
    logits, features = prefill(target, cache, prompt, layers)
    root = policy.pick(logits, torch.zeros_like(lengths).unsqueeze(1), lengths - 1, max_depth=0).squeeze(1)
    start = 0 if rows.common_length == prompt.tokens.shape[1] else None
    seen = Observed(prompt.tokens, prompt.positions, lengths, features, max(rows.lengths), start)
    rows.start(root.tolist(), streamer)
    clock.lap("prefill")

    while not rows.finished:
        # 1. Draft. No deeper than what is still wanted: a round always adds one token of the target's own.
        current = plan.cut(rows.most_wanted - 1)
        if drafter is not None and current.depth > 0:
            tree = drafter.propose(state, seen, root, current, noise)
        else:
            tree = DraftTree.chain(root.unsqueeze(1))
        clock.lap("draft")

        # 2. Score the whole tree in one pass of the target.
        reach = tree.ancestors()
        depths = reach.sum(dim=2) - 1
        nodes = tree.tokens.shape[1]
        start, end = rows.common_length, max(rows.lengths) + nodes
        if nodes == 1:  # nothing was drafted
            clock.lap("other")
            logits, features = target.read(tree.tokens, lengths.unsqueeze(1), end, start, cache, layers)
        else:
            slots = lengths.unsqueeze(1) + torch.arange(nodes, device=lengths.device)
            positions = (lengths.unsqueeze(1) + depths).clamp(max=rows.max_length - 1)
            width = cache.open(slots, end, start)
            visible, slot_positions = tree_visibility(lengths, reach, depths, width)
            clock.lap("other")
            logits, features = target.score(tree.tokens, positions, visible, slot_positions, cache, layers)
        clock.lap("verify")

        # 3. Walk along the target's own picks, and keep the slots of that path.
        picks = policy.pick(logits, depths, lengths, current.depth)
        path = walk(tree, reach, depths, picks, current.depth)
        steps = torch.arange(path.nodes.shape[1], device=lengths.device)
        if current.width > 1:  # the nodes of a chain already lie where they belong
            cache.keep(lengths.unsqueeze(1) + path.nodes, lengths.unsqueeze(1) + steps)

        # 4. The one read of the round: how far the tree went, how far the walk went, and what to emit.
        drafted = torch.where(tree.is_node, depths, 0).amax(dim=1)
        report = torch.cat([drafted.unsqueeze(1), path.accepted.unsqueeze(1), path.picks], dim=1).tolist()
        active = rows.advance(report, streamer)

        # 5. Unfinished rows move on; what they kept goes to the drafter.
        moved = torch.where(active, path.accepted + 1, 0)
        root = path.picks.gather(1, path.accepted.unsqueeze(1)).squeeze(1)
        if features is not None:
            features = features.gather(1, path.nodes.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        kept = tree.tokens.gather(1, path.nodes)
        positions, lengths = lengths.unsqueeze(1) + steps, lengths + moved
        seen = Observed(kept, positions, lengths, features, max(rows.lengths), start)
        clock.lap("other")

    if streamer is not None:
        streamer.end()
    sequences = rows.sequences(input_ids)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateOutput(sequences=sequences, stats=rows.stats_with(clock))


# --- Before the first forward pass ------------------------------------------------------------------------------------


def refuse_beams(config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Beam search arrives in the loop as a plain expanded batch, so it must be seen before."""
    beams = kwargs.get("num_beams") or config.num_beams or 1
    if beams > 1:
        raise ValueError(f"num_beams={beams}: selfdraft decodes greedily or by sampling; use model.generate for beams")


def refuse(
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> None:
    """ValueError that names what this loop cannot honour exactly."""
    refuse_beams(config, {})
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"the options ask for {mode}; selfdraft decodes greedily or by sampling")
    for processor in processors:
        if type(processor).__name__ not in _SCORES_ONLY:
            raise ValueError(
                f"{type(processor).__name__} may depend on the text so far, which selfdraft does not support yet; "
                "drop the option that adds it, or use model.generate"
            )
    for criterion in criteria:
        if type(criterion).__name__ not in _CRITERIA:
            raise ValueError(f"{type(criterion).__name__} is not supported yet; stop by max_new_tokens or eos_token_id")
    for name in _REFUSED_OUTPUTS:
        if getattr(config, name, False):
            raise ValueError(f"{name}=True is not supported yet; out.sequences and out.stats are what is returned")
    for name, value in model_kwargs.items():
        if name not in _OWN_INPUTS and value is not None:
            raise ValueError(f"the model argument '{name}' is not supported; pass input_ids and attention_mask only")
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    valid = torch.ones_like(input_ids) if mask is None else mask.long()
    if positions is not None and ((positions - valid.cumsum(dim=1) + 1) * valid).any():
        raise ValueError("position_ids that do not count the tokens of the attention_mask are not supported")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("continuing from a filled cache is not supported; pass the whole conversation as input_ids")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer takes one row, and the batch has {len(input_ids)}")


@dataclass(frozen=True)
class Prompt:
    """The prompt, padding in front; padding is given the free slots past the row's tokens, where nothing looks."""

    tokens: Int[Tensor, "batch time"]
    positions: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    host_lengths: list[int]


def read_prompt(input_ids: Int[Tensor, "batch time"], attention_mask: Tensor | None) -> Prompt:
    """Rows of any padding, brought to padding on the left. ValueError for a row without tokens."""
    valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device).long()
    order = valid.argsort(dim=1, stable=True)
    valid = valid.gather(1, order)
    lengths = valid.sum(dim=1)
    host_lengths = lengths.tolist()
    if min(host_lengths) == 0:
        raise ValueError(f"row {host_lengths.index(0)} of the batch has no tokens: its attention_mask is all zero")
    padding = (1 - valid).cumsum(dim=1) - 1
    positions = torch.where(valid.bool(), valid.cumsum(dim=1) - 1, lengths.unsqueeze(1) + padding)
    return Prompt(input_ids.gather(1, order), positions, lengths, host_lengths)


def row_seeds(seed: int | Sequence[int] | None, batch: int, device: torch.device) -> Int[Tensor, " batch"]:
    """One seed per row: the given ones, or `seed + b`. Torch's global RNG is read only when `seed` is None."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    seeds = [seed + row for row in range(batch)] if isinstance(seed, int) else [int(each) for each in seed]
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for a batch of {batch}: give one int, or one per row")
    return torch.tensor(seeds, device=device)


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


# --- The host's side of a round ---------------------------------------------------------------------------------------


class Rows:
    """What the host knows of each row: its new tokens, how many more it wants, and whether it is finished."""

    def __init__(self, prompt: Prompt, config: GenerationConfig):
        eos = config.eos_token_id
        stops = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self.stops = set(stops)
        self.pad = config.pad_token_id if config.pad_token_id is not None else (stops or [0])[0]  # as transformers
        self.device = prompt.tokens.device
        self.max_length = config.max_length
        self.budget = self.max_length - prompt.tokens.shape[1]
        self.lengths = list(prompt.host_lengths)  # committed tokens in the cache
        self.new: list[list[int]] = [[] for _ in self.lengths]
        self.done = [False] * len(self.lengths)
        self.active = torch.ones(len(self.lengths), dtype=torch.bool, device=self.device)
        self.stats = Stats()

    @property
    def finished(self) -> bool:
        return all(self.done)

    @property
    def most_wanted(self) -> int:
        """Tokens that the hungriest unfinished row still wants."""
        return max(self.budget - len(new) for new, done in zip(self.new, self.done, strict=True) if not done)

    @property
    def common_length(self) -> int | None:
        """The committed length, when all rows agree on it."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    def start(self, first: list[int], streamer: Any) -> None:
        """The token that the prefill decided in each row."""
        self.stats.prefills = self.stats.new_tokens = len(first)
        for row, token in enumerate(first):
            self.emit(row, [token], streamer)
        self.active = torch.tensor([not done for done in self.done], device=self.device)

    def advance(self, report: list[list[int]], streamer: Any) -> Bool[Tensor, " batch"]:
        """Books one round, `[drafted, accepted, picks...]` per row; returns which rows go on, on the device."""
        ended = False
        for row, (drafted, accepted, *picks) in enumerate(report):
            if self.done[row]:
                continue
            wanted = self.budget - len(self.new[row])
            emitted = self.emit(row, picks[: accepted + 1], streamer)
            self.stats.count(min(drafted, wanted), min(accepted, emitted), emitted)
            if self.done[row]:
                ended = True
            else:
                self.lengths[row] += accepted + 1
        if ended:
            self.active = torch.tensor([not done for done in self.done], device=self.device)
        return self.active

    def emit(self, row: int, tokens: list[int], streamer: Any) -> int:
        """Appends tokens up to the first stop or the budget; returns how many."""
        tokens = tokens[: self.budget - len(self.new[row])]
        stop = next((place for place, token in enumerate(tokens) if token in self.stops), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        self.new[row].extend(tokens)
        self.done[row] = stop is not None or len(self.new[row]) >= self.budget
        if streamer is not None:
            for token in tokens:
                streamer.put(torch.tensor([token]))
        return len(tokens)

    def sequences(self, input_ids: Int[Tensor, "batch time"]) -> Int[Tensor, "batch total"]:
        """The prompt as it was given, followed by the new tokens; finished rows are padded to the longest."""
        longest = max(len(new) for new in self.new)
        new = [tokens + [self.pad] * (longest - len(tokens)) for tokens in self.new]
        return torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], dim=1)

    def stats_with(self, clock: Stopwatch) -> Stats:
        """The counts, and the seconds of the clock's laps."""
        seconds = clock.seconds()
        self.stats.prefill_seconds = seconds.get("prefill", 0.0)
        self.stats.draft_seconds = seconds.get("draft", 0.0)
        self.stats.verify_seconds = seconds.get("verify", 0.0)
        self.stats.total_seconds = sum(seconds.values())
        return self.stats

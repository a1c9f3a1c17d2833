"""A separate draft model: any smaller causal LM with the target's tokenizer, asked again about its own drafts.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318); trained by distillation on the
target's answers.
"""

import difflib
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfdraft.cache import SlotCache
from selfdraft.drafters import vocabulary
from selfdraft.drafters.base import FeatureBatch, LossSum, Observed
from selfdraft.drafters.growth import Levels, grow
from selfdraft.drafters.shortening import copy_weights, shortened
from selfdraft.losses import Loss, check_loss, vocabulary_loss
from selfdraft.planner import Plan
from selfdraft.sampling import Noise
from selfdraft.target import Target, prompt_parts, stored_weight
from selfdraft.tree import DraftTree

_NOT_ITS_OWN = {"selfdraft", "quantization_config"}  # fields of a loaded config that say nothing of the model
SAME_TOKENIZER = 0.75  # vocabularies padded differently differ by less than this; other tokenizers often by more


def small_llama() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True)
class DraftModelConfig:
    """A separate draft model."""

    model: dict[str, Any] = field(default_factory=small_llama)
    """Its Hugging Face config, `model_type` included; `vocab_size` is the target's where it is not given."""
    layers_of_target: tuple[int, ...] = ()
    """Instead of `model`: the target itself with these of its layers only (0 is the first), which it starts from."""
    draft_vocab_size: int = 0
    """How many of the most frequent answer tokens it knows; 0 for the vocabulary of `model`."""
    loss: Loss = "soft"
    """Training: what is minimised, `soft` (forward KL from the target), `hard` (the answer's own tokens), `reverse_kl`,
    `total_variation`, `log_acceptance` or `lk`; see docs/training.md."""
    depth: int = 5
    """Draft: levels of the tree."""
    width: int = 1
    """Draft: nodes expanded per level, and children of each; 1 is a chain."""
    nodes: int = 5
    """Draft: nodes that are sent to the target."""

    def __post_init__(self) -> None:
        check_loss(self.loss)
        if self.layers_of_target and self.model not in ({}, small_llama()):
            raise ValueError("layers_of_target takes its config from the target; leave out `model`")

    def resolved(self, target: Target) -> "DraftModelConfig":
        """The same with the vocabulary's size written down."""
        cut = self.draft_vocab_size and vocabulary.size_of(self.draft_vocab_size, target.vocab_size)
        if self.layers_of_target:
            return replace(self, model={}, draft_vocab_size=cut)
        vocab = cut or self.model.get("vocab_size") or target.vocab_size
        return replace(self, model={**self.model, "vocab_size": vocab}, draft_vocab_size=cut)


@dataclass
class DraftState:
    """The draft model's own cache: every committed token, and the newest root, in the slot of its position."""

    cache: SlotCache
    begun: bool = False
    outgrown: bool = False  # the text has become longer than the draft model can read


class DraftModel(nn.Module):
    """Drafts with a causal LM. Its cache is brought up to date from what the target decided, once per round."""

    config_class = DraftModelConfig
    draft_tokens: Tensor
    stand_ins: Tensor
    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: DraftModelConfig, target: Target, model: PreTrainedModel | None = None):
        super().__init__()
        self.config = config = config.resolved(target)
        self.lend = lambda: target  # a function, so that the target is not a submodule, not saved and not copied
        self.model = fresh_model(config, target) if model is None else model
        if config.draft_vocab_size:
            # The target's token of every draft token, and the draft token that stands for every token of the target.
            self.register_buffer("draft_tokens", torch.arange(config.draft_vocab_size))
            self.register_buffer("stand_ins", torch.arange(target.vocab_size) % config.draft_vocab_size)
        self.register_state_dict_post_hook(name_as_model)
        self.register_load_state_dict_pre_hook(name_as_drafter)
        self.register_load_state_dict_post_hook(tie)

    @classmethod
    def from_model(cls, model: PreTrainedModel, target: Target, plan: Plan | None = None) -> "DraftModel":
        """A drafter out of a ready causal LM with the target's tokenizer, which is moved to the target's device, but
        where accelerate has placed it."""
        vocabulary.refuse_other_tokenizer(str(model.config._name_or_path), str(target.config._name_or_path))
        config = DraftModelConfig(model=plain_config(model))
        if plan is not None:
            config = replace(config, depth=plan.depth, width=plan.width, nodes=plan.nodes)
        return cls(config, target, model if hasattr(model, "_hf_hook") else model.to(target.device))

    @property
    def target(self) -> Target:
        return self.lend()

    @property
    def plan(self) -> Plan:
        return Plan(self.config.depth, self.config.width, self.config.nodes)

    @property
    def model_config(self) -> dict[str, Any]:
        """What makes the saved folder that of an ordinary Hugging Face model."""
        return plain_config(self.model)

    @property
    def ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """The target's token id of every draft token; None when they are the same."""
        return getattr(self, "draft_tokens", None)

    @property
    def position_limit(self) -> int | None:
        """How many positions it has learned, where it learns them one by one."""
        return self.reader().position_limit

    def reader(self) -> Target:
        """The draft model in the role of a target: something that reads slots and says what comes next."""
        return Target(self.model)

    def check(self, target: Target) -> None:
        """ValueError for a draft model that cannot be rolled back, or surely has another tokenizer."""
        try:
            own = self.reader().vocab_size
        except ValueError as error:
            raise ValueError(f"this draft model cannot be used: {error}") from error
        if self.ids is None:
            if min(own, target.vocab_size) < SAME_TOKENIZER * max(own, target.vocab_size):
                raise ValueError(
                    f"the draft model has a vocabulary of {own} tokens and the target one of {target.vocab_size}, so "
                    "they cannot share a tokenizer; take a draft model of the target's own family"
                )
            return
        ids, stand_ins = self.ids, self.stand_ins
        if len(stand_ins) != target.vocab_size:
            raise ValueError(
                f"this draft model was trained for a vocabulary of {len(stand_ins)} tokens, and the target's has "
                f"{target.vocab_size}; load the one of this target or train a new one"
            )
        valid = len(ids) == own and vocabulary.are_valid(ids, target.vocab_size)
        if not valid or stand_ins.min() < 0 or stand_ins.max() >= own:
            raise ValueError("draft_tokens or stand_ins has an id outside its vocabulary, or one id twice")

    # --- drafting -----------------------------------------------------------------------------------------------------

    def begin(self, batch_size: int) -> DraftState:
        return DraftState(SlotCache(capacity=1024))

    def propose(
        self, state: DraftState, seen: Observed, root: Int[Tensor, " batch"], plan: Plan, noise: Noise
    ) -> DraftTree:
        draft = self.reader()
        # No slot past `last` is written before the tree. The entries that only fill the shape reach furthest.
        time = seen.tokens.shape[1]
        last = seen.longest + time if state.begun else max(seen.longest, time)
        if self.outgrown(state, draft, max(last, seen.longest + plan.depth)):
            return DraftTree.chain(root.unsqueeze(1))
        first = self.read(draft, state, seen, root, last + 1).unsqueeze(1)
        # In the draft's cache the root is committed too, so its levels begin one slot further on.
        levels = Levels(state.cache, seen.lengths + 1, seen.longest + 1)

        def step(tokens: Tensor, parents: Tensor) -> Tensor:
            positions, visible, slot_positions = levels.next(parents)
            logits, _ = draft.score(self.translate(tokens), positions, visible, slot_positions, state.cache)
            return self.common(logits)

        return grow(root, self.common(first), self.ids, plan, step, noise, seen.lengths)

    def outgrown(self, state: DraftState, draft: Target, last: int) -> bool:
        """True, and one warning per call of `generate`, when `last` is a position that it cannot read."""
        limit = getattr(draft.config, "max_position_embeddings", None)
        if limit is not None and last >= limit and not state.outgrown:
            warnings.warn(f"the draft model reads {limit} positions; from here on nothing is drafted", stacklevel=3)
            state.outgrown = True
        return state.outgrown

    def read(
        self, draft: Target, state: DraftState, seen: Observed, root: Int[Tensor, " batch"], end: int
    ) -> Float[Tensor, "batch vocab"]:
        """Takes what was decided since the last round into the cache, the root included; its logits after the root.

        Every entry is computed anew from the tokens that the target kept, so that nothing of a rejected draft stays.
        Entries that only fill the shape land in free slots, before `end`.
        """
        start = seen.start
        if state.begun:
            tokens, start = self.translate(seen.next_tokens(root)), None if start is None else start + 1
            logits, _ = draft.read(tokens, seen.positions + 1, end, start, state.cache)
            return seen.last(logits)
        state.begun = True
        # The prompt, then the root; the padding of shorter rows makes room for it.
        places = torch.where(seen.valid, seen.positions, seen.positions + 1)
        tokens = self.translate(torch.cat([seen.tokens, root.unsqueeze(1)], dim=1))
        positions = torch.cat([places, seen.lengths.unsqueeze(1)], dim=1)
        for part in prompt_parts(tokens.shape[1]):
            begin = None if start is None else start + part.start
            logits, _ = draft.read(tokens[:, part], positions[:, part], end, begin, state.cache, logits_to_keep=1)
        return logits[:, 0]

    def translate(self, tokens: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The draft model's ids of the target's tokens; those that it does not know get a stand-in."""
        if self.ids is not None:
            return self.stand_ins[tokens]
        return tokens.clamp(max=stored_weight(self.model.get_input_embeddings()).shape[0] - 1)

    def common(self, logits: Float[Tensor, "*shape vocab"]) -> Float[Tensor, "*shape common"]:
        """The logits of tokens that the target has too: vocabularies are often padded to different sizes."""
        return logits[..., : self.target.vocab_size]

    # --- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, answer_counts: Int[Tensor, " vocab"]) -> None:
        """The most frequent answer tokens become the draft vocabulary; the embeddings start from the target's.

        Where the draft model is narrower, they are the target's along its principal components; they are as large as
        they were. A token outside the draft vocabulary gets the stand-in whose embedding in the target is most like
        its own. With `layers_of_target` all weights start from the target's.
        """
        if getattr(self.model.get_output_embeddings(), "bias", None) is not None:
            raise ValueError(f"{self.model.config.model_type} has a bias on its vocabulary, which is not trained here")
        weight = self.model.get_input_embeddings().weight
        everything = torch.arange(self.target.vocab_size, device=weight.device)
        embedded = self.target.embed(everything).float()
        if self.ids is not None:
            self.ids.copy_(vocabulary.most_frequent(answer_counts.to(weight.device), len(self.ids)))
            directions = nn.functional.normalize(embedded, dim=-1).to(self.target.dtype)
            known = directions[self.ids]
            nearest = [(part @ known.T).argmax(-1) for part in directions.split(4096)]
            self.stand_ins.copy_(torch.cat(nearest))
            self.stand_ins[self.ids] = torch.arange(len(self.ids), device=weight.device)
            embedded = embedded[self.ids]
        if self.config.layers_of_target:
            return copy_weights(self.model, self.target, self.config.layers_of_target, self.ids)
        rows = min(len(embedded), len(weight))
        if weight.shape[1] < embedded.shape[1]:
            embedded = embedded @ vocabulary.main_directions(embedded, weight.shape[1])
        if weight.shape[1] == embedded.shape[1]:
            weight[:rows] = embedded[:rows] * (weight.std() / embedded.std())

    def forward(self, batch: FeatureBatch) -> LossSum:
        """loss(target, draft model) of the next token, at answer tokens, over the tokens that both have.

        Answer tokens outside the draft vocabulary are left out, but
        counted, so that the loss is a mean per trained token for any vocabulary.
        """
        trained = batch.trained & batch.attention
        trained[:, 0] = False  # nothing stands before it
        draft = self.reader()
        wanted = trained & vocabulary.among(self.ids, batch.tokens, self.target.vocab_size)
        if self.ids is None:
            wanted = wanted & (batch.tokens < draft.vocab_size)
        rows, places = wanted.nonzero(as_tuple=True)
        _, hidden = draft.encode(self.translate(batch.tokens), ())
        weight = self.model.get_output_embeddings().weight[: self.target.vocab_size]
        with torch.no_grad():
            logits = self.target.project(batch.hidden[rows, places - 1], self.ids)[:, : len(weight)]
            probs, best = logits.softmax(-1), logits.argmax(-1)
        labels = self.translate(batch.tokens[rows, places])
        total, hits = vocabulary_loss(self.config.loss, hidden[rows, places - 1], weight, probs, best, labels)
        return LossSum(total, trained.sum(), {"accuracy_1": (hits, wanted.sum())})

    loss = forward


def fresh_model(config: DraftModelConfig, target: Target) -> PreTrainedModel:
    """The model that a resolved config describes, with random weights. ValueError for a field that does not exist,
    before a default in its place makes the model a large one."""
    if config.layers_of_target:
        return shortened(target, config.layers_of_target, config.draft_vocab_size or target.vocab_size)
    refuse_unknown_fields(config.model)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model))


# --- An ordinary Hugging Face folder ----------------------------------------------------------------------------------


def plain_config(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config as JSON takes it, with the dtype that the weights have now."""
    values = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_ITS_OWN}
    return values | {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Weights that are another one under a second name, and the name under which it is saved."""
    return dict(model.all_tied_weights_keys)


def name_as_model(drafter: DraftModel, state_dict: dict, prefix: str, local_metadata: Any) -> None:
    """Takes `model.` off the names, and tied weights out: the model's own file, as transformers writes it."""
    inner = f"{prefix}model."
    tied = {inner + name for name in tied_names(drafter.model)}
    for name in [name for name in state_dict if name.startswith(inner)]:
        value = state_dict.pop(name)
        if name not in tied:
            state_dict[prefix + name.removeprefix(inner)] = value


def name_as_drafter(drafter: DraftModel, state_dict: dict, prefix: str, *rest: Any) -> None:
    """The way back."""
    own = {name for name, _ in drafter.named_buffers(recurse=False)}
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if name.removeprefix(prefix) not in own:
            state_dict[f"{prefix}model.{name.removeprefix(prefix)}"] = state_dict.pop(name)
    for name, source in tied_names(drafter.model).items():
        if f"{prefix}model.{source}" in state_dict:
            state_dict[f"{prefix}model.{name}"] = state_dict[f"{prefix}model.{source}"]


def tie(drafter: DraftModel, incompatible_keys: Any) -> None:
    """Loading may have put two tensors where one belongs."""
    drafter.model.tie_weights()


def refuse_unknown_fields(config: dict[str, Any]) -> None:
    """ValueError for a misspelt field, which transformers would take without a word."""
    if "model_type" not in config:
        raise ValueError(f"the draft model's config has no model_type, only {', '.join(config)}; give it, as in llama")
    known = AutoConfig.for_model(config["model_type"]).to_dict()
    for key in config:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"a {config['model_type']} config has no field '{key}'; {hint}")


drafter_class = DraftModel

"""A shorter twin of the target: the same architecture with some of its layers, for a draft model to start as."""

import copy

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfdraft.target import Target


def shortened(target: Target, layers: tuple[int, ...], vocab_size: int) -> PreTrainedModel:
    """A fresh float32 model with the target's config, but these layers only, and a vocabulary of `vocab_size` tokens.

    ValueError for layers that the target does not have, and for targets whose layers cannot change their place.
    """
    outside = [index for index in layers if not 0 <= index < target.num_layers]
    if outside:
        raise ValueError(f"layers_of_target has {outside}, and the target's layers are 0 to {target.num_layers - 1}")
    config = copy.deepcopy(target.config)
    for name, value in target.config.to_dict().items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == target.num_layers:
            setattr(config, name, [value[index] for index in layers])  # what kind each layer is of
    config.num_hidden_layers = len(layers)
    if vocab_size < target.vocab_size:
        config.vocab_size, config.pad_token_id = vocab_size, None  # a padding token must be one of the vocabulary
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    theirs = target.model.state_dict()
    for name, value in model.state_dict().items():
        source = theirs.get(source_of(name, model, layers))
        rows = [target.vocab_size, *value.shape[1:]] if value.shape[:1] == (vocab_size,) else [*value.shape]
        if source is None or list(source.shape) not in ([*value.shape], rows):
            raise ValueError(
                f"layers_of_target {layers} cannot be cut out of a {target.config.model_type}: the target has no "
                f"weight that '{name}' could start from; name other layers, or give a config in `model`"
            )
    return model


def source_of(name: str, model: PreTrainedModel, layers: tuple[int, ...]) -> str:
    """The target's name of a weight of its shorter twin."""
    stack = next(path for path, part in model.named_modules() if part is Target(model).layers)
    if not name.startswith(f"{stack}."):
        return name
    index, _, rest = name.removeprefix(f"{stack}.").partition(".")
    return f"{stack}.{layers[int(index)]}.{rest}"


@torch.no_grad()
def copy_weights(
    model: PreTrainedModel, target: Target, layers: tuple[int, ...], ids: Int[Tensor, " draft_vocab"] | None
) -> None:
    """Starts the shorter twin from the target's weights; of a vocabulary's rows, from those of the tokens `ids`."""
    theirs = target.model.state_dict()
    for name, value in model.state_dict().items():
        source = theirs[source_of(name, model, layers)]
        value.copy_(source if source.shape == value.shape or ids is None else source[ids])

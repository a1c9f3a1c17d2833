"""The draft vocabulary: the most frequent answer tokens, which a small vocabulary projection is cut down to.

Ids are the target's token ids of every draft token, in ascending order; None stands for all of them.
"""

import functools

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoTokenizer


def most_frequent(answer_counts: Int[Tensor, " vocab"], size: int) -> Int[Tensor, " draft_vocab"]:
    """The ids of the `size` tokens that answers use most."""
    return answer_counts.topk(size).indices.sort().values


def size_of(wanted: int, vocab_size: int) -> int:
    """How many of the target's tokens can be drafted when `wanted` are asked for: all for 0. ValueError below 0."""
    if wanted < 0:
        raise ValueError(f"draft_vocab_size is {wanted}; give 0 for the whole vocabulary, or how many tokens to draft")
    return min(wanted or vocab_size, vocab_size)


def among(
    ids: Int[Tensor, " draft_vocab"] | None, tokens: Int[Tensor, "*shape"], vocab_size: int
) -> Bool[Tensor, "*shape"]:
    """Which of the target's tokens can be drafted."""
    if ids is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    known = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device)
    known[ids] = True
    return known[tokens]


def places(
    ids: Int[Tensor, " draft_vocab"] | None, tokens: Int[Tensor, "*shape"], vocab_size: int
) -> Int[Tensor, "*shape"]:
    """The draft token that is each of the target's tokens; 0 for those that cannot be drafted (see `among`)."""
    if ids is None:
        return tokens
    table = torch.zeros(vocab_size, dtype=torch.long, device=tokens.device)
    table[ids] = torch.arange(len(ids), device=tokens.device)
    return table[tokens]


def main_directions(rows: Float[Tensor, "rows size"], count: int) -> Float[Tensor, "size count"]:
    """The `count` orthonormal directions that hold most of these vectors (Eckart-Young), the greatest one last."""
    rows = rows.float()
    return torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -count:]  # in ascending order of their energy


def are_valid(ids: Int[Tensor, " draft_vocab"], vocab_size: int) -> bool:
    """Whether every id is one of the target's, and none comes twice. Reads from the device."""
    return bool(ids.min() >= 0 and ids.max() < vocab_size and len(ids.unique()) == len(ids))


@functools.lru_cache
def refuse_other_tokenizer(own: str, theirs: str) -> None:
    """ValueError when two checkpoints on this machine have tokenizers that give one id to different tokens.

    Added tokens are left out: one family's checkpoints often differ in those, and a text has few of them. Without
    tokenizer files nothing is known.
    """
    if own == theirs or not own or not theirs:
        return
    try:
        ours, others = plain_tokens(own), plain_tokens(theirs)
    except (OSError, ValueError):
        return
    for index in sorted(ours.keys() & others.keys()):
        if ours[index] != others[index]:
            raise ValueError(
                f"the draft model's token {index} is {ours[index]!r} and the target's is {others[index]!r}, so they do "
                "not share a tokenizer; take a draft model of the target's own family"
            )


def plain_tokens(checkpoint: str) -> dict[int, str]:
    """The tokens of a checkpoint's tokenizer by their ids, without those added to its vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    added = tokenizer.added_tokens_decoder
    return {index: token for token, index in tokenizer.get_vocab().items() if index not in added}

"""What the target thinks of a batch: computed on the spot, or computed once and read from disk."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from data import Conversations, collate
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfdraft.drafters.base import FeatureBatch
from selfdraft.target import Target

SHARD_BYTES = 256e6  # about; a build that is killed loses one unfinished shard per process
OPEN_SHARDS = 128  # mapped at once
LINE_SECONDS = 10  # between two lines of progress

_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype"}  # of a config: says nothing about its hidden states


def live_features(
    target: Target,
    layers: tuple[int, ...],
    tokens: Tensor,
    trained: Tensor,
    attention: Tensor,
    packed: bool = False,
    differentiable: bool = False,
) -> FeatureBatch:
    """The batch with the target's hidden states, in the target's own dtype and on its device; without gradients, unless
    they are to be `differentiable`.

    `tokens`, `trained` and `attention` are `[batch, time]`, padded on the right: no token attends to one after it,
    so padding changes nothing, and neither does the number of conversations in a batch. `packed` has the target read
    them all in one row, without the padding, none seeing another.
    """
    tokens, trained, attention = (part.to(target.device, non_blocking=True) for part in (tokens, trained, attention))
    with torch.set_grad_enabled(differentiable):
        if packed:
            positions = (attention.cumsum(dim=1) - 1)[attention]
            rows = target.encode(tokens[attention].unsqueeze(0), layers, positions.unsqueeze(0))
            features, hidden = (
                row.new_zeros(*tokens.shape, row.shape[-1]).masked_scatter_(attention.unsqueeze(-1), row)
                for row in rows
            )
        else:
            features, hidden = target.encode(tokens, layers)
    return FeatureBatch(tokens=tokens, trained=trained, attention=attention, features=features, hidden=hidden)


class FeatureCache:
    """Hidden states of the target on disk: what `live_features` would compute, without the target's layers.

    `folder` gets a sub-folder for each target (every weight counts), set of layers and dtype, with `key.json` telling
    which, and files of many conversations each. A conversation is found by a hash of its token ids and mask, so the
    order and choice of the data may change, and equal ones are kept once. Tokenizer, chat template and longest length
    act through the ids.

    Args:
        layers: as in `live_features`; the last hidden state is kept too, once.
        dtype: "target" keeps every bit; "bfloat16"; "float8" is e4m3 with one float32 scale per token and layer.
    """

    def __init__(self, folder: str | Path, target: Target, layers: tuple[int, ...], dtype: str = "target"):
        last = target.num_layers
        if any(not -last - 1 <= layer <= last for layer in layers):
            raise ValueError(f"the layers {layers} do not all exist in a target of {last} layers")
        self.target = target
        self.wanted = [layer % (last + 1) for layer in layers]
        self.kept = sorted({*self.wanted, last})  # so the last hidden state is the last of them
        self.dtype = {"target": target.dtype, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}[dtype]
        self.key = cache_key(target) | {"layers": self.kept, "dtype": str(self.dtype)}
        name = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = Path(folder).expanduser() / name
        self.places: dict[bytes, tuple[Path, int]] = {}  # file and first row of a conversation
        self.open = functools.lru_cache(OPEN_SHARDS)(open_shard)

    @property
    def bytes_per_token(self) -> int:
        scale = 4 if self.dtype == torch.float8_e4m3fn else 0
        return len(self.kept) * (self.target.hidden_size * self.dtype.itemsize + scale)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, tokens: Tensor, trained: Tensor, attention: Tensor) -> FeatureBatch:
        """What `live_features` gives for this batch, with zeros at padding. ValueError when it was not built.

        Only the rows of its conversations are read from the mapped files.
        """
        size, device = self.target.hidden_size, self.target.device
        states = {layer: torch.zeros(*tokens.shape, size, dtype=self.dtype) for layer in self.kept}
        scales = {layer: torch.zeros(*tokens.shape, 1) for layer in self.kept if self.dtype == torch.float8_e4m3fn}
        for row in range(len(tokens)):
            if not trained[row].any():
                continue  # what a process without work gets: nothing of it is looked at
            length = int(attention[row].sum())
            digest = digest_of(tokens[row, :length].numpy(), trained[row, :length].numpy())
            if digest not in self.places:
                raise ValueError(f"{self.folder} lacks a conversation of {length} tokens that the batch needs")
            file, first = self.places[digest]
            shard, rows = self.open(file), slice(first, first + length)
            for layer in self.kept:
                states[layer][row, :length] = shard.get_slice(str(layer))[rows]
            for layer in scales:
                scales[layer][row, :length] = shard.get_slice(f"{layer}.scale")[rows]
        loaded = {layer: self.decode(states[layer].to(device), scales.get(layer)) for layer in self.kept}
        hidden = loaded[self.kept[-1]]
        features = torch.cat([loaded[layer] for layer in self.wanted], dim=-1) if self.wanted else hidden[..., :0]
        tokens, trained, attention = (part.to(device, non_blocking=True) for part in (tokens, trained, attention))
        return FeatureBatch(tokens=tokens, trained=trained, attention=attention, features=features, hidden=hidden)

    def decode(self, state: Tensor, scale: Tensor | None) -> Tensor:
        return (state if scale is None else state.float() * scale.to(state.device)).to(self.target.dtype)

    # --- building -----------------------------------------------------------------------------------------------------

    def build(
        self,
        conversations: Conversations,
        steps: list[list[list[np.ndarray]]],
        accelerator: Accelerator,
        say: Callable[[str], None],
    ) -> None:
        """Computes what is missing, each process its share, and says how large it is and how it goes.

        `steps` are those of the training: of every step the forward batches (indices of conversations) by process, as
        `share_step` gives them. The features are computed in just these batches, because in bf16 another padding rounds
        otherwise: so a first epoch from the cache equals a live one bit for bit.

        A file gets its name when it is whole; a build that was killed goes on after the last one, with the same result.
        One training builds at a time, and others wait. Raises ValueError, before anything is computed, when the disk
        cannot hold it; also when a file cannot be read or written.
        """
        with writing_in(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".lock").touch()
        with locked(self.folder / ".lock", say) if accelerator.is_main_process else contextlib.nullcontext():
            if accelerator.is_main_process:
                for stale in self.folder.glob(".*.partial"):
                    stale.unlink()
            accelerator.wait_for_everyone()
            self.scan()
            shards = self.plan_shards(conversations, steps, accelerator.num_processes)
            self.announce(conversations, shards, say)
            accelerator.wait_for_everyone()  # nobody writes before all have looked
            if accelerator.is_main_process and any(shards):
                with writing_in(self.folder):
                    (self.folder / "key.json").write_text(json.dumps(self.key, indent=2) + "\n")
            with self.progress(conversations, shards[accelerator.process_index], say) as advance:
                for shard in shards[accelerator.process_index]:
                    self.write_shard(conversations, shard, advance)
            accelerator.wait_for_everyone()
            self.scan()

    def scan(self) -> None:
        """Learns which conversations lie where."""
        for file in sorted(self.folder.glob("*.safetensors")):
            shard = self.open(file)
            lengths = shard.get_tensor("lengths")
            firsts = (lengths.cumsum(0) - lengths).tolist()
            digests = (bytes(row) for row in shard.get_tensor("digests").numpy())
            self.places |= {digest: (file, first) for digest, first in zip(digests, firsts, strict=True)}

    def plan_shards(
        self, conversations: Conversations, steps: list[list[list[np.ndarray]]], processes: int
    ) -> list[list[list[np.ndarray]]]:
        """By process, the batches of every file that is still to be written, each conversation once."""
        planned, known = [], set(self.places)
        for process in range(processes):
            shards: list[list[np.ndarray]] = [[]]
            size = 0
            for batch in (batch for step in steps for batch in step[process]):
                missing = []
                for index in batch:
                    digest = digest_of(conversations.tokens[index], conversations.trained[index])
                    if digest not in known:
                        known.add(digest)
                        missing.append(index)
                if missing and size >= SHARD_BYTES:
                    shards.append([])
                    size = 0
                if missing:
                    shards[-1].append(np.array(missing))
                    size += int(conversations.lengths[missing].sum()) * self.bytes_per_token
            planned.append([shard for shard in shards if shard])
        return planned

    def announce(self, conversations: Conversations, shards: list[list[list[np.ndarray]]], say: Callable) -> None:
        """Says what will be computed and how large it is; ValueError when it does not fit on the disk."""
        indices = [index for each in shards for shard in each for batch in shard for index in batch]
        if not indices:
            say(f"features: everything is in {self.folder}")
            return
        tokens = int(conversations.lengths[indices].sum())
        size, free = tokens * self.bytes_per_token, shutil.disk_usage(self.folder).free
        layers, dtype = ", ".join(map(str, self.kept)), str(self.dtype).removeprefix("torch.")
        say(
            f"features: {len(indices):,} conversations, {tokens:,} tokens, layers {layers} in {dtype}: "
            f"{size / 1e9:.3f} GB for {self.folder}, where {free / 1e9:.1f} GB are free"
        )
        if 1.01 * size > free:
            raise ValueError(
                f"the features take {size / 1e9:.2f} GB, and the disk of {self.folder} has {free / 1e9:.2f} GB free; "
                "make room, set --features.cache to another disk, or train without it"
            )

    @contextlib.contextmanager
    def progress(self, conversations: Conversations, shards: list[list[np.ndarray]], say: Callable) -> Iterator:
        """A function that counts tokens and now and then says how far it is, how fast, and how long it will take."""
        total = sum(int(conversations.lengths[batch].sum()) for shard in shards for batch in shard)
        done, began, last_line = 0, time.perf_counter(), 0.0

        def advance(tokens: int) -> None:
            nonlocal done, last_line
            done += tokens
            now = time.perf_counter()
            if now - last_line > LINE_SECONDS or done == total:
                last_line, rate = now, done / (now - began)
                left = (total - done) / rate / 60
                say(f"features: {done:,} of {total:,} tokens, {rate:,.0f} tokens/s, {left:.1f} minutes left")

        try:
            yield advance
        except KeyboardInterrupt:
            say("\nstopped while features were computed; the same command goes on from the files that are whole")
            raise SystemExit(130) from None

    def write_shard(self, conversations: Conversations, shard: list[np.ndarray], advance: Callable) -> None:
        indices = [index for batch in shard for index in batch]
        digests = [digest_of(conversations.tokens[index], conversations.trained[index]) for index in indices]
        states: dict[int, list[Tensor]] = {layer: [] for layer in self.kept}
        for batch in shard:
            tokens, trained, attention = collate(conversations, batch)
            seen = live_features(self.target, tuple(self.kept[:-1]), tokens, trained, attention)
            parts = [*seen.features.split(self.target.hidden_size, dim=-1), seen.hidden]
            for layer, part in zip(self.kept, parts[-len(self.kept) :], strict=True):
                states[layer].append(part[seen.attention].cpu())
            advance(int(attention.sum()))
        tensors = {
            "digests": torch.tensor([list(digest) for digest in digests], dtype=torch.uint8),
            "lengths": torch.from_numpy(conversations.lengths[indices]),
        }
        for layer in self.kept:
            state = torch.cat(states.pop(layer))
            assert state.dtype == self.target.dtype, "what the disk was asked for, and what read() makes of it"
            if self.dtype == torch.float8_e4m3fn:
                tensors[str(layer)], tensors[f"{layer}.scale"] = as_float8(state)
            else:
                tensors[str(layer)] = state.to(self.dtype)
        name = hashlib.sha256(b"".join(digests)).hexdigest()[:16]
        save_whole(tensors, self.folder / f"{name}.safetensors")


@contextlib.contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """ValueError when the folder does not take what it is given."""
    try:
        yield
    except OSError as problem:
        raise ValueError(
            f"features cannot be kept in {folder} ({problem}); set --features.cache to another folder"
        ) from problem


@contextlib.contextmanager
def locked(file: Path, say: Callable) -> Iterator[None]:
    """Holds a lock that a killed process gives back; says so when it has to wait for it."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"features: waiting for another training that computes some in {file.parent}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def cache_key(target: Target) -> dict[str, Any]:
    """What the hidden states of a target depend on, apart from the text."""
    identity = {name: value for name, value in target.identity().items() if name != "name"}
    config = {name: value for name, value in target.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in target.model.base_model.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return {"format": 1, "target": identity, "weights": digest.hexdigest()[:16], "target_dtype": str(target.dtype)}


def digest_of(tokens: np.ndarray, trained: np.ndarray) -> bytes:
    """16 bytes that stand for a conversation: its ids and its mask."""
    return hashlib.sha256(tokens.tobytes() + trained.tobytes()).digest()[:16]


def as_float8(state: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and the scale of every row: its largest value becomes the largest one that e4m3 has."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = state.float().abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * most) / most
    return (state.float() / scale).to(torch.float8_e4m3fn), scale


def open_shard(file: Path) -> Any:
    """The file, mapped into memory."""
    try:
        return safe_open(file, "pt")
    except (OSError, SafetensorError) as problem:
        raise ValueError(
            f"{file} cannot be read ({problem}); delete it, and the same command computes it again"
        ) from problem


def save_whole(tensors: dict[str, Tensor], file: Path) -> None:
    """The file gets its name when all of it is on the disk. ValueError when it cannot be written."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        save_file(tensors, partial)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.rename(file)
    except (OSError, SafetensorError) as problem:
        partial.unlink(missing_ok=True)
        free = shutil.disk_usage(file.parent).free
        raise ValueError(
            f"could not write {file} ({problem}; {free / 1e9:.2f} GB are free); the files before it are whole: "
            "the same command continues from them"
        ) from problem

"""SlotCache: preallocated keys and values, written at named slots and compacted on the device."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache

BUCKET = 64  # an explicit mask has a multiple of this width, so that few different shapes occur
GROWTH = 1024  # slots added at a time when a row outgrows what was reserved


class SlotCache(Cache):
    """Keys and values of a batch, `[batch, heads, capacity, dim]` per layer.

    The owner says before every forward where it writes. With `open` it passes an explicit mask over the slots, and
    moves what it keeps with `keep`; the cache itself knows no lengths, and every row may have its own. With `extend`
    all rows are equally long, and to the model this is a cache like any of transformers' own.
    """

    def __init__(self, capacity: int):
        super().__init__(layers=[])
        self.capacity = -(-capacity // BUCKET) * BUCKET
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._slots: Tensor | None = None  # where the next forward writes, by index
        self._run: slice | None = None  # the same place, when every row writes at the same run of slots
        self._before = 0  # tokens that the model takes for granted when it makes its own mask
        self._width = 0
        self._windows: list[tuple[Tensor, Tensor]] = []  # of every layer, the slots that attention sees

    def open(self, slots: Int[Tensor, "batch time"], end: int, start: int | None = None) -> int:
        """Direct the next forward to write at `slots`; returns the width of the attention mask it needs.

        `end` is one more than the largest slot. `start` is given when every row writes at `start..end-1`: a slice
        is cheaper than an index.
        """
        self._slots, self._run = slots, None if start is None else slice(start, end)
        self._before = 0
        width = -(-end // BUCKET) * BUCKET
        self._show(width)
        return width

    def extend(self, start: int, end: int) -> None:
        """Direct the next forward to append at `start..end-1` in every row; it sees the first `end` slots.

        Then slots are positions, so that the model's own causal mask is right, and none is needed for one token.
        """
        self._slots, self._run, self._before = None, slice(start, end), start
        self._show(end)

    def _show(self, width: int) -> None:
        if width > self.capacity:
            self._grow(width)
        if width != self._width:  # the same for many rounds
            self._width, self._windows = width, []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by transformers' attention: writes at the opened slots, returns the slots that attention sees."""
        while len(self.keys) <= layer_idx:
            self.keys.append(self._reserve(key_states))
            self.values.append(self._reserve(value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        compiling = torch.compiler.is_compiling()  # then one form for all passes: every other is another graph
        if self._slots is None or (not compiling and self._run is not None):
            keys[:, :, self._run] = key_states
            values[:, :, self._run] = value_states
        else:
            slots = self._slots.to(keys.device)
            rows = torch.arange(len(slots), device=keys.device).unsqueeze(1)
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        if compiling:
            return keys[:, :, : self._width], values[:, :, : self._width]
        while len(self._windows) <= layer_idx:
            stores = self.keys[len(self._windows)], self.values[len(self._windows)]
            self._windows.append((stores[0][:, :, : self._width], stores[1][:, :, : self._width]))
        return self._windows[layer_idx]

    def keep(self, source: Int[Tensor, "batch moved"], target: Int[Tensor, "batch moved"]) -> None:
        """Copy slots `source` to slots `target` in every layer; all sources are read before any is written."""
        rows = torch.arange(len(source), device=source.device).unsqueeze(1)
        for store in (*self.keys, *self.values):
            if rows.device != store.device:  # layers of one model may lie on several devices
                rows, source, target = (index.to(store.device) for index in (rows, source, target))
            store[rows, :, target] = store[rows, :, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """For transformers' own mask: the tokens before those of this forward."""
        return self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """For transformers' own mask: how many slots attention sees, and the position of the first."""
        return self._width, 0

    def _reserve(self, states: Tensor) -> Tensor:
        batch, heads, _, dim = states.shape
        # Zeros, not empty: a masked slot still takes part in the sum, with weight 0, and 0 * nan is nan.
        return torch.zeros(batch, heads, self.capacity, dim, dtype=states.dtype, device=states.device)

    def _grow(self, needed: int) -> None:
        extra = -(-(needed - self.capacity) // GROWTH) * GROWTH
        self.capacity += extra
        for stores in (self.keys, self.values):
            for index, store in enumerate(stores):
                stores[index] = torch.nn.functional.pad(store, (0, 0, 0, extra))

"""Runs steps on a loaded shard: packs the rows of a batch, binds them beside the KV arena, and hands back the real rows.

Owns the rules that make a row's result independent of its company. Matrix kernels take another path for one row than for
more, and attention for one column: so a shared batch always has two token rows and two columns at least, a solo batch one.
Knows slots, not sequences; called by the worker's compute thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InternalError
from shoal.types import ShardShape
from worker.kv.arena import Arena
from worker.session import Binding, Session

_ALIGNMENT = 64
# Each has the KV of all layers bound for one range of slots; a steady batch needs one or two.
_MAX_WINDOWS = 32


@dataclass(frozen=True, slots=True)
class ShardRow:
    """The tokens of one sequence in a step.

    position: tokens the slot holds before; lower than its length rolls back. A chunk of a prompt must not be of one token,
    nor of one more than a multiple of 16: attention takes its rows by blocks, and one that is alone in its block as a
    decode row is. Only a prompt of one token is, or the last token of one behind a border that chunks must not cross.
    """

    slot: int
    position: int
    num_tokens: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """One step: rows, and their token ids (int64 [T]) or hidden rows (float32 [T, E]) in row order.

    solo: one row of one token, computed alone (numeric class SOLO).
    """

    rows: tuple[ShardRow, ...]
    tokens_or_hidden: NDArray[Any]
    solo: bool = False


@dataclass(frozen=True, slots=True)
class _Layout:
    """The sizes of a step: slots [low, low + width), rows of at most `longest` tokens, T = num_rows of them in all.

    logit_rows: token rows whose logits are wanted. The last of num_rows and num_logits may be there only to make two.
    """

    low: int
    width: int
    longest: int
    num_rows: int
    num_logits: int
    logit_rows: tuple[int, ...]


class _Window:
    """What is bound for one range of slots, and the small inputs that every step fills in.

    Invariant: bound arrays have the sizes of `sizes`; a step of the same sizes binds nothing.
    """

    __slots__ = ("binding", "logit_rows", "pad", "queries", "seqlens", "sizes", "total", "unpad")

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.sizes: tuple[int, ...] = ()
        self.total = np.zeros((), np.int32)

    def fit(self, layout: _Layout) -> None:
        self.pad = np.zeros((layout.width, layout.longest), np.int64)  # [S, Q]
        self.unpad = np.zeros(layout.num_rows, np.int64)  # [T]
        self.seqlens = np.zeros(layout.width, np.int32)  # [S]
        self.queries = np.zeros(layout.width, np.int32)  # [S]
        self.logit_rows = np.zeros(layout.num_logits, np.int64)  # [R]
        self.binding.bind_input("pad_index", self.pad)
        self.binding.bind_input("unpad_index", self.unpad)
        self.binding.bind_input("seqlens_k", self.seqlens)
        self.binding.bind_input("query_seqlens", self.queries)
        self.binding.bind_input("total_sequence_length", self.total)

    def fill(self, rows: tuple[ShardRow, ...], layout: _Layout) -> None:
        """Say where each token row is among the slots; an idle slot claims one token held and none new: it is skipped."""
        self.seqlens.fill(0)
        self.queries.fill(0)
        start = 0
        for row in rows:
            slot, count = row.slot - layout.low, row.num_tokens
            self.seqlens[slot] = row.position + count - 1
            self.queries[slot] = count
            self.pad[slot, :count] = range(start, start + count)
            self.unpad[start : start + count] = range(slot * layout.longest, slot * layout.longest + count)
            start += count
        self.total[()] = max(layout.longest, max(row.position + row.num_tokens for row in rows))
        if layout.logit_rows:
            self.logit_rows.fill(layout.logit_rows[-1])
            self.logit_rows[: len(layout.logit_rows)] = layout.logit_rows


class Shard:
    """A session with its arena.

    Invariants: arena lengths are those after the steps that succeeded; a refused step writes nothing.
    """

    __slots__ = ("_arena", "_generation", "_input", "_output", "_session", "_shape", "_windows")

    def __init__(self, shape: ShardShape, session: Session, arena: Arena) -> None:
        self._shape = shape
        self._session = session
        self._arena = arena
        self._windows: OrderedDict[tuple[int, int], _Window] = OrderedDict()
        self._input = _aligned(0)
        self._output = _aligned(0)
        self._generation = 0

    @property
    def provider(self) -> str:
        return self._session.provider

    @property
    def weight_bytes(self) -> int:
        return self._session.weight_bytes

    @property
    def kv_bytes(self) -> int:
        return self._arena.resident_bytes

    @property
    def arena(self) -> Arena:
        """Where slots are copied from, and filled between two runs."""
        return self._arena

    def run(self, batch: ShardBatch) -> NDArray[np.float32]:
        """Compute a step: hidden rows [T, E], or on the last shard logits [R, V] of the rows that want them.

        Appends to the arena. The result is a view that the next run overwrites. Raises InternalError if the step does not
        fit the arena.
        """
        num_tokens = self._check(batch)
        layout = _lay_out(batch, num_tokens)
        window = self._window(layout.low, layout.width)
        data, result = self._buffers(layout)
        sizes = (layout.longest, layout.num_rows, layout.num_logits, self._generation)
        if window.sizes != sizes:
            window.fit(layout)
            self._bind_ends(window, data, result)
            window.sizes = sizes
        window.fill(batch.rows, layout)
        # The payload is copied: it may be unaligned, and is not ours after the call.
        data[:num_tokens] = batch.tokens_or_hidden
        data[num_tokens:] = 0
        self._session.run(window.binding)
        for row in batch.rows:
            self._arena.set_length(row.slot, row.position + row.num_tokens)
        return result[: len(layout.logit_rows) if self._shape.is_last else num_tokens]

    def release(self, slot: int) -> None:
        """Empty a slot and give its memory back."""
        self._arena.release(slot)

    def close(self) -> None:
        """Free weights and KV; the shard cannot run afterwards."""
        self._windows.clear()
        self._session.close()
        self._arena.close()

    def check_invariants(self) -> None:
        self._arena.check_invariants()

    def _check(self, batch: ShardBatch) -> int:
        """The number of tokens of a step that may run; raise InternalError for one that may not."""
        rows = batch.rows
        if not rows or len({row.slot for row in rows}) != len(rows):
            raise InternalError("a step needs rows, each in a slot of its own")
        if batch.solo and (len(rows) != 1 or rows[0].num_tokens != 1):
            raise InternalError("a solo step has one row of one token")
        for row in rows:
            self._arena.check_room(row.slot, row.position, row.num_tokens)
        self._arena.check_total({row.slot: row.position + row.num_tokens for row in rows})
        num_tokens = sum(row.num_tokens for row in rows)
        expected = (num_tokens,) if self._shape.is_first else (num_tokens, self._shape.hidden_size)
        if batch.tokens_or_hidden.shape != expected:
            raise InternalError(f"a step of {num_tokens} tokens came with an array {batch.tokens_or_hidden.shape}")
        return num_tokens

    def _window(self, low: int, width: int) -> _Window:
        """The window on these slots; the least recently used are dropped."""
        key = (low, width)
        if key in self._windows:
            self._windows.move_to_end(key)
            return self._windows[key]
        window = _Window(self._session.binding())
        shape = (width, self._shape.num_kv_heads, self._arena.capacity, self._shape.head_dim)
        for layer in range(self._shape.num_layers):
            for kv, half in enumerate(("key", "value")):
                pointer = self._arena.pointer(layer, kv, low)
                window.binding.bind_in_place(f"past_{half}_{layer}", f"present_{half}_{layer}", shape, pointer)
        self._windows[key] = window
        if len(self._windows) > _MAX_WINDOWS:
            self._windows.popitem(last=False)
        return window

    def _buffers(self, layout: _Layout) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Input and output arrays of a step, in memory that all windows share and that only grows."""
        shape = self._shape
        in_row, dtype = (8, np.int64) if shape.is_first else (4 * shape.hidden_size, np.float32)
        out_rows, out_columns = layout.num_rows, shape.hidden_size
        if shape.is_last:
            out_rows, out_columns = layout.num_logits, shape.vocab_size
        in_bytes, out_bytes = layout.num_rows * in_row, out_rows * out_columns * 4
        if self._input.nbytes < in_bytes or self._output.nbytes < out_bytes:
            self._input = _aligned(max(in_bytes, self._input.nbytes))
            self._output = _aligned(max(out_bytes, self._output.nbytes))
            self._generation += 1
        data = self._input[:in_bytes].view(dtype)
        result = self._output[:out_bytes].view(np.float32).reshape(out_rows, out_columns)
        return data if shape.is_first else data.reshape(layout.num_rows, -1), result

    def _bind_ends(self, window: _Window, data: NDArray[Any], result: NDArray[np.float32]) -> None:
        window.binding.bind_input("token_ids" if self._shape.is_first else "hidden", data)
        if self._shape.is_last:
            window.binding.bind_input("logit_rows", window.logit_rows)
        window.binding.bind_output("logits" if self._shape.is_last else "hidden_out", result)


def open_shard(shape: ShardShape, graph: bytes, blob_directory: Path, *, num_threads: int = 1) -> Shard:
    """Load a shard's graph, whose weights are files of blob_directory, and reserve its arena."""
    return Shard(shape, Session(graph, blob_directory, num_threads=num_threads), Arena(shape))


def _lay_out(batch: ShardBatch, num_tokens: int) -> _Layout:
    rows, least = batch.rows, 1 if batch.solo else 2
    low = min(row.slot for row in rows)
    logit_rows = _logit_rows(rows)
    return _Layout(
        low=low,
        width=max(row.slot for row in rows) + 1 - low,
        longest=max(least, *(row.num_tokens for row in rows)),
        num_rows=max(least, num_tokens),
        # The head follows the same rule as the layers.
        num_logits=max(least, len(logit_rows)) if logit_rows else 0,
        logit_rows=logit_rows,
    )


def _logit_rows(rows: tuple[ShardRow, ...]) -> tuple[int, ...]:
    """The last token row of each row that wants logits."""
    found, stop = [], 0
    for row in rows:
        stop += row.num_tokens
        if row.wants_logits:
            found.append(stop - 1)
    return tuple(found)


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + num_bytes]

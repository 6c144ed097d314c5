"""Writes one blob: arrays laid out one after the other, packed weights filled in by rows as they are made.

Owns the layout (4096-aligned, so that a runtime can map each array) and that nothing is visible before it is whole and
on disk. Holds a few rows at a time, never a whole weight. Knows neither models nor file formats; the store opens one
for each blob and `packing` fills it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from io import BufferedRandom

import numpy as np
from numpy.typing import NDArray

from modelstore.manifest import ArrayEntry, BlobEntry, Linear
from modelstore.quantize import PackedLinear

ALIGNMENT = 4096

Array = NDArray[np.uint8] | NDArray[np.float32]


class BlobWriter:
    """A blob being written to a file that nobody else looks at."""

    def __init__(self, file: BufferedRandom) -> None:
        self._file = file
        self._end = 0
        self._arrays: dict[str, ArrayEntry] = {}
        self._linears: dict[str, Linear] = {}

    def add_array(self, name: str, shape: tuple[int, ...], chunks: Iterable[NDArray[np.float32]]) -> None:
        """Append a float32 array whose rows come in chunks."""
        entry = self._arrays[name] = self._reserve("float32", shape)
        self._file.seek(entry.offset)
        for chunk in chunks:
            self._file.write(np.ascontiguousarray(chunk).data)

    def add_linear(self, name: str, num_rows: int, chunks: Iterable[PackedLinear], *, is_lookup: bool = False) -> None:
        """Append a packed weight whose rows come in chunks of one kind; is_lookup: a float32 one is [V, E]."""
        row = 0
        for chunk in chunks:
            if name not in self._linears:
                self._linears[name] = self._reserve_linear(chunk, num_rows, is_lookup)
            for array_name, values in chunk.arrays.items():
                axis = _row_axis(array_name, is_lookup)
                self._write_rows(self._linears[name].arrays[array_name], values, row, axis)
            row += chunk.n
        assert row == num_rows, f"{name} got {row} of {num_rows} rows"

    def finish(self) -> BlobEntry:
        """Put the bytes on disk and return what they are."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        return BlobEntry(digest, self._end, self._arrays, self._linears)

    def _reserve(self, dtype: str, shape: tuple[int, ...]) -> ArrayEntry:
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._end = offset + num_bytes
        return ArrayEntry(offset, num_bytes, dtype, shape)

    def _reserve_linear(self, chunk: PackedLinear, num_rows: int, is_lookup: bool) -> Linear:
        entries = {}
        for name, values in chunk.arrays.items():
            axis = _row_axis(name, is_lookup)
            shape = (*values.shape[:axis], num_rows, *values.shape[axis + 1 :])
            entries[name] = self._reserve(values.dtype.name, shape)
        return Linear(chunk.kind, num_rows, chunk.k, chunk.block, entries)

    def _write_rows(self, entry: ArrayEntry, values: Array, row: int, axis: int) -> None:
        """Write rows [row, row + n) of an array; with axis 1 they are columns, and each line gets its piece."""
        lines = values if axis == 1 else values.reshape(1, -1)
        item_bytes = values.dtype.itemsize
        line_bytes = entry.shape[1] * item_bytes if axis == 1 else 0
        start = row * (item_bytes if axis == 1 else entry.num_bytes // entry.shape[0])
        for index, line in enumerate(np.ascontiguousarray(lines)):
            self._file.seek(entry.offset + index * line_bytes + start)
            self._file.write(line.data)


def _row_axis(array_name: str, is_lookup: bool) -> int:
    return 1 if array_name == "correction" or (array_name == "w" and not is_lookup) else 0

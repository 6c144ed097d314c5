"""Owns the device tier of the KV cache: one reserved stretch of memory for every slot of a shard's layers.

Knows no runtime and no sequence, only slots and how many tokens each holds. The shard binds it by pointer, as past and
present at once, so a step appends in place. Addresses are reserved for the longest context up front; memory is taken page
by page as tokens are written, and given back when a slot is released. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InternalError
from shoal.kv import BLOCK_TOKENS
from shoal.types import ShardShape

# A step's rows are padded to its longest, and each slot must have room for that after what it holds.
MAX_CHUNK_TOKENS = 512
# One layer's slot then is a whole number of 4 KiB pages for every head size of 16 or more, so slots share none.
_CAPACITY_STEP = 64
_ALIGNMENT = 64
_FLOAT_BYTES = 4
# Python names this flag from 3.13 on: reserve addresses without promising memory for all of them.
_LINUX_MAP_NORESERVE = 0x4000


class Arena:
    """KV memory [layer, 2, slot, kv_head, capacity, head_dim] in float32, keys before values.

    Invariants:
    - every slot holds between 0 and slot_tokens tokens, and at least as many are written (its touched tokens);
    - the tokens held by all slots are at most kv_tokens;
    - memory outside the touched tokens of every slot, and outside pages shared with them, is not resident.
    """

    __slots__ = (
        "_address",
        "_lengths",
        "_map",
        "_page_bytes",
        "_shape",
        "_slot_bytes",
        "_touched",
        "array",
        "capacity",
    )

    def __init__(self, shape: ShardShape) -> None:
        self._shape = shape
        self.capacity = -(-(shape.slot_tokens + MAX_CHUNK_TOKENS) // _CAPACITY_STEP) * _CAPACITY_STEP
        num_slots = shape.num_slots
        axes = (shape.num_layers, 2, num_slots, shape.num_kv_heads, self.capacity, shape.head_dim)
        self._slot_bytes = shape.num_kv_heads * self.capacity * shape.head_dim * _FLOAT_BYTES
        self._map = _reserve(shape.num_layers * 2 * num_slots * self._slot_bytes)
        self.array: NDArray[np.float32] = np.frombuffer(self._map, np.float32).reshape(axes)
        self._address = int(self.array.ctypes.data)
        assert self._address % _ALIGNMENT == 0
        self._page_bytes = mmap.PAGESIZE
        self._lengths = [0] * num_slots
        self._touched = [0] * num_slots

    @property
    def num_slots(self) -> int:
        return len(self._lengths)

    @property
    def tokens_held(self) -> int:
        return sum(self._lengths)

    @property
    def resident_bytes(self) -> int:
        """An upper estimate of the memory that written tokens take, in whole pages."""
        token_bytes = self._shape.head_dim * _FLOAT_BYTES
        heads = self._shape.num_layers * 2 * self._shape.num_kv_heads
        # A head that does not begin with a page may end in one more.
        more = 1 if self.capacity * token_bytes % self._page_bytes else 0
        pages = sum(-(-tokens * token_bytes // self._page_bytes) + more for tokens in self._touched if tokens)
        return pages * self._page_bytes * heads

    def pointer(self, layer: int, kv: int, slot: int) -> int:
        """The address of a layer's keys (kv 0) or values (kv 1) from this slot on."""
        return self._address + ((layer * 2 + kv) * self.num_slots + slot) * self._slot_bytes

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def block(self, slot: int, index: int) -> NDArray[np.float32]:
        """A view of a slot's index-th block of tokens, to read or to fill: [L, 2, K, tokens, D].

        Who fills it tells set_length.
        """
        return self.tokens(slot, index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)

    def tokens(self, slot: int, start: int, stop: int) -> NDArray[np.float32]:
        """The same of any tokens [start, stop)."""
        return self.array[:, :, slot, :, start:stop]

    def check_room(self, slot: int, position: int, num_tokens: int) -> None:
        """Raise InternalError if a step may not write these tokens: nothing is written then."""
        held = self._lengths[slot] if 0 <= slot < self._shape.num_slots else -1
        if not 0 <= position <= held:
            raise InternalError(
                f"a step writes slot {slot} from token {position}, but it holds {held} (-1: there is no such slot)"
            )
        if not 0 < num_tokens <= MAX_CHUNK_TOKENS:
            raise InternalError(
                f"a step writes {num_tokens} tokens to slot {slot}; it must be at least 1 and at most {MAX_CHUNK_TOKENS}"
            )
        if position + num_tokens > self._shape.slot_tokens:
            raise InternalError(
                f"slot {slot} would hold {position + num_tokens} tokens; "
                f"a slot of this shard holds {self._shape.slot_tokens}"
            )

    def check_fill(self, slot: int, tokens: int) -> None:
        """Raise InternalError if a slot may not be filled with so many tokens from its first on."""
        if not 0 <= slot < self._shape.num_slots:
            raise InternalError(f"slot {slot} was to be filled; this shard has {self._shape.num_slots}")
        if tokens > self._shape.slot_tokens:
            raise InternalError(
                f"slot {slot} was to be filled with {tokens} tokens; a slot of this shard holds {self._shape.slot_tokens}"
            )
        self.check_total({slot: tokens})

    def check_total(self, lengths: Mapping[int, int]) -> None:
        """Raise InternalError if the slots cannot all have these lengths beside what the others hold."""
        total = self._total_with(lengths)
        if total > self._shape.kv_tokens:
            raise InternalError(f"slots would hold {total} tokens; this shard holds {self._shape.kv_tokens}")

    def has_room(self, lengths: Mapping[int, int]) -> bool:
        """Whether check_total would pass, for slots that there are."""
        return self._total_with(lengths) <= self._shape.kv_tokens

    def _total_with(self, lengths: Mapping[int, int]) -> int:
        return self.tokens_held + sum(tokens - self._lengths[slot] for slot, tokens in lengths.items())

    def set_length(self, slot: int, tokens: int) -> None:
        """Say how many tokens a slot holds: after a step wrote more, or to roll back to fewer."""
        self._lengths[slot] = tokens
        self._touched[slot] = max(self._touched[slot], tokens)

    def release(self, slot: int) -> None:
        """Empty a slot and give its memory back to the system; what it held is gone."""
        self._lengths[slot] = 0
        if self._touched[slot] == 0:
            return
        self._touched[slot] = 0
        for layer in range(self._shape.num_layers):
            for kv in (0, 1):
                self._discard(self.pointer(layer, kv, slot) - self._address, self._slot_bytes)

    def close(self) -> None:
        """Give all memory back; the arena cannot be used afterwards, nor can views of it."""
        num_bytes = self.array.nbytes
        del self.array
        self._discard(0, num_bytes)
        # Who still has a view, as the traceback of an error may, keeps the addresses, not the memory.
        with contextlib.suppress(BufferError):
            self._map.close()

    def check_invariants(self) -> None:
        for slot, (held, touched) in enumerate(zip(self._lengths, self._touched, strict=True)):
            assert 0 <= held <= touched <= self._shape.slot_tokens, f"slot {slot}: {held} held, {touched} touched"
        assert self.tokens_held <= self._shape.kv_tokens

    def _discard(self, start: int, num_bytes: int) -> None:
        """Give back the pages that lie wholly in a range; those shared with a neighbour stay."""
        first = -(-start // self._page_bytes) * self._page_bytes
        stop = (start + num_bytes) // self._page_bytes * self._page_bytes
        if stop <= first:
            return
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)
        else:
            ctypes.memset(self._address + first, 0, stop - first)


def _reserve(num_bytes: int) -> mmap.mmap:
    """Private anonymous memory, zero and not resident until written, in small pages only."""
    if sys.platform == "linux":
        reserved = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _LINUX_MAP_NORESERVE)
        reserved.madvise(mmap.MADV_NOHUGEPAGE)
    else:
        reserved = mmap.mmap(-1, num_bytes)
    return reserved

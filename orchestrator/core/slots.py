"""Who holds which slot of the KV arenas, and how many tokens are reserved.

A slot and the tokens a sequence may grow to are taken together at admission, so that a running sequence never runs
out of room. It does not know what is in a slot; the scheduler is its only caller.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from shoal.types import SequenceId, SlotId

# Arenas take and give back memory in pages of 4 KiB, which is 16 tokens of a head of 64 float32 values: a reservation
# that ends inside a page occupies all of it.
PAGE_TOKENS = 16


def round_up_to_page(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


def round_down_to_page(num_tokens: int) -> int:
    return num_tokens // PAGE_TOKENS * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Reservation:
    slot: SlotId
    num_tokens: int


class SlotPool:
    """Slots 0 .. num_slots - 1 and kv_tokens shared by them.

    Invariants: every slot is either free or held by exactly one sequence; used_tokens is the sum of the reservations,
    each a multiple of PAGE_TOKENS, and at most kv_tokens.
    """

    __slots__ = ("_free", "_held", "kv_tokens", "num_slots", "used_tokens")

    def __init__(self, num_slots: int, kv_tokens: int) -> None:
        self.num_slots = num_slots
        self.kv_tokens = kv_tokens
        self.used_tokens = 0
        self._free = [SlotId(slot) for slot in range(num_slots)]
        self._held: dict[SequenceId, Reservation] = {}

    @property
    def used_slots(self) -> int:
        return len(self._held)

    @property
    def free_tokens(self) -> int:
        return self.kv_tokens - self.used_tokens

    def acquire(self, sequence_id: SequenceId, num_tokens: int, preferred: SlotId | None = None) -> SlotId | None:
        """Reserve a free slot and num_tokens of KV, or nothing (None) if either is short.

        The preferred one if it is free, for what a stage may have kept in it; else the lowest, because a stage computes
        over the range that covers the slots in use: low numbers keep it short.
        """
        assert sequence_id not in self._held, f"sequence {sequence_id} already holds {self._held[sequence_id]}"
        reserved = round_up_to_page(num_tokens)
        if not self._free or self.used_tokens + reserved > self.kv_tokens:
            return None
        if preferred is not None and preferred in self._free:
            slot = preferred
            self._free.remove(slot)
            heapq.heapify(self._free)
        else:
            slot = heapq.heappop(self._free)
        self._held[sequence_id] = Reservation(slot, reserved)
        self.used_tokens += reserved
        return slot

    def release(self, sequence_id: SequenceId) -> SlotId:
        """Give back what a sequence holds; it must hold something."""
        reservation = self._held.pop(sequence_id)
        self.used_tokens -= reservation.num_tokens
        heapq.heappush(self._free, reservation.slot)
        return reservation.slot

    def get(self, sequence_id: SequenceId) -> Reservation | None:
        return self._held.get(sequence_id)

    def check_invariants(self) -> None:
        slots = [*self._free, *(held.slot for held in self._held.values())]
        assert sorted(slots) == list(range(self.num_slots)), f"slots lost or held twice: {sorted(slots)}"
        assert self.used_tokens == sum(held.num_tokens for held in self._held.values())
        assert all(held.num_tokens % PAGE_TOKENS == 0 for held in self._held.values())
        assert 0 <= self.used_tokens <= self.kv_tokens

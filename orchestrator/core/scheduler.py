"""Decides what every forward pass computes: which sequences run, in which batches, how long a burst may be.

First come, first served; chunked prefill inside a token budget; as many batches in flight as keep all stages busy.
Pure: it knows no model, transport, text or clock. The engine submits sequences, asks for batches until there is none,
and commits what the last stage sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, islice

from orchestrator.core.limits import PREFILL_ROOM_TOKENS, SchedulerLimits
from orchestrator.core.sequence import Sequence, SequenceState
from orchestrator.core.slots import SlotPool
from shoal.errors import Overloaded
from shoal.types import FinishReason, NumericClass, SequenceId, SlotId

# With more streams than this, bursts are short: who comes new waits for their end, and they gain less. They still spare each
# micro-batch the way through the orchestrator, which is a bubble where stages are about equally fast.
FEW_SEQUENCES = 2
MANY_BURST_STEPS = 4
# Attention takes query rows in blocks; measured sizes (32 at head size 16, 128 at 64) are multiples of this.
ATTENTION_BLOCK = 16
DEFAULT_RETRY_AFTER_S = 1.0
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
# Weight of the newest gap in the running mean of the time between two ends.
END_GAP_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class BatchRow:
    """num_tokens tokens of a sequence, the first of them at `position`.

    is_sampled: a token is drawn after the last. is_start: the first row of this sequence; stages take the slot for it.
    """

    sequence_id: SequenceId
    slot: SlotId
    position: int
    num_tokens: int
    token_ids: tuple[int, ...]
    is_sampled: bool
    is_start: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass: decode rows first (num_decode_rows of them), then prefill chunks.

    burst_steps: decode steps that the last stage may go on with after this one. is_solo: one row, computed alone.
    """

    step: int
    rows: tuple[BatchRow, ...]
    burst_steps: int
    is_solo: bool
    num_decode_rows: int


@dataclass(frozen=True, slots=True)
class SampledId:
    sequence_id: SequenceId
    token_id: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """The answer token number `index` (from 0) of a sequence; finish: why it was the last one."""

    sequence_id: SequenceId
    index: int
    token_id: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class EndedSequence:
    sequence_id: SequenceId
    slot: SlotId


class Scheduler:
    """Waiting and running sequences, and the batches in flight.

    Invariants:
    - a sequence waits, or runs and holds a slot with room for num_tokens_max;
    - a decoding sequence is either ready or in exactly one batch in flight; its row is sampled;
    - a prefilling sequence is in `_prefilling` exactly while a part of its prompt is not dispatched;
    - at most num_stages batches with decode rows are in flight, and num_stages + 1 overall.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._slots = SlotPool(limits.num_slots, limits.kv_tokens)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting: OrderedDict[SequenceId, Sequence] = OrderedDict()
        self._prefilling: OrderedDict[SequenceId, Sequence] = OrderedDict()
        # Decoding sequences that no batch carries -> when they became so, as a rising number: longest waiting first.
        self._ready = {numeric: OrderedDict[SequenceId, int]() for numeric in NumericClass}
        self._num_readied = 0
        self._num_decoding = dict.fromkeys(NumericClass, 0)
        self._in_flight: dict[int, Batch] = {}
        self._num_decode_batches = 0
        self._next_step = 1
        self._ended: list[EndedSequence] = []
        self._last_end_at: float | None = None
        self._end_gap_s = DEFAULT_RETRY_AFTER_S

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._sequences) - len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def used_slots(self) -> int:
        return self._slots.used_slots

    @property
    def used_kv_tokens(self) -> int:
        return self._slots.used_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight)

    def get(self, sequence_id: SequenceId) -> Sequence | None:
        """Find a sequence that waits or runs."""
        return self._sequences.get(sequence_id)

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence and lower its max_tokens to what the context leaves.

        Raises InvalidRequest, ContextExceeded (waiting would not help) or Overloaded (later it may); the servicer tells
        the client.
        """
        assert sequence.sequence_id not in self._sequences, f"submitted twice: {sequence.story()}"
        self.limits.check_request(len(sequence.prompt_token_ids), sequence.max_tokens)
        if self.num_waiting >= self.limits.max_waiting:
            raise Overloaded(
                f"{self.num_waiting} requests wait already, the most allowed; try again later",
                retry_after_s=self._retry_after_s(now),
            )
        sequence.max_tokens = min(sequence.max_tokens, self.limits.sequence_tokens - len(sequence.prompt_token_ids))
        self._sequences[sequence.sequence_id] = sequence
        self._waiting[sequence.sequence_id] = sequence

    def schedule(self, now: float) -> Batch | None:
        """Make the next batch, if a credit is free and there is work for it."""
        if len(self._in_flight) > self.limits.num_stages:
            return None
        decoding = self._take_ready()
        is_solo = bool(decoding) and decoding[0].numeric is NumericClass.SOLO
        burst_steps = self._burst_steps(decoding)
        rows = [_decode_row(sequence) for sequence in decoding]
        if not is_solo:
            rows += self._take_chunks(self.limits.chunk_tokens - len(rows), now)
        if not rows:
            return None
        batch = Batch(self._next_step, tuple(rows), burst_steps, is_solo, len(decoding))
        self._next_step += 1
        self._in_flight[batch.step] = batch
        self._num_decode_batches += bool(decoding)
        return batch

    def commit(self, step: int, tokens: Seq[SampledId], burst_left: int, now: float) -> list[Emitted]:
        """Take the tokens sampled by a step of a batch; burst_left == 0 ends the batch and frees its credit.

        Every sampled row of a living sequence must have a token in each step. Unknown steps and the tokens of ended
        sequences are ignored: both may still be under way after an abort.
        """
        batch = self._in_flight.get(step)
        if batch is None:
            return []
        sampled = {row.sequence_id for row in batch.rows if row.is_sampled}
        emitted = []
        for token in tokens:
            sequence = self._sequences.get(token.sequence_id)
            if sequence is not None and token.sequence_id in sampled:
                emitted.append(self._accept(sequence, token.token_id, now))
        if burst_left == 0:
            self._close(batch)
        return emitted

    def abort(self, sequence_id: SequenceId, reason: FinishReason | None, now: float) -> bool:
        """End a sequence now (reason None: by an error); False if it is not known (any more)."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._end(sequence, reason, now)
        return True

    def take_ended(self) -> list[EndedSequence]:
        """Sequences that stages know of and that ended since the last call.

        The caller sends Cancel for them before any later batch: their slots may be in it already, for others.
        """
        ended, self._ended = self._ended, []
        return ended

    def fail_step(self, step: int, now: float) -> list[SequenceId]:
        """End a batch that a stage could not run, and all its sequences; returns those it ended."""
        batch = self._in_flight.get(step)
        if batch is None:
            return []
        failed = [row.sequence_id for row in batch.rows if self.abort(row.sequence_id, None, now)]
        self._close(batch)
        return failed

    def release_all(self) -> list[SequenceId]:
        """End everything, the waiting too, and forget what is in flight: the pipeline is lost, nobody is to be told."""
        lost = list(self._sequences)
        for sequence in list(self._sequences.values()):
            self._remove(sequence, None)
        self._in_flight.clear()
        self._num_decode_batches = 0
        self._ended.clear()
        return lost

    def _retry_after_s(self, now: float) -> float:
        """A place in the queue is expected when the next sequence ends."""
        since_end = 0.0 if self._last_end_at is None else now - self._last_end_at
        return min(max(self._end_gap_s - since_end, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _take_ready(self) -> list[Sequence]:
        """Pick the decoding sequences of the next batch: those waiting longest, or a SOLO one alone."""
        if self._num_decode_batches >= self.limits.num_stages:
            return []
        solo, shared = self._ready[NumericClass.SOLO], self._ready[NumericClass.SHARED]
        if solo and (not shared or _first(solo) < _first(shared)):
            return [self._sequences[solo.popitem(last=False)[0]]]
        num_rows = min(len(shared), self._max_decode_rows())
        return [self._sequences[shared.popitem(last=False)[0]] for _ in range(num_rows)]

    def _max_decode_rows(self) -> int:
        """An even share for as many batches as there are stages, but none below min_rows."""
        limits = self.limits
        share = -(-self._num_decoding[NumericClass.SHARED] // limits.num_stages)
        has_prefill = bool(self._prefilling or self._waiting)
        budget = limits.chunk_tokens - (PREFILL_ROOM_TOKENS if has_prefill else 0)
        return min(limits.max_batch, max(limits.min_rows, share), budget)

    def _burst_steps(self, decoding: Seq[Sequence]) -> int:
        """Further steps to grant: none while anything else wants its turn at step boundaries."""
        num_prefill = self.num_running - sum(self._num_decoding.values())
        if not decoding or self._waiting or num_prefill:
            return 0
        most = self.limits.burst_steps if self.num_running <= FEW_SEQUENCES else MANY_BURST_STEPS
        return min(most, self.limits.burst_steps, *(sequence.num_output_left for sequence in decoding)) - 1

    def _take_chunks(self, room: int, now: float) -> list[BatchRow]:
        """Fill `room` tokens with prefill chunks in order of arrival; admits the waiting as their turn comes."""
        rows: list[BatchRow] = []
        # No more than `room` of them can have a token here, so the queue's length does not matter.
        for sequence in list(islice(chain(self._prefilling.values(), self._waiting.values()), room)):
            num_tokens = chunk_size(sequence.num_prompt_left, room)
            if num_tokens == 0 or not self._admit(sequence, now):
                break
            rows.append(self._take_chunk(sequence, num_tokens))
            room -= num_tokens
        return rows

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence its slot; True if it has one. The first in the queue waits, and all behind it."""
        if sequence.slot is None:
            sequence.slot = self._slots.acquire(sequence.sequence_id, sequence.num_tokens_max)
            if sequence.slot is None:
                return False
            sequence.move_to(SequenceState.PREFILL)
            sequence.admitted_at = now
            self._prefilling[sequence.sequence_id] = self._waiting.pop(sequence.sequence_id)
        return True

    def _take_chunk(self, sequence: Sequence, num_tokens: int) -> BatchRow:
        assert sequence.slot is not None, sequence.story()
        start, stop = sequence.num_dispatched, sequence.num_dispatched + num_tokens
        sequence.num_dispatched = stop
        is_last = sequence.num_prompt_left == 0
        if is_last:
            del self._prefilling[sequence.sequence_id]
        token_ids = sequence.prompt_token_ids[start:stop]
        return BatchRow(sequence.sequence_id, sequence.slot, start, num_tokens, token_ids, is_last, start == 0)

    def _accept(self, sequence: Sequence, token_id: int, now: float) -> Emitted:
        if sequence.state is SequenceState.PREFILL:
            sequence.move_to(SequenceState.DECODE)
            sequence.first_token_at = now
            self._num_decoding[sequence.numeric] += 1
        index = len(sequence.output_token_ids)
        finish = sequence.append(token_id)
        if finish is not None:
            self._end(sequence, finish, now)
        return Emitted(sequence.sequence_id, index, token_id, finish)

    def _close(self, batch: Batch) -> None:
        """Free the credit of a batch; what still decodes in it is ready again."""
        del self._in_flight[batch.step]
        self._num_decode_batches -= batch.num_decode_rows > 0
        for row in batch.rows:
            sequence = self._sequences.get(row.sequence_id)
            if row.is_sampled and sequence is not None and sequence.state is SequenceState.DECODE:
                self._num_readied += 1
                self._ready[sequence.numeric][row.sequence_id] = self._num_readied

    def _end(self, sequence: Sequence, reason: FinishReason | None, now: float) -> None:
        if self._last_end_at is not None:
            gap_s = min(now - self._last_end_at, MAX_RETRY_AFTER_S)
            self._end_gap_s += END_GAP_WEIGHT * (gap_s - self._end_gap_s)
        self._last_end_at = now
        self._remove(sequence, reason)

    def _remove(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Forget a sequence wherever it is, and free what it holds."""
        self._num_decoding[sequence.numeric] -= sequence.state is SequenceState.DECODE
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish_reason = reason
        self._waiting.pop(sequence.sequence_id, None)
        self._prefilling.pop(sequence.sequence_id, None)
        self._ready[sequence.numeric].pop(sequence.sequence_id, None)
        del self._sequences[sequence.sequence_id]
        if sequence.slot is not None:
            self._slots.release(sequence.sequence_id)
            self._ended.append(EndedSequence(sequence.sequence_id, sequence.slot))
            sequence.slot = None

    def check_invariants(self) -> None:
        """Assert the invariants of the class; costs time proportional to all sequences."""
        self._slots.check_invariants()
        assert len(self._in_flight) <= self.limits.num_stages + 1
        assert self._num_decode_batches == sum(batch.num_decode_rows > 0 for batch in self._in_flight.values())
        assert self._num_decode_batches <= self.limits.num_stages
        carried = [row for batch in self._in_flight.values() for row in batch.rows if row.is_sampled]
        sampled = [row.sequence_id for row in carried if row.sequence_id in self._sequences]
        assert len(sampled) == len(set(sampled)), "a sequence is sampled by two batches in flight"
        for sequence in self._sequences.values():
            self._check_sequence(sequence, set(sampled))
        running = [one for one in self._sequences.values() if one.state is not SequenceState.WAITING]
        assert self._slots.used_slots == len(running)
        for numeric, count in self._num_decoding.items():
            decoding = [one for one in running if one.state is SequenceState.DECODE and one.numeric is numeric]
            assert count == len(decoding)

    def _check_sequence(self, sequence: Sequence, sampled: set[SequenceId]) -> None:
        sequence.check_invariants()
        key, story = sequence.sequence_id, sequence.story()
        is_decoding = sequence.state is SequenceState.DECODE
        is_ready = key in self._ready[sequence.numeric]
        assert (key in self._waiting) == (sequence.state is SequenceState.WAITING), story
        is_dispatching = sequence.state is SequenceState.PREFILL and sequence.num_prompt_left > 0
        assert (key in self._prefilling) == is_dispatching, story
        assert (is_ready + (key in sampled) == 1) if is_decoding else not is_ready, story
        reservation = self._slots.get(key)
        assert (reservation is None) == (sequence.slot is None), story
        if reservation is not None:
            assert reservation.slot == sequence.slot, story
            assert reservation.num_tokens >= sequence.num_tokens_max, story


def chunk_size(num_left: int, room: int) -> int:
    """How many of num_left prompt tokens go into the next chunk of at most `room`; 0 if it has to wait for more room.

    Logits must not depend on how a prompt was cut, and a token that a kernel gets alone is rounded differently. So a prompt
    of two or more tokens never yields a chunk of one, nor one that is a token longer than a multiple of ATTENTION_BLOCK.
    """
    if num_left == 1:
        return 1 if room >= 1 else 0
    for size in range(min(num_left, room), 1, -1):
        if size % ATTENTION_BLOCK != 1 and num_left - size != 1:
            return size
    return 0


def _decode_row(sequence: Sequence) -> BatchRow:
    assert sequence.slot is not None, sequence.story()
    token_ids = (sequence.output_token_ids[-1],)
    return BatchRow(sequence.sequence_id, sequence.slot, sequence.decode_position, 1, token_ids, True, False)


def _first(ready: OrderedDict[SequenceId, int]) -> int:
    return next(iter(ready.values()))

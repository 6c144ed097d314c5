"""What a batch is, how prompts may be cut for it, and the account of the batches that stages work on.

Values that scheduler and engine exchange. Nothing here decides who is in a batch: that is the scheduler's, which is the only
owner of the account.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from orchestrator.core.limits import STEP_TOKENS, Pace, SchedulerLimits
from orchestrator.core.sequence import RunId, Sequence
from orchestrator.core.step_time import StepTimes
from shoal.types import FinishReason, SequenceId, SlotId

# Attention takes query rows in blocks; measured sizes (32 at head size 16, 128 at 64) are multiples of this.
ATTENTION_BLOCK = 16
# Cut in two, one of the parts would be a single token.
INDIVISIBLE_TOKENS = 3
# Where steps are rationed, so many rows that go alone may follow each other while a prompt waits for its patience to end.
MAX_SOLO_STEPS = 3


@dataclass(frozen=True, slots=True)
class BatchRow:
    """num_tokens tokens of a run, the first of them at `position`.

    is_sampled: a token is drawn after the last. is_start: the first row of this run, at a position
    above 0 if stages restored what is before it; they take the slot for it if they have not.
    """

    run_id: RunId
    slot: SlotId
    position: int
    num_tokens: int
    token_ids: tuple[int, ...]
    is_sampled: bool
    is_start: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass: decode rows first (num_decode_rows of them), then prefill chunks.

    burst_steps: decode steps that the last stage may go on with after this one. is_solo: one row, computed alone. work: what
    it costs, in tokens of slots that hold nothing; of the first step of a burst.
    """

    step: int
    rows: tuple[BatchRow, ...]
    burst_steps: int
    is_solo: bool
    num_decode_rows: int
    work: float

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def has_chunk(self) -> bool:
        return len(self.rows) > self.num_decode_rows

    @property
    def num_steps(self) -> int:
        """Decode steps that it counts for where steps are limited."""
        return -(-self.num_tokens // STEP_TOKENS) if self.has_chunk else 1


@dataclass(frozen=True, slots=True)
class SampledId:
    run_id: RunId
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
    """A run that is over: its sequence has ended, or lost its slot to another one and goes on later (will_resume)."""

    run_id: RunId
    slot: SlotId
    will_resume: bool = False


class InFlight:
    """The batches that stages work on. A pipeline of n stages takes n with decode rows, and one more with a prompt.

    Invariants: at most num_stages batches with decode rows, and num_stages + 1 overall.
    """

    def __init__(self, limits: SchedulerLimits, times: StepTimes) -> None:
        self._num_stages = limits.num_stages
        self._limits = limits
        self._times = times
        self._next_step = 1
        self._batches: dict[int, Batch] = {}
        self._num_with_rows = 0
        self._last_at = float("-inf")
        self._last_steps = 0
        # So many went alone, one after the other, before the next one.
        self._num_solo = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def has_credit(self) -> bool:
        return len(self._batches) <= self._num_stages

    @property
    def has_decode_credit(self) -> bool:
        return self._num_with_rows < self._num_stages

    @property
    def has_chunk(self) -> bool:
        return any(batch.has_chunk for batch in self._batches.values())

    def shared(self) -> list[Batch]:
        """Those with decode rows that chunks could have been in one batch with."""
        return [batch for batch in self._batches.values() if batch.num_decode_rows and not batch.is_solo]

    def busy_s(self) -> float:
        """What all of them take at the slowest stage."""
        return sum(self._times.bottleneck_s(batch.work) for batch in self._batches.values())

    def next_at(self, pace: Pace) -> float:
        """When the pace allows the next one; in the past if it does already."""
        return self._last_at + self._last_steps * pace.period_s

    def get(self, step: int) -> Batch | None:
        return self._batches.get(step)

    def is_turn_of_prompts(self, pace: Pace, prompt_rank: Callable[[], float | None], now: float) -> bool:
        """Whether prompts go next because SOLO rows, which none can join, would take all of the steps that are allowed."""
        if not (pace.steps_per_s and self._num_solo):
            return False
        rank = prompt_rank()
        return rank is not None and (self._num_solo >= MAX_SOLO_STEPS or rank <= now)

    def open(self, rows: Seq[BatchRow], chunks: Seq[BatchRow], burst_steps: int, is_solo: bool, now: float) -> Batch:
        """Make a batch of decode rows and chunks, and count it."""
        work = sum(self._limits.work_of(row.num_tokens, row.position) for row in (*rows, *chunks))
        batch = Batch(self._next_step, (*rows, *chunks), burst_steps, is_solo, len(rows), work)
        self._next_step += 1
        self._batches[batch.step] = batch
        self._num_with_rows += batch.num_decode_rows > 0
        self._last_at, self._last_steps = now, batch.num_steps
        self._num_solo = self._num_solo + 1 if batch.is_solo else 0
        return batch

    def close(self, batch: Batch) -> None:
        del self._batches[batch.step]
        self._num_with_rows -= batch.num_decode_rows > 0

    def clear(self) -> None:
        self._batches.clear()
        self._num_with_rows = 0

    def sampled(self) -> list[RunId]:
        """The runs that a token is awaited of, one for each row."""
        return [row.run_id for batch in self._batches.values() for row in batch.rows if row.is_sampled]

    def check_invariants(self) -> None:
        assert len(self._batches) <= self._num_stages + 1
        assert self._num_with_rows == sum(batch.num_decode_rows > 0 for batch in self._batches.values())
        assert self._num_with_rows <= self._num_stages


def decode_row(sequence: Sequence) -> BatchRow:
    """Make the row of the next token of a decoding sequence."""
    assert sequence.run_id is not None, sequence.story()
    assert sequence.slot is not None, sequence.story()
    position, token_id = sequence.next_input()
    is_start = position == sequence.num_restored
    return BatchRow(sequence.run_id, sequence.slot, position, 1, (token_id,), True, is_start)


def chunk_row(sequence: Sequence, num_tokens: int) -> BatchRow:
    """Make the row of the next num_tokens tokens of a prompt."""
    assert sequence.run_id is not None, sequence.story()
    assert sequence.slot is not None, sequence.story()
    start = sequence.num_dispatched
    token_ids = sequence.prompt_token_ids[start : start + num_tokens]
    is_last = num_tokens == sequence.num_prompt_left
    return BatchRow(
        sequence.run_id, sequence.slot, start, num_tokens, token_ids, is_last, start == sequence.num_restored
    )


def chunk_size(num_left: int, room: int) -> int:
    """How many of num_left prompt tokens go into the next chunk of at most `room`; 0 if it has to wait for more room.

    Logits must not depend on how a prompt was cut, and a token that a kernel gets alone is rounded differently. So a prompt
    of two or more tokens never yields a chunk of one, nor one that is a token longer than a multiple of ATTENTION_BLOCK.
    Where chunks have borders, num_left is what is before the next one: the last token of a prompt may be alone behind it,
    and then is alone however the prompt is cut.
    """
    if num_left == 1:
        return 1 if room >= 1 else 0
    for size in range(min(num_left, room), 1, -1):
        if size % ATTENTION_BLOCK != 1 and num_left - size != 1:
            return size
    return 0

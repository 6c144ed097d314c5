"""The scheduler against stages that are modelled only by what each slot holds, under arbitrary sequences of events.

The stages check what real ones rely on: a row continues exactly where its slot ends, with the right tokens, and a slot
is taken only when it is free. At the end all work is let run out: nothing may be left over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.scheduler import ATTENTION_BLOCK, Batch, SampledId, Scheduler, chunk_size
from orchestrator.core.sequence import Sequence, SequenceState
from shoal.types import FinishReason, NumericClass, SequenceId, SlotId
from tests.support.builders import STOP_ID, TOKEN_ID, make_limits, make_sequence

# A schedule that needs more turns than this to run out is stuck: no example has more than some thousand tokens.
MAX_TURNS = 5_000


@dataclass
class ModelStages:
    """What the slots of all stages hold: sequence and tokens, in the order frames reach them."""

    owners: dict[SlotId, SequenceId] = field(default_factory=dict)
    tokens: dict[SlotId, list[int]] = field(default_factory=dict)

    def cancel(self, scheduler: Scheduler) -> None:
        for ended in scheduler.take_ended():
            assert self.owners.pop(ended.slot) == ended.sequence_id
            del self.tokens[ended.slot]

    def run(self, batch: Batch) -> None:
        for row in batch.rows:
            if row.is_start:
                assert row.slot not in self.owners, f"slot {row.slot} is taken"
                self.owners[row.slot], self.tokens[row.slot] = row.sequence_id, []
            assert self.owners[row.slot] == row.sequence_id
            assert len(self.tokens[row.slot]) == row.position
            assert len(row.token_ids) == row.num_tokens
            self.feed(row.slot, row.sequence_id, row.token_ids)

    def feed(self, slot: SlotId, sequence_id: SequenceId, token_ids: tuple[int, ...]) -> None:
        if self.owners.get(slot) == sequence_id:
            self.tokens[slot].extend(token_ids)


@dataclass
class Running:
    """A batch in flight: the decode steps it may still do, and the tokens its last step drew."""

    batch: Batch
    burst_left: int
    drawn: dict[SequenceId, int] = field(default_factory=dict)


limits_strategy = st.builds(
    make_limits,
    num_stages=st.integers(1, 3),
    num_slots=st.integers(1, 6),
    kv_tokens=st.integers(64, 256),
    context_tokens=st.integers(20, 80),
    max_batch=st.integers(1, 20),
    chunk_tokens=st.integers(8, 24),
    max_waiting=st.just(64),
    burst_steps=st.integers(1, 6),
    min_rows=st.integers(1, 4),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(limits=limits_strategy)
    def start(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.stages = ModelStages()
        self.running: list[Running] = []
        self.sequences: dict[SequenceId, Sequence] = {}
        self.ended: set[SequenceId] = set()
        self.admitted: list[SequenceId] = []
        self.last_step = 0
        self.now = 0.0

    @rule(num_prompt=st.integers(1, 79), max_tokens=st.integers(1, 30), numeric=st.sampled_from(NumericClass))
    def submit(self, num_prompt: int, max_tokens: int, numeric: NumericClass) -> None:
        if self.scheduler.num_waiting == self.limits.max_waiting:
            return
        num_prompt = min(num_prompt, self.limits.sequence_tokens - 1)
        key = len(self.sequences) + 1
        sequence = make_sequence(key, num_prompt=num_prompt, max_tokens=max_tokens, numeric=numeric)
        self.scheduler.submit(sequence, self.now)
        assert sequence.num_tokens_max <= self.limits.sequence_tokens
        self.sequences[SequenceId(key)] = sequence

    @rule()
    def schedule(self) -> None:
        self.now += 1.0
        self.stages.cancel(self.scheduler)
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.check(batch)
            self.stages.run(batch)
            self.running.append(Running(batch, batch.burst_steps))

    def check(self, batch: Batch) -> None:
        assert batch.step > self.last_step
        self.last_step = batch.step
        limits, rows = self.limits, batch.rows
        decode, chunks = rows[: batch.num_decode_rows], rows[batch.num_decode_rows :]
        assert len({row.sequence_id for row in rows}) == len(rows) > 0
        assert len(decode) <= limits.max_batch
        assert sum(row.num_tokens for row in rows) <= limits.chunk_tokens
        for row in decode:
            assert row.num_tokens == 1
            assert row.is_sampled
            assert (self.sequences[row.sequence_id].numeric is NumericClass.SOLO) == batch.is_solo
        for row in chunks:
            num_prompt = len(self.sequences[row.sequence_id].prompt_token_ids)
            assert row.num_tokens >= 2 or num_prompt == 1
            assert row.is_sampled == (row.position + row.num_tokens == num_prompt)
            self.admitted += [row.sequence_id] * row.is_start
        assert self.admitted == sorted(self.admitted), "admitted out of turn"
        if batch.is_solo:
            assert len(rows) == 1
        if batch.burst_steps:
            assert not chunks
            assert batch.burst_steps < limits.burst_steps
            assert self.scheduler.num_waiting == 0
        self.check_work_is_taken(batch)

    def check_work_is_taken(self, batch: Batch) -> None:
        """A batch without decode rows is made only if no decode row could go or no decode credit is free."""
        others = [one.batch for one in self.running]
        if batch.num_decode_rows == 0 and sum(one.num_decode_rows > 0 for one in others) < self.limits.num_stages:
            carried = {row.sequence_id for one in others for row in one.rows if row.is_sampled}
            assert all(
                key in carried for key, sequence in self.sequences.items() if sequence.state is SequenceState.DECODE
            )

    @precondition(lambda self: self.running)
    @rule(stops=st.sets(st.integers(0, 5)), late=st.booleans(), ends_early=st.booleans())
    def commit(self, stops: set[int], late: bool, ends_early: bool) -> None:
        """The oldest batch does one step; `late`: tokens of sequences that have ended meanwhile still come."""
        one = self.running[0]
        living = [row for row in one.batch.rows if row.is_sampled and self.is_living(row.sequence_id)]
        for row in living:
            if row.sequence_id in one.drawn:
                self.stages.feed(row.slot, row.sequence_id, (one.drawn[row.sequence_id],))
        one.drawn = {row.sequence_id: STOP_ID if i in stops else TOKEN_ID for i, row in enumerate(living)}
        tokens = [SampledId(key, token_id) for key, token_id in one.drawn.items()]
        if late:
            tokens += [SampledId(key, TOKEN_ID) for key in self.ended]
        if ends_early or all(token_id == STOP_ID for token_id in one.drawn.values()):
            one.burst_left = 0
        before = {key: len(self.sequences[key].output_token_ids) for key in one.drawn}
        emitted = self.scheduler.commit(one.batch.step, tokens, one.burst_left, self.now)
        assert [(out.sequence_id, out.index) for out in emitted] == list(before.items())
        for out in emitted:
            sequence = self.sequences[out.sequence_id]
            is_full = len(sequence.output_token_ids) == sequence.max_tokens
            assert (out.finish is not None) == (out.token_id == STOP_ID or is_full)
            self.ended |= {out.sequence_id} if out.finish else set()
        if one.burst_left == 0:
            self.running.pop(0)
        else:
            one.burst_left -= 1

    def is_living(self, sequence_id: SequenceId) -> bool:
        return sequence_id not in self.ended

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        key = SequenceId(choice % len(self.sequences) + 1)
        assert self.scheduler.abort(key, FinishReason.CANCELLED, self.now) == self.is_living(key)
        self.ended.add(key)

    @precondition(lambda self: self.running)
    @rule()
    def fail_step(self) -> None:
        one = self.running.pop(0)
        failed = self.scheduler.fail_step(one.batch.step, self.now)
        assert set(failed) == {row.sequence_id for row in one.batch.rows} - self.ended
        self.ended |= set(failed)

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def lose_pipeline(self) -> None:
        assert set(self.scheduler.release_all()) == set(self.sequences) - self.ended
        self.ended = set(self.sequences)
        self.running.clear()
        self.stages = ModelStages()
        assert not self.scheduler.has_work

    @invariant()
    def invariants_hold(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.num_in_flight == len(self.running)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.sequences) - len(self.ended)

    @invariant()
    def slots_hold_what_was_dispatched(self) -> None:
        """Each slot has the leading tokens of prompt and answer of its owner, no more than are reserved."""
        for slot, owner in self.stages.owners.items():
            sequence, held = self.sequences[owner], self.stages.tokens[slot]
            if self.is_living(owner):
                whole = [*sequence.prompt_token_ids, *sequence.output_token_ids]
                assert held == whole[: len(held)]
                assert len(held) < sequence.num_tokens_max

    def teardown(self) -> None:
        """All that is left runs to its end, whatever happened before."""
        for _ in range(MAX_TURNS):
            if not self.scheduler.has_work:
                break
            for _ in range(self.limits.num_stages + 1):
                self.schedule()
            assert self.running, "there is work, but nothing is in flight"
            self.commit(set(), False, False)
        assert not self.scheduler.has_work, "the work does not end"
        self.stages.cancel(self.scheduler)
        assert not self.stages.owners
        assert (self.scheduler.used_slots, self.scheduler.used_kv_tokens) == (0, 0)
        assert all(sequence.state is SequenceState.FINISHED for sequence in self.sequences.values())


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(num_prompt=st.integers(2, 500), rooms=st.lists(st.integers(0, 70), min_size=1, max_size=40))
def test_no_cut_of_a_longer_prompt_has_a_chunk_of_one_token(num_prompt: int, rooms: list[int]) -> None:
    left = num_prompt
    for room in rooms:
        size = chunk_size(left, room)
        assert size != 1
        assert size <= room
        left -= size
        assert left != 1


@given(num_left=st.integers(1, 500), room=st.integers(4, 70))
def test_room_for_four_tokens_is_always_enough_to_go_on(num_left: int, room: int) -> None:
    assert chunk_size(num_left, room) > 0


@given(num_left=st.integers(2, 500), room=st.integers(4, 70))
def test_at_most_two_tokens_of_the_room_are_given_away(num_left: int, room: int) -> None:
    assert chunk_size(num_left, room) >= min(num_left, room) - 2


@given(num_left=st.integers(2, 500), room=st.integers(4, 200))
def test_no_token_is_alone_in_a_block_of_attention(num_left: int, room: int) -> None:
    size = chunk_size(num_left, room)
    assert size >= 2
    assert size % ATTENTION_BLOCK != 1
    assert num_left - size != 1

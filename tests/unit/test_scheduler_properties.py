"""The scheduler against stages that are modelled only by what each slot holds, under arbitrary sequences of events.

The stages check what real ones rely on: a row continues exactly where its slot ends, with the right tokens, and a slot
is taken only when it is free. They keep blocks of prompts, lose some, and restore what they have when they come to it.
Whatever is preempted, moved, aborted or slowed down, each answer is the one that its prompt alone determines. At the end all
work is let run out: nothing may be left over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core.admission import MAX_PREEMPTIONS
from orchestrator.core.batch import Batch, BatchRow, Emitted, SampledId
from orchestrator.core.limits import STEP_TOKENS, Pace, SchedulerLimits
from orchestrator.core.qos import outranks
from orchestrator.core.restores import Restore
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import MIN_PREFILL_TOKENS, RestoredPrefix, RunId, Sequence, SequenceState
from orchestrator.core.step_time import StepTiming
from orchestrator.core.tenants import TenantLedger
from shoal.errors import DeadlineUnmeetable
from shoal.kv import BLOCK_TOKENS
from shoal.types import DeviceMode, FinishReason, KVReuse, NumericClass, QosClass, SequenceId
from tests.support.builders import STOP_ID, TOKEN_ID, make_limits, make_sequence, with_blocks
from tests.support.model_stages import ModelStages, answer_of

# A schedule that needs more turns than this to run out is stuck: no example has more than some thousand tokens.
MAX_TURNS = 5_000
# What a paced token may come too early by rounding.
ROUNDING_S = 1e-9


@dataclass
class Running:
    """A batch in flight: the decode steps it may still do, and the tokens its next report has."""

    batch: Batch
    burst_left: int
    drawn: list[SampledId]


limits_strategy = st.builds(
    make_limits,
    num_stages=st.integers(1, 3),
    num_slots=st.integers(1, 6),
    kv_tokens=st.integers(64, 640),
    context_tokens=st.integers(20, 220),
    max_batch=st.integers(1, 20),
    chunk_tokens=st.integers(8, 24),
    max_waiting=st.just(1000),
    burst_steps=st.integers(1, 6),
    min_rows=st.integers(1, 4),
    keeps_blocks=st.sampled_from([True, True, True, False]),
    chunk_border=st.sampled_from([0, 16, 32]),
    mode=st.sampled_from(DeviceMode),
)

sequence_strategy = st.fixed_dictionaries(
    {
        "num_prompt": st.one_of(st.integers(1, 79), st.integers(64, 219)),
        "num_shared": st.sampled_from([0, 64, 100, 128, 200]),
        "num_stored": st.sampled_from([0, 0, 1, 3]),
        "kv_reuse": st.sampled_from(KVReuse),
        "max_tokens": st.integers(1, 30),
        "numeric": st.sampled_from(NumericClass),
        "qos": st.sampled_from(QosClass),
        "tenant": st.sampled_from(["a", "b", "c"]),
        "inter_token_s": st.sampled_from([None, 0.03, 0.2]),
        "max_tokens_per_s": st.sampled_from([0.0, 0.0, 0.0, 2.0, 30.0]),
        "stop_ids": st.sampled_from([frozenset({STOP_ID}), frozenset[int]()]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(limits=limits_strategy)
    def start(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.ledger = TenantLedger({"b": 2.0})
        self.scheduler = Scheduler(limits, self.ledger)
        self.stages = ModelStages()
        self.running: list[Running] = []
        self.restoring: list[tuple[Restore, RestoredPrefix]] = []
        self.sequences: dict[SequenceId, Sequence] = {}
        self.ended: set[SequenceId] = set()
        self.answers: dict[SequenceId, list[int]] = {}
        self.last_batch: Batch | None = None
        self.last_batch_at = 0.0
        self.now = 0.0

    @rule(requests=st.lists(sequence_strategy, min_size=1, max_size=4))
    def submit_some(self, requests: list[dict[str, Any]]) -> None:
        for fields in requests:
            self.submit(fields, None)

    @rule(fields=sequence_strategy, deadline_s=st.sampled_from([0.5, 5.0]))
    def submit(self, fields: dict[str, Any], deadline_s: float | None) -> None:
        key = SequenceId(len(self.sequences) + 1)
        plain = dict(fields)
        num_shared, num_stored, kv_reuse = (plain.pop(name) for name in ("num_shared", "num_stored", "kv_reuse"))
        sequence = make_sequence(key, arrived_at=self.now, **plain)
        num_prompt = min(len(sequence.prompt_token_ids), self.limits.sequence_tokens - 1)
        sequence.prompt_token_ids = tuple(
            number if number < num_shared else 1000 * key + number for number in range(num_prompt)
        )
        with_blocks(sequence, num_stored)
        sequence.kv_reuse = kv_reuse
        if kv_reuse is not KVReuse.NONE and key % 3:
            sequence.trail_id = b"trail" + bytes([key % 256, key // 256])
        sequence.deadline_at = None if deadline_s is None else self.now + deadline_s
        try:
            self.scheduler.submit(sequence, self.now)
        except DeadlineUnmeetable:
            assert deadline_s is not None
            return
        assert sequence.num_tokens_max <= self.limits.sequence_tokens
        self.sequences[key] = sequence
        self.answers[key] = []

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.3, 3.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def schedule(self) -> None:
        self.now += 0.01
        slots_before = {run_id: self.scheduler.sequence_of(run_id) for run_id in self.stages.owners.values()}
        batch = self.scheduler.schedule(self.now)
        ended = self.scheduler.take_ended()
        for one in ended:
            self.check_victim(slots_before[one.run_id])
        self.stages.cancel(ended)
        for restore in self.scheduler.take_restores():
            self.check_restore(restore)
            self.restoring.append((restore, self.stages.restore(restore)))
        for prefetch in self.scheduler.take_prefetches(self.now):
            assert prefetch.block_hashes
            assert prefetch.timeout_s > 0
        if batch is not None:
            self.check(batch)
            drawn = self.stages.run(batch, self.scheduler.sequence_of)
            self.running.append(Running(batch, batch.burst_steps, drawn))
        elif not self.running and not self.restoring and self.scheduler.has_work:
            assert self.scheduler.wake_at(self.now) is not None, "there is work, but nothing will ever happen"

    def check_restore(self, restore: Restore) -> None:
        """Stages are asked for what the prompt begins with, and always something is left to compute."""
        sequence = self.find(restore.run_id)
        assert sequence.slot == restore.slot
        assert restore.block_hashes == sequence.block_hashes[: len(restore.block_hashes)]
        left = len(sequence.prompt_token_ids) - BLOCK_TOKENS * len(restore.block_hashes)
        goes_on = bool(sequence.trail_id and sequence.output_token_ids)
        assert restore.num_tokens == (sequence.num_resumable if goes_on else 0)
        assert (restore.trail_id == sequence.trail_id) if goes_on else (restore.trail_id == b"")
        assert left >= (0 if goes_on else MIN_PREFILL_TOKENS)
        assert restore.is_exact_only == (goes_on or sequence.kv_reuse is KVReuse.EXACT)
        assert sequence.kv_reuse is not KVReuse.NONE
        assert self.limits.keeps_blocks or goes_on
        assert restore.timeout_s > 0

    @precondition(lambda self: self.restoring)
    @rule(choice=st.integers(0, 1000), fewer=st.integers(0, 2), exaggerates=st.booleans())
    def answer_restore(self, choice: int, fewer: int, exaggerates: bool) -> None:
        """Stages answer in any order, maybe with less than they hold; too late, or not at all, for a run that is over."""
        restore, held = self.restoring.pop(choice % len(self.restoring))
        num_blocks, num_tokens = max(held.num_blocks - fewer, 0), held.num_tokens - 5 * fewer
        if exaggerates and held.num_blocks == len(restore.block_hashes):
            num_blocks = held.num_blocks + 7
            num_tokens = held.num_tokens + 500 if held.num_tokens == restore.num_tokens else held.num_tokens
        is_alive = self.stages.owners.get(restore.slot) == restore.run_id
        if is_alive or exaggerates:
            told = replace(held, num_blocks=num_blocks, num_tokens=num_tokens)
            self.scheduler.restored(restore.run_id, told, self.now)
        if is_alive:
            sequence = self.find(restore.run_id)
            assert not sequence.is_restoring
            num_prompt, num_known = len(sequence.prompt_token_ids), min(num_tokens, sequence.num_resumable)
            if num_known >= num_prompt:
                assert sequence.state is SequenceState.DECODE
                assert sequence.num_restored == num_known
            else:
                most = min(num_blocks, len(restore.block_hashes), len(sequence.restorable_blocks))
                assert sequence.num_restored == BLOCK_TOKENS * most

    @rule(every=st.integers(1, 4))
    def lose_blocks(self, every: int) -> None:
        """Stages evict some of what they keep, whatever the scheduler believes."""
        for block_hash in list(self.stages.kept)[::every]:
            del self.stages.kept[block_hash]

    def check_victim(self, victim: Sequence | None) -> None:
        """Runs that end without a report before are preempted."""
        if victim is not None and victim.state is SequenceState.WAITING:
            winner = QosClass(victim.events[-1].detail.rpartition(" ")[2])
            assert victim.events[-1].what == "preempted"
            assert outranks(winner, victim.qos)
            assert victim.num_preemptions <= MAX_PREEMPTIONS

    def check(self, batch: Batch) -> None:
        limits, pace, rows = self.limits, self.scheduler.pace, batch.rows
        decode, chunks = rows[: batch.num_decode_rows], rows[batch.num_decode_rows :]
        assert len({row.run_id for row in rows}) == len(rows) > 0
        assert len(decode) <= min(limits.max_batch, pace.max_batch)
        assert sum(row.num_tokens for row in rows) <= limits.chunk_tokens
        for row in decode:
            sequence = self.find(row.run_id)
            assert row.num_tokens == 1
            assert row.is_sampled
            assert (sequence.numeric is NumericClass.SOLO) == batch.is_solo
            if sequence.is_paced and not sequence.num_to_replay:
                assert self.now >= sequence.next_token_at
        for row in chunks:
            sequence = self.find(row.run_id)
            num_prompt = len(sequence.prompt_token_ids)
            assert not sequence.is_restoring
            assert row.is_start == (row.position == sequence.num_restored)
            self.check_borders(row, num_prompt)
            assert row.is_sampled == (row.position + row.num_tokens == num_prompt)
        if batch.is_solo:
            assert len(rows) == 1
        if batch.burst_steps:
            assert not chunks
            assert batch.burst_steps < limits.burst_steps
            assert self.scheduler.num_waiting == 0
            assert not any(self.find(row.run_id).num_to_replay for row in decode)
        self.check_steps(batch, pace)

    def check_borders(self, row: BatchRow, num_prompt: int) -> None:
        """No chunk crosses a border; one of a single token is a prompt, or the last of one behind a border."""
        border = self.limits.chunk_border or num_prompt
        assert row.position // border == (row.position + row.num_tokens - 1) // border
        assert row.num_tokens >= 2 or (row.position % border == 0 and row.position == num_prompt - 1)

    def check_steps(self, batch: Batch, pace: Pace) -> None:
        """Batches come in order, and not more of them in a time than the pace allows."""
        if self.last_batch is not None:
            assert batch.step > self.last_batch.step
            if pace.steps_per_s:
                num_tokens = sum(row.num_tokens for row in self.last_batch.rows)
                is_decode = self.last_batch.num_decode_rows == len(self.last_batch.rows)
                num_steps = 1 if is_decode else -(-num_tokens // STEP_TOKENS)
                assert self.now >= self.last_batch_at + num_steps / pace.steps_per_s - ROUNDING_S
                assert batch.burst_steps == 0
        self.last_batch, self.last_batch_at = batch, self.now

    def find(self, run_id: RunId) -> Sequence:
        sequence = self.scheduler.sequence_of(run_id)
        assert sequence is not None
        assert sequence.run_id == run_id
        return sequence

    @precondition(lambda self: self.running)
    @rule(late=st.booleans(), seconds=st.floats(0.001, 0.1))
    def commit(self, late: bool, seconds: float) -> None:
        """The oldest batch reports a step; `late`: tokens of runs that are over still come."""
        one = self.running[0]
        self.now += seconds
        stop_ids = {one.run_id: one.stop_ids for one in self.sequences.values() if one.run_id is not None}
        going_on = self.stages.go_on(one.batch, one.drawn, stop_ids) if one.burst_left else []
        num_left = one.burst_left if going_on else 0
        tokens = list(one.drawn)
        if late:
            living = {sequence.run_id for sequence in self.sequences.values()}
            dead = {row.run_id for row in one.batch.rows} | {RunId(number) for number in range(1, 40)}
            tokens += [SampledId(run_id, TOKEN_ID) for run_id in sorted(dead - living)]
        self.scheduler.observe(
            StepTiming(one.batch.num_tokens, (0.02 + 0.005 * one.batch.num_tokens,) * self.limits.num_stages, False)
        )
        for emitted in self.scheduler.commit(one.batch.step, tokens, num_left, self.now):
            self.deliver(emitted)
        self.stages.cancel(self.scheduler.take_ended())
        one.drawn, one.burst_left = going_on, one.burst_left - 1
        if num_left == 0:
            self.running.pop(0)

    @rule(num_turns=st.integers(2, 20), seconds=st.sampled_from([0.001, 0.05, 0.5]))
    def proceed(self, num_turns: int, seconds: float) -> None:
        """For a while nothing but steps happens."""
        for _ in range(num_turns):
            for _ in range(self.limits.num_stages + 1):
                self.schedule()
            if self.restoring:
                self.answer_restore(0, 0, False)
            if self.running:
                self.commit(False, seconds)

    def deliver(self, emitted: Emitted) -> None:
        """What a client sees: every token once, in order, and no earlier than it asked for."""
        sequence, answer = self.sequences[emitted.sequence_id], self.answers[emitted.sequence_id]
        assert emitted.sequence_id not in self.ended
        assert emitted.index == len(answer)
        answer.append(emitted.token_id)
        is_stop, is_full = emitted.token_id in sequence.stop_ids, len(answer) == sequence.max_tokens
        assert (emitted.finish is not None) == (is_stop or is_full)
        self.ended |= {emitted.sequence_id} if emitted.finish else set()
        if sequence.is_paced:
            assert sequence.first_token_at is not None
            due_at = sequence.first_token_at + emitted.index / sequence.max_tokens_per_s
            assert self.now >= due_at - ROUNDING_S

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        key = SequenceId(self.choose(choice))
        assert self.scheduler.abort(key, FinishReason.CANCELLED, self.now) == (key not in self.ended)
        self.ended.add(key)
        self.stages.cancel(self.scheduler.take_ended())

    def choose(self, choice: int) -> SequenceId:
        return list(self.sequences)[choice % len(self.sequences)]

    @rule()
    def expire(self) -> None:
        for sequence in self.scheduler.expire(self.now):
            assert sequence.deadline_at is not None
            assert sequence.deadline_at <= self.now
            assert sequence.state is SequenceState.FINISHED
            self.ended.add(sequence.sequence_id)
        self.stages.cancel(self.scheduler.take_ended())
        living = [one for key, one in self.sequences.items() if key not in self.ended]
        assert all(one.deadline_at is None or one.deadline_at > self.now for one in living)

    @precondition(lambda self: self.running)
    @rule()
    def fail_step(self) -> None:
        one = self.running.pop(0)
        living = {self.scheduler.sequence_of(row.run_id) for row in one.batch.rows} - {None}
        failed = self.scheduler.fail_step(one.batch.step, self.now)
        assert set(failed) == {sequence.sequence_id for sequence in living if sequence is not None}
        self.ended |= set(failed)
        self.stages.cancel(self.scheduler.take_ended())

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def lose_pipeline(self) -> None:
        """All sequences go on in another pipeline."""
        taken = self.scheduler.take_all(self.now)
        assert {one.sequence_id for one in taken} == set(self.sequences) - self.ended
        assert not self.scheduler.has_work
        assert self.scheduler.take_ended() == []
        assert self.scheduler.take_restores() == []
        assert self.scheduler.num_replay_mismatches == 0
        self.scheduler = Scheduler(self.limits, self.ledger)
        self.running.clear()
        self.restoring.clear()
        self.stages, self.last_batch = ModelStages(trails=self.stages.trails), None
        for sequence in taken:
            self.resubmit(sequence)

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 1000))
    def withdraw(self, choice: int) -> None:
        """A waiting sequence goes to another pipeline and comes back."""
        key = self.choose(choice)
        is_waiting = self.sequences[key].state is SequenceState.WAITING
        sequence = self.scheduler.withdraw(key, self.now)
        assert (sequence is not None) == is_waiting
        if sequence is not None:
            assert self.scheduler.get(key) is None
            self.resubmit(sequence)

    def resubmit(self, sequence: Sequence) -> None:
        try:
            self.scheduler.submit(sequence, self.now)
        except DeadlineUnmeetable:
            assert not sequence.has_started
            self.ended.add(sequence.sequence_id)
            sequence.finish(None, self.now)

    @rule(max_batch=st.integers(1, 8), steps_per_s=st.sampled_from([0.0, 3.0, 12.0]))
    def set_pace(self, max_batch: int, steps_per_s: float) -> None:
        self.scheduler.set_pace(Pace(max_batch, steps_per_s))

    @rule(num_prompt=st.integers(1, 500), qos=st.sampled_from(QosClass))
    def predict(self, num_prompt: int, qos: QosClass) -> None:
        prediction = self.scheduler.predict(num_prompt, qos, self.now)
        assert prediction.queue_s >= 0
        assert prediction.prefill_s > 0
        assert prediction.inter_token_s > 0

    @invariant()
    def invariants_hold(self) -> None:
        self.scheduler.check_invariants()
        self.ledger.check_invariants()
        assert self.scheduler.num_in_flight == len(self.running)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.sequences) - len(self.ended)
        assert self.scheduler.num_replay_mismatches == 0

    @invariant()
    def clients_have_what_was_computed(self) -> None:
        for key, sequence in self.sequences.items():
            assert self.answers[key] == sequence.output_token_ids

    def teardown(self) -> None:
        """All that is left runs to its end once devices are spared no more, whatever happened before."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.set_pace(Pace(self.limits.max_batch))
        for _ in range(MAX_TURNS):
            if not self.scheduler.has_work:
                break
            for _ in range(self.limits.num_stages + 1):
                self.schedule()
            if self.restoring:
                self.answer_restore(0, 0, False)
            elif self.running:
                self.commit(False, 0.01)
            else:
                wake_at = self.scheduler.wake_at(self.now)
                assert wake_at is not None, "there is work, but nothing will ever happen"
                self.now = max(self.now, wake_at)
            self.expire()
            self.scheduler.check_invariants()
        assert not self.scheduler.has_work, "the work does not end"
        assert not self.stages.owners
        assert (self.scheduler.used_slots, self.scheduler.used_kv_tokens) == (0, 0)
        for key, sequence in self.sequences.items():
            assert sequence.state is SequenceState.FINISHED
            whole = answer_of(sequence)
            assert self.answers[key] == whole[: len(self.answers[key])]
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.answers[key] == whole


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

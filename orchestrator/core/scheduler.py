"""Decides what every forward pass computes: which sequences run, in which batches, how long a burst may be.

Composes who gets a slot and whose prompt is next (`admission`) with who decodes next and how much may go along (`decoding`)
into batches, and follows what becomes of them. Pure: it knows no model, transport, text or clock. The engine submits
sequences, asks for batches until there is none, and commits what the last stage sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

from orchestrator.core.admission import Admission
from orchestrator.core.batch import (
    INDIVISIBLE_TOKENS,
    Batch,
    BatchRow,
    Emitted,
    EndedSequence,
    InFlight,
    SampledId,
    chunk_row,
    chunk_size,
    decode_row,
)
from orchestrator.core.deadlines import Deadlines
from orchestrator.core.decoding import Decoding, Moment
from orchestrator.core.forecast import Forecast
from orchestrator.core.limits import Pace, SchedulerLimits
from orchestrator.core.prompts import Prompts
from orchestrator.core.qos import outranks
from orchestrator.core.restores import Prefetch, Restore, Restores
from orchestrator.core.sequence import RestoredPrefix, RunId, Sequence, SequenceState
from orchestrator.core.step_time import Prediction, StepTimes, StepTiming
from orchestrator.core.tenants import TenantLedger
from shoal.errors import ContextExceeded
from shoal.types import FinishReason, NumericClass, QosClass, SequenceId

# On a pipeline for class LATENCY, prompt tokens of other classes in a batch.
BORROWED_CHUNK_TOKENS = 16


class Scheduler:
    """Waiting and running sequences, and the batches in flight.

    A sequence whose slot is taken waits again. In its next run prompt and known answer tokens are computed anew, one at a
    time as they were drawn, so that it goes on as if nothing had happened; but first the run awaits what stages may have
    kept of it, and takes no part in batches meanwhile.

    Invariants:
    - a sequence waits, or runs and holds a slot with room for num_tokens_max;
    - a run that awaits what is kept of it is in no batch, nor its prompt among those that are computed;
    - a decoding sequence is ready, parked until its next token is due, or in exactly one batch in flight, sampled there;
    - at most num_stages batches with decode rows are in flight, and num_stages + 1 overall.
    """

    def __init__(self, limits: SchedulerLimits, ledger: TenantLedger | None = None) -> None:
        self.limits = limits
        self.num_replay_mismatches = 0
        # What is known of how long steps take.
        self.times = StepTimes(limits.num_stages, limits.stage_costs)
        self._admission = Admission(limits, TenantLedger() if ledger is None else ledger)
        self._decoding = Decoding(limits, self.times)
        self._prompts = Prompts(limits, self.times, self._decoding)
        # For others to read what is believed of blocks, and to forget such as are deleted.
        self.restores = Restores(limits.keeps_blocks)
        self._forecast = Forecast(self.times, self._admission, self._decoding, self._prompts, self.restores)
        self._sequences: dict[SequenceId, Sequence] = {}
        # In order of admission.
        self._runs: dict[RunId, Sequence] = {}
        self._num_runs = 0
        self._in_flight = InFlight(limits, self.times)
        self._ended: list[EndedSequence] = []
        self._deadlines = Deadlines(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.queue)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def used_slots(self) -> int:
        return self._admission.slots.used_slots

    @property
    def used_kv_tokens(self) -> int:
        return self._admission.slots.used_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight)

    @property
    def pace(self) -> Pace:
        return self._decoding.pace

    def has_class(self, qos: QosClass) -> bool:
        """Whether a sequence of this class waits or runs."""
        return self._admission.num_running(qos) + self._admission.queue.num_of(qos) > 0

    def get(self, sequence_id: SequenceId) -> Sequence | None:
        """Find a sequence that waits or runs."""
        return self._sequences.get(sequence_id)

    def sequence_of(self, run_id: RunId) -> Sequence | None:
        """Find whose run this is; None once it is over."""
        return self._runs.get(run_id)

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence, new or with a part of its answer, and lower its max_tokens to what the context leaves.

        Raises InvalidRequest, ContextExceeded (waiting would not help), Overloaded or DeadlineUnmeetable (later it may); the
        servicer tells the client. Who had a slot before, anywhere, is not refused for lack of room or time.
        """
        assert sequence.sequence_id not in self._sequences, f"submitted twice: {sequence.story()}"
        num_prompt = len(sequence.prompt_token_ids)
        self.limits.check_request(num_prompt, sequence.max_tokens)
        max_tokens = min(sequence.max_tokens, self.limits.sequence_tokens - num_prompt)
        if max_tokens <= len(sequence.output_token_ids):
            raise ContextExceeded(
                f"a pipeline with room for {self.limits.sequence_tokens} tokens of a sequence cannot go on with one of "
                f"{num_prompt + len(sequence.output_token_ids)}"
            )
        self.restores.expect(sequence)
        if not (sequence.has_started or sequence.output_token_ids):
            self._admission.check_bounds(sequence.tenant, now)
            self._forecast.check_deadline(sequence, max_tokens, self._moment(now))
        sequence.max_tokens = max_tokens
        self._sequences[sequence.sequence_id] = sequence
        self._admission.enter(sequence, now)
        self._deadlines.add(sequence)
        sequence.note(now, "queued")

    def withdraw(self, sequence_id: SequenceId, now: float) -> Sequence | None:
        """Take out a sequence that waits, to submit it elsewhere; None if it does not wait here."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.state is not SequenceState.WAITING:
            return None
        del self._sequences[sequence_id]
        self._admission.withdraw(sequence)
        sequence.queue_s += now - sequence.queued_at
        return sequence

    def take_all(self, now: float) -> list[Sequence]:
        """Give up everything because the pipeline is lost: the running in order of admission, then the waiting.

        All of them wait then, with what they have of their answers, and can be submitted elsewhere. Nobody is to be told.
        """
        running = list(self._runs.values())
        for sequence in running:
            self._stop_run(sequence)
            sequence.stop_run(now)
            self._admission.leave(sequence)
            del self._sequences[sequence.sequence_id]
        waiting = list(self._admission.queue)
        for sequence in waiting:
            self.withdraw(sequence.sequence_id, now)
        self._in_flight.clear()
        self._ended.clear()
        return running + waiting

    def overdue(self, now: float, timeout_s: float) -> list[Sequence]:
        """Those who wait here for timeout_s or longer and never had a slot, the first few by rank."""
        return self._admission.queue.queued_before(now - timeout_s)

    def expire(self, now: float) -> list[Sequence]:
        """End those whose deadline has passed, and return them: their clients are to be told."""
        expired = []
        while (sequence := self._deadlines.pop(now)) is not None:
            expired.append(sequence)
            self._end(sequence, None, now)
        return expired

    def observe(self, timing: StepTiming) -> None:
        """Learn how long steps take."""
        self.times.observe(timing.stage_s, timing.work, timing.is_solo)

    def set_pace(self, pace: Pace) -> None:
        """Spare the devices from the next batch on, or no longer."""
        self._decoding.pace = pace

    def schedule(self, now: float) -> Batch | None:
        """Make the next batch, if a credit is free and there is work for it that may be done now.

        It may take slots from running sequences for it: their runs are in take_ended() before the batch may be sent.
        """
        for run_id in self.restores.late(now):
            self.restored(run_id, RestoredPrefix(0), now)
        if not self._in_flight.has_credit or now < self._in_flight.next_at(self.pace):
            return None
        moment = self._moment(now)
        is_theirs = self._in_flight.is_turn_of_prompts(self.pace, self._admission.prompt_rank, now)
        chunks = self._take_chunks(0, moment) if is_theirs else []
        decoding = self._decoding.take(moment) if self._in_flight.has_decode_credit and not chunks else []
        is_solo = bool(decoding) and decoding[0].numeric is NumericClass.SOLO
        # No burst while anything else wants its turn at step boundaries.
        may_burst = not self.num_waiting and self.num_running == self._decoding.num_decoding
        burst_steps = self._decoding.burst_steps(decoding, self.num_running) if may_burst else 0
        if not chunks and not is_solo:
            chunks = self._take_chunks(len(decoding), moment)
        # Without those whose slot was taken for a chunk.
        rows = [decode_row(sequence) for sequence in decoding if sequence.state is SequenceState.DECODE]
        if not rows and not chunks:
            return None
        return self._in_flight.open(rows, chunks, burst_steps, is_solo, now)

    def commit(self, step: int, tokens: Seq[SampledId], burst_left: int, now: float) -> list[Emitted]:
        """Take the tokens sampled by a step of a batch; burst_left == 0 ends the batch and frees its credit.

        Every sampled row of a living run must have a token in each step. Unknown steps and the tokens of runs that are over
        are ignored: both may still be under way after an abort or a preemption.
        """
        if (batch := self._in_flight.get(step)) is None:
            return []
        for row in batch.rows[batch.num_decode_rows :]:
            if (sequence := self._runs.get(row.run_id)) is not None:
                self.restores.learn(sequence, row.position, row.position + row.num_tokens)
        sampled = {row.run_id for row in batch.rows if row.is_sampled}
        emitted = []
        for token in tokens:
            sequence = self._runs.get(token.run_id)
            if sequence is not None and token.run_id in sampled:
                emitted += self._accept(sequence, token.token_id, now)
        if burst_left == 0:
            self._close(batch, now)
        return emitted

    def abort(self, sequence_id: SequenceId, reason: FinishReason | None, now: float) -> bool:
        """End a sequence now (reason None: by an error); False if it is not known (any more)."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._end(sequence, reason, now)
        return True

    def take_ended(self) -> list[EndedSequence]:
        """Runs that stages know of and that ended since the last call: to be cancelled before any later batch is sent.

        That of a schedule() which took their slots included: the slots may be in it already, for others.
        """
        ended, self._ended = self._ended, []
        return ended

    def take_restores(self) -> list[Restore]:
        """What stages are to be asked to restore since the last call: after the Cancels, before any later batch."""
        return self.restores.take()

    def take_prefetches(self, now: float) -> list[Prefetch]:
        """What stages should fetch for those who came since the last call and wait, as long as they do."""
        return self.restores.take_prefetches(partial(self.fetch_s, now))

    def restored(self, run_id: RunId, prefix: RestoredPrefix, now: float) -> None:
        """Let a run go on behind what stages have restored; nothing if nobody awaits that (any more)."""
        sequence = self.restores.answer(run_id, prefix, now)
        if sequence is not None and sequence.num_prompt_left:
            self._admission.join(sequence)
        elif sequence is not None:
            self._decode(sequence)
            self._decoding.put_back(sequence, now)

    def fail_step(self, step: int, now: float) -> list[SequenceId]:
        """End a batch that a stage could not run, and all its sequences; returns those it ended."""
        if (batch := self._in_flight.get(step)) is None:
            return []
        failed = [self._runs[row.run_id] for row in batch.rows if row.run_id in self._runs]
        for one in failed:
            self._end(one, None, now)
        self._close(batch, now)
        return [one.sequence_id for one in failed]

    def wake_at(self, now: float) -> float | None:
        """When schedule() or expire() may have something to do though nothing else happens until then; None: never."""
        next_at = self._in_flight.next_at(self.pace)
        later = [*self.restores.late_at(), *([next_at] if self._sequences else [])]
        if (decoding_at := self._decoding.wake_at(now)) is not None:
            later.append(max(decoding_at, next_at))
        if self.limits.is_reserved:
            later += [rank for rank, _ in self._admission.prompts_in_turn()]
        return min([*self._deadlines.first(), *(at for at in later if at > now)], default=None)

    def predict(self, num_prompt: int, qos: QosClass, now: float, num_cached: int = 0) -> Prediction:
        """Say what a request that comes now may expect, num_cached of its prompt being there, as far as times are known."""
        return self._forecast.predict(num_prompt, qos, self._moment(now), num_cached)

    def fetch_s(self, now: float, first: int, stop: int) -> float:
        """How long stages may try to fetch the blocks [first, stop) of a prompt."""
        return self._forecast.fetch_s(first, stop, self._moment(now))

    def _moment(self, now: float) -> Moment:
        shared = self._in_flight.shared()
        num_free = self.limits.num_slots - self.used_slots
        num_prompts = self.num_running - self._decoding.num_decoding - len(self.restores)
        return Moment(
            now=now,
            busy_s=self._in_flight.busy_s(),
            num_prompts=num_prompts + min(self.num_waiting, num_free),
            has_latency=self._admission.num_running(QosClass.LATENCY) > 0,
            has_chunk_in_flight=self._in_flight.has_chunk,
            rows_in_flight=tuple(batch.num_decode_rows for batch in shared),
            num_soon_back=sum(batch.burst_steps == 0 for batch in shared),
        )

    def _take_chunks(self, num_rows: int, moment: Moment) -> list[BatchRow]:
        """Fill the room beside decode rows with prefill chunks; admits the waiting as their turn comes."""
        rows: list[BatchRow] = []
        if not (self._admission.num_prompt_left or self.num_waiting):
            return rows
        room = self._prompts.room(num_rows, self._admission.prompt_position(), moment)
        while room > 0 and (found := self._next_chunk(room, not rows, moment)) is not None:
            sequence, num_tokens = found
            if sequence.is_restoring:
                # It takes part when its blocks are there; meanwhile it is the turn of others.
                continue
            rows.append(chunk_row(sequence, num_tokens))
            self._admission.dispatch(sequence, num_tokens, moment.now)
            room -= num_tokens
            if sequence.num_prompt_left:
                break
        # Without those whose slot was taken for a later one.
        return [row for row in rows if row.run_id in self._runs]

    def _next_chunk(self, room: int, is_first: bool, moment: Moment) -> tuple[Sequence, int] | None:
        """Find whose prompt is next and how much of it. Who finds no slot keeps its turn, and all lower ones wait."""
        blocked: Sequence | None = None
        for rank, sequence in self._admission.prompts_in_turn():
            is_borrower = self.limits.is_reserved and sequence.qos is not QosClass.LATENCY
            if is_borrower and moment.has_latency and rank > moment.now:
                continue
            num_left = self.limits.before_border(sequence.num_prompt_left, sequence.num_dispatched)
            num_tokens = chunk_size(num_left, min(room, BORROWED_CHUNK_TOKENS) if is_borrower else room)
            if num_tokens == 0 and is_first and num_left <= INDIVISIBLE_TOKENS:
                # Or the prompt would never end where there is room for two tokens at a time.
                num_tokens = num_left
            if num_tokens == 0:
                return None
            if sequence.slot is not None or self._admit(sequence, blocked, moment.now):
                return sequence, num_tokens
            blocked = sequence if blocked is None else blocked
        return None

    def _admit(self, sequence: Sequence, blocked: Sequence | None, now: float) -> bool:
        """Give a waiting sequence a slot, that of somebody of a lower class if need be; False if there is none for it.

        blocked: who was before it and found no room. Only by a higher class may they be overtaken, and only while there is
        somebody whose slot it could take: such runs come to an end, so the wait does too.
        """
        if blocked is not None:
            may_overtake = outranks(sequence.qos, blocked.qos) and self._admission.victims(sequence, now)
            if not may_overtake:
                return False
        if self._start_run(sequence, now):
            return True
        victims = self._admission.victims(sequence, now)
        for victim in victims:
            self._preempt(victim, sequence, now)
        return bool(victims) and self._start_run(sequence, now)

    def _start_run(self, sequence: Sequence, now: float) -> bool:
        run_id = RunId(self._num_runs + 1)
        if not self._admission.admit(sequence, run_id, now):
            return False
        self._num_runs += 1
        self._runs[run_id] = sequence
        if not self.restores.ask(sequence, partial(self.fetch_s, now), self._forecast.trail_s, now):
            self._admission.join(sequence)
        return True

    def _preempt(self, victim: Sequence, winner: Sequence, now: float) -> None:
        """Take the slot of a running sequence, which waits again; what is in flight of its run is worth nothing."""
        self._stop_run(victim, will_resume=True)
        victim.num_preemptions += 1
        victim.stop_run(now)
        victim.note(now, "preempted", f"by a request of class {winner.qos.value}")
        self._admission.wait_again(victim)

    def _stop_run(self, sequence: Sequence, *, will_resume: bool = False) -> None:
        """Take a running sequence out of everything that its run is in."""
        assert sequence.run_id is not None, sequence.story()
        assert sequence.slot is not None, sequence.story()
        if sequence.state is SequenceState.DECODE:
            self._decoding.remove(sequence)
        self._admission.release(sequence)
        if not self.restores.stop(sequence.run_id):
            self._ended.append(EndedSequence(sequence.run_id, sequence.slot, will_resume))
        del self._runs[sequence.run_id]

    def _accept(self, sequence: Sequence, token_id: int, now: float) -> list[Emitted]:
        """Take a token of a run; nothing is emitted while it computes again what is known."""
        if sequence.state is SequenceState.PREFILL:
            self._decode(sequence)
        if sequence.num_to_replay:
            self.num_replay_mismatches += not sequence.replay(token_id)
            self._decoding.took_token(sequence)
            return []
        index = len(sequence.output_token_ids)
        finish = sequence.append(token_id, now)
        self._decoding.took_token(sequence)
        if finish is not None:
            self._end(sequence, finish, now)
        return [Emitted(sequence.sequence_id, index, token_id, finish)]

    def _decode(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.DECODE)
        self._decoding.add(sequence)

    def _close(self, batch: Batch, now: float) -> None:
        """Free the credit of a batch; what still decodes in it is ready again."""
        self._in_flight.close(batch)
        for row in batch.rows:
            sequence = self._runs.get(row.run_id)
            if row.is_sampled and sequence is not None and sequence.state is SequenceState.DECODE:
                self._decoding.put_back(sequence, now)

    def _end(self, sequence: Sequence, reason: FinishReason | None, now: float) -> None:
        """Forget a sequence wherever it is, and free what it holds."""
        self._admission.on_end(now)
        del self._sequences[sequence.sequence_id]
        if sequence.state is SequenceState.WAITING:
            self._admission.withdraw(sequence)
            sequence.queue_s += now - sequence.queued_at
        else:
            self._stop_run(sequence)
            self._admission.leave(sequence)
        sequence.finish(reason, now)

    def check_invariants(self) -> None:
        """Assert the invariants of the class; costs time proportional to all sequences."""
        self._in_flight.check_invariants()
        running = list(self._runs.values())
        assert all(run_id == sequence.run_id for run_id, sequence in self._runs.items())
        self._admission.check_invariants(running)
        self.restores.check_invariants(running)
        waiting = list(self._admission.queue)
        assert {one.sequence_id for one in (*running, *waiting)} == set(self._sequences)
        assert len(running) + len(waiting) == len(self._sequences)
        assert all(one.state is SequenceState.WAITING for one in waiting)
        for sequence in self._sequences.values():
            sequence.check_invariants()
        carried = [run_id for run_id in self._in_flight.sampled() if run_id in self._runs]
        assert len(carried) == len(set(carried)), "a run is sampled by two batches in flight"
        decoding = [one for one in running if one.state is SequenceState.DECODE]
        self._decoding.check_invariants(decoding, set(carried))

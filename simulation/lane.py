"""A simulated pipeline with the scheduler that feeds it: batches go to `stages`, and come back when these say so.

Does in virtual time what `orchestrator.lane` does between scheduler and frames. Knows nothing of other pipelines: the site
that owns it is called when tokens are there.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from orchestrator.core.batch import Batch, BatchRow, Emitted, SampledId
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.placement import Placement
from orchestrator.core.restores import Restore
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RestoredPrefix, Sequence
from orchestrator.core.step_time import StepTiming
from orchestrator.core.tenants import TenantLedger
from shoal.types import PipelineId, SequenceId, SlotId
from simulation.agenda import Agenda
from simulation.fetches import Fetches
from simulation.stages import Stages


@dataclass(frozen=True, slots=True)
class Calls:
    """What a lane asks of its site.

    draw: the token that a sequence draws as its answer's number so and so. deliver: takes new tokens; the flag says whether
    something else may be sent now.
    """

    draw: Callable[[Sequence, int], int]
    deliver: Callable[[SimulatedLane, Seq[Emitted], bool], None]


class SimulatedLane:
    """is_lost: one of its devices is gone, whether anybody knows or not: nothing comes back any more.

    fallback_at, alarm_at: when the site is to look for those who wait too long, and to ask the scheduler again.
    """

    def __init__(
        self,
        placement: Placement,
        limits: SchedulerLimits,
        stages: Stages,
        fetches: Fetches,
        ledger: TenantLedger,
        fallback_s: float,
    ) -> None:
        self.placement = placement
        self.scheduler = Scheduler(limits, ledger)
        self.stages = stages
        self.fallback_s = fallback_s
        self._fetches = fetches
        self._all_stages = tuple(range(len(placement.stages)))
        # Slots that stages still hold for whom they were of, and the stages that do not.
        self._kept: dict[SequenceId, SlotId | None] = {}
        self._new_stages = self._all_stages
        self.fallback_at: float | None = None
        self.alarm_at: float | None = None
        self.is_lost = False

    @property
    def pipeline_id(self) -> PipelineId:
        return self.placement.pipeline_id

    def take_all(self, now: float) -> list[Sequence]:
        """Give up everything because a device was lost; the other stages keep the slots for a while."""
        sequences = self.scheduler.take_all(now)
        self._kept = {one.sequence_id: one.last_slot for one in sequences if one.has_started}
        return sequences

    def keep(self, before: SimulatedLane, new_stages: tuple[int, ...]) -> None:
        """Take up the slots of a lane that was lost: all stages but the new ones still hold them."""
        self._kept, self._new_stages = before._kept, new_stages

    def send_all(self, agenda: Agenda, calls: Calls) -> None:
        """Send every batch that can be made now, and ask for what is to be restored."""
        scheduler = self.scheduler
        while True:
            batch = scheduler.schedule(agenda.now)
            scheduler.take_ended()
            for restore in scheduler.take_restores():
                self._restore(restore, agenda, calls)
            if batch is None:
                return
            self._send(batch, batch.rows, batch.burst_steps, agenda.now + self.stages.enter_s, agenda, calls)

    def _send(
        self, batch: Batch, rows: Seq[BatchRow], burst_left: int, at: float, agenda: Agenda, calls: Calls
    ) -> None:
        num_rows = batch.num_decode_rows if batch.has_chunk else len(rows)
        left_at, passes_s = self.stages.run(batch, num_rows, sum(row.is_sampled for row in rows), at)
        back = partial(self._back, batch, rows, burst_left, left_at, passes_s, agenda, calls)
        agenda.at(left_at + self.stages.leave_s, back)

    def _back(
        self,
        batch: Batch,
        rows: Seq[BatchRow],
        burst_left: int,
        left_at: float,
        passes_s: tuple[float, ...],
        agenda: Agenda,
        calls: Calls,
    ) -> None:
        """A step is there: the last stage has gone on with the next one of a burst meanwhile."""
        if self.is_lost:
            return
        scheduler = self.scheduler
        sampled, left = [], []
        for row in rows:
            sequence = scheduler.sequence_of(row.run_id) if row.is_sampled else None
            if sequence is not None:
                index = len(sequence.output_token_ids) - sequence.num_to_replay
                token_id = calls.draw(sequence, index)
                sampled.append(SampledId(row.run_id, token_id))
                if token_id not in sequence.stop_ids:
                    left.append(row)
        self._observe(batch, len(sampled), passes_s)
        burst_left = burst_left if left else 0
        emitted = scheduler.commit(batch.step, sampled, burst_left, agenda.now)
        if burst_left:
            at = left_at + self.stages.back_s(len(left))
            self._send(batch, left, burst_left - 1, at, agenda, calls)
        calls.deliver(self, emitted, not burst_left or any(one.finish is not None for one in emitted))

    def _observe(self, batch: Batch, num_drawn: int, passes_s: tuple[float, ...]) -> None:
        """As `orchestrator.pipeline`: what shows what such a pass takes."""
        num_sampled = sum(row.is_sampled for row in batch.rows)
        work = batch.work if num_drawn == num_sampled else 0.0
        if not batch.has_chunk:
            work = batch.work * num_drawn / num_sampled
        if work:
            self.scheduler.observe(StepTiming(work, passes_s, batch.is_solo, 0 if batch.has_chunk else num_drawn))

    def _restore(self, restore: Restore, agenda: Agenda, calls: Calls) -> None:
        sequence = self.scheduler.sequence_of(restore.run_id)
        if sequence is None:
            return
        is_kept = self._kept.pop(sequence.sequence_id, None) == restore.slot
        stages = self._new_stages if is_kept else self._all_stages
        there_at, num_tokens = self._fetches.fetch(restore, stages, agenda.now)
        agenda.at(there_at, partial(self._restored, restore, num_tokens, agenda, calls))

    def _restored(self, restore: Restore, num_tokens: int, agenda: Agenda, calls: Calls) -> None:
        if not self.is_lost:
            self.scheduler.restored(restore.run_id, RestoredPrefix(0, num_tokens=num_tokens), agenda.now)
            calls.deliver(self, (), True)

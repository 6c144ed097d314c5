"""A scheduler with a pipeline in virtual time: stages whose passes take a time that is linear in their work.

Everything happens in order of (time, number); nothing waits and nothing is random but what a test draws from a seed. What
clients would see is in `tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from orchestrator.core.batch import Batch, SampledId
from orchestrator.core.restores import Restore
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import Sequence
from orchestrator.core.step_time import StepTiming
from shoal.types import SequenceId
from tests.support.clock import FakeAlarm, FakeClock
from tests.support.model_stages import ModelStages


@dataclass(frozen=True, slots=True)
class StageSpeed:
    base_s: float
    token_s: float

    def seconds(self, work: float) -> float:
        return self.base_s + self.token_s * work


@dataclass(frozen=True, slots=True)
class Token:
    at: float
    token_id: int


@dataclass(frozen=True, slots=True)
class RestoreAnswer:
    """How stages answer a Restore: after a time, and with no more blocks than that of those they keep."""

    after_s: float = 0.005
    max_blocks: int = 1000


class SimulatedPipeline:
    """Drives a scheduler as the engine would. check: called after every event. answer: how each Restore is answered."""

    def __init__(
        self,
        scheduler: Scheduler,
        speeds: Seq[StageSpeed],
        check: Callable[[], None] | None = None,
        answer: Callable[[Restore], RestoreAnswer] = lambda _: RestoreAnswer(),
    ) -> None:
        self.scheduler = scheduler
        self.speeds = list(speeds)
        self.restores: list[tuple[float, Restore]] = []
        self._answer = answer
        self.clock = FakeClock()
        self._alarm: FakeAlarm | None = None
        self.tokens: dict[SequenceId, list[Token]] = {}
        self.finished_at: dict[SequenceId, float] = {}
        self.expired: list[SequenceId] = []
        self.batches: list[tuple[float, Batch]] = []
        self._check = check
        self.stages = ModelStages()
        self._free_at = [0.0] * len(self.speeds)

    @property
    def now(self) -> float:
        return self.clock.now()

    def at(self, time: float, action: Callable[[], None]) -> FakeAlarm:
        return self.clock.call_at(time, partial(self._act, action))

    def _act(self, action: Callable[[], None]) -> None:
        action()
        self._turn()
        if self._check is not None:
            self._check()

    def submit(self, sequence: Sequence, at: float) -> None:
        def arrive() -> None:
            sequence.arrived_at = at
            self.tokens[sequence.sequence_id] = []
            self.scheduler.submit(sequence, at)

        self.at(at, arrive)

    def run(self, until: float) -> None:
        """Let everything happen up to a time."""
        self.clock.move_to(until)

    def _turn(self) -> None:
        for sequence in self.scheduler.expire(self.now):
            self.expired.append(sequence.sequence_id)
        while (batch := self._next_batch()) is not None:
            self.batches.append((self.now, batch))
            drawn = self.stages.run(batch, self.scheduler.sequence_of)
            self._pass(batch, drawn, batch.work, batch.burst_steps)
        wake_at = self.scheduler.wake_at(self.now)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if wake_at is None else self.at(wake_at, lambda: None)

    def _next_batch(self) -> Batch | None:
        """Make a batch; stages hear of ends first, of restores second, of the batch last."""
        batch = self.scheduler.schedule(self.now)
        self.stages.cancel(self.scheduler.take_ended())
        for restore in self.scheduler.take_restores():
            self._restore(restore)
        return batch

    def _restore(self, restore: Restore) -> None:
        """Have the stages answer later, unless the run is cancelled by then."""
        self.restores.append((self.now, restore))
        held, answer = self.stages.restore(restore), self._answer(restore)
        prefix = replace(held, num_blocks=min(held.num_blocks, answer.max_blocks))

        def report() -> None:
            if self.stages.owners.get(restore.slot) == restore.run_id:
                self.scheduler.restored(restore.run_id, prefix, self.now)

        self.at(self.now + answer.after_s, report)

    def _pass(self, batch: Batch, drawn: Seq[SampledId], work: float, burst_left: int) -> None:
        """Send a step through all stages, each of which takes one after the other."""
        done_at, stage_s = self.now, []
        for stage, speed in enumerate(self.speeds):
            stage_s.append(speed.seconds(work))
            done_at = self._free_at[stage] = max(done_at, self._free_at[stage]) + stage_s[-1]
        timing = StepTiming(work, tuple(stage_s), batch.is_solo)
        self.at(done_at, lambda: self._report(batch, drawn, timing, burst_left))

    def _report(self, batch: Batch, drawn: Seq[SampledId], timing: StepTiming, burst_left: int) -> None:
        self.scheduler.observe(timing)
        runs = {one.run_id: self.scheduler.sequence_of(one.run_id) for one in drawn}
        stop_ids = {run_id: one.stop_ids for run_id, one in runs.items() if one is not None}
        going_on = self.stages.go_on(batch, drawn, stop_ids) if burst_left else []
        for emitted in self.scheduler.commit(batch.step, drawn, burst_left if going_on else 0, self.now):
            self.tokens[emitted.sequence_id].append(Token(self.now, emitted.token_id))
            if emitted.finish is not None:
                self.finished_at[emitted.sequence_id] = self.now
        self.stages.cancel(self.scheduler.take_ended())
        if going_on:
            work = batch.work * len(going_on) / len(batch.rows)
            self._pass(batch, going_on, work, burst_left - 1)

    def gaps(self, sequence_id: SequenceId, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Times between two tokens of an answer that both came in this time."""
        times = [token.at for token in self.tokens[sequence_id] if since <= token.at <= until]
        return [after - before for before, after in pairwise(times)]

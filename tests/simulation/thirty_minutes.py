"""A phone at full load for half an hour, in virtual time: the real scheduler, thermal monitor and thermal model.

One phone holds the whole model, so its limits are the pipeline's and its heat is the work of every step: the hardest case.
Simulated are the links, and that a step takes as long as it was measured to. Run as a module it writes the trace:

    python -m tests.simulation.thirty_minutes --out trace.json
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launch.profiles import load_profile
from orchestrator.core.batch import Batch, SampledId
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import Sequence
from orchestrator.core.step_time import StepTiming
from orchestrator.core.thermal import ThermalMonitor
from shoal.types import DeviceProfile, NumericClass, QosClass, SamplingParams, SequenceId, Telemetry
from tests.simulation.fleet import BASE_S, HEARTBEAT_S, TOKEN_S
from worker.emulation import EmulatedDevice

LOAD_S = 30 * 60.0
RECOVERY_S = 10 * 60.0
TICK_S = 0.5
PROMPT_TOKENS = 48
ANSWER_TOKENS = 96
# As many as run at most, and some that wait.
NUM_STREAMS = 12


@dataclass(frozen=True, slots=True)
class Moment:
    """How things are at the end of a second; tokens: answer tokens of that second, busy: its share that was computed."""

    at_s: float
    temperature_c: float
    battery_percent: float
    state: str
    cause: str
    clock: float
    max_batch: int
    steps_per_s: float
    tokens: int
    steps: int
    busy: float
    num_running: int
    num_waiting: int


class Simulation:
    """Runs until load_s + recovery_s; streams come for load_s. is_limited False: nobody heeds the thermal state.

    Invariant: the device works on at most one batch, the first of `_queue`, in the order they were made.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        *,
        load_s: float = LOAD_S,
        recovery_s: float = RECOVERY_S,
        is_limited: bool = True,
    ) -> None:
        self._load_s, self._end_s, self._is_limited = load_s, load_s + recovery_s, is_limited
        self._scheduler = Scheduler(
            SchedulerLimits(
                num_stages=1, num_slots=8, kv_tokens=8 * 512, context_tokens=512, max_batch=profile.max_batch
            )
        )
        self._monitor = ThermalMonitor(profile.limits, profile.max_batch)
        self._device = EmulatedDevice(profile, 0.0)
        self._link_s = profile.link.delay_ms / 1e3
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._sequence_ids = itertools.count(1)
        self._queue: deque[Batch] = deque()
        self._wake_at: float | None = None
        self._num_tokens = self._num_steps = 0
        self._seen_busy_s = 0.0
        self.trace: list[Moment] = []

    def run(self) -> list[Moment]:
        for _ in range(NUM_STREAMS):
            self._at(0.0, self._arrive)
        self._at(HEARTBEAT_S, self._beat)
        self._at(TICK_S, self._tick)
        while self._agenda:
            now, _, action = heapq.heappop(self._agenda)
            if now > self._end_s:
                break
            action(now)
        return self.trace

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), action))

    def _arrive(self, now: float) -> None:
        sequence = Sequence(
            sequence_id=SequenceId(next(self._sequence_ids)),
            prompt_token_ids=tuple(range(PROMPT_TOKENS)),
            sampling=SamplingParams(),
            max_tokens=ANSWER_TOKENS,
            stop_ids=frozenset(),
            numeric=NumericClass.SHARED,
            qos=QosClass.THROUGHPUT,
            arrived_at=now,
        )
        self._scheduler.submit(sequence, now)
        self._turn(now)

    def _turn(self, now: float) -> None:
        """What the engine does whenever something has happened."""
        while (batch := self._scheduler.schedule(now)) is not None:
            self._at(now + self._link_s, self._receive(batch))
        self._scheduler.take_ended()
        wake_at = self._scheduler.wake_at(now)
        if wake_at is not None and (self._wake_at is None or wake_at < self._wake_at):
            self._wake_at = max(wake_at, now)
            self._at(self._wake_at, self._wake)

    def _wake(self, now: float) -> None:
        if now == self._wake_at:  # else an earlier time has taken its place
            self._wake_at = None
            self._turn(now)

    def _receive(self, batch: Batch) -> Callable[[float], None]:
        def receive(now: float) -> None:
            self._queue.append(batch)
            if len(self._queue) == 1:
                self._begin(batch, batch.burst_steps, now)

        return receive

    def _begin(self, batch: Batch, burst_left: int, now: float) -> None:
        """The compute thread takes a pass of a batch up; the wait of the slowed-down device is part of it."""
        self._device.begin(now)
        num_tokens = sum(row.num_tokens for row in batch.rows)
        compute_s = BASE_S + TOKEN_S * num_tokens
        taken_s = compute_s + self._device.slow_down.extra_seconds(compute_s)

        def end(now: float) -> None:
            self._device.end(now)
            self._at(now + self._link_s, lambda now: self._result(batch, burst_left, num_tokens, taken_s, now))
            if burst_left:
                self._begin(batch, burst_left - 1, now)
                return
            self._queue.popleft()
            if self._queue:
                self._begin(self._queue[0], self._queue[0].burst_steps, now)

        self._at(now + taken_s, end)

    def _result(self, batch: Batch, burst_left: int, num_tokens: int, taken_s: float, now: float) -> None:
        self._scheduler.observe(StepTiming(num_tokens, (taken_s,), batch.is_solo))
        sampled = [SampledId(row.run_id, 7) for row in batch.rows if row.is_sampled]
        emitted = self._scheduler.commit(batch.step, sampled, burst_left, now)
        self._num_tokens += len(emitted)
        self._num_steps += 1
        for one in emitted:
            if one.finish is not None and now < self._load_s:
                self._arrive(now)
        self._turn(now)

    def _beat(self, now: float) -> None:
        condition = self._device.condition(now)
        telemetry = Telemetry(
            temperature_c=condition.temperature_c, battery_percent=condition.battery_percent, clock=condition.clock
        )
        self._heed(self._monitor.observe(telemetry, now), now)
        assert condition.temperature_c is not None
        assert condition.battery_percent is not None
        pace = self._monitor.pace()
        self.trace.append(
            Moment(
                at_s=now,
                temperature_c=condition.temperature_c,
                battery_percent=condition.battery_percent,
                state=self._monitor.state.value,
                cause=self._monitor.cause,
                clock=condition.clock,
                max_batch=pace.max_batch,
                steps_per_s=pace.steps_per_s,
                tokens=self._num_tokens,
                steps=self._num_steps,
                busy=(condition.busy_s - self._seen_busy_s) / HEARTBEAT_S,
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
            )
        )
        self._num_tokens = self._num_steps = 0
        self._seen_busy_s = condition.busy_s
        self._at(now + HEARTBEAT_S, self._beat)

    def _tick(self, now: float) -> None:
        self._heed(self._monitor.tick(now), now)
        self._at(now + TICK_S, self._tick)

    def _heed(self, has_changed: bool, now: float) -> None:
        if has_changed and self._is_limited:
            self._scheduler.set_pace(self._monitor.pace())
            self._turn(now)


def phone(**fields: object) -> DeviceProfile:
    """The shipped phone, changed as said."""
    return replace(load_profile("phone"), **fields)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate half an hour of full load on the shipped phone.")
    parser.add_argument("--out", type=Path, required=True, help="where to write the trace, a moment a second, as JSON")
    parser.add_argument("--unlimited", action="store_true", help="let nobody heed the thermal state")
    args = parser.parse_args()
    trace = Simulation(phone(), is_limited=not args.unlimited).run()
    args.out.write_text(json.dumps([asdict(moment) for moment in trace], indent=1) + "\n", encoding="utf-8")
    hottest_c = max(moment.temperature_c for moment in trace)
    sys.stdout.write(f"{args.out}: {len(trace)} s, at most {hottest_c:.1f} C\n")


if __name__ == "__main__":
    main()

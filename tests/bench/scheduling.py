"""How long schedule() takes with many sequences: a thousand that run, ten thousand that wait.

Only calls of schedule() that make a batch are timed; between them steps are committed, answers end, and others come in their
place. Called by `run`, and by itself: `python -m tests.bench.scheduling`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from itertools import count

from orchestrator.core.batch import Batch
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import Sequence
from shoal.types import QosClass
from tests.support.builders import know_times, make_sequence, sampled_ids

NUM_RUNNING = 1_000
NUM_WAITING = 10_000
NUM_TENANTS = 3_000
NUM_CALLS = 2_000
# A step of two stages with 16 rows takes about as long.
STEP_S = 0.05
# By turns; a third is as much of each class as a mixed load is likely to have.
CLASSES = tuple(QosClass)
TARGETS_S = {QosClass.LATENCY: 0.05, QosClass.BALANCED: 0.1, QosClass.THROUGHPUT: None}


def measure_schedule() -> dict[str, float]:
    """Microseconds of a call, median and p99, over NUM_CALLS."""
    scheduler, requests = _loaded()
    now, in_flight, times_s = 1_000.0, list[Batch](), list[float]()
    while len(times_s) < NUM_CALLS:
        started = time.perf_counter()
        batch = scheduler.schedule(now)
        took_s = time.perf_counter() - started
        scheduler.take_ended()
        if batch is not None:
            times_s.append(took_s)
            in_flight.append(batch)
            continue
        now += STEP_S
        _commit(scheduler, in_flight.pop(0), now)
        while scheduler.num_waiting < NUM_WAITING:
            scheduler.submit(next(requests), now)
    return {
        "median_us": statistics.median(times_s) * 1e6,
        "p99_us": statistics.quantiles(times_s, n=100)[-1] * 1e6,
        "num_running": float(scheduler.num_running),
        "num_waiting": float(scheduler.num_waiting),
    }


def _loaded() -> tuple[Scheduler, Iterator[Sequence]]:
    """A scheduler whose slots are all taken by sequences that decode, with the others waiting."""
    limits = SchedulerLimits(
        num_stages=2, num_slots=NUM_RUNNING, kv_tokens=NUM_RUNNING * 256, context_tokens=2048, max_waiting=NUM_WAITING
    )
    scheduler, requests = Scheduler(limits), _requests()
    while scheduler.num_running < NUM_RUNNING:
        while scheduler.num_waiting < NUM_RUNNING:
            scheduler.submit(next(requests), 0.0)
        batch = scheduler.schedule(0.0)
        assert batch is not None
        _commit(scheduler, batch, 0.0)
    while scheduler.num_waiting < NUM_WAITING:
        scheduler.submit(next(requests), 0.0)
    # Only now: prompts would have to be careful of those who run already.
    know_times(scheduler)
    return scheduler, requests


def _commit(scheduler: Scheduler, batch: Batch, now: float) -> None:
    scheduler.commit(batch.step, sampled_ids(batch), 0, now)


def _requests() -> Iterator[Sequence]:
    for number in count(1):
        qos = CLASSES[number % len(CLASSES)]
        yield make_sequence(
            number,
            num_prompt=8 + number % 56,
            max_tokens=24 + number % 128,
            qos=qos,
            tenant=f"tenant-{number % NUM_TENANTS}",
            inter_token_s=TARGETS_S[qos],
            arrived_at=number * 0.001,
            stop_ids=frozenset(),
        )


if __name__ == "__main__":
    sys.stdout.write("".join(f"{name}: {value:.0f}\n" for name, value in measure_schedule().items()))

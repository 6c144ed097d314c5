"""Prompts that begin with named blocks, and schedulers that believe such to be kept; used by the tests of restores."""

from __future__ import annotations

from orchestrator.core.batch import Batch
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.restores import Restore
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RunId, Sequence
from shoal.types import QosClass
from tests.support.builders import (
    make_limits,
    make_sequence,
    with_blocks,
)

BALANCED = QosClass.BALANCED
RUN = RunId(1)


def make_prompt(
    sequence_id: int = 1, *, num_prompt: int = 200, num_stored: int = 0, max_tokens: int = 16, qos: QosClass = BALANCED
) -> Sequence:
    """One whose first 64, 128 and 192 tokens have names; those of all prompts here begin alike."""
    return with_blocks(make_sequence(sequence_id, num_prompt=num_prompt, max_tokens=max_tokens, qos=qos), num_stored)


def make_scheduler(limits: SchedulerLimits | None = None, *, known: int = 0) -> Scheduler:
    """A scheduler that believes the first blocks of these prompts to be kept."""
    scheduler = Scheduler(limits or make_limits())
    scheduler.restores.index.learn(make_prompt(num_prompt=1000).block_hashes[:known])
    return scheduler


def ask(scheduler: Scheduler, sequence: Sequence, now: float = 0.0) -> Restore:
    """Submit a sequence, which is to be the only one that awaits blocks."""
    scheduler.submit(sequence, now)
    assert scheduler.schedule(now) is None
    (restore,) = scheduler.take_restores()
    scheduler.check_invariants()
    return restore


def next_batch(scheduler: Scheduler, now: float = 0.0) -> Batch:
    batch = scheduler.schedule(now)
    assert batch is not None, "there is no batch"
    scheduler.check_invariants()
    return batch

"""Builders with defaults for the values that tests of the pure cores are about.

Each takes only what a test wants to say; nothing here starts, waits or draws random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from orchestrator.core.batch import Batch, SampledId
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.placement import Placement, Stage
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import QosTargets, Sequence, SequenceState
from orchestrator.core.step_time import StepTiming
from shoal.kv import KVScope, chain
from shoal.types import (
    DeviceMode,
    DeviceProfile,
    LayerRange,
    NumericClass,
    QosClass,
    SamplingParams,
    SequenceId,
    WorkerId,
)

MIB = 2**20
STOP_ID = 2
SCOPE = KVScope("model", "f32-rope-1")
TOKEN_ID = 7


def make_sequence(
    sequence_id: int = 1,
    *,
    num_prompt: int = 8,
    max_tokens: int = 16,
    numeric: NumericClass = NumericClass.SHARED,
    qos: QosClass = QosClass.BALANCED,
    arrived_at: float = 0.0,
    tenant: str = "default",
    inter_token_s: float | None = None,
    deadline_at: float | None = None,
    max_tokens_per_s: float = 0.0,
    stop_ids: frozenset[int] = frozenset({STOP_ID}),
) -> Sequence:
    """A greedy sequence with the prompt 100, 101, ... that ends at STOP_ID."""
    return Sequence(
        sequence_id=SequenceId(sequence_id),
        prompt_token_ids=tuple(range(100, 100 + num_prompt)),
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        numeric=numeric,
        qos=qos,
        arrived_at=arrived_at,
        tenant=tenant,
        targets=QosTargets(inter_token_s=inter_token_s),
        deadline_at=deadline_at,
        max_tokens_per_s=max_tokens_per_s,
    )


def with_blocks(sequence: Sequence, num_stored: int = 0) -> Sequence:
    """The same sequence with the names of its prompt's blocks, num_stored of which Redis is said to hold."""
    sequence.block_hashes = chain(SCOPE, sequence.prompt_token_ids)
    sequence.num_stored_blocks = num_stored
    return sequence


def make_limits(
    *,
    num_stages: int = 1,
    num_slots: int = 8,
    kv_tokens: int = 4096,
    context_tokens: int = 512,
    max_batch: int = 16,
    chunk_tokens: int = 64,
    max_waiting: int = 256,
    burst_steps: int = 1,
    min_rows: int = 4,
    mode: DeviceMode = DeviceMode.MIXED,
    stage_costs: tuple[float, ...] = (),
    keeps_blocks: bool = True,
    chunk_border: int = 0,
) -> SchedulerLimits:
    """Limits of a small pipeline; bursts are off unless asked for."""
    return SchedulerLimits(
        num_stages=num_stages,
        num_slots=num_slots,
        kv_tokens=kv_tokens,
        context_tokens=context_tokens,
        max_batch=max_batch,
        chunk_tokens=chunk_tokens,
        max_waiting=max_waiting,
        burst_steps=burst_steps,
        min_rows=min_rows,
        mode=mode,
        stage_costs=stage_costs,
        keeps_blocks=keeps_blocks,
        chunk_border=chunk_border,
    )


def sampled_ids(batch: Batch, token_id: int = TOKEN_ID) -> list[SampledId]:
    """What the last stage reports for a step of this batch if every row draws token_id."""
    return [SampledId(row.run_id, token_id) for row in batch.rows if row.is_sampled]


def start_decoding(scheduler: Scheduler, sequences: Seq[Sequence], now: float = 0.0) -> None:
    """Submit sequences and run their prefill to the end, so that all of them decode and nothing is in flight.

    They must fit the slots, and have enough max_tokens: decode rows that get in between draw TOKEN_ID too.
    """
    for sequence in sequences:
        scheduler.submit(sequence, now)
    while any(sequence.first_token_at is None for sequence in sequences):
        batch = scheduler.schedule(now)
        assert batch is not None, "the sequences do not all get a slot"
        scheduler.commit(batch.step, sampled_ids(batch), 0, now)
    assert all(sequence.state is SequenceState.DECODE for sequence in sequences), "an answer ended meanwhile"


def make_sequences(*classes: QosClass, num_prompt: int = 8, max_tokens: int = 64) -> list[Sequence]:
    """Sequences 1, 2, ... of these classes."""
    return [
        make_sequence(key, num_prompt=num_prompt, max_tokens=max_tokens, qos=qos)
        for key, qos in enumerate(classes, start=1)
    ]


def make_decoding(limits: SchedulerLimits, *sequences: Sequence) -> Scheduler:
    """A scheduler with these sequences ready to decode, at 0.0."""
    scheduler = Scheduler(limits)
    start_decoding(scheduler, sequences)
    scheduler.check_invariants()
    return scheduler


def make_decoding_as(limits: SchedulerLimits, *numeric: NumericClass) -> Scheduler:
    """The same with sequences 1, 2, ... of these classes, whose answers are long."""
    return make_decoding(
        limits, *(make_sequence(key, numeric=one, max_tokens=64) for key, one in enumerate(numeric, start=1))
    )


def schedule_all(scheduler: Scheduler) -> list[Batch]:
    """All the batches that there are to make at 0.0."""
    batches = []
    while (batch := scheduler.schedule(0.0)) is not None:
        batches.append(batch)
        scheduler.check_invariants()
    return batches


def run_ids(batch: Batch) -> list[int]:
    """The runs of a batch: where none is preempted, they have the numbers of their sequences."""
    return [row.run_id for row in batch.rows]


def sequences_in(scheduler: Scheduler, batch: Batch | None) -> list[int]:
    """The sequences in a batch, row by row."""
    assert batch is not None, "there is no batch"
    sequences = [scheduler.sequence_of(row.run_id) for row in batch.rows]
    return [sequence.sequence_id for sequence in sequences if sequence is not None]


def run_step(scheduler: Scheduler, now: float, took_s: float = 0.0) -> list[int]:
    """Make a batch if there is one, let it be done, and name the sequences that were in it."""
    batch = scheduler.schedule(now)
    if batch is None:
        return []
    found = sequences_in(scheduler, batch)
    scheduler.commit(batch.step, sampled_ids(batch), 0, now + took_s)
    scheduler.check_invariants()
    return found


def know_times(scheduler: Scheduler, *, base_s: float = 0.02, token_s: float = 0.005) -> None:
    """Let it have seen passes of such times, at each stage."""
    for num_tokens in (1, 4, 16, 64) * 5:
        stage_s = (base_s + token_s * num_tokens,) * scheduler.limits.num_stages
        scheduler.observe(StepTiming(num_tokens, stage_s, is_solo=False))


def make_profile(
    name: str = "phone", *, memory_bytes: int = 1024 * MIB, speed: float = 1.0, kind: str = "phone"
) -> DeviceProfile:
    return DeviceProfile(name=name, kind=kind, memory_bytes=memory_bytes, speed=speed)


def make_workers(*profiles: DeviceProfile) -> list[tuple[WorkerId, DeviceProfile]]:
    """Workers w0, w1, ... in this order."""
    return [(WorkerId(f"w{index}"), profile) for index, profile in enumerate(profiles)]


def make_model(
    *,
    num_layers: int = 30,
    layer_bytes: int = 3 * MIB,
    embedding_bytes: int = 30 * MIB,
    head_bytes: int = 4096,
    is_head_tied: bool = True,
    kv_bytes_per_token_per_layer: int = 1536,
    context_tokens: int = 2048,
) -> ModelFootprint:
    """About the sizes of SmolLM2-135M."""
    return ModelFootprint(
        layer_bytes=(layer_bytes,) * num_layers,
        embedding_bytes=embedding_bytes,
        head_bytes=head_bytes,
        is_head_tied=is_head_tied,
        kv_bytes_per_token_per_layer=kv_bytes_per_token_per_layer,
        context_tokens=context_tokens,
    )


def make_placement(*worker_ids: str, layers_each: int = 10) -> Placement:
    """Equal stages over these workers, in order."""
    stages = tuple(
        Stage(WorkerId(worker_id), LayerRange(index * layers_each, (index + 1) * layers_each), 1, 1)
        for index, worker_id in enumerate(worker_ids)
    )
    return Placement(stages=stages, kv_tokens=4096, context_tokens=512, slots=8)

"""What a seed stands for: devices, options and how much goes wrong, drawn from it and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from orchestrator.core.footprint import ModelFootprint
from shoal.types import DeviceLimits, DeviceMode, DeviceProfile
from tests.simulation.layers import NUM_LAYERS
from tests.simulation.requests import Wish, draw_wish
from tests.simulation.worker import Device

CONTEXT_TOKENS = 256
LIMITS = DeviceLimits(moderate_c=60.0, hot_c=70.0, critical_c=80.0, max_batch=(8, 6, 4, 2), steps_per_s=(0, 0, 60, 20))
FAULTS = (
    "kill", "freeze", "cut_links", "cut_off", "redis_away", "redis_flush", "kill_orchestrator", "stall", "leave", "past",
    "break_step", "heat", "cordon", "drain",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """faults: what may happen, by weight. fault_gap_s: mean time between two. stop_at_s: when all is well again."""

    devices: tuple[Device, ...]
    wishes: tuple[tuple[float, Wish], ...]
    faults: dict[str, float]
    fault_gap_s: float
    stop_at_s: float
    num_slots: int
    burst_steps: int
    replicas: int
    lease_s: float
    heartbeat_s: float
    expect_workers: int
    has_redis: bool
    delay_s: float


def draw_scenario(random: Random, footprint: ModelFootprint) -> Scenario:
    num_slots = random.randint(1, 5)
    keeps_blocks = random.random() < 0.8
    # Who can hold all layers is a pipeline alone.
    has_large = random.random() < 0.3
    num_devices = random.randint(2, 5)
    devices = tuple(
        _draw_device(random, f"w{index}", footprint, num_slots, keeps_blocks=keeps_blocks, has_large=has_large)
        for index in range(num_devices)
    )
    stop_at_s = random.uniform(3.0, 7.0)
    num_wishes = random.randint(2, 6)
    wishes = [(random.uniform(0.3, 0.8 * stop_at_s), draw_wish(random, number)) for number in range(1, num_wishes + 1)]
    # Without somebody who dies, little is to be gone on with.
    kinds = {"kill", *random.sample(FAULTS, random.randint(1, len(FAULTS)))}
    heartbeat_s = random.uniform(0.4, 1.0)
    return Scenario(
        devices=devices,
        wishes=tuple(sorted(wishes, key=lambda one: one[0])),
        faults={kind: random.uniform(0.2, 2.0) for kind in sorted(kinds)},
        fault_gap_s=random.choice((0.3, 0.6, 1.0, 2.0)),
        stop_at_s=stop_at_s,
        num_slots=num_slots,
        burst_steps=random.choice((1, 4, 16)),
        replicas=random.choice((1, 1, 2)),
        lease_s=heartbeat_s * random.uniform(2.5, 5.0),
        heartbeat_s=heartbeat_s,
        expect_workers=random.choice((1, num_devices)),
        has_redis=random.random() < 0.8,
        delay_s=random.choice((0.0005, 0.002, 0.01)),
    )


def _draw_device(
    random: Random, worker_id: str, footprint: ModelFootprint, num_slots: int, *, keeps_blocks: bool, has_large: bool
) -> Device:
    """One that can hold half of the layers at least, with all slots full, so that any two can hold all."""
    num_layers = random.choice((2, 2, 3, NUM_LAYERS) if has_large else (2, 2, 3))
    kv_tokens = num_slots * CONTEXT_TOKENS
    starts = range(NUM_LAYERS - num_layers + 1)
    memory_bytes = max(footprint.need_bytes(start, start + num_layers, kv_tokens) for start in starts)
    host_kv_bytes = 1 << 20 if keeps_blocks else 0
    profile = DeviceProfile(
        name=worker_id,
        kind="box",
        memory_bytes=memory_bytes + host_kv_bytes,
        speed=random.choice((0.5, 1.0, 2.0)),
        max_batch=8,
        allow_direct_links=random.random() < 0.8,
        mode=random.choice((DeviceMode.MIXED, DeviceMode.MIXED, DeviceMode.THROUGHPUT, DeviceMode.LATENCY)),
        limits=LIMITS,
        host_kv_bytes=host_kv_bytes,
    )
    return Device(
        worker_id=worker_id,
        profile=profile,
        load_s=random.choice((0.02, 0.2, 0.8)),
        token_s=random.uniform(0.01, 0.04),
        max_blocks=random.choice((4, 64)) if keeps_blocks else 0,
        skew=random.uniform(0.9, 1.1),
    )

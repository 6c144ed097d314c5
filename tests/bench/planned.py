"""What the planner believes against what is measured: milliseconds a token, and its plan against one by memory alone.

On an unequal fleet of shipped devices, all of them slowed down so far that the cores of this machine are not what holds
them back. What is believed is asked of the running fleet, as an operator would.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import grpc

from launch.profiles import load_profile
from modelstore.store import ModelStore
from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.placement import Placement, placement_of
from orchestrator.core.predictions import predict
from orchestrator.shards import footprint
from orchestrator.what_if import fleet_of_messages
from shoal.types import DeviceProfile, LayerRange, QosClass, WorkerId
from shoal.v1 import admin_pb2, admin_pb2_grpc
from simulation.synthetic import dealt
from tests.bench.context import Bench, decode_prompts
from tests.bench.figures import Figure, from_pairs
from tests.bench.fleet import System
from tests.bench.pairs import MAX_FLEET_BUSY_CORES, MAX_FOREIGN_CORES, Run, collect

# Devices whose speed, memory and links differ, and most memory where the speed is least.
UNEQUAL_FLEET = ("flagship-phone", "phone", "sbc")
# Together they then take less than one of the two cores that this machine has at least.
SLOWER = 0.4
NUM_STREAMS = 8
SHORT_PROMPT = 32
LONE = Demand(num_streams=1)

Stages = Sequence[tuple[WorkerId, LayerRange]]


def unequal_devices() -> list[DeviceProfile]:
    """The unequal fleet, slowed down; heat has no time to show."""
    profiles = [load_profile(name) for name in UNEQUAL_FLEET]
    return [replace(profile, speed=profile.speed * SLOWER) for profile in profiles]


def split_by_memory(profiles: Sequence[DeviceProfile], num_layers: int) -> str:
    """Layers in proportion to the memory that each device has for a shard, the largest remainders rounded up."""
    total = sum(profile.shard_bytes for profile in profiles)
    return ",".join(map(str, dealt(num_layers, [profile.shard_bytes / total for profile in profiles])))


def prediction(bench: Bench) -> list[Figure]:
    """How far the time of a token that the figures promise is from the one that a lone stream gets, in either direction."""
    raw: list[dict[str, object]] = []
    plan, prompt, sizes = bench.long_plan, bench.prompt(bench.sizes.prompt), bench.sizes
    model = footprint(ModelStore(bench.home_of_models).open(bench.model))
    with _fleet(bench, "predicted") as system:
        for qos in (QosClass.BALANCED, QosClass.LATENCY):
            system.ask([prompt], sizes.skip, qos)
            for _ in range(plan.tries):
                fleet, stages = _ask(system)
                predicted = predict(model, fleet, _placement(model, stages), LONE)
                predicted_s = predicted.solo_token_s if qos is QosClass.LATENCY else predicted.token_s
                measured = system.ask([prompt], sizes.answer, qos)
                token_ms = 1e3 / measured.streams[0].tokens_per_s(sizes.skip)
                load = measured.load
                raw.append(
                    {
                        "class": qos.value,
                        "stages": ", ".join(f"{worker_id} {layers}" for worker_id, layers in stages),
                        "predicted_ms": 1e3 * predicted_s,
                        "measured_ms": token_ms,
                        "value": abs(1e3 * predicted_s / token_ms - 1.0),
                        "foreign_cores": load.foreign_cores,
                        "counts": load.foreign_cores <= MAX_FOREIGN_CORES,
                    }
                )
    counted = [row for row in raw if row["counts"]]
    value = statistics.median(float(str(row["value"])) for row in counted) if counted else None
    last = raw[-1]
    note = f"{last['stages']}; last {last['predicted_ms']:.1f} ms predicted, {last['measured_ms']:.1f} measured"
    return [Figure("prediction", value, len(counted), len(raw) - len(counted), raw, note)]


def plan_gain(bench: Bench) -> list[Figure]:
    """Streams at the same time on the fleet as it is planned, and with layers in proportion to memory."""
    sizes = bench.sizes
    split = split_by_memory(unequal_devices(), bench.num_layers)

    def run(system: System) -> Run:
        prompts = decode_prompts(bench, NUM_STREAMS, SHORT_PROMPT)
        measured = system.ask(prompts, sizes.answer, QosClass.THROUGHPUT)
        return Run(measured.shared_tokens_per_s(sizes.skip), measured.load)

    with _fleet(bench, "planned") as planned, _fleet(bench, "by-memory", split=split) as by_memory:
        for system in (planned, by_memory):
            system.meter.add(planned.process_ids + by_memory.process_ids)
        pairs = collect(
            bench.long_plan,
            lambda: run(by_memory),
            lambda: run(planned),
            max_busy_cores=MAX_FLEET_BUSY_CORES,
        )
        _, stages = _ask(planned)
    note = (
        f"{' + '.join(UNEQUAL_FLEET)} at {SLOWER:g} of their speed, {NUM_STREAMS} streams: by memory {split} "
        f"{pairs.typical(lambda pair: pair.baseline):.1f} tok/s; planned "
        + ", ".join(f"{worker_id} {layers}" for worker_id, layers in stages)
    )
    return [from_pairs("plan_gain", pairs, lambda pair: pair.ratio, note)]


def _placement(model: ModelFootprint, stages: Stages) -> Placement:
    worker_ids, layers = zip(*stages, strict=True)
    return placement_of(model, LONE, worker_ids, [one.stop for one in layers], LONE.most_kv(model))


def _fleet(bench: Bench, name: str, **options: object) -> AbstractContextManager[System]:
    return bench.fleet(name, num_workers=len(UNEQUAL_FLEET), profiles=unequal_devices(), **options)


def _ask(system: System) -> tuple[FleetFigures, Stages]:
    """The figures that the planner has now, and the stages in force, in their order."""
    with grpc.insecure_channel(system.address) as channel:
        plan = admin_pb2_grpc.AdminServiceStub(channel).GetPlan(admin_pb2.GetPlanRequest(), timeout=5.0)
    placed = [(WorkerId(one.worker_id), one.layers) for one in system.status().devices if one.layers is not None]
    return fleet_of_messages(plan.devices), sorted(placed, key=lambda one: one[1].start)

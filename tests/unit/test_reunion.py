"""Pipelines that devices still hold: which of their shards make a whole one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.demand import Demand
from orchestrator.core.placement import placement_of
from orchestrator.core.reunion import Held, reunite
from shoal.types import DeviceMode, LayerRange, PipelineId, WorkerId
from tests.support.builders import make_model

P1, P2 = PipelineId("p1"), PipelineId("p2")
DEMAND = Demand(num_streams=4, context_tokens=512)
KV_TOKENS = 2048
MODES = {WorkerId(f"w{index}"): DeviceMode.MIXED for index in range(6)}
MODEL = make_model(num_layers=12)


def held(worker_id: str, start: int, stop: int, pipeline_id: PipelineId = P1, kv_tokens: int = KV_TOKENS) -> Held:
    return Held(WorkerId(worker_id), pipeline_id, LayerRange(start, stop), 4, 512, kv_tokens)


def test_stages_that_cover_all_layers_are_the_pipeline_that_they_were() -> None:
    found = reunite(MODEL, [held("w2", 8, 12), held("w0", 0, 4), held("w1", 4, 8)], MODES, DEMAND)

    workers = [WorkerId("w0"), WorkerId("w1"), WorkerId("w2")]
    assert found == (replace(placement_of(MODEL, DEMAND, workers, [4, 8, 12], KV_TOKENS), pipeline_id=P1),)


@pytest.mark.parametrize(
    "shards",
    [
        [held("w0", 0, 4), held("w2", 8, 12)],
        [held("w0", 0, 4), held("w1", 4, 8)],
        [held("w1", 4, 12)],
        [held("w0", 0, 6), held("w1", 4, 12)],
        [held("w0", 0, 4), held("w1", 4, 12, kv_tokens=1024)],
        [held("w0", 0, 4), held("w1", 4, 12, P2)],
    ],
    ids=["hole", "no end", "no begin", "overlap", "other sizes", "other pipeline"],
)
def test_what_is_not_whole_is_nothing(shards: list[Held]) -> None:
    assert reunite(MODEL, shards, MODES, DEMAND) == ()


def test_of_two_with_the_same_layers_one_is_taken() -> None:
    (found,) = reunite(MODEL, [held("w3", 0, 6), held("w1", 0, 6), held("w2", 6, 12)], MODES, DEMAND)

    assert found.worker_ids == ("w1", "w2")


def test_two_pipelines_come_back_as_two() -> None:
    shards = [held("w0", 0, 12), held("w1", 0, 5, P2), held("w2", 5, 12, P2)]

    assert [one.pipeline_id for one in reunite(MODEL, shards, MODES, DEMAND)] == [P1, P2]


def test_one_id_is_given_once() -> None:
    shards = [held("w0", 0, 12), held("w1", 0, 12, kv_tokens=1024)]

    assert len(reunite(MODEL, shards, MODES, DEMAND)) == 1


@pytest.mark.parametrize(
    "demand",
    [replace(DEMAND, num_streams=8), replace(DEMAND, context_tokens=256), replace(DEMAND, split=(6, 6))],
    ids=["more streams", "shorter context", "another split"],
)
def test_what_other_options_would_make_otherwise_is_not_taken_up(demand: Demand) -> None:
    shards = [held("w0", 0, 4), held("w1", 4, 12)]
    assert len(reunite(MODEL, shards, MODES, DEMAND)) == 1

    assert reunite(MODEL, shards, MODES, demand) == ()


def test_pipelines_that_share_the_streams_come_back_with_their_parts() -> None:
    shards = [held("w0", 0, 12), held("w1", 0, 12, P2)]
    demand = replace(DEMAND, num_streams=8, replicas=0)

    assert [one.slots for one in reunite(MODEL, shards, MODES, demand)] == [4, 4]
    assert reunite(MODEL, shards, MODES, replace(demand, num_streams=3)) == ()


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ([DeviceMode.LATENCY], DeviceMode.LATENCY),
        ([DeviceMode.LATENCY, DeviceMode.LATENCY], DeviceMode.MIXED),
        ([DeviceMode.THROUGHPUT, DeviceMode.THROUGHPUT], DeviceMode.THROUGHPUT),
        ([DeviceMode.THROUGHPUT, DeviceMode.MIXED], DeviceMode.MIXED),
    ],
)
def test_it_is_for_what_its_devices_are_for(modes: list[DeviceMode], expected: DeviceMode) -> None:
    stops = [12] if len(modes) == 1 else [6, 12]
    shards = [held(f"w{i}", stops[i] - stops[0], stop) for i, stop in enumerate(stops)]

    (found,) = reunite(MODEL, shards, {WorkerId(f"w{i}"): mode for i, mode in enumerate(modes)}, DEMAND)

    assert found.mode is expected

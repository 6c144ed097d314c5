"""Weights for devices that stand by: what control has them fetch, and when; told by hand what workers say."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from modelstore.graph import shard_blobs
from orchestrator import prefetching
from orchestrator.core.demand import Demand
from orchestrator.core.figures import declared_fleet
from orchestrator.core.placement import place_split
from orchestrator.prefetching import BLOB_TIMEOUT_S, CALM_S, wanted_of
from orchestrator.shards import footprint
from shoal.errors import StorageFull
from shoal.status import status_from_proto
from shoal.types import LayerRange, WorkerId
from shoal.v1 import fleet_pb2
from tests.support.builders import make_profile, make_workers
from tests.support.desk import Desk, make_desk
from tests.support.shards import TinyModel


class Calm:
    """Lets time go by at a desk where nothing happens."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.now = time.monotonic()

    def go_by(self, seconds: float) -> None:
        self.now += seconds
        self._desk.control.tick(self.now)


def make_pipeline(model: TinyModel, *standbys: str, **profile: Any) -> tuple[Desk, Calm]:
    """w0 and w1 serve, the others stand by."""
    desk = make_desk(model, split="2,2", expect_workers=2 + len(standbys))
    for name in ("w0", "w1"):
        desk.join(name)
    for name in standbys:
        desk.join(name, **profile)
    desk.bring_up("w0", "w1")
    calm = Calm(desk)
    calm.go_by(0.0)
    for name in standbys:
        desk.commands(name)
    return desk, calm


def prefetches(desk: Desk, worker_id: str) -> list[list[str]]:
    """The digests that a worker was asked for, each time; none: it is to stop."""
    commands = [one.prefetch_blobs for one in desk.commands(worker_id) if one.HasField("prefetch_blobs")]
    return [[blob.digest for blob in command.blobs] for command in commands]


def digests(model: TinyModel, start: int, stop: int) -> set[str]:
    return {blob.digest for blob in shard_blobs(model.manifest, LayerRange(start, stop))}


def have(desk: Desk, worker_id: str, wanted: list[str]) -> None:
    for digest in wanted:
        desk.tell(worker_id, blob_prefetched=fleet_pb2.BlobPrefetched(digest=digest))


async def test_a_device_that_stands_by_is_asked_to_fetch_what_it_would_take_over(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2")

    calm.go_by(CALM_S)

    (asked,) = prefetches(desk, "w2")
    assert set(asked) == digests(fleet_model, 0, 2) | digests(fleet_model, 2, 4)
    assert len(asked) == len(set(asked))
    assert prefetches(desk, "w0") == prefetches(desk, "w1") == []


async def test_nobody_is_asked_soon_after_something_changed(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2")
    calm.go_by(CALM_S - 1.0)
    assert prefetches(desk, "w2") == []

    desk.join("w3")
    calm.go_by(2.0)
    assert prefetches(desk, "w2") == prefetches(desk, "w3") == []

    calm.go_by(CALM_S)
    assert prefetches(desk, "w2") != []


async def test_nobody_is_asked_while_a_pipeline_comes_up(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, split="2,2", expect_workers=3)
    for name in ("w0", "w1", "w2"):
        desk.join(name)
    calm = Calm(desk)

    calm.go_by(CALM_S)
    calm.go_by(CALM_S)

    assert prefetches(desk, "w2") == []


async def test_nobody_is_asked_while_links_are_measured(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2")
    desk.control.measuring._probed_by[WorkerId("w2")] = math.inf

    calm.go_by(CALM_S)
    calm.go_by(CALM_S)
    while_measuring = prefetches(desk, "w2")
    del desk.control.measuring._probed_by[WorkerId("w2")]
    calm.go_by(CALM_S)

    assert while_measuring == []
    assert len(prefetches(desk, "w2")) == 1


async def test_nobody_is_asked_while_layers_move(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2", "w3")

    draining = asyncio.create_task(desk.control.relief.drain(WorkerId("w0")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calm.go_by(CALM_S)
    calm.go_by(CALM_S)

    assert prefetches(desk, "w2") == prefetches(desk, "w3") == []
    draining.cancel()
    desk.control.stop()


def make_two_takers(model: TinyModel) -> tuple[Desk, Calm]:
    """w2 would take w1's stage, and has no room for w0's, which w3 would take."""
    desk = make_desk(model, split="1,3", expect_workers=2)
    for name in ("w0", "w1"):
        desk.join(name)
    desk.bring_up("w0", "w1")
    small, large = sorted(stage.need_bytes for one in desk.control._fleet.placements for stage in one.stages)
    desk.join("w2", speed=0.5, memory_bytes=small)
    desk.join("w3", speed=0.25, memory_bytes=large)
    assert desk.serving() == {"p1": ["w0", "w1"]}
    calm = Calm(desk)
    calm.go_by(0.0)
    for name in desk.sessions:
        desk.commands(name)
    return desk, calm


async def test_one_device_fetches_at_a_time(fleet_model: TinyModel) -> None:
    desk, calm = make_two_takers(fleet_model)

    calm.go_by(CALM_S)
    (first,) = prefetches(desk, "w2")
    while_it_fetches = prefetches(desk, "w3")
    have(desk, "w2", first)
    calm.go_by(0.25)
    (second,) = prefetches(desk, "w3")

    assert while_it_fetches == []
    assert set(first) == digests(fleet_model, 0, 1)
    assert set(second) == digests(fleet_model, 1, 4)


async def test_who_fetches_stops_when_another_device_loads(fleet_model: TinyModel) -> None:
    desk, calm = make_two_takers(fleet_model)
    calm.go_by(CALM_S)
    assert len(prefetches(desk, "w2")) == 1

    desk.lose("w1")

    assert desk.hub.routes["p1"] == ("w0", "w3")  # type: ignore[index]
    assert prefetches(desk, "w2") == [[]]
    calm.go_by(CALM_S)
    assert prefetches(desk, "w2") == []


async def test_what_a_device_has_said_to_have_it_is_not_asked_for_again(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2")
    calm.go_by(CALM_S)
    (asked,) = prefetches(desk, "w2")
    have(desk, "w2", asked[:1])

    desk.join("w3", speed=0.1)
    calm.go_by(0.0)
    stopped = prefetches(desk, "w2")
    calm.go_by(CALM_S)
    (again,) = prefetches(desk, "w2")
    have(desk, "w2", again)
    calm.go_by(CALM_S)

    assert stopped == [[]]
    assert again == asked[1:]
    assert prefetches(desk, "w2") == []


@pytest.mark.parametrize("trouble", ["says so", "says nothing"])
async def test_a_device_that_cannot_fetch_is_asked_no_more_before_it_attaches_again(
    fleet_model: TinyModel, trouble: str
) -> None:
    desk, calm = make_two_takers(fleet_model)
    calm.go_by(CALM_S)
    assert len(prefetches(desk, "w2")) == 1

    if trouble == "says so":
        failed = fleet_pb2.BlobPrefetched(reason=StorageFull.reason, message="the device's disk is full")
        desk.tell("w2", blob_prefetched=failed)
    calm.go_by(BLOB_TIMEOUT_S)
    for_the_other = prefetches(desk, "w3")
    have(desk, "w3", for_the_other[0])
    calm.go_by(CALM_S)
    assert prefetches(desk, "w2") == []
    assert len(for_the_other) == 1

    small = desk.sessions["w2"].hello.profile.memory_bytes
    desk.lose("w2")
    desk.join("w2", speed=0.5, memory_bytes=small)
    calm.go_by(0.0)
    calm.go_by(CALM_S)
    assert len(prefetches(desk, "w2")) == 1


async def test_who_has_a_blob_in_time_has_as_long_for_the_next(
    fleet_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefetching, "BLOB_TIMEOUT_S", 60.0)
    desk, calm = make_pipeline(fleet_model, "w2")
    calm.go_by(CALM_S)
    (asked,) = prefetches(desk, "w2")

    calm.go_by(59.0)
    event = fleet_pb2.BlobPrefetched(digest=asked[0])
    desk.control._prefetching.prefetched(desk.sessions["w2"], event, calm.now)
    calm.go_by(59.0)
    in_time = caplog.text
    calm.go_by(2.0)

    assert "not_prefetched" not in in_time
    assert "not_prefetched worker=w2" in caplog.text


async def test_nobody_is_asked_before_stages_have_their_links(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, split="2,2", expect_workers=3)
    for name in ("w0", "w1", "w2"):
        desk.join(name)
    shards = {name: desk.load_command(name) for name in ("w0", "w1")}
    for name, shard in shards.items():
        loaded = fleet_pb2.ShardLoaded(pipeline_id=shard.pipeline_id, epoch=shard.epoch, stage=shard.stage)
        desk.tell(name, shard_loaded=loaded)
    calm = Calm(desk)

    calm.go_by(CALM_S)
    calm.go_by(CALM_S)

    assert prefetches(desk, "w2") == []


async def test_what_a_ghost_has_is_not_had_by_who_came_after_it(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2")
    calm.go_by(CALM_S)
    (asked,) = prefetches(desk, "w2")
    ghost = desk.sessions["w2"]
    desk.lose("w2")
    desk.join("w2")

    desk.control.on_event(ghost, fleet_pb2.AttachRequest(blob_prefetched=fleet_pb2.BlobPrefetched(digest=asked[0])))
    calm.go_by(0.0)
    calm.go_by(CALM_S)

    assert prefetches(desk, "w2")[-1] == asked


async def test_who_attaches_again_before_it_is_missed_is_asked_for_all_of_it_again(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2")
    calm.go_by(CALM_S)
    (asked,) = prefetches(desk, "w2")
    have(desk, "w2", asked[:1])

    desk.incarnations["w2"] -= 1
    desk.join("w2")
    calm.go_by(0.0)
    calm.go_by(CALM_S)

    assert prefetches(desk, "w2") == [asked]


async def test_operators_see_what_a_device_would_take_over_and_how_far_it_is(fleet_model: TinyModel) -> None:
    desk, calm = make_pipeline(fleet_model, "w2")
    calm.go_by(CALM_S)
    (asked,) = prefetches(desk, "w2")
    have(desk, "w2", asked[:1])

    status = status_from_proto(desk.control.status())

    (w2,) = (one for one in status.devices if one.worker_id == "w2")
    bytes_of = {blob.digest: blob.num_bytes for blob in fleet_model.manifest.blobs}
    assert w2.standby_layers == (LayerRange(0, 2), LayerRange(2, 4))
    assert w2.prefetch_bytes == sum(bytes_of[digest] for digest in asked)
    assert w2.prefetched_bytes == bytes_of[asked[0]]
    assert all(one.prefetch_bytes == 0 for one in status.devices if one.worker_id != "w2")


def test_a_device_fetches_whole_stages_and_no_more_than_its_memory_would_hold(fleet_model: TinyModel) -> None:
    manifest, workers = fleet_model.manifest, make_workers(make_profile(), make_profile())
    demand = Demand(num_streams=1)
    stages = place_split(
        footprint(manifest), declared_fleet(footprint(manifest), workers).devices, demand, [1, 3]
    ).stages
    most_bytes = sum(blob.num_bytes for blob in shard_blobs(manifest, LayerRange(1, 4)))

    assert wanted_of(manifest, stages, most_bytes).layers == (LayerRange(0, 1),)
    assert wanted_of(manifest, stages[::-1], most_bytes).layers == (LayerRange(1, 4),)
    assert wanted_of(manifest, stages, 2 * most_bytes).layers == (LayerRange(0, 1), LayerRange(1, 4))

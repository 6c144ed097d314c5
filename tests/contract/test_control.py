"""Control with several pipelines, told by hand what workers say: what it commands, and whom it believes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator import bringup, control
from orchestrator.core.limits import Pace
from shoal import messages
from shoal.errors import ConfigError, NotReady
from shoal.types import DeviceMode, PipelineId, Telemetry
from shoal.v1 import fleet_pb2
from tests.support.architectures import options_of
from tests.support.desk import Desk, make_desk
from tests.support.shards import TinyModel, make_tiny_model

P1, P2 = PipelineId("p1"), PipelineId("p2")
# Longer than any state holds, and within the lease.
RECOVERED_S = 60.0
TWO_REPLICAS: dict[str, Any] = {"replicas": 2, "expect_workers": 4}


def make_two_pipelines(model: TinyModel) -> Desk:
    """p1 is w0 and w2, p2 is w1 and w3."""
    desk = make_desk(model, **TWO_REPLICAS)
    for index in range(4):
        desk.join(f"w{index}")
    desk.bring_up("w0", "w2")
    desk.bring_up("w1", "w3")
    assert desk.serving() == {"p1": ["w0", "w2"], "p2": ["w1", "w3"]}
    return desk


async def test_each_pipeline_loads_links_and_serves_by_itself(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, **TWO_REPLICAS)
    for index in range(4):
        desk.join(f"w{index}")

    desk.bring_up("w1", "w3")

    assert desk.serving() == {"p2": ["w1", "w3"]}
    assert desk.hub.routes == {P1: ("w0", "w2"), P2: ("w1", "w3")}
    await desk.control.wait_serving()
    desk.bring_up("w0", "w2")
    assert desk.serving() == {"p1": ["w0", "w2"], "p2": ["w1", "w3"]}
    assert desk.epoch(P1) != desk.epoch(P2)


async def test_chunks_have_borders_on_pipelines_of_models_with_wide_heads_alone(
    fleet_model: TinyModel, tmp_path: Path
) -> None:
    wide = make_tiny_model(tmp_path, **options_of("gemma3 of wide heads"), weight_type="F16", layout="hf")
    borders = []
    for model in (fleet_model, wide):
        desk = make_desk(model, expect_workers=1)
        desk.join("w0")
        desk.bring_up("w0")
        borders.append(desk.engine.pipelines[P1].limits.chunk_border)
    assert borders == [0, 32]


async def test_a_load_command_names_the_stages_of_its_own_pipeline_alone(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, **TWO_REPLICAS)
    for index in range(4):
        desk.join(f"w{index}")

    commands = {worker_id: desk.load_command(worker_id) for worker_id in desk.sessions}

    assert {one: commands[one].pipeline_id for one in commands} == {"w0": "p1", "w2": "p1", "w1": "p2", "w3": "p2"}
    assert [stage.worker_id for stage in commands["w3"].stages] == ["w1", "w3"]
    assert commands["w0"].link_token == commands["w2"].link_token != commands["w1"].link_token


async def test_a_lost_worker_ends_its_own_pipeline_and_leaves_the_other_its_epoch(fleet_model: TinyModel) -> None:
    desk = make_two_pipelines(fleet_model)
    epoch = desk.epoch(P2)

    desk.lose("w0")

    assert desk.serving() == {"p2": ["w1", "w3"]}
    assert desk.epoch(P2) == epoch
    assert desk.hub.routes[P1] == ("w2",), "what is left of the other is placed at once"
    await desk.control.wait_serving()


async def test_what_is_left_of_a_lost_pipeline_is_placed_again_without_loading_the_other_anew(
    fleet_model: TinyModel,
) -> None:
    desk = make_two_pipelines(fleet_model)
    before = desk.epoch(P2)
    for worker_id in desk.sessions:
        desk.commands(worker_id)

    desk.lose("w0")
    desk.bring_up("w2")

    assert desk.serving() == {"p1": ["w2"], "p2": ["w1", "w3"]}
    assert desk.epoch(P1) > desk.epoch(P2) == before
    assert desk.commands("w1") == desk.commands("w3") == []


@pytest.mark.parametrize("forgery", ["shard_failed", "shard_loaded", "links_opened"])
async def test_a_worker_cannot_speak_for_a_pipeline_it_is_no_stage_of(fleet_model: TinyModel, forgery: str) -> None:
    desk = make_desk(fleet_model, **TWO_REPLICAS)
    for index in range(4):
        desk.join(f"w{index}")
    shard = desk.load_command("w0")
    forged: dict[str, Any] = {
        "shard_failed": fleet_pb2.ShardFailed(pipeline_id="p1", epoch=shard.epoch),
        "shard_loaded": fleet_pb2.ShardLoaded(pipeline_id="p1", epoch=shard.epoch),
        "links_opened": fleet_pb2.LinksOpened(pipeline_id="p1", epoch=shard.epoch, link_to_next="socket"),
    }

    desk.tell("w1", **{forgery: forged[forgery]})

    assert desk.hub.routes.keys() == {P1, P2}
    assert {desk.device(f"w{index}").state for index in range(4)} == {"loading"}
    assert desk.sessions["w1"].link_to_next == ""


@pytest.mark.parametrize(("teller", "serving"), [("w1", ["p1", "p2"]), ("w2", ["p2"])], ids=["a stranger", "a stage"])
async def test_a_broken_link_ends_the_pipeline_of_who_tells_it(
    fleet_model: TinyModel, monkeypatch: pytest.MonkeyPatch, teller: str, serving: list[str]
) -> None:
    monkeypatch.setattr(control, "LINK_GRACE_S", 0.0)
    desk = make_two_pipelines(fleet_model)

    desk.tell(teller, link_failed=fleet_pb2.LinkFailed(pipeline_id="p1", epoch=desk.epoch(P1), message="reset"))
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, later.set)
    await later.wait()

    assert list(desk.serving()) == serving


async def test_links_of_an_earlier_epoch_do_not_count(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model)
    desk.join("w0")
    stale = desk.load_command("w0")
    desk.join("w1")
    fresh = desk.load_command("w0")
    assert fresh.epoch > stale.epoch

    desk.link("w0", "p1", stale.epoch)

    assert desk.sessions["w0"].link_to_next == ""


async def test_a_shard_that_cannot_be_loaded_ends_the_pipeline_it_is_of_alone(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, **TWO_REPLICAS)
    for index in range(4):
        desk.join(f"w{index}")
    desk.bring_up("w1", "w3")
    shard = desk.load_command("w0")

    failed = fleet_pb2.ShardFailed(pipeline_id="p1", epoch=shard.epoch, reason="CORRUPT_BLOB", message="torn")
    desk.tell("w0", shard_failed=failed)

    assert desk.serving() == {"p2": ["w1", "w3"]}
    assert (desk.device("w0").state, desk.device("w2").state) == ("standby", "standby")
    assert desk.control.status().ready


async def test_a_pipeline_that_loads_for_too_long_is_given_up_alone(
    fleet_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bringup, "LOAD_TIMEOUT_S", 0.0)
    desk = make_desk(fleet_model, **TWO_REPLICAS)
    for index in range(4):
        desk.join(f"w{index}")
    desk.bring_up("w1", "w3")
    shard = desk.load_command("w2")
    desk.tell("w2", shard_loaded=fleet_pb2.ShardLoaded(pipeline_id="p1", epoch=shard.epoch))

    desk.control.tick(time.monotonic())

    assert desk.serving() == {"p2": ["w1", "w3"]}
    assert desk.is_closed("w0")
    assert not desk.is_closed("w2")
    desk.lose("w0")
    assert desk.control.status().departed[0].why == "it did not load its layers in time"


async def test_a_worker_that_leaves_closes_its_pipeline_and_another_takes_requests(fleet_model: TinyModel) -> None:
    desk = make_two_pipelines(fleet_model)

    desk.tell("w2", leaving=fleet_pb2.Leaving())
    await asyncio.sleep(0)

    assert desk.serving() == {"p2": ["w1", "w3"]}
    assert "w2" in desk.sessions
    await desk.control.wait_serving()


async def test_a_device_kept_for_latency_joins_a_fleet_and_the_others_only_hear_whom_to_dial(
    fleet_model: TinyModel,
) -> None:
    desk = make_desk(fleet_model)
    desk.join("w0")
    desk.bring_up("w0")
    epoch = desk.epoch(P1)
    desk.commands("w0")

    desk.join("w1", mode=DeviceMode.LATENCY)
    desk.bring_up("w1")

    assert desk.serving() == {"p1": ["w0"], "p2": ["w1"]}
    assert desk.epoch(P1) == epoch
    assert [command.WhichOneof("command") for command in desk.commands("w0")] == ["try_peers"]
    assert [one.mode for one in desk.control.status().pipelines] == ["mixed", "latency"]


async def test_the_first_placement_waits_for_the_devices_that_are_expected(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, expect_workers=2)
    desk.join("w0", mode=DeviceMode.LATENCY)
    assert desk.hub.routes == {}
    with pytest.raises(NotReady, match="1 of 2 devices have joined"):
        await desk.control.wait_serving()

    desk.join("w1")

    assert desk.hub.routes == {P1: ("w1",), P2: ("w0",)}


async def test_a_hot_device_slows_its_own_pipeline_to_what_it_may_do(fleet_model: TinyModel) -> None:
    desk = make_two_pipelines(fleet_model)

    heat(desk, "w2", 61.0)
    heat(desk, "w0", 72.0)

    assert pace(desk, P1) == Pace(max_batch=4, steps_per_s=6.0)
    assert pace(desk, P2) == Pace(max_batch=8)
    (p1, p2) = desk.control.status().pipelines
    assert ((p1.max_batch, p1.steps_per_s), (p2.max_batch, p2.steps_per_s)) == ((4, 6.0), (8, 0.0))
    hot = desk.device("w0")
    assert (hot.thermal_state, hot.thermal_cause, hot.max_batch, hot.steps_per_s) == ("hot", "72.0 C", 4, 6.0)


async def test_a_pipeline_that_comes_up_with_a_hot_device_is_limited_at_once(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model)
    desk.join("w0")
    heat(desk, "w0", 61.0)

    desk.bring_up("w0")

    assert pace(desk, P1) == Pace(max_batch=6, steps_per_s=12.0)


async def test_recovery_needs_time_and_no_news(fleet_model: TinyModel) -> None:
    desk = make_two_pipelines(fleet_model)
    heat(desk, "w1", 61.0)
    heat(desk, "w1", 40.0)
    assert pace(desk, P2) == Pace(max_batch=6, steps_per_s=12.0)

    desk.control.tick(time.monotonic() + RECOVERED_S)

    assert pace(desk, P2) == Pace(max_batch=8)


async def test_a_worker_that_comes_back_is_not_as_hot_as_its_ghost(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model)
    desk.join("w0")
    heat(desk, "w0", 72.0)
    desk.lose("w0")

    desk.join("w0")

    assert desk.device("w0").thermal_state == "nominal"


def test_a_split_of_more_than_one_pipeline_is_refused_at_the_start(fleet_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="replicas = 2"):
        make_desk(fleet_model, split="2,2", replicas=2)


def heat(desk: Desk, worker_id: str, temperature_c: float) -> None:
    telemetry = messages.telemetry_to_proto(Telemetry(temperature_c=temperature_c))
    desk.tell(worker_id, heartbeat=fleet_pb2.Heartbeat(telemetry=telemetry))


def pace(desk: Desk, pipeline_id: PipelineId) -> Pace:
    lane = desk.engine.lane(pipeline_id)
    assert lane is not None
    return lane.scheduler.pace

"""Control with several pipelines, told by hand what workers say: what it commands, and whom it believes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator import bringup, control
from orchestrator.control import Control
from orchestrator.core.limits import Pace
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.worker_session import WorkerSession
from shoal import messages
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError, InternalError, NotReady
from shoal.types import DeviceLimits, DeviceMode, PipelineId, Telemetry, WorkerId
from shoal.v1 import admin_pb2, fleet_pb2
from tests.support.fleet import make_device
from tests.support.shards import TinyModel

P1, P2 = PipelineId("p1"), PipelineId("p2")
LIMITS = DeviceLimits(moderate_c=60.0, hot_c=70.0, max_batch=(8, 6, 4, 2))
# Longer than any state holds, and within the lease.
RECOVERED_S = 60.0
TWO_REPLICAS: dict[str, Any] = {"replicas": 2, "expect_workers": 4}


@dataclass
class Desk:
    """A control task without its loop, and the commands that it gave each worker."""

    control: Control
    engine: Engine
    hub: FlowHub
    sessions: dict[str, WorkerSession] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)

    def join(self, worker_id: str, held: fleet_pb2.HeldShard | None = None, **profile: Any) -> None:
        self.incarnations[worker_id] = self.incarnations.get(worker_id, 0) + 1
        device = make_device(max_batch=8, limits=LIMITS, **profile)
        hello = fleet_pb2.Hello(
            worker_id=worker_id,
            incarnation=self.incarnations[worker_id],
            profile=messages.profile_to_proto(device),
            flow_address=f"{worker_id}:1",
            held=held,
        )
        self.sessions[worker_id] = self.control.take_in(hello)
        self.tell(worker_id, heartbeat=fleet_pb2.Heartbeat())
        self.control.joined(WorkerId(worker_id))
        while self._answer_survey():
            pass

    def _answer_survey(self) -> bool:
        """Let all workers that are asked of themselves say that there is nothing to tell; False if nobody is asked."""
        has_answered = False
        for worker_id, session in list(self.sessions.items()):
            queue = session._commands
            for command in [queue.get_nowait() for _ in range(queue.qsize())]:
                match None if command is None else command.WhichOneof("command"):
                    case "measure":
                        self.tell(worker_id, measured=fleet_pb2.Measured(reason=InternalError.reason))
                    case "probe_links":
                        self.tell(worker_id, links_probed=fleet_pb2.LinksProbed())
                    case _:
                        queue.put_nowait(command)
                        continue
                has_answered = True
        return has_answered

    def tell(self, worker_id: str, **event: Any) -> None:
        self.control.on_event(self.sessions[worker_id], fleet_pb2.AttachRequest(**event))

    def lose(self, worker_id: str) -> None:
        self.control.left(self.sessions.pop(worker_id))

    def commands(self, worker_id: str) -> list[fleet_pb2.AttachResponse]:
        """What the worker has not read yet; a stream that was closed ends them."""
        queue, commands = self.sessions[worker_id]._commands, []
        while not queue.empty():
            command = queue.get_nowait()
            if command is not None:
                commands.append(command)
        return commands

    def is_closed(self, worker_id: str) -> bool:
        queue = self.sessions[worker_id]._commands
        return None in [queue.get_nowait() for _ in range(queue.qsize())]

    def load_command(self, worker_id: str) -> fleet_pb2.LoadShard:
        """The newest; earlier ones were overtaken."""
        return [one.load_shard for one in self.commands(worker_id) if one.HasField("load_shard")][-1]

    def bring_up(self, *worker_ids: str) -> None:
        """Let these, the stages of one pipeline, load and link."""
        shards = {worker_id: self.load_command(worker_id) for worker_id in worker_ids}
        for worker_id, shard in shards.items():
            loaded = fleet_pb2.ShardLoaded(pipeline_id=shard.pipeline_id, epoch=shard.epoch, stage=shard.stage)
            self.tell(worker_id, shard_loaded=loaded)
        for worker_id, shard in shards.items():
            self.link(worker_id, shard.pipeline_id, shard.epoch)

    def link(self, worker_id: str, pipeline_id: str, epoch: int) -> None:
        opened = fleet_pb2.LinksOpened(pipeline_id=pipeline_id, epoch=epoch, link_to_next="socket")
        self.tell(worker_id, links_opened=opened)

    def epoch(self, pipeline_id: PipelineId) -> int:
        return self.engine.pipelines[pipeline_id].epoch

    def serving(self) -> dict[str, list[str]]:
        status = self.control.status()
        return {one.pipeline_id: list(one.worker_ids) for one in status.pipelines}

    def device(self, worker_id: str) -> admin_pb2.DeviceStatus:
        return next(one for one in self.control.status().devices if one.worker_id == worker_id)


def make_desk(model: TinyModel, **options: Any) -> Desk:
    config = OrchestratorConfig(home=model.store.root, model=model.manifest.name, lease_s=1000.0, **options)
    engine = Engine()
    hub = FlowHub(engine.on_frame, lambda worker_id, message: None)

    async def ignore(_: bool) -> None:
        pass

    return Desk(Control(config, model.manifest, hub, engine, ignore), engine, hub)


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


async def test_a_worker_that_leaves_closes_its_pipeline_and_another_takes_requests(fleet_model: TinyModel) -> None:
    desk = make_two_pipelines(fleet_model)

    desk.tell("w2", leaving=fleet_pb2.Leaving())

    assert desk.serving() == {"p2": ["w1", "w3"]}
    assert "w2" in desk.sessions
    await desk.control.wait_serving()


async def test_a_device_kept_for_latency_joins_a_fleet_without_a_word_to_the_others(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model)
    desk.join("w0")
    desk.bring_up("w0")
    epoch = desk.epoch(P1)
    desk.commands("w0")

    desk.join("w1", mode=DeviceMode.LATENCY)
    desk.bring_up("w1")

    assert desk.serving() == {"p1": ["w0"], "p2": ["w1"]}
    assert desk.epoch(P1) == epoch
    assert desk.commands("w0") == []
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


def held_by(command: fleet_pb2.LoadShard) -> fleet_pb2.HeldShard:
    return fleet_pb2.HeldShard(
        pipeline_id=command.pipeline_id, layers=command.layers, model_digest=command.model_digest, shape=command.shape
    )


async def test_devices_that_hold_a_whole_pipeline_have_it_again_whoever_else_is_awaited(fleet_model: TinyModel) -> None:
    before = make_desk(fleet_model, split="2,2", expect_workers=2)
    for name in ("w0", "w1"):
        before.join(name)
    held = {name: held_by(before.load_command(name)) for name in ("w0", "w1")}
    desk = make_desk(fleet_model, split="2,2", expect_workers=4)

    for name, shard in held.items():
        desk.join(name, shard)
    desk.bring_up("w0", "w1")

    assert desk.serving() == {"p1": ["w0", "w1"]}


async def test_who_holds_layers_waits_a_moment_for_its_partner_and_not_for_ever(fleet_model: TinyModel) -> None:
    before = make_desk(fleet_model, split="2,2", expect_workers=2)
    for name in ("w0", "w1"):
        before.join(name)
    held = held_by(before.load_command("w0"))
    desk = make_desk(fleet_model, expect_workers=3)
    desk.join("w0", held)
    desk.control.tick(desk.control._started_at + control.REUNION_S - 0.1)
    assert desk.commands("w0") == []
    desk.control._started_at -= control.REUNION_S

    desk.control.tick(time.monotonic())
    desk.bring_up("w0")

    assert desk.serving() == {"p1": ["w0"]}

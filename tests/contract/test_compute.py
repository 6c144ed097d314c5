"""The compute thread with a real inbox and real shards: what it loads, where it sends, and that no step can kill it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from shoal.codec import pack_frame
from shoal.errors import InternalError
from shoal.types import LayerRange, ThermalModel
from shoal.v1 import flow_pb2
from tests.support.compute import NUM_LAYERS, WAIT_S, Bench, FakeLink, bench, model, run_badly, start
from tests.support.shards import make_tokens
from tests.support.stages import EPOCH, PIPELINE_ID, make_cancel, make_row, make_spec, make_step
from worker.commands import (
    AdoptSocket,
    ConnectStage,
    LinkBroke,
    LoadStage,
    SetUplink,
    StageFailed,
    StageLoaded,
    UnloadStage,
)
from worker.shard import Shard

__all__ = ["bench", "model", "start"]

PROMPT = make_tokens(7, 280, seed=1)


def prefill(step: int = 1, sequence_id: int = 1) -> flow_pb2.Frame:
    return make_step(step, [make_row(sequence_id, num_tokens=7)], PROMPT)


def test_a_loaded_stage_answers_steps(bench: Bench) -> None:
    loaded = bench.load()
    bench.compute.post(prefill())

    assert isinstance(loaded, StageLoaded)
    assert loaded.execution_provider == "CPUExecutionProvider"
    assert len(bench.uplink.next().step_result.tokens) == 1


def test_a_graph_that_cannot_be_loaded_is_told_and_the_thread_lives_on(bench: Bench) -> None:
    spec = make_spec(bench.model, LayerRange(0, NUM_LAYERS), 0, 1)
    bench.compute.post(LoadStage(spec, b"no graph", bench.model.blob_directory))

    failed = bench.next_event()

    assert isinstance(failed, StageFailed)
    assert isinstance(failed.error, InternalError)
    assert isinstance(bench.load(), StageLoaded)


def test_a_step_that_does_not_fit_its_slot_becomes_a_lost_step_and_the_thread_lives_on(bench: Bench) -> None:
    bench.load()
    bench.compute.post(make_step(1, [make_row(1, num_tokens=7, slot=99)], PROMPT))
    failed = bench.uplink.next().step_failed
    bench.compute.post(prefill(step=2))

    assert (failed.step, failed.stage, failed.reason) == (1, 0, "INTERNAL")
    assert "slot 99" in failed.message
    assert bench.uplink.next().step_result.step == 2


def test_an_error_nobody_foresaw_becomes_a_lost_step_with_a_number_to_look_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.load()
    with monkeypatch.context() as patch:
        patch.setattr(Shard, "run", run_badly)
        bench.compute.post(prefill())
        failed = bench.uplink.next().step_failed
    bench.compute.post(prefill(step=2))

    assert (failed.step, failed.reason) == (1, "INTERNAL")
    assert "ZeroDivisionError" in failed.message
    assert "correlation id" in failed.message
    assert bench.uplink.next().step_result.step == 2


def test_a_token_outside_the_vocabulary_never_reaches_the_runtime(bench: Bench) -> None:
    bench.load()
    bench.compute.post(make_step(1, [make_row(1, num_tokens=7)], [*PROMPT[:6], 288]))

    assert "token 288 is not in the vocabulary of 288" in bench.uplink.next().step_failed.message


def test_frames_for_a_pipeline_that_is_not_here_are_dropped(bench: Bench) -> None:
    bench.compute.post(prefill())
    bench.load()
    bench.compute.post(prefill(step=2))

    assert bench.uplink.next().step_result.step == 2


def test_a_burst_on_one_device_needs_no_link(bench: Bench) -> None:
    bench.load()
    bench.compute.post(prefill())
    first = bench.uplink.next().step_result.tokens[0]

    bench.compute.post(make_step(2, [make_row(1, position=7)], [first.token_id], burst_steps=2))

    assert [bench.uplink.next().step_result.burst_steps for _ in range(3)] == [2, 1, 0]


def test_a_burst_on_one_device_can_be_cancelled(bench: Bench) -> None:
    bench.load()
    bench.compute.post(prefill())
    first = bench.uplink.next().step_result.tokens[0]
    bench.compute.post(make_step(2, [make_row(1, position=7)], [first.token_id], burst_steps=100))
    bench.uplink.next()

    bench.compute.post(make_cancel((1, 0)))

    while (result := bench.uplink.next().step_result).burst_steps:
        assert result.burst_steps > 1, "the burst ran to its end"
    assert list(result.tokens) == []


def test_frames_for_the_next_stage_take_its_link(bench: Bench) -> None:
    direct = FakeLink()
    bench.load(LayerRange(0, 2), stage=0, num_stages=2)
    bench.compute.post(ConnectStage(PIPELINE_ID, EPOCH, {1: direct}))

    bench.compute.post(prefill())

    assert direct.next().to_stage == 1
    assert bench.uplink.sent.empty()


def test_without_a_link_to_the_next_stage_frames_go_by_the_orchestrator(bench: Bench) -> None:
    bench.load(LayerRange(0, 2), stage=0, num_stages=2)
    bench.compute.post(ConnectStage(PIPELINE_ID, EPOCH, {}))

    bench.compute.post(prefill())

    assert bench.uplink.next().to_stage == 1


def test_a_broken_link_is_told(bench: Bench) -> None:
    bench.load(LayerRange(0, 2), stage=0, num_stages=2)
    bench.compute.post(ConnectStage(PIPELINE_ID, EPOCH, {1: FakeLink(is_broken=True)}))

    bench.compute.post(prefill())

    broke = bench.next_event()
    assert isinstance(broke, LinkBroke)
    assert (broke.spec.pipeline_id, broke.spec.epoch) == (PIPELINE_ID, EPOCH)
    assert broke.message == "to stage 1: the peer is gone"


def test_without_a_link_to_the_orchestrator_its_loss_is_told(bench: Bench) -> None:
    bench.load()
    bench.compute.post(SetUplink(None))
    bench.compute.post(prefill())

    broke = bench.next_event()

    assert isinstance(broke, LinkBroke)
    assert "the orchestrator is out of reach" in broke.message
    bench.uplink.closed.get(timeout=WAIT_S)


def test_links_of_an_epoch_that_is_over_are_closed(bench: Bench) -> None:
    late = FakeLink()
    bench.load()

    bench.compute.post(ConnectStage(PIPELINE_ID, EPOCH - 1, {0: late}))

    late.closed.get(timeout=WAIT_S)


def test_unloading_closes_links_in_both_directions(bench: Bench) -> None:
    outgoing = FakeLink()
    ours, theirs = socket.socketpair()
    bench.load(LayerRange(0, 2), stage=0, num_stages=2)
    bench.compute.post(ConnectStage(PIPELINE_ID, EPOCH, {1: outgoing}))
    bench.compute.post(AdoptSocket(PIPELINE_ID, ours))

    bench.compute.post(UnloadStage(PIPELINE_ID))

    outgoing.closed.get(timeout=WAIT_S)
    with theirs:
        theirs.settimeout(WAIT_S)
        assert theirs.recv(1) == b""


def test_frames_of_an_adopted_socket_are_computed(bench: Bench) -> None:
    ours, theirs = socket.socketpair()
    bench.load()
    bench.compute.post(AdoptSocket(PIPELINE_ID, ours))

    with theirs:
        theirs.sendall(pack_frame(prefill()))
        assert bench.uplink.next().step_result.step == 1


def test_a_socket_for_a_pipeline_that_is_not_here_is_hung_up_on(bench: Bench) -> None:
    ours, theirs = socket.socketpair()

    bench.compute.post(AdoptSocket(PIPELINE_ID, ours))

    with theirs:
        theirs.settimeout(WAIT_S)
        assert theirs.recv(1) == b""


def test_kv_in_use_is_known_and_given_back(bench: Bench) -> None:
    bench.load()
    bench.compute.post(prefill())
    bench.uplink.next()
    bench.compute.post(make_cancel((1, 0)))
    bench.compute.post(prefill(step=2, sequence_id=2))
    bench.uplink.next()
    bench.compute.post(make_cancel((2, 0)))
    bench.compute.post(make_step(3, [make_row(9, position=7)], [5]))
    bench.uplink.next()
    assert isinstance(bench.load(), StageLoaded)

    assert bench.compute.kv_bytes == 0


def test_a_stage_is_replaced_by_a_later_one_of_its_pipeline(bench: Bench) -> None:
    bench.load(LayerRange(0, 2), stage=0, num_stages=2)
    bench.load()

    bench.compute.post(prefill())

    assert len(bench.uplink.next().step_result.tokens) == 1


@pytest.mark.parametrize("profile", [{"speed": 2.0}, {"speed": 0.5, "is_emulated": True}], ids=str)
def test_devices_faster_and_slower_than_this_machine_can_load(
    start: Callable[..., Bench], profile: dict[str, object]
) -> None:
    assert isinstance(start(**profile).load(), StageLoaded)


def test_a_real_device_has_no_model_of_its_heat(bench: Bench) -> None:
    assert bench.compute.emulated is None


def test_what_an_emulated_device_computes_and_waits_for_warms_it(start: Callable[..., Bench]) -> None:
    bench = start(is_emulated=True, speed=0.5, thermal=ThermalModel(heat_c_per_s=100.0))
    device = bench.compute.emulated
    assert device is not None
    cold = device.condition(time.monotonic())
    assert cold.temperature_c is not None

    bench.load()
    for step in range(1, 20):
        bench.compute.post(prefill(step=step, sequence_id=step))
        bench.uplink.next()
    bench.compute.stop(WAIT_S)

    warm = device.condition(time.monotonic())
    assert warm.busy_s > cold.busy_s
    assert warm.temperature_c is not None
    assert warm.temperature_c > cold.temperature_c


def test_a_hot_device_waits_longer_for_the_same_work(
    start: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    hot = start(is_emulated=True, thermal=ThermalModel(ambient_c=60.0, heat_c_per_s=100.0, cooling_per_s=0.001))
    hot.load()
    monkeypatch.setattr("worker.stage.time.sleep", waits.append)

    while not waits:
        hot.compute.post(prefill())
        hot.uplink.next()
        hot.compute.post(make_cancel((1, 0)))

    assert hot.compute.emulated is not None
    assert hot.compute.emulated.slow_down.clock < 1.0


def test_a_stop_unloads_and_ends_the_thread(start: Callable[..., Bench]) -> None:
    bench = start()
    bench.load()

    assert bench.compute.stop(WAIT_S)
    bench.uplink.closed.get(timeout=WAIT_S)

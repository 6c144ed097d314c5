"""Who is asked for times and links, when a placement waits for them, and what the planner is told. Workers speak by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from orchestrator import measuring
from orchestrator.core import refinement
from orchestrator.core.figures import LinkFigures
from orchestrator.measuring import MAX_WAIT_S, MEASURE_TIMEOUT_S, PROBE_TIMEOUT_S, RETRY_S
from orchestrator.worker_session import WorkerSession
from shoal.errors import InternalError, NotReady
from shoal.types import WorkerId
from shoal.v1 import fleet_pb2
from tests.support.measured import NOW, Desk, make_lane, make_profile, passed
from tests.support.shards import TinyModel, make_tiny_model
from worker import profiling


@pytest.fixture
def desk(tiny_model: TinyModel) -> Desk:
    return Desk(tiny_model)


def test_a_device_that_knows_nothing_of_itself_is_measured_and_then_its_link_is_probed(desk: Desk) -> None:
    desk.join("a")
    assert desk.told("a") == ["measure"]
    desk.measured("a")
    assert desk.told("a") == ["probe_links"]
    desk.probed("a", up=(2.0, 100.0))
    assert desk.told("a") == []


def test_who_comes_and_those_that_are_there_try_each_other_though_they_hold_layers(desk: Desk) -> None:
    desk.busy = {"a"}
    for worker_id in "abc":
        desk.join(worker_id)
    for worker_id in "abc":
        desk.commands(worker_id)

    assert desk.tries == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}


def test_who_has_no_link_yet_is_not_tried_by_those_that_come(desk: Desk) -> None:
    desk.measuring.take_in(WorkerSession(fleet_pb2.Hello(worker_id="early")), make_profile())
    for worker_id in "ab":
        desk.join(worker_id)
    for worker_id in "ab":
        desk.commands(worker_id)

    assert desk.tries == {"a": ["b"], "b": ["a"]}


def test_a_device_that_was_measured_earlier_says_so_and_is_not_measured(desk: Desk) -> None:
    desk.join("a", known=desk.times(0.007))
    assert desk.told("a") == ["probe_links"]
    assert desk.figures.devices[0].times.layer_at(1) == 0.007
    assert not desk.figures.devices[0].is_declared


@pytest.mark.parametrize(
    "fields",
    [
        {"shape_digest": "another"},
        {"measured_at_s": 1.0},
        {"measured_at_s": 4e9},
        {"layer": []},
        {"layer": [fleet_pb2.RowsTime(rows=2, seconds=0.1), fleet_pb2.RowsTime(rows=1, seconds=0.1)]},
        {"layer": [fleet_pb2.RowsTime(rows=1, seconds=0.0)]},
        {"layer": [fleet_pb2.RowsTime(rows=1, seconds=math.nan)]},
        {"head": [fleet_pb2.RowsTime(rows=1, seconds=math.inf)]},
        {"prefill_token_s": -1.0},
    ],
)
def test_known_times_that_are_old_or_of_another_model_or_no_times_at_all_do_not_count(
    desk: Desk, fields: dict[str, Any]
) -> None:
    desk.join("a", known=desk.times(**fields))
    assert desk.told("a") == ["measure"]
    assert desk.figures.devices[0].is_declared


def test_devices_of_one_machine_are_measured_one_after_the_other(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, host="same")
    assert (desk.told("a"), desk.told("b")) == (["measure"], [])
    desk.measured("a")
    assert desk.told("b") == ["measure"]


def test_devices_that_say_they_share_a_machine_are_measured_one_after_the_other_whatever_their_addresses(
    desk: Desk,
) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, machine_id="same")
    assert (desk.told("a"), desk.told("b")) == (["measure"], [])


def test_devices_of_different_machines_are_measured_at_the_same_time(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id)
    assert (desk.told("a"), desk.told("b")) == (["measure"], ["measure"])


def test_nobody_is_asked_before_the_expected_devices_are_there(tiny_model: TinyModel) -> None:
    desk = Desk(tiny_model, num_expected=2)
    desk.join("a")
    assert desk.told("a") == []
    desk.join("b")
    assert (desk.told("a"), desk.told("b")) == (["measure"], ["measure"])


def test_a_device_that_holds_layers_is_asked_when_it_does_not(desk: Desk) -> None:
    desk.busy = {"a"}
    desk.join("a")
    assert desk.told("a") == []
    desk.busy = set()
    desk.measuring.tick([], NOW + 1.0)
    assert desk.told("a") == ["measure"]


def test_links_are_probed_when_nobody_computes(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    desk.probed("a")
    desk.join("b", host="same")
    desk.join("c", host="same")
    assert desk.told("c") == []
    desk.measured("b")
    assert desk.told("c") == ["measure"]
    desk.measured("c")
    assert (desk.told("b")[-1], desk.told("c")) == ("probe_links", ["probe_links"])


def test_of_devices_that_come_together_each_pair_is_probed_once(tiny_model: TinyModel) -> None:
    desk = Desk(tiny_model, num_expected=3)
    for worker_id in ("a", "b", "c"):
        desk.join(worker_id, known=desk.times())
    probes = {worker_id: desk.commands(worker_id)[0].probe_links for worker_id in desk.sessions}
    pairs = [{worker_id, peer.worker_id} for worker_id, probe in probes.items() for peer in probe.peers]
    assert sorted(map(sorted, pairs)) == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert len({probe.link_token for probe in probes.values()}) == 1


def test_a_device_that_comes_later_probes_those_that_are_free_and_they_learn_the_token(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, known=desk.times())
        desk.probed(worker_id)
    desk.commands("a"), desk.commands("b")
    desk.busy = {"b"}
    desk.join("c", known=desk.times())
    probe = desk.commands("c")[0].probe_links
    assert [peer.worker_id for peer in probe.peers] == ["a"]
    assert [one.probe_links.link_token for one in desk.commands("a")] == [probe.link_token]
    assert desk.commands("b") == []


def test_a_placement_waits_until_times_and_links_are_there(desk: Desk) -> None:
    desk.join("a")
    assert desk.awaits("a")
    desk.measured("a")
    assert desk.awaits("a")
    desk.probed("a")
    assert not desk.awaits("a")


def test_a_placement_does_not_wait_for_long(desk: Desk) -> None:
    desk.join("a")
    assert desk.awaits("a", NOW + MAX_WAIT_S - 0.1)
    assert not desk.awaits("a", NOW + MAX_WAIT_S)


def test_a_device_that_waited_for_others_is_waited_for_from_when_it_is_asked(tiny_model: TinyModel) -> None:
    desk = Desk(tiny_model, num_expected=2)
    desk.join("a", now=NOW - 100.0)
    desk.join("b", now=NOW)
    assert desk.awaits("a", NOW + MAX_WAIT_S - 0.1)


def test_a_placement_does_not_wait_for_a_device_that_holds_layers(desk: Desk) -> None:
    desk.busy = {"a"}
    desk.join("a")
    assert not desk.awaits("a")


def test_a_device_that_was_busy_is_asked_again_later_and_not_waited_for(desk: Desk) -> None:
    desk.join("a")
    desk.commands("a")
    desk.refuse("a", NotReady.reason)
    assert not desk.awaits("a")
    desk.measuring.tick([], NOW + RETRY_S - 0.1)
    assert "measure" not in desk.told("a")
    desk.measuring.tick([], NOW + RETRY_S)
    assert "measure" in desk.told("a")


def test_a_device_that_cannot_be_measured_is_placed_by_what_its_profile_declares(desk: Desk) -> None:
    desk.join("a")
    desk.refuse("a", InternalError.reason)
    desk.probed("a")
    desk.measuring.tick([], NOW + 100.0)
    assert "measure" not in desk.told("a")[1:]
    assert desk.figures.devices[0].is_declared


def test_a_device_that_never_answers_holds_nobody_up_forever(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, host="same")
    desk.measuring.tick([], NOW + MEASURE_TIMEOUT_S)
    assert desk.told("b") == ["measure"]
    assert desk.told("a") == ["measure"]


def test_an_answer_that_comes_late_counts_all_the_same(desk: Desk) -> None:
    desk.join("a")
    desk.measuring.tick([], NOW + MEASURE_TIMEOUT_S)
    desk.measured("a", now=NOW + MEASURE_TIMEOUT_S + 1.0)
    assert not desk.figures.devices[0].is_declared


def test_a_probe_without_an_answer_is_given_up(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    desk.measuring.tick([], NOW + PROBE_TIMEOUT_S)
    assert not desk.awaits("a", NOW + PROBE_TIMEOUT_S)


def test_what_a_ghost_says_does_not_count(desk: Desk) -> None:
    desk.join("a")
    ghost = desk.sessions["a"]
    desk.join("a")
    request = fleet_pb2.AttachRequest(measured=fleet_pb2.Measured(times=desk.times()))
    assert not desk.measuring.on_event(ghost, request, NOW)
    assert desk.figures.devices[0].is_declared


def test_times_of_another_shape_are_not_taken(desk: Desk) -> None:
    desk.join("a")
    desk.measured("a", desk.times(shape_digest="another"))
    assert desk.figures.devices[0].is_declared


def test_a_lost_device_is_no_longer_among_the_figures(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    desk.measuring.remove(WorkerId("a"))
    assert desk.figures.devices == ()
    assert desk.figures.links == {}


def test_memory_that_was_found_free_is_told(desk: Desk) -> None:
    desk.join("a", known=desk.times(free_bytes=123 << 20))
    assert desk.figures.devices[0].free_bytes == 123 << 20


def test_a_link_takes_one_way_half_of_there_and_back(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    desk.probed("a", up=(4.0, 80.0))
    assert desk.link("a", None) == desk.link(None, "a") == LinkFigures(0.002, 10e6)


def test_a_link_without_a_rate_is_not_limited(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    desk.probed("a", up=(0.5, 0.0))
    assert desk.link("a", None).bytes_per_s == math.inf


def test_a_probed_pair_is_as_far_apart_as_was_found_from_either_end(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, known=desk.times())
    desk.probed("a", up=(2.0, 100.0))
    desk.probed("b", up=(2.0, 100.0), a=(6.0, 40.0))
    assert desk.link("a", "b") == desk.link("b", "a") == LinkFigures(0.003, 5e6)


def test_real_devices_that_were_not_probed_are_as_far_apart_as_both_are_from_the_orchestrator(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, known=desk.times())
    desk.probed("a", up=(2.0, 80.0))
    desk.probed("b", up=(6.0, 40.0))
    assert desk.link("a", "b") == LinkFigures(0.004, 5e6)


def test_an_emulated_device_delays_what_it_sends_and_only_that(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, known=desk.times(), is_emulated=True)
    desk.probed("a", up=(2.0, 80.0))
    desk.probed("b", up=(6.0, 40.0))
    assert desk.link("a", "b") == LinkFigures(0.001, 10e6)


def test_emulated_devices_that_are_not_dialled_are_reached_by_way_of_the_orchestrator(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        desk.join(worker_id, known=desk.times(), is_emulated=True, allow_direct_links=False)
    desk.probed("a", up=(2.0, 80.0))
    desk.probed("b", up=(6.0, 40.0))
    assert desk.link("a", "b") == LinkFigures(0.004, 5e6)


def test_a_device_that_takes_three_times_as_long_as_it_said_is_planned_with_what_it_takes(desk: Desk) -> None:
    for worker_id in ("a", "b"):
        # With attention for nothing, what slots hold makes no difference.
        desk.join(worker_id, known=desk.times(layer_s=0.010, prefill_token_s=0.0))
    before = {str(one.worker_id): one.times.layer_at(2) for one in desk.figures.devices}
    lane = make_lane("a", "b")
    for _ in range(200):
        # Two layers of 15 ms; the second has the head of the model of four.
        desk.measuring.tick([passed(lane, 0.030, 3 * 0.034)], NOW)
    after = {str(one.worker_id): one.times.layer_at(2) for one in desk.figures.devices}
    assert after["a"] == before["a"]
    assert after["b"] == pytest.approx(3 * before["b"], rel=0.12)


def test_passes_with_prompts_in_them_say_nothing(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    before = desk.figures
    lane = make_lane("a")
    for _ in range(200):
        desk.measuring.tick([passed(lane, 9.0, num_rows=0)], NOW)
    assert desk.figures is before


def test_a_stage_of_a_device_that_has_left_says_nothing(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    lane = make_lane("gone")
    for _ in range(200):
        desk.measuring.tick([passed(lane, 9.0)], NOW)
    assert desk.figures.devices[0].times.layer_at(1) == 0.001


def test_operators_see_what_the_planner_sees(desk: Desk) -> None:
    desk.join("a", known=desk.times(0.007))
    desk.probed("a", up=(4.0, 80.0))
    (planned,) = desk.measuring.planned_devices()
    assert (planned.worker_id, planned.is_declared) == ("a", False)
    assert planned.times.layer[0].seconds == 0.007
    assert [(link.worker_id, link.rtt_ms, link.mbit_s) for link in planned.links] == [("", 4.0, 80.0)]


def test_a_model_without_a_middle_is_placed_by_what_profiles_declare(tmp_path: Path) -> None:
    desk = Desk(make_tiny_model(tmp_path, num_layers=2))
    desk.join("a", known=None)
    assert desk.told("a") == ["probe_links"]
    assert desk.figures.devices[0].is_declared


def test_orchestrator_and_workers_agree_on_what_is_fresh_and_on_the_context_that_is_timed() -> None:
    assert (measuring.MAX_AGE_S, measuring.MAX_AHEAD_S) == (profiling.MAX_AGE_S, profiling.MAX_AHEAD_S)
    assert refinement.CONTEXT_TOKENS == profiling.CONTEXT_TOKENS

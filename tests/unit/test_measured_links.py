"""What is known of links: told by devices that come back, probed, or seen to be late by the steps that go over them."""

from __future__ import annotations

import pytest

from orchestrator import measuring
from orchestrator.core.figures import LinkFigures
from orchestrator.core.hops import NUM_HOPS, TELL_EVERY_S, Hop
from orchestrator.lane import Lane
from shoal.types import WorkerId
from tests.support.measured import NOW, Desk, make_lane
from tests.support.shards import TinyModel

A, B = WorkerId("a"), WorkerId("b")


@pytest.fixture
def desk(tiny_model: TinyModel) -> Desk:
    return Desk(tiny_model)


def test_what_devices_that_hold_layers_know_of_their_links_is_planned_with(desk: Desk) -> None:
    desk.busy = {"a", "b"}

    desk.join("a", known=desk.times(), links={"up": (4.0, 80.0)})
    desk.join("b", known=desk.times(), links={"up": (2.0, 40.0), "a": (6.0, 8.0)})

    assert desk.link(None, "a") == LinkFigures(0.002, 1e7)
    assert desk.link("a", "b") == LinkFigures(0.003, 1e6)
    assert desk.told("a") == desk.told("b") == []


def test_links_that_a_free_device_knows_are_probed_again_and_what_comes_of_that_counts(desk: Desk) -> None:
    desk.join("a", known=desk.times(), links={"up": (4.0, 80.0)})

    assert desk.told("a") == ["probe_links"]
    desk.probed("a", up=(8.0, 40.0))
    assert desk.link(None, "a") == LinkFigures(0.004, 5e6)


def test_a_device_is_not_believed_to_have_measured_links_without_end(desk: Desk) -> None:
    desk.join(
        "a", links={f"peer-{number}": (1.0, 1.0) for number in range(measuring.MAX_TOLD_LINKS)} | {"b": (9.0, 9.0)}
    )
    desk.join("b")

    assert desk.link("a", "b") == LinkFigures()


def hopped(lane: Lane, seconds: float, num_rows: int = 0) -> Lane:
    """The lane, as it is when messages went from a to b in so long."""
    lane.pipeline._hops.extend([Hop(A, B, seconds, num_rows)] * NUM_HOPS)
    return lane


def make_pair(desk: Desk) -> Lane:
    """a and b hold layers; there and back between them takes 4 ms, at a megabyte a second."""
    desk.busy = {"a", "b"}
    desk.join("a", known=desk.times(), links={"up": (2.0, 80.0)})
    desk.join("b", known=desk.times(), links={"up": (2.0, 80.0), "a": (4.0, 8.0)})
    return make_lane("a", "b")


def test_a_link_that_has_become_slow_is_told_once_and_planned_with_both_ways(desk: Desk) -> None:
    lane = make_pair(desk)
    assert not desk.measuring.tick([hopped(lane, 7.002)], NOW)

    assert desk.measuring.tick([hopped(lane, 7.102)], NOW)

    assert desk.link("a", "b") == desk.link("b", "a")
    assert desk.link("a", "b").delay_s == pytest.approx(0.102)
    assert desk.link("a", "b").bytes_per_s == 1e6
    assert desk.link(None, "a") == LinkFigures(0.001, 1e7)
    assert not desk.measuring.tick([hopped(lane, 7.102)], NOW + TELL_EVERY_S)
    assert desk.link("a", "b").delay_s == pytest.approx(0.102)


def test_a_link_that_is_known_to_be_far_is_not_late_by_what_would_be_much_for_a_near_one(desk: Desk) -> None:
    desk.busy = {"a", "b"}
    desk.join("a", known=desk.times())
    desk.join("b", known=desk.times(), links={"a": (200.0, 8.0)})
    lane = make_lane("a", "b")
    desk.measuring.tick([hopped(lane, 0.1)], NOW)

    assert not desk.measuring.tick([hopped(lane, 0.28)], NOW)
    assert desk.measuring.tick([hopped(lane, 0.32)], NOW)


def test_what_rows_take_on_their_way_makes_no_link_late(desk: Desk) -> None:
    lane = make_pair(desk)
    num_rows = 250
    sending_s = num_rows * desk.measuring._footprint.activation_bytes / 1e6
    assert sending_s > 0.05
    desk.measuring.tick([hopped(lane, 0.002)], NOW)

    assert not desk.measuring.tick([hopped(lane, 0.002 + sending_s, num_rows)], NOW)


def test_a_link_that_was_late_is_probed_again_once_its_devices_hold_no_layers_and_that_counts(desk: Desk) -> None:
    desk.join("a", known=desk.times())
    desk.probed("a", up=(2.0, 80.0))
    desk.join("b", known=desk.times())
    desk.probed("b", up=(2.0, 80.0), a=(4.0, 8.0))
    lane = make_lane("a", "b")
    for name in ("a", "b"):
        desk.commands(name)
    desk.busy = {"a", "b"}
    desk.measuring.tick([hopped(lane, 0.002)], NOW)
    desk.measuring.tick([hopped(lane, 0.102)], NOW)
    assert desk.told("a") == desk.told("b") == []

    desk.busy = set()
    desk.measuring.advance(NOW)
    assert desk.told("a") == desk.told("b") == ["probe_links"]
    desk.probed("b", up=(2.0, 80.0), a=(20.0, 8.0))

    assert desk.link("a", "b") == LinkFigures(0.010, 1e6)


def test_a_device_that_refuses_to_probe_leaves_its_links_late(desk: Desk) -> None:
    lane = make_pair(desk)
    desk.measuring.tick([hopped(lane, 0.002)], NOW)
    desk.measuring.tick([hopped(lane, 0.102)], NOW)

    desk.probed("b")

    assert desk.link("a", "b").delay_s == pytest.approx(0.102)


def test_a_device_that_comes_again_has_no_late_links(desk: Desk) -> None:
    lane = make_pair(desk)
    desk.measuring.tick([hopped(lane, 0.002)], NOW)
    desk.measuring.tick([hopped(lane, 0.102)], NOW)

    desk.join("b", known=desk.times(), links={"a": (4.0, 8.0)})

    assert desk.link("a", "b") == LinkFigures(0.002, 1e6)

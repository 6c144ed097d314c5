"""Devices that are killed or frozen in mid-stream: every answer goes on, and is what it would have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from modelstore.manifest import Manifest
from tests.chaos.losses import Fault, LossyFleet, Stream, lossy_fleet, make_streams
from tests.support.real_model import real_store

pytestmark = pytest.mark.e2e

NUM_STREAMS, NUM_TOKENS = 4, 40

StartFleet = Callable[..., LossyFleet]


@pytest.fixture(scope="module")
def device_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What devices have fetched: a device that stands by in a later fleet has the weights already."""
    return tmp_path_factory.mktemp("devices")


@pytest.fixture
def start_fleet(real_model: Manifest, tmp_path: Path, device_folder: Path) -> Iterator[StartFleet]:
    for name in ("models", "blobs"):
        (tmp_path / name).symlink_to(real_store().root / name)
    (tmp_path / "devices").symlink_to(device_folder)
    with ExitStack() as running:
        yield lambda **options: running.enter_context(lossy_fleet(tmp_path, **options))


def undisturbed(fleet: LossyFleet) -> list[Stream]:
    streams = make_streams(NUM_STREAMS, NUM_TOKENS)
    fleet.answer(streams)
    assert [one.problem for one in streams] == [""] * NUM_STREAMS
    return streams


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.FREEZE])
def test_answers_outlive_a_device_in_the_middle_with_the_same_text(start_fleet: StartFleet, fault: Fault) -> None:
    fleet = start_fleet()
    expected = undisturbed(fleet)

    outcome = fleet.suffer(make_streams(NUM_STREAMS, NUM_TOKENS), expected, fault, after=12)

    assert outcome.wrong == ()
    assert outcome.detected_s is not None
    assert {one.num_recoveries for one in outcome.streams} == {1}


def test_answers_outlive_a_device_and_redis_lost_together(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    expected = undisturbed(fleet)
    fleet.kill_redis()

    outcome = fleet.suffer(make_streams(NUM_STREAMS, NUM_TOKENS), expected, Fault.KILL, after=5)

    assert outcome.wrong == ()


def test_without_a_device_that_stands_by_answers_wait_for_the_lost_one_to_come_back(start_fleet: StartFleet) -> None:
    fleet = start_fleet(num_devices=3, has_redis=False)
    expected = undisturbed(fleet)

    outcome = fleet.suffer(make_streams(NUM_STREAMS, NUM_TOKENS), expected, Fault.KILL, after=5, restarts_at_once=True)

    assert outcome.wrong == ()


def test_answers_outlive_an_orchestrator_that_is_killed_and_started_again(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    expected = undisturbed(fleet)

    outcome = fleet.suffer(make_streams(NUM_STREAMS, NUM_TOKENS), expected, Fault.ORCHESTRATOR, after=8)

    assert outcome.wrong == ()


def test_answers_outlive_an_orchestrator_and_redis_killed_together(start_fleet: StartFleet) -> None:
    fleet = start_fleet()
    expected = undisturbed(fleet)

    streams = make_streams(NUM_STREAMS, NUM_TOKENS)
    outcome = fleet.suffer(streams, expected, Fault.ORCHESTRATOR, after=20, kills_redis=True)

    assert outcome.wrong == ()

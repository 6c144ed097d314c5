"""Workers that are killed, frozen, started again or of another version, as the fleet and its clients see it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from launch.local import Child, LocalFleet
from shoal import Client
from shoal.generation import Generation
from shoal.status import FleetStatus
from tests.e2e.conftest import DEVICES, THIRDS, StartFleet
from tests.support.commands import WAIT_S, start_program, start_shoal, until

pytestmark = pytest.mark.e2e

PROMPT = "A very long story. Once upon a time"
LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "deadline_s": 3600.0}
# Of the long answer, when something happens.
NUM_BEFORE = 10


@pytest.fixture
def own_fleet(start_fleet: StartFleet) -> LocalFleet:
    return start_fleet(*DEVICES)


@pytest.fixture
def own_client(own_fleet: LocalFleet) -> Iterator[Client]:
    with Client(own_fleet.address, timeout_s=WAIT_S) as client:
        yield client


def child_named(fleet: LocalFleet, name: str) -> Child:
    return next(child for child in fleet.children if child.name == name)


def long_answer(client: Client) -> Generation:
    return client.generate(PROMPT, **LONG)


class Answering:
    """The long answer, which has begun when this is made. victim: the last one of those who compute it."""

    def __init__(self, client: Client) -> None:
        self._stream = client.stream(PROMPT, **LONG)
        self._deltas = iter(self._stream)
        assert [delta.index for delta in islice(self._deltas, NUM_BEFORE)] == list(range(NUM_BEFORE))
        (pipeline,) = [one for one in client.status().pipelines if one.num_running]
        self.victim = pipeline.worker_ids[-1]

    def rest(self) -> Generation:
        """Read it to its end."""
        assert [delta.index for delta in self._deltas] == list(range(NUM_BEFORE, LONG["max_tokens"]))
        return self._stream.result


def wait_members(client: Client, *worker_ids: str) -> FleetStatus:
    """Wait until exactly these are there, and requests are taken."""

    def is_so(status: FleetStatus) -> bool:
        return status.is_complete and {one.worker_id for one in status.devices} == set(worker_ids)

    return until(client.status, is_so)


def test_an_answer_whose_worker_is_killed_goes_on_with_the_others_and_is_what_it_would_have_been(
    own_fleet: LocalFleet, own_client: Client
) -> None:
    expected = long_answer(own_client)
    answering = Answering(own_client)
    child_named(own_fleet, answering.victim).process.kill()
    answer = answering.rest()

    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert (answer.num_recoveries, answer.has_changed_kernels) == (1, False)
    others = [worker_id for worker_id in own_fleet.worker_ids if worker_id != answering.victim]
    wait_members(own_client, *others)
    later = long_answer(own_client)
    assert later.token_ids == expected.token_ids
    assert {stage.worker_id for stage in later.pipeline} <= set(others)


def test_an_answer_waits_for_a_worker_that_is_started_again_where_nobody_else_can_have_its_layers(
    start_fleet: StartFleet, home: Path
) -> None:
    fleet = start_fleet(*DEVICES, split=THIRDS)
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        expected = long_answer(client)
        answering = Answering(client)
        child = child_named(fleet, "phone-1")
        child.process.kill()
        child.process.wait()
        until(client.status, lambda status: not status.ready)

        with start_shoal(
            "worker", "--join", fleet.address, "--profile", "phone", "--id", "phone-1", home=home
        ) as again:
            answer = answering.rest()
            wait_members(client, *fleet.worker_ids)
            again.process.terminate()

            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
            assert again.wait() == 0
        status = until(client.status, lambda status: not status.ready)
        assert "phone-1" not in {one.worker_id for one in status.devices}


def test_an_answer_whose_worker_freezes_goes_on_with_the_others_and_the_worker_comes_back_when_it_thaws(
    own_fleet: LocalFleet, own_client: Client
) -> None:
    expected = long_answer(own_client)
    answering = Answering(own_client)
    frozen = child_named(own_fleet, answering.victim).process.pid
    os.kill(frozen, signal.SIGSTOP)
    answer = answering.rest()

    assert (answer.token_ids, answer.text, answer.num_recoveries) == (expected.token_ids, expected.text, 1)
    wait_members(own_client, *(worker_id for worker_id in own_fleet.worker_ids if worker_id != answering.victim))
    os.kill(frozen, signal.SIGCONT)

    wait_members(own_client, *own_fleet.worker_ids)
    assert long_answer(own_client).token_ids == expected.token_ids


def test_a_worker_of_another_version_ends_and_says_what_to_do(fleet: LocalFleet, client: Client, home: Path) -> None:
    program = "import shoal.types; shoal.types.PROTOCOL_VERSION = 99; from cli.main import main; main()"
    with start_program(
        program, "worker", "--join", fleet.address, "--profile", "phone", "--id", "old", home=home
    ) as old:
        assert old.wait() == 1
        (line,) = old.err.splitlines()

    assert "worker 'old' speaks protocol 99" in line
    assert "install the same version of Shoal on both" in line
    assert {device.worker_id for device in client.status().devices} == set(fleet.worker_ids)

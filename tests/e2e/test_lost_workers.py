"""Workers that are killed, frozen, started again or of another version, as the fleet and its clients see it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.local import Child, LocalFleet
from shoal import Client
from shoal.errors import ShoalError, WorkerLost
from shoal.generation import Delta
from shoal.status import FleetStatus
from tests.e2e.conftest import DEVICES, StartFleet
from tests.support.commands import WAIT_S, start_program, start_shoal, until

pytestmark = pytest.mark.e2e

PROMPT = "A very long story. Once upon a time"
# Beyond the lease, after which a silent device is given up: for a busy machine.
SLACK_S = 3.0


@pytest.fixture
def own_fleet(start_fleet: StartFleet) -> LocalFleet:
    return start_fleet(*DEVICES)


@pytest.fixture
def own_client(own_fleet: LocalFleet) -> Iterator[Client]:
    with Client(own_fleet.address, timeout_s=WAIT_S) as client:
        yield client


def child_named(fleet: LocalFleet, name: str) -> Child:
    return next(child for child in fleet.children if child.name == name)


def begin_answer(client: Client) -> Iterator[Delta]:
    """An answer that is being computed and will be for long."""
    deltas = iter(client.stream(PROMPT, max_tokens=4000, ignore_eos=True, deadline_s=3600.0))
    next(deltas)
    return deltas


def error_of(deltas: Iterator[Delta]) -> ShoalError:
    with pytest.raises(ShoalError) as ended:
        for _ in deltas:
            pass
    return ended.value


def wait_serving(client: Client, *worker_ids: str) -> FleetStatus:
    """Wait until exactly these serve."""

    def is_so(status: FleetStatus) -> bool:
        return status.ready and {one.worker_id for one in status.devices if one.layers} == set(worker_ids)

    return until(client.status, is_so)


def short_answer(client: Client) -> tuple[int, ...]:
    return client.generate(PROMPT, max_tokens=12, ignore_eos=True).token_ids


def test_a_worker_killed_in_mid_answer_ends_it_and_the_others_take_over(
    own_fleet: LocalFleet, own_client: Client
) -> None:
    expected = short_answer(own_client)
    deltas = begin_answer(own_client)
    child_named(own_fleet, "phone-2").process.kill()

    error = error_of(deltas)
    assert isinstance(error, WorkerLost)
    assert "device phone-2 was lost while it computed this answer" in error.message
    wait_serving(own_client, "phone-1", "tablet-1")
    assert short_answer(own_client) == expected


def test_a_worker_started_again_under_its_id_is_used_again(
    own_fleet: LocalFleet, own_client: Client, home: Path
) -> None:
    child = child_named(own_fleet, "phone-1")
    child.process.kill()
    child.process.wait()
    wait_serving(own_client, "phone-2", "tablet-1")

    with start_shoal(
        "worker", "--join", own_fleet.address, "--profile", "phone", "--id", "phone-1", home=home
    ) as again:
        wait_serving(own_client, *own_fleet.worker_ids)
        answer = own_client.generate(PROMPT, max_tokens=4)
        again.process.terminate()

        assert "phone-1" in {stage.worker_id for stage in answer.pipeline}
        assert again.wait() == 0
    wait_serving(own_client, "phone-2", "tablet-1")


def test_a_frozen_worker_ends_the_answer_and_comes_back_when_it_thaws(
    own_fleet: LocalFleet, own_client: Client
) -> None:
    frozen = child_named(own_fleet, "phone-2").process.pid
    deltas = begin_answer(own_client)
    os.kill(frozen, signal.SIGSTOP)
    stopped_at = time.monotonic()

    assert isinstance(error_of(deltas), WorkerLost)
    assert time.monotonic() - stopped_at < own_fleet.config.lease_s + SLACK_S
    wait_serving(own_client, "phone-1", "tablet-1")
    os.kill(frozen, signal.SIGCONT)

    wait_serving(own_client, *own_fleet.worker_ids)
    assert len(own_client.generate(PROMPT, max_tokens=4).pipeline) == 3


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

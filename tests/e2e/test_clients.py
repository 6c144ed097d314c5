"""Clients that are killed, come at the same time, or have no patience: what is left of them in the fleet."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from launch.local import LocalFleet
from shoal import AsyncClient, Client
from shoal.errors import DeadlineExceeded, DeadlineUnmeetable
from shoal.status import FleetStatus
from tests.support.commands import LOOK_S, WAIT_S, RunningCommand, start_program, until

pytestmark = pytest.mark.e2e

# What a client that is gone may keep, and for how long, is promised.
RELEASE_S = 1.0
NUM_SLOTS = 16
PROMPT = "A very long story. Once upon a time"
PROGRAM = """
import sys
from shoal import AsyncClient, Client
with Client(sys.argv[1]) as client:
    for delta in client.stream(sys.argv[2], max_tokens=int(sys.argv[3]), ignore_eos=True):
        print(delta.text, end="", flush=True)
print("<end>")
"""


def start_client(fleet: LocalFleet, home: Path, max_tokens: int) -> RunningCommand:
    return start_program(PROGRAM, fleet.address, PROMPT, str(max_tokens), home=home)


def is_free(status: FleetStatus) -> bool:
    pipeline = status.pipeline
    return pipeline is not None and (pipeline.used_slots, pipeline.used_kv_tokens, status.num_running) == (0, 0, 0)


def test_a_client_killed_in_mid_answer_holds_nothing_a_second_later(
    fleet: LocalFleet, home: Path, client: Client
) -> None:
    with start_client(fleet, home, 3000) as doomed:
        doomed.read_until(" ")
        assert not is_free(client.status())

        doomed.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        until(client.status, is_free, bound_s=killed_at + RELEASE_S - time.monotonic())


def test_the_memory_of_a_killed_clients_answer_goes_back_to_the_devices(
    fleet: LocalFleet, home: Path, client: Client
) -> None:
    def has_kv(status: FleetStatus) -> bool:
        return all(device.telemetry.kv_bytes > 0 for device in status.devices)

    def has_none(status: FleetStatus) -> bool:
        return all(device.telemetry.kv_bytes == 0 for device in status.devices)

    with start_client(fleet, home, 3000) as doomed:
        doomed.read_until(" ")
        until(client.status, has_kv)

        doomed.process.send_signal(signal.SIGKILL)
        until(client.status, has_none)


def test_of_two_clients_at_once_the_one_that_stays_gets_its_whole_answer(
    fleet: LocalFleet, home: Path, client: Client
) -> None:
    expected = client.generate(PROMPT, max_tokens=60, ignore_eos=True).text
    with start_client(fleet, home, 60) as staying, start_client(fleet, home, 3000) as doomed:
        doomed.read_until(" ")
        until(client.status, lambda status: status.num_running == 2 or staying.process.poll() is not None)
        doomed.process.send_signal(signal.SIGKILL)

        assert staying.read_until("<end>") == expected
        assert staying.wait() == 0
    until(client.status, is_free, bound_s=RELEASE_S)


async def test_clients_that_leave_together_hold_neither_slots_nor_places_in_the_queue(
    fleet: LocalFleet, client: Client
) -> None:
    async with AsyncClient(fleet.address) as leaving, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(leaving.generate(PROMPT, max_tokens=3000, ignore_eos=True)) for _ in range(NUM_SLOTS + 4)
        ]
        async with asyncio.timeout(WAIT_S):
            while (await leaving.status()).num_waiting == 0 or (await leaving.status()).num_running < 2:
                await asyncio.sleep(LOOK_S)
        for task in tasks:
            task.cancel()

    until(client.status, lambda status: is_free(status) and status.num_waiting == 0, bound_s=RELEASE_S)


def test_a_client_whose_time_is_up_gets_an_error_and_holds_nothing(fleet: LocalFleet, client: Client) -> None:
    with Client(fleet.address, timeout_s=1.0) as hasty, pytest.raises(DeadlineExceeded, match="allow more time"):
        hasty.generate(PROMPT, max_tokens=30, max_tokens_per_s=1.0)

    until(client.status, is_free, bound_s=RELEASE_S)


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_numbers(fleet: LocalFleet, client: Client) -> None:
    client.generate(PROMPT, max_tokens=8, ignore_eos=True)

    with pytest.raises(DeadlineUnmeetable, match="all 3000 tokens would take") as refused:
        client.generate(PROMPT, max_tokens=3000, ignore_eos=True, deadline_s=2.0)

    # Coming again later would not help.
    assert refused.value.retry_after_s == 0
    assert is_free(client.status())

"""`shoal up` and `shoal demo`: they start a whole fleet and leave nothing behind, however they end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from launch.local import LocalFleet
from shoal import Client
from tests.support.commands import WAIT_S, RunningCommand, processes_of, run_shoal, start_shoal, until

pytestmark = pytest.mark.e2e

COLUMNS = 100
# The command, the orchestrator, two workers and Redis.
NUM_PROCESSES = 5
# An orchestrator whose launcher is gone drains, and workers end what they compute.
GONE_S = 15.0
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TABLE_HEAD = r"stage +device +layers +memory"


def address_of(up: RunningCommand) -> str:
    """Where a fleet is, once it says that it is ready."""
    up.read_until("smollm2-135m is ready at ")
    return up.read_until(";")


def none_left(home: Path) -> bool:
    return not processes_of(home)


def test_up_serves_until_ctrl_c_and_stops_all_it_started(home: Path) -> None:
    with start_shoal("up", "--port", "0", "--devices", "phone,tablet", home=home) as up:
        with Client(address_of(up), timeout_s=WAIT_S) as client:
            assert len(client.generate("Hi", max_tokens=4).pipeline) == 2
        assert len(processes_of(home)) == NUM_PROCESSES

        up.process.send_signal(signal.SIGINT)

        assert up.wait(GONE_S) == 0
        assert none_left(home)
        assert "Traceback" not in up.err


def test_what_up_started_ends_when_it_is_killed(home: Path) -> None:
    with start_shoal("up", "--port", "0", "--devices", "phone,tablet", home=home) as up:
        address_of(up)
        assert len(processes_of(home)) == NUM_PROCESSES

        up.process.kill()
        up.wait()
        until(lambda: processes_of(home), lambda left: not left, bound_s=GONE_S)


def redis_of(home: Path) -> list[psutil.Process]:
    return [process for process in processes_of(home) if process.name() == "valkey-server"]


def test_up_goes_on_while_its_redis_is_killed_and_starts_it_again(home: Path) -> None:
    with start_shoal("up", "--port", "0", "--devices", "phone,tablet", home=home) as up:
        with Client(address_of(up), timeout_s=WAIT_S) as client:
            (redis,) = redis_of(home)
            redis.kill()
            before = client.generate("Hi", max_tokens=4)
            until(lambda: up.err, lambda said: "redis has died (exit code -9); it is started again" in said)
            (again,) = until(lambda: redis_of(home))

            assert again.pid != redis.pid
            assert client.generate("Hi", max_tokens=4).text == before.text
        up.process.send_signal(signal.SIGINT)

        assert up.wait(GONE_S) == 0
        assert none_left(home)


def test_up_without_redis_starts_none(home: Path) -> None:
    with start_shoal("up", "--port", "0", "--devices", "phone,tablet", "--redis", "none", home=home) as up:
        address_of(up)

        assert len(processes_of(home)) == NUM_PROCESSES - 1
        up.process.send_signal(signal.SIGINT)

        assert up.wait(GONE_S) == 0


def test_up_with_layers_that_can_never_be_shared_ends_with_the_reason(home: Path) -> None:
    ended = run_shoal("up", "--port", "0", "--devices", "phone", "--split", "10,10,10", home=home)

    assert ended.code == 1
    assert "the split gives layers to 3 workers, 1 can be used now" in ended.err
    assert none_left(home)


def test_up_on_a_port_that_is_taken_says_so_in_one_line(fleet: LocalFleet, home: Path) -> None:
    outcome = run_shoal("up", "--port", str(fleet.config.port), home=home)

    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith(f"error: cannot listen on {fleet.address}")
    assert none_left(home)


def check_demo(text: str) -> None:
    """The answer, who computed it, and how fast it was."""
    before, _, after = text.partition("> List three facts")
    assert "3 devices ready after" in before
    answer, head, rest = re.split(f"({TABLE_HEAD})", after)
    assert len(answer.split()) > 20
    assert head
    stages = re.findall(r"(phone-1|phone-2|tablet-1) +\[(\d+), (\d+)\)", rest)
    assert sorted(name for name, _, _ in stages) == ["phone-1", "phone-2", "tablet-1"]
    assert [layer for _, start, stop in stages for layer in range(int(start), int(stop))] == list(range(30))
    assert re.search(r"\d+ tokens, first after \d+ ms, \d+\.\d tokens/s", rest)
    assert "all stopped after" in rest


def test_demo_shows_answer_plan_and_speed_in_a_log(home: Path) -> None:
    outcome = run_shoal("demo", home=home)

    assert outcome.code == 0
    check_demo(outcome.out)
    assert "\x1b" not in outcome.out + outcome.err
    assert none_left(home)


def test_demo_shows_the_same_at_a_terminal(home: Path) -> None:
    with start_shoal("demo", home=home, columns=COLUMNS) as demo:
        text = CONTROLS.sub("", demo.read_rest())

        assert demo.wait() == 0
    check_demo(text)
    table = text[re.search(TABLE_HEAD, text).start() :]  # type: ignore[union-attr]
    assert all(len(line) <= COLUMNS for line in table.splitlines())
    assert none_left(home)

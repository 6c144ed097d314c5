"""The server that a fleet brings along: started, found dead and started again, shared by the fleets of a home, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import redis_server
from launch.local import LocalFleet
from launch.redis_server import FIRST_REVIVAL_S, EmbeddedRedis
from shoal.config import OrchestratorConfig
from shoal.errors import LaunchFailed
from tests.support.clock import FakeClock
from tests.support.redis import PATIENCE_S, command, short_directory

MIB = 2**20


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def server(directory: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(directory, 32 * MIB)
    yield server
    server.stop()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def kill(server: EmbeddedRedis) -> None:
    """And wait until that can be seen."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_answers_and_evicts_only_what_has_a_time_to_live(server: EmbeddedRedis) -> None:
    server.start()

    assert command(server.url, "CONFIG", "GET", "maxmemory-policy")[1] == b"volatile-lru"
    assert command(server.url, "CONFIG", "GET", "maxmemory")[1] == b"%d" % (32 * MIB)


def test_what_was_stored_is_there_after_it_was_stopped_or_killed(server: EmbeddedRedis) -> None:
    server.start()
    command(server.url, "SET", b"a", b"1")
    server.stop()
    server.start()
    command(server.url, "SET", b"b", b"2")
    kill(server)
    server.revive()
    server._wait(PATIENCE_S)

    assert (command(server.url, "GET", b"a"), command(server.url, "GET", b"b")) == (b"1", b"2")


def test_stopping_ends_it_also_if_it_hangs(server: EmbeddedRedis) -> None:
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    # Rather than wait for so long, pytest ends the test.
    server.stop(timeout_s=10 * 60)

    assert not is_alive(pid)
    assert server.pid is None


def test_stopping_what_was_not_started_does_nothing(server: EmbeddedRedis) -> None:
    server.stop()


def test_its_socket_and_data_are_for_its_user_alone(server: EmbeddedRedis) -> None:
    server.start()

    assert server.socket_path.stat().st_mode & 0o077 == 0


def test_a_home_with_a_long_path_has_its_socket_elsewhere(directory: Path) -> None:
    server = EmbeddedRedis(directory / ("x" * 120), 32 * MIB)
    try:
        server.start()
        assert command(server.url, "PING") == b"PONG"
        assert server.socket_path.parent.stat().st_mode & 0o077 == 0
    finally:
        server.stop()
        server.socket_path.parent.rmdir()


def test_a_second_fleet_of_the_home_uses_the_first_one_s(server: EmbeddedRedis, directory: Path) -> None:
    server.start()
    second = EmbeddedRedis(directory, 32 * MIB)
    second.start()
    second.stop()

    assert second.url == server.url
    assert command(server.url, "PING") == b"PONG"


def test_the_fleet_that_stays_runs_it_when_the_other_has_ended(server: EmbeddedRedis, directory: Path) -> None:
    server.start()
    clock = FakeClock()
    second = EmbeddedRedis(directory, 32 * MIB, clock.now)
    second.start()
    assert second.revive() == ""
    server.stop()
    clock.jump_to(clock.now() + FIRST_REVIVAL_S)
    try:
        assert "has ended; it is started again" in second.revive()
        second._wait(PATIENCE_S)
        assert command(second.url, "PING") == b"PONG"
    finally:
        second.stop()


def test_one_that_dies_is_started_again_and_that_is_said_once(server: EmbeddedRedis) -> None:
    server.start()
    assert server.revive() == ""
    kill(server)

    assert "redis has died (exit code -9); it is started again" in server.revive()
    assert server.revive() == ""


def test_one_that_keeps_dying_is_started_ever_more_rarely(directory: Path) -> None:
    clock = FakeClock()
    server = EmbeddedRedis(directory, 32 * MIB, clock.now)
    server.start()
    waits = []
    try:
        for _ in range(4):
            kill(server)
            waits.append(0.0)
            while not server.revive():
                clock.jump_to(clock.now() + 1.0)
                waits[-1] += 1.0
    finally:
        server.stop()

    assert waits == [0.0, 2.0, 4.0, 8.0]


def test_an_orphan_of_a_fleet_that_was_killed_is_ended_first(server: EmbeddedRedis, directory: Path) -> None:
    orphan = subprocess.Popen(
        [redis_server.find_server(), *EmbeddedRedis(directory, 32 * MIB)._options()], stdout=subprocess.DEVNULL
    )
    until(lambda: bool(redis_server._ask(server.socket_path, b"PING\r\n")))
    try:
        server.start()
        orphan.wait(PATIENCE_S)
        assert command(server.url, "PING") == b"PONG"
    finally:
        orphan.kill()
        orphan.wait()


PARENT = """
import sys, time
from pathlib import Path
from launch.redis_server import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]), 2**25)
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not redis_server._dying_with_us(), reason="this system has no setpriv")
def test_it_ends_with_a_parent_that_is_killed(directory: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(directory)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    # Of a process that nobody waits for, something stays where there is no init.
    until(lambda: not is_alive(pid) or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])


def test_a_platform_without_a_server_is_said_and_a_fleet_goes_on_without(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    server = EmbeddedRedis(directory / "redis", 32 * MIB)
    with pytest.raises(LaunchFailed, match="no server for this platform: Unsupported architecture: riscv64"):
        server.start()

    monkeypatch.setattr(LocalFleet, "_start_child", lambda *_: None)
    fleet = LocalFleet(OrchestratorConfig(home=directory, port=0), ["phone"], redis=server)
    fleet.start()
    fleet.stop()
    assert "riscv64" in fleet.redis_failure
    assert fleet.redis_url == ""


def test_a_server_that_ends_at_once_is_said_with_its_last_words(directory: Path) -> None:
    (directory / "appendonlydir").write_text("in the way")
    server = EmbeddedRedis(directory, 32 * MIB)

    with pytest.raises(LaunchFailed, match=r"redis ended with exit code 1: .*append"):
        server.start()
    assert server.pid is None
    (directory / "appendonlydir").unlink()
    server.start()
    server.stop()


def test_a_fleet_runs_it_from_before_its_processes_to_after_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bytes]] = []
    monkeypatch.setattr(
        LocalFleet, "_start_child", lambda fleet, name, *_: seen.append((name, command(fleet.redis_url, "PING")))
    )
    monkeypatch.setattr(LocalFleet, "_end", lambda fleet, *_: seen.append(("end", command(fleet.redis_url, "PING"))))
    server = EmbeddedRedis(directory / "redis", 32 * MIB)
    with LocalFleet(OrchestratorConfig(home=directory, port=0), ["phone"], redis=server):
        pass

    assert seen == [(name, b"PONG") for name in ("orchestrator", "phone-1", "end", "end")]
    assert server.pid is None

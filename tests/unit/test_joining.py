"""Whom a worker joins of the orchestrators that answered, and what it says where there is nobody."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Collection
from dataclasses import replace

import pytest

from shoal import discovery
from shoal.config import WorkerConfig
from shoal.discovery import Announced, Surroundings
from shoal.errors import ConfigError, ConnectionFailed, ProtocolMismatch
from shoal.types import PROTOCOL_VERSION
from tests.unit.conftest import Run
from worker import joining
from worker.app import join_of
from worker.joining import BACKOFF_S, choose, find, why_nobody

KITCHEN = Announced("kitchen-50070", ("192.168.1.7:50070",), "smollm2-135m")
STUDY = Announced("study-50070", ("192.168.1.8:50070",), "smollm2-135m")
HOME = Surroundings(("127.0.0.1", "192.168.1.9"), is_container=False)


class Network:
    """Answers that come one look after the other; the last one stays. A failure is raised instead."""

    def __init__(self, *answers: list[Announced] | ConnectionFailed, closed: Collection[str] = ()) -> None:
        self._answers = list(answers)
        self._closed = closed
        self.pauses: list[float] = []

    async def look(self) -> list[Announced]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, ConnectionFailed):
            raise answer
        return answer

    async def reach(self, addresses: Collection[str]) -> str | None:
        return next((one for one in addresses if one not in self._closed), None)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def find(self, name: str = "", here: Surroundings = HOME) -> str:
        return await find(name, look=self.look, reach=self.reach, here=lambda: here, pause=self.pause)


async def test_the_only_orchestrator_that_answers_is_joined() -> None:
    assert await Network([KITCHEN]).find() == "192.168.1.7:50070"


async def test_of_several_the_one_that_was_named_is_joined() -> None:
    assert await Network([KITCHEN, STUDY]).find("study-50070") == "192.168.1.8:50070"


async def test_several_without_a_name_are_told_and_none_is_chosen() -> None:
    with pytest.raises(
        ConfigError, match=r"2 orchestrators.*kitchen-50070 at 192.168.1.7:50070.*study-50070"
    ) as raised:
        await Network([KITCHEN, STUDY]).find()
    assert "--join discover:kitchen-50070" in raised.value.message


async def test_one_that_comes_later_is_found_by_looking_again_after_ever_longer() -> None:
    network = Network([], [], [], [KITCHEN])
    assert await network.find() == "192.168.1.7:50070"
    assert network.pauses == list(BACKOFF_S[:3])


async def test_an_address_where_nobody_listens_is_passed_over() -> None:
    docker = replace(KITCHEN, addresses=("172.17.0.1:50070", "192.168.1.7:50070"))
    assert await Network([docker], closed=["172.17.0.1:50070"]).find() == "192.168.1.7:50070"


async def test_what_keeps_a_worker_waiting_is_said_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    dead = replace(KITCHEN, addresses=("192.168.1.7:1",))
    failure = ConnectionFailed("multicast DNS cannot be used on lo: no such device")
    network = Network([], [], [dead], failure, failure, [KITCHEN], closed=["192.168.1.7:1"])
    with caplog.at_level(logging.WARNING):
        await network.find()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "UDP port 5353" in told[0]
    assert "kitchen-50070 at 192.168.1.7:1 (smollm2-135m) tells of itself, but nobody answers there" in told[1]
    assert "cannot be used on lo: no such device" in told[2]
    assert all("--join HOST:PORT" in one for one in told)


def test_nobody_is_explained_by_what_can_be_seen_of_this_machine() -> None:
    plain = why_nobody([], "", HOME)
    assert "_shoal._tcp.local. on 127.0.0.1, 192.168.1.9" in plain
    assert "--discoverable" in plain
    assert "another subnet" in plain
    assert "container" not in plain
    assert "loopback" not in plain
    assert "container" in why_nobody([], "", replace(HOME, is_container=True))
    assert "no network interface but loopback" in why_nobody([], "", Surroundings(("127.0.0.1",), False))


def test_a_name_that_does_not_answer_is_told_with_those_that_do() -> None:
    assert choose([KITCHEN], "study-50070") is None
    assert "no orchestrator named study-50070" in why_nobody([KITCHEN], "study-50070", HOME)
    assert "kitchen-50070 at 192.168.1.7:50070" in why_nobody([KITCHEN], "study-50070", HOME)


def test_an_orchestrator_of_another_protocol_version_is_not_joined() -> None:
    old = replace(KITCHEN, protocol_version=PROTOCOL_VERSION - 1)
    with pytest.raises(ProtocolMismatch, match=f"version {PROTOCOL_VERSION - 1}, this worker {PROTOCOL_VERSION}"):
        choose([old], "")
    assert choose([old, STUDY], "") == STUDY


def test_an_orchestrator_that_wants_secured_connections_is_not_joined() -> None:
    with pytest.raises(ProtocolMismatch, match="secured by 'tls'"):
        choose([replace(KITCHEN, security="tls")], "kitchen-50070")


async def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[discovery\]'"):
        await discovery.look()
    with pytest.raises(ConfigError, match=r"shoal\[discovery\]"):
        await find("")


@pytest.mark.parametrize("words", [["up"], ["orchestrator", "--port", "0"]])
def test_an_orchestrator_that_cannot_be_discoverable_does_not_start(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    outcome = run(*words, "--discoverable")
    assert outcome.code == 1
    assert "shoal[discovery]" in outcome.err + caplog.text


async def test_a_worker_that_is_told_to_stop_looks_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: str) -> str:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    monkeypatch.setattr(joining, "find", never)
    stopping = asyncio.Event()
    stopping.set()
    assert await join_of(WorkerConfig(join="discover"), stopping) is None


async def test_a_worker_goes_on_with_the_address_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(name: str) -> str:
        return f"192.168.1.7:5{len(name)}"

    monkeypatch.setattr(joining, "find", found)
    config = WorkerConfig(join="discover:study", worker_id="w")
    assert await join_of(config, asyncio.Event()) == replace(config, join="192.168.1.7:55")
    assert await join_of(WorkerConfig(), asyncio.Event()) == WorkerConfig()

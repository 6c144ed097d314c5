"""Work that is spread over a cluster: what is said where nobody could ever do it, or has not done it. Without a cluster."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError, ConnectionFailed, InternalError, LaunchFailed

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
pytest.importorskip("ray", reason="needs shoal[ray]")
connection: Any = importlib.import_module("launch.ray_cluster.connection")
work: Any = importlib.import_module("launch.ray_cluster.work")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the cluster was told."""
    told: list[str] = []
    monkeypatch.setattr(work, "connect", lambda address: told.append(f"connect {address}"))
    monkeypatch.setattr(work.ray, "shutdown", lambda: told.append("shutdown"))
    return told


def test_tasks_that_would_wait_for_a_processor_for_ever_are_refused_with_the_numbers(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work.ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(work.ray, "available_resources", lambda: {"CPU": 0.5})

    with pytest.raises(LaunchFailed, match=r"of the Ray cluster's 2 processors 0\.5 are free"):
        list(work.each("head:6379", len, ["part"], 2))

    assert told == ["connect head:6379", "shutdown"]


def test_an_address_that_nobody_listens_at_is_refused_at_once() -> None:
    with pytest.raises(LaunchFailed, match="ray start --head"):
        list(work.each("127.0.0.1:1", len, ["part"], 2))


def helper_of(monkeypatch: pytest.MonkeyPatch, error: Exception) -> tuple[Any, list[object]]:
    """One helper that fails so each time, and the actors that were started for it."""
    started: list[object] = []

    async def fail(part: str) -> None:
        raise error

    def start(helpers: object) -> object:
        started.append(SimpleNamespace(do=SimpleNamespace(remote=fail)))
        return started[-1]

    monkeypatch.setattr(work.Helpers, "_start", start)
    return work.Helpers("head:6379", len, 1), started


class Hand:
    """What Ray would have on some node: with the work done in place."""

    def __init__(self) -> None:
        hand = work._Hand()
        for name in ("look", "stop", "work"):
            setattr(self, name, SimpleNamespace(remote=partial(self._begin, getattr(hand, name))))

    @staticmethod
    def _begin(method: Callable[..., Any], *args: object) -> asyncio.Task[Any]:
        """As Ray does it, whether anybody awaits it or not."""
        return asyncio.create_task(method(*args))


@pytest.fixture
def hands(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make hands of a coroutine function and its parts."""
    made = SimpleNamespace(remote=Hand)
    monkeypatch.setattr(work.ray, "remote", lambda _: SimpleNamespace(options=lambda **_: made))
    monkeypatch.setattr(work, "LOOK_S", 0.01)
    return lambda do, parts: work.Hands("head:6379", do, parts)


async def test_hands_begin_together_and_say_how_far_they_are(hands: Callable[..., Any], told: list[str]) -> None:
    shown: list[list[str]] = []
    begun: list[float] = []

    async def do(part: str, start_at: float, show: Callable[[str], None], stopping: asyncio.Event) -> str:
        begun.append(start_at)
        show(f"half of {part}")
        async with asyncio.timeout(30.0):
            while ["half of one", "half of two"] not in shown:
                await asyncio.sleep(0.01)
        return part.upper()

    with hands(do, ["one", "two"]) as made:
        results = await made.work(1000.0, asyncio.Event(), shown.append)

    assert results == ["ONE", "TWO"]
    assert begun[0] == begun[1] > time.time()
    assert told == ["connect head:6379", "shutdown"]


async def test_hands_that_are_told_to_stop_give_what_they_have(hands: Callable[..., Any]) -> None:
    stopping = asyncio.Event()

    async def do(part: str, start_at: float, show: Callable[[str], None], told: asyncio.Event) -> str:
        show(part)
        await told.wait()
        return f"{part}, in part"

    def stop_when_seen(seen: list[str]) -> None:
        if len(seen) == 2:
            stopping.set()

    with hands(do, ["one", "two"]) as made:
        assert await made.work(0.0, stopping, stop_when_seen) == ["one, in part", "two, in part"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (work.RayTaskError("work", "Traceback", ConfigError("no such server")), ConfigError, "no such server"),
        (work.RayTaskError("work", "Traceback\nKeyError: 'x'", KeyError("x")), LaunchFailed, "KeyError: 'x'"),
    ],
)
async def test_one_hand_that_fails_is_the_end_of_all(
    hands: Callable[..., Any], error: Exception, kind: type[Exception], message: str
) -> None:
    async def do(part: str, *_: object) -> None:
        if part == "bad":
            raise error
        await asyncio.sleep(60.0)

    with hands(do, ["good", "bad"]) as made, pytest.raises(kind, match=message):
        await made.work(0.0, asyncio.Event(), lambda _: None)


async def test_a_hand_that_is_lost_costs_its_part_alone(
    hands: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def do(part: str, start_at: float, show: Callable[[str], None], told: asyncio.Event) -> str:
        show(part)
        if part == "bad":
            raise work.ray.exceptions.RayActorError
        await told.wait()
        return part

    stopping, shown = asyncio.Event(), list[list[str]]()

    def show(seen: list[str]) -> None:
        shown.append(seen)
        if len(shown) > 3:
            stopping.set()

    async def look(hand: Any) -> str:
        if hand._seen == "bad":
            raise work.ray.exceptions.RayActorError
        return str(hand._seen)

    monkeypatch.setattr(work._Hand, "look", look)
    with hands(do, ["good", "bad"]) as made:
        good, bad = await made.work(0.0, stopping, show)

    assert good == "good"
    assert isinstance(bad, LaunchFailed)
    assert "Ray has lost a part of the work" in bad.message
    assert shown[-1] == ["good"]


async def test_a_hand_that_is_frozen_keeps_neither_the_others_nor_the_end(
    hands: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def do(part: str, start_at: float, show: Callable[[str], None], told: asyncio.Event) -> str:
        show(part)
        await (asyncio.sleep(3600.0) if part == "frozen" else told.wait())
        return part

    async def look(hand: Any) -> Any:
        if hand._seen == "frozen":
            await asyncio.sleep(3600.0)
        return hand._seen

    stopping = asyncio.Event()
    monkeypatch.setattr(work._Hand, "look", look)
    monkeypatch.setattr(work, "STOP_S", 0.05)
    with hands(do, ["frozen", "good"]) as made:
        frozen, good = await made.work(0.0, stopping, lambda seen: stopping.set() if seen == ["good"] else None)

    assert good == "good"
    assert isinstance(frozen, LaunchFailed)
    assert "did not end within 0.05 s" in frozen.message


async def test_what_shows_how_far_they_are_may_fail_and_is_not_silenced(hands: Callable[..., Any]) -> None:
    async def do(part: str, *_: object) -> None:
        await asyncio.sleep(3600.0)

    with hands(do, ["part"]) as made, pytest.raises(ZeroDivisionError):
        await made.work(0.0, asyncio.Event(), lambda seen: 1 / 0)


def test_the_end_of_a_process_is_its_own_affair_again_once_ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work.ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    before = signal.getsignal(signal.SIGTERM)
    try:
        connection.connect("auto")
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_hands_that_do_not_start_are_not_waited_for_for_ever(
    hands: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "HANDS_UP_S", 0.01)
    monkeypatch.setattr(work._Hand, "look", lambda _: asyncio.sleep(60.0))

    with hands(len, ["part"]) as made, pytest.raises(LaunchFailed, match="not started all of 1 actors"):
        await made.work(0.0, asyncio.Event(), lambda _: None)


async def test_a_fault_of_the_work_itself_is_not_taken_for_a_lost_helper(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = work.RayTaskError("do", "Traceback ...\nTypeError: no such thing", TypeError("no such thing"))
    made, started = helper_of(monkeypatch, fault)

    with (
        made as helpers,
        pytest.raises(InternalError, match="a helper has not done its part: TypeError: no such thing"),
    ):
        await helpers.do("part")

    assert len(started) == 1


async def test_a_helper_that_is_lost_is_replaced_and_its_part_may_be_asked_again(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, started = helper_of(monkeypatch, work.ray.exceptions.RayActorError())

    with made as helpers, pytest.raises(ConnectionFailed, match="Ray has lost a helper") as failed:
        await helpers.do("part")

    assert failed.value.is_retryable
    assert len(started) == 2


def test_where_there_is_no_ray_one_piece_of_advice_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to.\nMore")

    monkeypatch.setattr(work.ray, "init", init)

    with pytest.raises(LaunchFailed) as failed:
        connection.connect("auto")

    assert failed.value.message == f"no Ray at 'auto': Could not find any running Ray instance; {connection.START_HINT}"

"""Work that is spread over a cluster: what is said where nobody could ever do it, or has not done it. Without a cluster."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConnectionFailed, InternalError, LaunchFailed

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray_cluster: Any = pytest.importorskip("launch.ray_cluster", reason="needs shoal[ray]")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the cluster was told."""
    told: list[str] = []
    monkeypatch.setattr(ray_cluster, "_connect", lambda address: told.append(f"connect {address}"))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: told.append("shutdown"))
    return told


def test_tasks_that_would_wait_for_a_processor_for_ever_are_refused_with_the_numbers(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray_cluster.ray, "available_resources", lambda: {"CPU": 0.5})

    with pytest.raises(LaunchFailed, match=r"of the Ray cluster's 2 processors 0\.5 are free"):
        list(ray_cluster.each("head:6379", len, ["part"], 2))

    assert told == ["connect head:6379", "shutdown"]


def test_an_address_that_nobody_listens_at_is_refused_at_once() -> None:
    with pytest.raises(LaunchFailed, match="ray start --head"):
        list(ray_cluster.each("127.0.0.1:1", len, ["part"], 2))


def helper_of(monkeypatch: pytest.MonkeyPatch, error: Exception) -> tuple[Any, list[object]]:
    """One helper that fails so each time, and the actors that were started for it."""
    started: list[object] = []

    async def fail(part: str) -> None:
        raise error

    def start(helpers: object) -> object:
        started.append(SimpleNamespace(do=SimpleNamespace(remote=fail)))
        return started[-1]

    monkeypatch.setattr(ray_cluster.Helpers, "_start", start)
    return ray_cluster.Helpers("head:6379", len, 1), started


async def test_a_fault_of_the_work_itself_is_not_taken_for_a_lost_helper(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = ray_cluster.RayTaskError("do", "Traceback ...\nTypeError: no such thing", TypeError("no such thing"))
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
    made, started = helper_of(monkeypatch, ray_cluster.RayActorError())

    with made as helpers, pytest.raises(ConnectionFailed, match="Ray has lost a helper") as failed:
        await helpers.do("part")

    assert failed.value.is_retryable
    assert len(started) == 2


def test_where_there_is_no_ray_one_piece_of_advice_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to.\nMore")

    monkeypatch.setattr(ray_cluster.ray, "init", init)

    with pytest.raises(LaunchFailed) as failed:
        ray_cluster._connect("auto")

    assert (
        failed.value.message == f"no Ray at 'auto': Could not find any running Ray instance; {ray_cluster.START_HINT}"
    )

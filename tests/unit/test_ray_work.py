"""Work that is spread over a cluster: what is said where nobody could ever do it. Without a cluster."""

from __future__ import annotations

import os
from typing import Any

import pytest

from shoal.errors import LaunchFailed

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

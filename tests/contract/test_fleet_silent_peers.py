"""Peers whose network drops what is sent to them are reached by the orchestrator, and directly once it lets things by."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fleet import WAIT_S, LocalFleet, make_device, start_fleet
from tests.support.shards import TinyModel
from worker import dialing


class Network:
    """Between devices; what they try over it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_up = False
        self.reached: set[str] = set()
        self.has_reached_two = asyncio.Event()
        monkeypatch.setattr(dialing, "answers", self._answers)
        monkeypatch.setattr(dialing, "TRY_AGAIN_S", 0.01)

    async def _answers(self, address: str, timeout_s: float) -> bool:
        if self.is_up:
            self.reached.add(address)
            if len(self.reached) == 2:
                self.has_reached_two.set()
        return self.is_up


async def links(fleet: LocalFleet, num_stages: int) -> set[str]:
    return {one.link_to_next for one in (await fleet.serving(num_stages)).devices}


async def test_a_network_between_devices_that_comes_back_is_used_by_the_next_pipeline(
    fleet_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch)
    async with start_fleet(fleet_model.store.root, tmp_path, [make_device()] * 2) as fleet:
        before = await links(fleet, 2)

        network.is_up = True
        async with asyncio.timeout(WAIT_S):
            await network.has_reached_two.wait()
        await fleet.client.drain("w1")
        await fleet.client.cordon("w1", False)
        after = await links(fleet, 2)

    assert (before, after) == ({"relay"}, {"socket"})

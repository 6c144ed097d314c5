"""Workers that lose their orchestrator: what they hold waits a while for the one that comes back, and for no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.config import WorkerConfig
from tests.support.fleet import LocalFleet, Running, make_device, start_fleet
from tests.support.shards import TinyModel
from worker import compute, holding
from worker.agent import Agent
from worker.shard import Shard, open_shard

DEVICE = make_device()
SPLIT = "2,2"


class Openings:
    """How often shards were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(compute, "open_shard", self._open)

    def _open(self, *arguments: object, **options: object) -> Shard:
        self.count += 1
        return open_shard(*arguments, **options)  # type: ignore[arg-type]


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    return Openings(monkeypatch)


async def lose_orchestrator(fleet: LocalFleet) -> None:
    await fleet.restart_orchestrator()
    await fleet.serving(2)


@pytest.mark.parametrize("use_sockets", [True, False], ids=["sockets", "grpc"])
async def test_shards_are_not_loaded_again_for_an_orchestrator_that_comes_back(
    fleet_model: TinyModel, tmp_path: Path, openings: Openings, use_sockets: bool
) -> None:
    async with start_fleet(
        fleet_model.store.root, tmp_path, [DEVICE] * 2, use_sockets=use_sockets, split=SPLIT
    ) as fleet:
        before = await fleet.client.generate("hello", max_tokens=8, num_logprobs=2)
        await lose_orchestrator(fleet)
        after = await fleet.client.generate("hello", max_tokens=8, num_logprobs=2)
        num_opened = openings.count

    assert (after.text, after.logprobs) == (before.text, before.logprobs)
    assert num_opened == 2


async def test_shards_that_nobody_asks_for_in_time_are_unloaded(
    fleet_model: TinyModel, tmp_path: Path, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "KEEP_S", 0.0)
    async with start_fleet(fleet_model.store.root, tmp_path, [DEVICE] * 2, split=SPLIT) as fleet:
        await lose_orchestrator(fleet)
        await fleet.client.generate("hello", max_tokens=2)
        num_opened = openings.count

    assert num_opened == 4


async def test_a_kept_shard_gives_way_to_another(fleet_model: TinyModel, tmp_path: Path, openings: Openings) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path, [DEVICE] * 2, split=SPLIT) as fleet:
        await fleet.orchestrator.end()
        await fleet.workers.pop("w1").vanish()
        fleet.config = replace(fleet.config, expect_workers=1, split="")
        await fleet.restart_orchestrator()
        await fleet.serving(1)
        answer = await fleet.client.generate("hello", max_tokens=2)

    assert answer.completion_tokens == 2
    assert openings.count == 3


async def test_an_abandoned_worker_has_all_its_time_from_when_its_orchestrator_is_lost(
    fleet_model: TinyModel, tmp_path: Path
) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path) as fleet:
        agent, stopping = (
            Agent(WorkerConfig(join=fleet.address, home=tmp_path), DEVICE, "w0", tmp_path),
            asyncio.Event(),
        )
        # As if it had begun long ago.
        agent._alone_since -= 1000.0
        fleet.workers["w0"] = Running(stopping, asyncio.create_task(agent.run(stopping)))
        await fleet.serving(1)

        agent.abandon(500.0)
        await fleet.restart_orchestrator()

        assert (await fleet.serving(1)).devices[0].worker_id == "w0"

"""The shard that a worker keeps for an orchestrator that comes back: who may open links to it, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.v1 import fleet_pb2, types_pb2
from tests.support.fleet import make_device
from worker import holding
from worker.blobs import BlobCache
from worker.commands import LoadStage, StageFailed, SuspendStage, UnloadStage
from worker.holding import Holding

TOKEN = b"0123456789abcdef"


@dataclass
class HoldingBench:
    """Holds a shard without blobs, as if the compute thread had loaded it."""

    folder: Path
    tokens: dict[str, bytes] = field(default_factory=dict)
    posted: list[LoadStage | SuspendStage | UnloadStage] = field(default_factory=list)
    failed: list[StageFailed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holding = Holding(
            make_device(),
            "w1",
            "localhost:1",
            BlobCache(self.folder),
            self.tokens,
            self.posted.append,
            self.failed.append,
        )

    async def take(self, epoch: int, *, loads: bool = True) -> None:
        command = fleet_pb2.LoadShard(
            pipeline_id="p1", epoch=epoch, link_token=TOKEN, layers=types_pb2.LayerRange(start=0, stop=2)
        )
        tasks: list[asyncio.Task[None]] = []

        def start(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(work))
            return tasks[-1]

        # There is nothing to fetch.
        self.holding.take(command, None, start)  # type: ignore[arg-type]
        await asyncio.gather(*tasks)
        if loads:
            self.holding.loaded()


async def test_nobody_may_open_a_link_to_a_shard_that_is_kept(tmp_path: Path) -> None:
    bench = HoldingBench(tmp_path)
    await bench.take(1)
    assert bench.tokens == {"p1": TOKEN}

    bench.holding.keep()

    assert bench.tokens == {}
    assert bench.holding.held is not None
    bench.holding.drop()


async def test_what_is_still_loading_is_not_kept(tmp_path: Path) -> None:
    bench = HoldingBench(tmp_path)
    await bench.take(1, loads=False)

    bench.holding.keep()

    assert bench.holding.command is None
    assert bench.posted[-1] == UnloadStage("p1")


async def test_what_a_stage_of_a_lost_orchestrator_says_is_nobody_s(tmp_path: Path) -> None:
    bench = HoldingBench(tmp_path)
    await bench.take(1)
    (loaded,) = bench.posted
    assert isinstance(loaded, LoadStage)
    assert bench.holding.is_of(loaded.spec)

    bench.holding.keep()

    assert not bench.holding.is_of(loaded.spec)
    bench.holding.drop()


async def test_a_kept_shard_that_was_asked_for_again_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "KEEP_S", 0.0)
    bench = HoldingBench(tmp_path)
    await bench.take(1)

    bench.holding.keep()
    await bench.take(2)

    assert bench.tokens == {"p1": TOKEN}
    assert not any(isinstance(one, UnloadStage) for one in bench.posted)
    assert bench.failed == []


async def test_links_are_opened_only_for_the_newest_command_of_an_orchestrator_that_is_there(tmp_path: Path) -> None:
    bench = HoldingBench(tmp_path)
    assert bench.holding.current_of("p1", 1) is None
    await bench.take(1)
    await bench.take(2)

    assert bench.holding.current_of("p1", 2) is bench.holding.command
    assert bench.holding.current_of("p1", 1) is None
    assert bench.holding.current_of("p2", 2) is None
    bench.holding.keep()
    assert bench.holding.current_of("p1", 2) is None
    bench.holding.drop()

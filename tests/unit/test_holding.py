"""The shard that a worker keeps for an orchestrator that comes back, and the blobs that it fetches for a shard to come."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.errors import CorruptBlob
from shoal.v1 import fleet_pb2, types_pb2
from tests.support.fleet import make_device
from worker import holding
from worker.blobs import BlobCache, FetchChunks
from worker.commands import LoadStage, StageFailed, SuspendStage, UnloadStage
from worker.holding import Holding

TOKEN = b"0123456789abcdef"
ONE, OTHER = b"one" * 100, b"other" * 100
CHUNK_BYTES = 100
BOUND_S = 10.0


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def turns() -> None:
    """Let all tasks come as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Stub:
    """An orchestrator's store in chunks. held: all chunks but the first come when it is set; without it, at once.

    may_end: a call that is cancelled takes until then to end.
    """

    def __init__(
        self, *contents: bytes, held: asyncio.Event | None = None, may_end: asyncio.Event | None = None
    ) -> None:
        self.asked: list[tuple[str, int]] = []
        self.is_asked = asyncio.Event()
        self._contents = {digest_of(content): content for content in contents}
        self._held = held
        self._may_end = may_end

    async def FetchBlob(  # noqa: N802 - as the generated stub has it
        self, request: fleet_pb2.FetchBlobRequest
    ) -> AsyncIterator[fleet_pb2.FetchBlobResponse]:
        self.asked.append((request.digest, request.offset))
        if request.digest not in self._contents:
            raise CorruptBlob("blob is missing: pull or import it again")
        try:
            async for response in self._chunks(request):
                yield response
        finally:
            if self._may_end is not None:
                await self._may_end.wait()

    async def _chunks(self, request: fleet_pb2.FetchBlobRequest) -> AsyncIterator[fleet_pb2.FetchBlobResponse]:
        content = self._contents[request.digest]
        for start in range(request.offset, len(content), CHUNK_BYTES):
            yield fleet_pb2.FetchBlobResponse(chunk=content[start : start + CHUNK_BYTES])
            self.is_asked.set()
            if self._held is not None:
                await self._held.wait()


class CountedBlobs(BlobCache):
    """Knows how many were at it at once."""

    num_inside = most_inside = 0

    async def ensure(self, blobs: Iterable[fleet_pb2.BlobRef], fetch: FetchChunks) -> int:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            return await super().ensure(blobs, fetch)
        finally:
            self.num_inside -= 1


@dataclass
class HoldingBench:
    """Holds a shard without blobs, as if the compute thread had loaded it."""

    folder: Path
    tokens: dict[str, bytes] = field(default_factory=dict)
    posted: list[LoadStage | SuspendStage | UnloadStage] = field(default_factory=list)
    failed: list[StageFailed] = field(default_factory=list)
    prefetched: list[fleet_pb2.BlobPrefetched] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

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

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    def prefetch(self, stub: Stub, *contents: bytes) -> None:
        blobs = [fleet_pb2.BlobRef(digest=digest_of(one), num_bytes=len(one)) for one in contents]
        command = fleet_pb2.PrefetchBlobs(blobs=blobs)
        self.holding.prefetch(command, stub, self.start, self.prefetched.append)  # type: ignore[arg-type]

    async def ended(self) -> None:
        """Wait for all that was begun."""
        async with asyncio.timeout(BOUND_S):
            await asyncio.wait(self.tasks)

    def kept(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    async def take(self, epoch: int, *, loads: bool = True) -> None:
        command = fleet_pb2.LoadShard(
            pipeline_id="p1", epoch=epoch, link_token=TOKEN, layers=types_pb2.LayerRange(start=0, stop=2)
        )
        # There is nothing to fetch.
        self.holding.take(command, None, self.start)  # type: ignore[arg-type]
        await self.ended()
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


async def test_blobs_for_later_are_fetched_one_after_the_other_and_each_is_told(tmp_path: Path) -> None:
    bench = HoldingBench(tmp_path)

    bench.prefetch(Stub(ONE, OTHER), ONE, OTHER)
    await bench.ended()

    assert [one.digest for one in bench.prefetched] == [digest_of(ONE), digest_of(OTHER)]
    assert bench.kept() == {digest_of(ONE), digest_of(OTHER)}
    assert bench.posted == []


async def test_a_shard_to_load_ends_what_is_fetched_for_later(tmp_path: Path) -> None:
    bench, stub = HoldingBench(tmp_path), Stub(ONE, held=asyncio.Event())
    bench.prefetch(stub, ONE)
    await stub.is_asked.wait()

    await bench.take(1)

    assert bench.prefetched == []
    assert isinstance(bench.posted[-1], LoadStage)
    assert bench.kept() == {f"{digest_of(ONE)}.part"}


async def test_a_shard_is_not_loaded_before_what_was_fetched_for_later_has_ended(tmp_path: Path) -> None:
    bench, may_end = HoldingBench(tmp_path), asyncio.Event()
    stub = Stub(ONE, held=asyncio.Event(), may_end=may_end)
    bench.prefetch(stub, ONE)
    await stub.is_asked.wait()

    taking = asyncio.create_task(bench.take(1))
    await turns()
    before = list(bench.posted)
    may_end.set()
    await taking

    assert before == []
    assert [type(one) for one in bench.posted] == [LoadStage]


async def test_one_fetches_for_later_at_a_time(tmp_path: Path) -> None:
    bench, may_end = HoldingBench(tmp_path), asyncio.Event()
    stub, blobs = Stub(ONE, held=asyncio.Event(), may_end=may_end), CountedBlobs(tmp_path)
    bench.holding._blobs = blobs
    bench.prefetch(stub, ONE)
    await stub.is_asked.wait()

    bench.prefetch(Stub(OTHER), OTHER)
    await turns()
    may_end.set()
    await bench.ended()

    assert blobs.most_inside == 1
    assert bench.kept() == {f"{digest_of(ONE)}.part", digest_of(OTHER)}


async def test_nothing_is_fetched_for_later_while_there_is_a_shard(tmp_path: Path) -> None:
    bench, stub = HoldingBench(tmp_path), Stub(ONE)
    await bench.take(1)

    bench.prefetch(stub, ONE)
    await bench.ended()

    assert stub.asked == []


async def test_what_is_kept_for_a_while_keeps_nobody_from_fetching_for_later(tmp_path: Path) -> None:
    bench = HoldingBench(tmp_path)
    await bench.take(1)
    bench.holding.keep()

    bench.prefetch(Stub(ONE), ONE)
    await bench.ended()

    assert [one.digest for one in bench.prefetched] == [digest_of(ONE)]
    assert bench.holding.held is not None


async def test_the_end_of_what_was_kept_does_not_end_fetching_for_later(tmp_path: Path) -> None:
    bench, may_go_on = HoldingBench(tmp_path), asyncio.Event()
    await bench.take(1)
    bench.holding.keep()
    stub = Stub(ONE, held=may_go_on)
    bench.prefetch(stub, ONE)
    await stub.is_asked.wait()

    bench.holding.drop()
    may_go_on.set()
    await bench.ended()

    assert [one.digest for one in bench.prefetched] == [digest_of(ONE)]


async def test_what_is_asked_for_last_is_fetched_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    bench, stub = HoldingBench(tmp_path), Stub(ONE, held=asyncio.Event())
    bench.prefetch(stub, ONE, OTHER)
    await stub.is_asked.wait()

    bench.prefetch(Stub())
    await bench.ended()
    assert bench.prefetched == []
    again = Stub(ONE)
    bench.prefetch(again, ONE)
    await bench.ended()

    assert again.asked == [(digest_of(ONE), CHUNK_BYTES)]
    assert bench.kept() == {digest_of(ONE)}


async def test_why_blobs_cannot_be_fetched_for_later_is_told_once(tmp_path: Path) -> None:
    bench = HoldingBench(tmp_path)

    bench.prefetch(Stub(ONE), OTHER, ONE)
    await bench.ended()

    assert [(one.digest, one.reason) for one in bench.prefetched] == [("", CorruptBlob.reason)]
    assert bench.failed == []


async def test_what_is_fetched_for_later_leaves_a_link_three_quarters_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, rests = 100.0, list[float]()

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal now
        for took_s in (0.1, 0.0001):
            now += took_s
            yield b"chunk"

    monkeypatch.setattr("worker.holding.time.monotonic", lambda: now)
    monkeypatch.setattr("worker.holding.asyncio.sleep", sleep)

    assert [chunk async for chunk in holding._at_leisure(chunks())] == [b"chunk", b"chunk"]
    assert rests == [pytest.approx(0.3), holding.MIN_REST_S]

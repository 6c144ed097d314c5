"""The blob cache of a device: fetched once, resumed where it broke off, verified before use."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.errors import ConnectionFailed, CorruptBlob
from shoal.v1 import fleet_pb2
from worker.blobs import BlobCache

CONTENT = bytes(range(256)) * 4
DIGEST = hashlib.sha256(CONTENT).hexdigest()
BLOB = fleet_pb2.BlobRef(digest=DIGEST, num_bytes=len(CONTENT))


class Source:
    """An orchestrator's store: serves CONTENT, or for the first calls what `faults` says; notes what was asked for."""

    def __init__(self, *faults: bytes | None, breaks_after: int | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self._faults = list(faults)
        self._breaks_after = breaks_after

    async def fetch(self, digest: str, offset: int) -> AsyncIterator[bytes]:
        self.asked.append((digest, offset))
        content = CONTENT
        if self._faults:
            content = self._faults.pop(0) or CONTENT
        for start in range(offset, len(content), 100):
            if self._breaks_after is not None and start >= self._breaks_after:
                self._breaks_after = None
                raise ConnectionFailed("the orchestrator went away")
            yield content[start : start + 100]


@pytest.fixture
def cache(tmp_path: Path) -> BlobCache:
    return BlobCache(tmp_path / "blobs")


def kept_files(cache: BlobCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.directory.iterdir()}


WRONG = b"\xff" + CONTENT[1:]


async def test_a_missing_blob_is_fetched(cache: BlobCache) -> None:
    source = Source()

    fetched_bytes = await cache.ensure([BLOB], source.fetch)

    assert (fetched_bytes, source.asked) == (len(CONTENT), [(DIGEST, 0)])
    assert kept_files(cache) == {DIGEST: CONTENT}


async def test_a_blob_that_is_there_is_not_fetched_again(cache: BlobCache) -> None:
    await cache.ensure([BLOB], Source().fetch)
    source = Source()

    assert await BlobCache(cache.directory).ensure([BLOB], source.fetch) == 0
    assert source.asked == []


async def test_a_broken_off_fetch_goes_on_where_it_ended(cache: BlobCache) -> None:
    with pytest.raises(ConnectionFailed):
        await cache.ensure([BLOB], Source(breaks_after=300).fetch)
    assert kept_files(cache) == {f"{DIGEST}.part": CONTENT[:300]}
    source = Source()

    fetched_bytes = await cache.ensure([BLOB], source.fetch)

    assert (fetched_bytes, source.asked) == (len(CONTENT) - 300, [(DIGEST, 300)])
    assert kept_files(cache) == {DIGEST: CONTENT}


async def test_a_part_that_is_complete_is_taken_without_asking(cache: BlobCache) -> None:
    (cache.directory / f"{DIGEST}.part").write_bytes(CONTENT)
    source = Source()

    assert await cache.ensure([BLOB], source.fetch) == 0
    assert source.asked == []
    assert kept_files(cache) == {DIGEST: CONTENT}


async def test_a_part_that_is_too_long_is_thrown_away(cache: BlobCache) -> None:
    (cache.directory / f"{DIGEST}.part").write_bytes(CONTENT + b"more")
    source = Source()

    await cache.ensure([BLOB], source.fetch)

    assert source.asked == [(DIGEST, 0)]
    assert kept_files(cache) == {DIGEST: CONTENT}


async def test_a_part_with_wrong_bytes_heals(cache: BlobCache) -> None:
    (cache.directory / f"{DIGEST}.part").write_bytes(WRONG[:300])
    source = Source()

    await cache.ensure([BLOB], source.fetch)

    assert source.asked == [(DIGEST, 300), (DIGEST, 0)]
    assert kept_files(cache) == {DIGEST: CONTENT}


async def test_wrong_bytes_once_are_fetched_again(cache: BlobCache) -> None:
    source = Source(WRONG)

    fetched_bytes = await cache.ensure([BLOB], source.fetch)

    assert (fetched_bytes, len(source.asked)) == (2 * len(CONTENT), 2)
    assert kept_files(cache) == {DIGEST: CONTENT}


async def test_wrong_bytes_twice_are_an_error_and_leave_nothing(cache: BlobCache) -> None:
    source = Source(WRONG, WRONG)

    with pytest.raises(CorruptBlob, match=f"blob {DIGEST[:12]} .* import or pull the model again"):
        await cache.ensure([BLOB], source.fetch)

    assert len(source.asked) == 2
    assert kept_files(cache) == {}


async def test_a_blob_that_failed_can_be_fetched_once_the_source_is_repaired(cache: BlobCache) -> None:
    with pytest.raises(CorruptBlob):
        await cache.ensure([BLOB], Source(WRONG, WRONG).fetch)

    assert await cache.ensure([BLOB], Source().fetch) == len(CONTENT)


async def test_a_source_that_ends_early_is_asked_again(cache: BlobCache) -> None:
    await cache.ensure([BLOB], Source(CONTENT[:500]).fetch)

    assert kept_files(cache) == {DIGEST: CONTENT}


@pytest.mark.parametrize("spoiled", [CONTENT[:-1], CONTENT + b"x", WRONG], ids=["shorter", "longer", "changed"])
async def test_a_kept_blob_that_was_spoiled_is_fetched_again(cache: BlobCache, spoiled: bytes) -> None:
    (cache.directory / DIGEST).write_bytes(spoiled)

    assert await cache.ensure([BLOB], Source().fetch) == len(CONTENT)
    assert kept_files(cache) == {DIGEST: CONTENT}


async def test_only_what_is_missing_is_fetched(cache: BlobCache) -> None:
    await cache.ensure([BLOB], Source().fetch)
    empty = fleet_pb2.BlobRef(digest=hashlib.sha256(b"").hexdigest(), num_bytes=0)
    source = Source()

    assert await cache.ensure([BLOB, empty], source.fetch) == 0
    assert source.asked == []
    assert kept_files(cache) == {DIGEST: CONTENT, empty.digest: b""}


async def test_a_part_that_another_process_fetches_into_is_left_to_it(cache: BlobCache) -> None:
    part = cache.directory / f"{DIGEST}.part"
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fetched_bytes = await cache.ensure([BLOB], Source().fetch)

    assert fetched_bytes == len(CONTENT)
    assert kept_files(cache) == {DIGEST: CONTENT, part.name: b""}


async def test_a_folder_in_the_place_of_a_blob_is_an_error(cache: BlobCache) -> None:
    (cache.directory / DIGEST).mkdir()

    with pytest.raises(OSError, match=DIGEST):
        await cache.ensure([BLOB], Source().fetch)

"""A device's cache of weight blobs: files named by their SHA-256, fetched from the orchestrator, verified before use.

Called by `agent` before a shard is loaded. Knows digests and bytes, not what is in them. An interrupted fetch goes on
where it ended; a blob whose bytes do not match its name is fetched again, once.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import CorruptBlob
from shoal.memory import need_bytes
from shoal.v1 import fleet_pb2

# (digest, offset) -> the chunks from there on
FetchChunks = Callable[[str, int], AsyncIterable[bytes]]
_READ_BYTES = 1 << 20


class BlobCache:
    """Blobs in one directory.

    Invariant: a file named by a digest was complete and had that digest when it was renamed to it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    async def ensure(self, blobs: Iterable[fleet_pb2.BlobRef], fetch: FetchChunks) -> int:
        """Have every blob, verified; return the bytes that were fetched. Raises CorruptBlob, or what fetch raises."""
        fetched_bytes = 0
        for blob in blobs:
            if not await asyncio.to_thread(self._is_sound, blob):
                fetched_bytes += await self._fetch(blob, fetch)
        return fetched_bytes

    def _is_sound(self, blob: fleet_pb2.BlobRef) -> bool:
        path = self.directory / blob.digest
        return path.is_file() and path.stat().st_size == blob.num_bytes and sha256_of(path) == blob.digest

    async def _fetch(self, blob: fleet_pb2.BlobRef, fetch: FetchChunks) -> int:
        with self._claimed(blob.digest) as part:
            fetched_bytes = await self._append(part, blob, fetch)
            if await asyncio.to_thread(sha256_of, part) != blob.digest:
                part.unlink()
                fetched_bytes += await self._append(part, blob, fetch)
            if await asyncio.to_thread(sha256_of, part) != blob.digest:
                part.unlink()
                raise CorruptBlob(
                    f"blob {blob.digest[:12]} arrives with other bytes than its digest says: on the orchestrator, "
                    "import or pull the model again"
                )
            os.replace(part, self.directory / blob.digest)
        return fetched_bytes

    @contextmanager
    def _claimed(self, digest: str) -> Iterator[Path]:
        """The file to fetch a blob into: the one that an earlier run left, unless another process fetches it now."""
        part = self.directory / f"{digest}.part"
        with part.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                part = self.directory / f"{digest}.{os.getpid()}.part"
            yield part

    async def _append(self, part: Path, blob: fleet_pb2.BlobRef, fetch: FetchChunks) -> int:
        offset = part.stat().st_size if part.exists() else 0
        fetched_bytes = 0
        with part.open("ab") as file:
            if offset < blob.num_bytes:
                async for chunk in fetch(blob.digest, offset):
                    file.write(chunk)
                    fetched_bytes += len(chunk)
        return fetched_bytes


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex; empty if there is none."""
    if not path.exists():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def need_of(blobs: Iterable[fleet_pb2.BlobRef], kv_bytes: int) -> int:
    """The memory that a shard of these blobs takes."""
    sizes = {True: 0, False: 0}
    for blob in blobs:
        sizes[blob.is_mapped] += blob.num_bytes
    return need_bytes(sizes[False], sizes[True], kv_bytes)

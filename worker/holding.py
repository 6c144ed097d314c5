"""The shard that a worker was told to hold, how long it is kept, and the blobs of what it may be told to hold next.

The same shard in another epoch is not loaded anew: the stage goes on, with what its slots hold. So is one whose orchestrator
was lost, if that one, or the next, asks for it again within KEEP_S. Lives on the event loop; the compute thread loads, and
`agent`, which owns it, tells it what was asked for and reports what came of it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial

import grpc

from shoal import messages, rpc
from shoal.errors import CorruptBlob, ShoalError, StorageFull
from shoal.types import DeviceProfile, LayerRange
from shoal.v1 import fleet_pb2, fleet_pb2_grpc
from worker.blobs import BlobCache, need_of
from worker.commands import LoadStage, StageFailed, SuspendStage, UnloadStage
from worker.emulation import check_fits
from worker.stage import StageSpec

logger = logging.getLogger(__name__)

# An orchestrator that was killed is started again within seconds; beyond that its clients have given up.
KEEP_S = 30.0
# Blobs that are not needed yet: after each chunk a rest of so many times what it took, and so long at least. What serves has
# three quarters of a slow link to itself, and a fast one carries 6 MB/s, which is a twentieth of the orchestrator's time.
REST = 3.0
MIN_REST_S = 0.005


class Holding:
    """Invariants: `command` is the newest LoadShard, None without a shard; links may be opened with its token and no other,
    and with none while it is kept; only the latest task touches the blob cache, and it prefetches only while no shard is in
    use.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        worker_id: str,
        join: str,
        blobs: BlobCache,
        tokens: dict[str, bytes],
        post: Callable[[LoadStage | SuspendStage | UnloadStage], None],
        on_failed: Callable[[StageFailed], None],
    ) -> None:
        """join: where blobs come from. tokens: with which links may be opened, by pipeline. post: to the compute thread."""
        self._profile = profile
        self._worker_id = worker_id
        self._join = join
        self._blobs = blobs
        self._tokens = tokens
        self._post = post
        self._on_failed = on_failed
        self.command: fleet_pb2.LoadShard | None = None
        self._spec: StageSpec | None = None
        self._is_loaded = False
        self._loading: asyncio.Task[None] | None = None
        self._prefetching: asyncio.Task[None] | None = None
        self._keeping: asyncio.TimerHandle | None = None

    @property
    def weight_bytes(self) -> int:
        return 0 if self.command is None else sum(blob.num_bytes for blob in self.command.blobs)

    @property
    def is_kept(self) -> bool:
        """Whether the shard is there only because it may be asked for again."""
        return self._keeping is not None

    @property
    def held(self) -> fleet_pb2.HeldShard | None:
        """What is loaded, as an orchestrator that comes back is to be told; None if there is nothing."""
        command = self.command
        if command is None or not self._is_loaded:
            return None
        return fleet_pb2.HeldShard(
            pipeline_id=command.pipeline_id,
            layers=command.layers,
            model_digest=command.model_digest,
            shape=command.shape,
        )

    def is_current(self, command: fleet_pb2.LoadShard) -> bool:
        """Whether a LoadShard is the newest, and its orchestrator still there."""
        return command is self.command and not self.is_kept

    def is_of(self, spec: StageSpec) -> bool:
        """Whether a stage is that of the newest LoadShard; not by its epoch, for another orchestrator may have the same."""
        return spec is self._spec and not self.is_kept

    def current_of(self, pipeline_id: str, epoch: int) -> fleet_pb2.LoadShard | None:
        """The newest LoadShard, if it is of this epoch and its orchestrator still there."""
        command = self.command
        if command is None or not self.is_current(command):
            return None
        return command if (command.pipeline_id, command.epoch) == (pipeline_id, epoch) else None

    def take(
        self,
        command: fleet_pb2.LoadShard,
        stub: fleet_pb2_grpc.FleetServiceStub,
        start: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        """Hold another shard, or the same in another epoch. start: runs a task as long as the worker is attached."""
        spec = _spec_of(command)
        earlier = self._under_way()
        self._stop_prefetching()
        if self._spec is not None and self._spec.is_same_shard(spec):
            self._stop_waiting()
        else:
            self.drop()
        self.command, self._spec = command, spec
        self._tokens[command.pipeline_id] = command.link_token
        self._loading = start(self._load(command, spec, stub, earlier))

    def prefetch(
        self,
        command: fleet_pb2.PrefetchBlobs,
        stub: fleet_pb2_grpc.FleetServiceStub,
        start: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        report: Callable[[fleet_pb2.BlobPrefetched], None],
    ) -> None:
        """Fetch blobs at leisure, in place of those asked for before, and report each; not while a shard is in use."""
        if self.command is not None and not self.is_kept:
            return
        earlier = self._under_way()
        self._stop_prefetching()
        self._prefetching = start(self._prefetch(command, stub, earlier, report))

    def loaded(self) -> None:
        """The compute thread has loaded it."""
        self._is_loaded = True

    def keep(self) -> None:
        """The orchestrator is lost: keep what is loaded for KEEP_S, in case it is asked for again."""
        if self.command is None or self.is_kept:
            return
        if not self._is_loaded:
            self.drop()
            return
        self._stop_waiting()
        self._tokens.pop(self.command.pipeline_id, None)
        self._post(SuspendStage(self.command.pipeline_id))
        self._keeping = asyncio.get_running_loop().call_later(KEEP_S, self._give_up)
        logger.info("shard_kept pipeline=%s for_s=%g", self.command.pipeline_id, KEEP_S)

    def drop(self) -> None:
        """Hold nothing any more."""
        self._stop_waiting()
        if self.command is None:
            return
        self._tokens.pop(self.command.pipeline_id, None)
        self._post(UnloadStage(self.command.pipeline_id))
        self.command = self._spec = None
        self._is_loaded = False

    def _give_up(self) -> None:
        logger.info("shard_given_up: nobody asked for it within %g s", KEEP_S)
        self.drop()

    def _under_way(self) -> set[asyncio.Task[None]]:
        """Who may be fetching now, whether or not it was told to end."""
        return {task for task in (self._loading, self._prefetching) if task is not None}

    def _stop_prefetching(self) -> None:
        if self._prefetching is not None:
            self._prefetching.cancel()

    def _stop_waiting(self) -> None:
        """Neither load what was asked for before, nor end what is kept."""
        if self._loading is not None:
            self._loading.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    async def _load(
        self,
        command: fleet_pb2.LoadShard,
        spec: StageSpec,
        stub: fleet_pb2_grpc.FleetServiceStub,
        earlier: set[asyncio.Task[None]],
    ) -> None:
        if earlier:
            await asyncio.wait(earlier)
        try:
            if not self._is_loaded:
                kv_bytes = spec.shape.kv_tokens * spec.shape.kv_bytes_per_token
                need = need_of(command.blobs, kv_bytes)
                check_fits(self._profile, need, f"{self._worker_id}: layers of {command.pipeline_id}")
                fetched_bytes = await self._blobs.ensure(command.blobs, partial(_fetch, stub))
                logger.info("blobs_ready pipeline=%s fetched_bytes=%d", command.pipeline_id, fetched_bytes)
            self._post(LoadStage(spec, command.graph, self._blobs.directory))
        except (grpc.RpcError, OSError, ShoalError) as error:
            self._on_failed(StageFailed(spec, self._fault(error)))

    async def _prefetch(
        self,
        command: fleet_pb2.PrefetchBlobs,
        stub: fleet_pb2_grpc.FleetServiceStub,
        earlier: set[asyncio.Task[None]],
        report: Callable[[fleet_pb2.BlobPrefetched], None],
    ) -> None:
        if earlier:
            await asyncio.wait(earlier)
        try:
            for blob in command.blobs:
                await self._blobs.ensure([blob], lambda digest, offset: _at_leisure(_fetch(stub, digest, offset)))
                report(fleet_pb2.BlobPrefetched(digest=blob.digest))
        except (grpc.RpcError, OSError, ShoalError) as error:
            fault = self._fault(error)
            report(fleet_pb2.BlobPrefetched(reason=fault.reason, message=fault.message))

    def _fault(self, error: grpc.RpcError | OSError | ShoalError) -> ShoalError:
        """What kept blobs from being fetched."""
        if isinstance(error, ShoalError):
            return error
        return _cache_fault(error) if isinstance(error, OSError) else rpc.error_from_rpc(error, self._join)


async def _fetch(stub: fleet_pb2_grpc.FleetServiceStub, digest: str, offset: int) -> AsyncIterator[bytes]:
    async for response in stub.FetchBlob(fleet_pb2.FetchBlobRequest(digest=digest, offset=offset)):
        yield response.chunk


async def _at_leisure(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    asked_at = time.monotonic()
    async for chunk in chunks:
        took_s = time.monotonic() - asked_at
        yield chunk
        await asyncio.sleep(max(REST * took_s, MIN_REST_S))
        asked_at = time.monotonic()


def _spec_of(command: fleet_pb2.LoadShard) -> StageSpec:
    return StageSpec(
        command.pipeline_id,
        command.epoch,
        command.stage,
        len(command.stages),
        messages.shape_from_proto(command.shape),
        LayerRange(command.layers.start, command.layers.stop),
        command.model_digest,
    )


def _cache_fault(error: OSError) -> ShoalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"the device's disk is full: {error}; free some or set SHOAL_HOME to another disk")
    return CorruptBlob(f"the device's blob cache cannot be used: {error}; remove that file or folder")

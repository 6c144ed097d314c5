"""A worker's membership: attaches to an orchestrator, carries out its commands, reports, and attaches again when cut off.

Lives on the event loop; owns the links, and tells the compute thread where to send; what shard there is, is `holding`'s to
know. Knows nothing of tokens or kernels.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path

import grpc

from shoal import messages, rpc
from shoal.config import WorkerConfig
from shoal.errors import ConnectionFailed, InternalError, RequestCancelled
from shoal.types import PROTOCOL_VERSION, DeviceProfile
from shoal.v1 import fleet_pb2, fleet_pb2_grpc
from worker import commands
from worker.blobs import BlobCache
from worker.compute import Compute
from worker.dialing import Dialer, Opened
from worker.holding import Holding
from worker.inbox import SocketClosed
from worker.kv.fetches import LowerTier
from worker.kv.policy import is_hot
from worker.lifecycle import Lifecycle, WorkerState
from worker.listener import PeerListener
from worker.probing import PROBES, EchoCame
from worker.profiling import ShapeMeasured
from worker.session import runtime_summary
from worker.surveying import Survey
from worker.telemetry import machine_id, telemetry_of

logger = logging.getLogger(__name__)

# An orchestrator that was killed is there again within seconds, and its clients wait for us.
BACKOFF_S = (0.1, 0.2, *[0.3] * 20, 0.8, 1.5)
WELCOME_TIMEOUT_S = 5.0
# Longer than an orchestrator drains by default.
LEAVE_TIMEOUT_S = 15.0
UPLINK = "the link to the orchestrator"


class Agent:
    """One worker process as a member of a fleet.

    Invariant: links between stages belong to the newest LoadShard, and are closed when its epoch ends or its orchestrator is
    lost.
    """

    def __init__(
        self,
        config: WorkerConfig,
        profile: DeviceProfile,
        worker_id: str,
        home: Path,
        *,
        lower: LowerTier | None = None,
    ) -> None:
        """lower: where KV blocks are kept below memory."""
        self._config = config
        self._profile = profile
        self._worker_id = worker_id
        self._incarnation = secrets.randbits(63)
        self._loop = asyncio.get_running_loop()
        kv_trace = Path(config.kv_trace) if config.kv_trace else None
        self._compute = Compute(profile, self._notify, lower=lower, kv_trace=kv_trace)
        self._is_hot = False
        self._dialer = Dialer(config, profile, worker_id, self._incarnation, self._compute.post)
        self._listener = PeerListener(config.host, self._compute.post, self._on_peer_socket, profile.link)
        self._survey = Survey(
            profile, config.home / "times", self._dialer, self._listener, self._compute.post, self._report, self._start
        )
        self._lifecycle = Lifecycle()
        self._events: asyncio.Queue[fleet_pb2.AttachRequest | None] = asyncio.Queue()
        self._holding = Holding(
            profile, worker_id, config.join, BlobCache(home / "blobs"), self._listener.tokens, self._compute.post,
            self._on_compute,
        )  # fmt: skip
        self._uplink: Opened | None = None
        self._peers: dict[socket.socket, fleet_pb2.LoadShard] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ports = (0, 0)
        self._telemetry = telemetry_of(profile, self._compute.emulated, time.monotonic())
        self._told_reason = ""
        self._is_leaving = False
        self._alone_since = time.monotonic()
        self._linger_s = math.inf

    def _notify(self, event: commands.Event) -> None:
        # A thread may still tell something when the event loop has ended: nobody wants to know.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_compute, event)

    async def run(self, stopping: asyncio.Event) -> None:
        """Be a member until `stopping` is set. Raises ProtocolMismatch where trying again cannot help."""
        if self._profile.allow_direct_links:
            self._ports = await self._listener.start(self._config.port, use_sockets=self._config.use_sockets)
        self._compute.start()
        stop = asyncio.create_task(stopping.wait())
        membership = asyncio.create_task(self._stay_attached())
        try:
            await asyncio.wait({stop, membership}, return_when=asyncio.FIRST_COMPLETED)
            if membership.done():
                membership.result()
            await self._leave(membership)
        finally:
            stop.cancel()
            membership.cancel()
            await asyncio.gather(membership, return_exceptions=True)
            await self._listener.stop()
            self._holding.drop()
            await asyncio.to_thread(self._compute.stop, 5.0)
            self._lifecycle.move_to(WorkerState.STOPPED)
            if self._is_leaving:
                logger.info("left worker=%s", self._worker_id)

    def abandon(self, linger_s: float) -> None:
        """Nobody looks after this worker any more: it ends by itself once it has had no orchestrator for so long."""
        logger.info("abandoned linger_s=%g", linger_s)
        self._linger_s = linger_s

    async def _leave(self, membership: asyncio.Task[None]) -> None:
        """Let running answers end, as long as the orchestrator wants us to and LEAVE_TIMEOUT_S allows."""
        self._is_leaving = True
        self._report(leaving=fleet_pb2.Leaving())
        if self._lifecycle.state is not WorkerState.DIALING:
            await asyncio.wait({membership}, timeout=LEAVE_TIMEOUT_S)

    async def _stay_attached(self) -> None:
        attempt = 0
        while True:
            try:
                await self._attach()
                attempt = 0
            except grpc.RpcError as error:
                refusal = rpc.error_from_rpc(error, self._config.join)
                if not refusal.is_retryable and not isinstance(refusal, InternalError | RequestCancelled):
                    raise refusal from error
                self._say_waiting(refusal.message)
            except ConnectionFailed as error:
                self._say_waiting(error.message)
            if self._is_leaving:
                return
            if self._lifecycle.state is not WorkerState.DIALING:
                attempt = 0
                self._alone_since = time.monotonic()
                self._lifecycle.move_to(WorkerState.DIALING)
            if time.monotonic() - self._alone_since > self._linger_s:
                logger.info("gave_up alone_s=%g", self._linger_s)
                return
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1

    def _say_waiting(self, reason: str) -> None:
        """Log what we wait for, once for each reason."""
        if reason != self._told_reason and not self._is_leaving:
            logger.info("not_attached waiting_for=%s reason=%s", self._config.join, reason)
            self._told_reason = reason

    async def _attach(self) -> None:
        join = self._config.join
        async with (
            grpc.aio.insecure_channel(join, options=rpc.FLEET_OPTIONS) as channel,
            grpc.aio.insecure_channel(join, options=rpc.BULK_OPTIONS) as bulk,
        ):
            self._events = asyncio.Queue()
            # A resolver that does not answer holds up its caller for many seconds.
            self._report(hello=self._hello(await asyncio.to_thread(self._dialer.advertised_host)))
            stub = fleet_pb2_grpc.FleetServiceStub(bulk)
            call = fleet_pb2_grpc.FleetServiceStub(channel).Attach(self._requests(self._events))
            responses = aiter(call)
            try:
                async with asyncio.timeout(WELCOME_TIMEOUT_S):
                    first = await anext(responses)
                await self._open_uplink(channel, first.welcome)
                self._lifecycle.move_to(WorkerState.ATTACHED)
                self._told_reason = ""
                logger.info("attached worker=%s orchestrator=%s", self._worker_id, join)
                self._start(self._beat(first.welcome.heartbeat_interval_s))
                self._start(self._dialer.keep_trying())
                async for response in responses:
                    self._obey(response, stub)
                raise ConnectionFailed("the orchestrator ended the stream")
            except StopAsyncIteration as error:
                raise ConnectionFailed("the orchestrator ended the stream without a welcome") from error
            except TimeoutError as error:
                raise ConnectionFailed(f"no welcome within {WELCOME_TIMEOUT_S} s") from error
            finally:
                await self._detach(call)

    async def _detach(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        self._holding.keep()
        self._peers.clear()
        self._compute.post(commands.SetUplink(None))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._uplink is not None and self._uplink.inbound is not None:
            self._uplink.inbound.close()
        self._uplink = None
        self._events.put_nowait(None)
        call.cancel()

    def _hello(self, host: str) -> fleet_pb2.Hello:
        flow_port, socket_port = self._ports
        summary = runtime_summary()
        return fleet_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            profile=messages.profile_to_proto(self._profile),
            runtime=fleet_pb2.RuntimeSummary(
                name=summary.name,
                version=summary.version,
                kernel_fingerprint=summary.kernel_fingerprint,
            ),
            flow_address=f"{host}:{flow_port}" if flow_port else "",
            socket_address=f"{host}:{socket_port}" if socket_port else "",
            times=self._survey.known_times(),
            links=self._survey.known_links(),
            held=self._holding.held,
            machine_id=machine_id(),
        )

    async def _open_uplink(self, channel: grpc.aio.Channel, welcome: fleet_pb2.Welcome) -> None:
        def on_closed(message: str) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._uplink_failed, message)

        self._uplink = uplink = await self._dialer.open_uplink(channel, welcome, on_closed)
        if uplink.carrying is not None:
            self._start(self._carry(uplink.carrying, UPLINK))
        self._compute.post(commands.SetUplink(uplink.link, uplink.connection))

    # Commands of the orchestrator

    def _obey(self, response: fleet_pb2.AttachResponse, stub: fleet_pb2_grpc.FleetServiceStub) -> None:
        if self._survey.obey(response, is_free=self._holding.command is None):
            return
        match response.WhichOneof("command"):
            case "try_peers":
                self._start(self._dialer.try_peers(response.try_peers.peers))
            case "load_shard":
                self._survey.stop_probing()
                self._lifecycle.move_to(WorkerState.LOADING)
                self._holding.take(response.load_shard, stub, self._start)
            case "open_links":
                current = self._holding.current_of(response.open_links.pipeline_id, response.open_links.epoch)
                if current is not None:
                    self._start(self._open_links(current))
            case "prefetch_blobs":
                self._holding.prefetch(
                    response.prefetch_blobs, stub, self._start, lambda had: self._report(blob_prefetched=had)
                )
            case "unload_shard":
                self._unload(response.unload_shard.epoch)
            case command:
                logger.warning("unknown_command command=%s", command)

    def _unload(self, epoch: int) -> None:
        """Obey an UnloadShard, whose epoch is that of the placement without us, later than the one of our shard."""
        command = self._holding.command
        if self._holding.is_kept:
            self._holding.drop()
        elif command is not None and command.epoch <= epoch:
            self._holding.drop()
            self._lifecycle.move_to(WorkerState.ATTACHED)

    async def _open_links(self, command: fleet_pb2.LoadShard) -> None:
        """Reach the next stage (the last: the first, for bursts) directly if we can; else frames go by the orchestrator."""
        following = (command.stage + 1) % len(command.stages)
        kind, links = "local", {}
        if following != command.stage:
            opened = await self._dialer.reach(command, following)
            kind = "relay" if opened is None else opened.link.kind
            links = {} if opened is None else {following: opened.link}
            if opened is not None and opened.carrying is not None:
                self._start(self._carry(opened.carrying, f"the link to stage {following}", command))
        if not self._holding.is_current(command):
            for link in links.values():
                link.close()
            return
        self._compute.post(commands.ConnectStage(command.pipeline_id, command.epoch, links))
        self._lifecycle.move_to(WorkerState.SERVING)
        report = fleet_pb2.LinksOpened(
            pipeline_id=command.pipeline_id, epoch=command.epoch, stage=command.stage, link_to_next=kind
        )
        self._report(links_opened=report)

    async def _carry(
        self, carrying: Coroutine[None, None, None], what: str, command: fleet_pb2.LoadShard | None = None
    ) -> None:
        try:
            await carrying
            message = "it ended"
        except grpc.RpcError as error:
            message = rpc.error_from_rpc(error, what).message
        self._link_failed(f"{what}: {message}", command or self._holding.command)

    # What happens by itself

    def _on_compute(self, event: commands.Event) -> None:
        match event:
            case commands.StageLoaded(spec, provider) if self._holding.is_of(spec):
                self._holding.loaded()
                self._lifecycle.move_to(WorkerState.LOADED)
                logger.info("shard_loaded pipeline=%s stage=%d provider=%s", spec.pipeline_id, spec.stage, provider)
                loaded = fleet_pb2.ShardLoaded(
                    pipeline_id=spec.pipeline_id,
                    epoch=spec.epoch,
                    stage=spec.stage,
                    weight_bytes=self._holding.weight_bytes,
                    execution_provider=provider,
                )
                self._report_telemetry()
                self._report(shard_loaded=loaded)
            case commands.StageFailed(spec, error) if self._holding.is_of(spec):
                logger.error("shard_failed pipeline=%s error=%s", spec.pipeline_id, error.message)
                failed = fleet_pb2.ShardFailed(
                    pipeline_id=spec.pipeline_id,
                    epoch=spec.epoch,
                    stage=spec.stage,
                    reason=error.reason,
                    message=error.message,
                )
                self._holding.drop()
                self._lifecycle.move_to(WorkerState.ATTACHED)
                self._report(shard_failed=failed)
            case commands.LinkBroke(spec, message) if self._holding.is_of(spec):
                self._link_failed(message, self._holding.command)
            case ShapeMeasured() | EchoCame():
                self._survey.on_compute(event)
            case SocketClosed(connection, message) if connection in self._peers:
                self._link_failed(f"a link from another stage: {message}", self._peers.pop(connection))
            case SocketClosed(connection, message) if self._uplink and connection is self._uplink.connection:
                self._uplink_failed(message)
            case _:
                return  # of an epoch that is over

    def _uplink_failed(self, message: str) -> None:
        self._link_failed(f"{UPLINK}: {message}", self._holding.command)

    def _link_failed(self, message: str, command: fleet_pb2.LoadShard | None) -> None:
        """Report a broken link of the current shard; links of earlier ones end without a word."""
        if command is None or not self._holding.is_current(command) or self._is_leaving:
            return
        logger.warning("link_failed pipeline=%s message=%s", command.pipeline_id, message)
        failed = fleet_pb2.LinkFailed(
            pipeline_id=command.pipeline_id, epoch=command.epoch, stage=command.stage, message=message
        )
        self._report(link_failed=failed)

    def _on_peer_socket(self, pipeline_id: str, connection: socket.socket) -> None:
        if pipeline_id == PROBES:
            self._survey.on_peer_socket(connection)
            return
        current = self._holding.command
        if current is None or current.pipeline_id != pipeline_id or self._holding.is_kept:
            connection.close()
            return
        logger.info("peer_linked pipeline=%s", pipeline_id)
        self._peers = {peer: command for peer, command in self._peers.items() if command is current}
        self._peers[connection] = current
        self._compute.post(commands.AdoptSocket(pipeline_id, connection))

    async def _beat(self, interval_s: float) -> None:
        while True:
            self._report_telemetry()
            await asyncio.sleep(interval_s)

    def _report_telemetry(self) -> None:
        now = time.monotonic()
        seen = self._telemetry.read(now)
        if is_hot(self._profile.limits, seen) is not self._is_hot:
            self._is_hot = not self._is_hot
            self._compute.post(commands.SetHeat(self._is_hot))
        telemetry = replace(
            seen,
            kv_bytes=self._compute.kv_bytes,
            weight_bytes=self._holding.weight_bytes,
            kv_tiers=self._compute.kv_tiers(now),
            busy_s=self._compute.busy_s(now),
        )
        self._report(heartbeat=fleet_pb2.Heartbeat(telemetry=messages.telemetry_to_proto(telemetry)))

    def _report(self, **event: object) -> None:
        self._events.put_nowait(fleet_pb2.AttachRequest(**event))  # type: ignore[arg-type]

    @staticmethod
    async def _requests(
        events: asyncio.Queue[fleet_pb2.AttachRequest | None],
    ) -> AsyncIterator[fleet_pb2.AttachRequest]:
        while (event := await events.get()) is not None:
            yield event

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that failed in a way nobody foresaw must not leave the fleet waiting for it."""
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        logger.error("task_failed", exc_info=task.exception())
        self._link_failed(f"a bug: {task.exception()!r}", self._holding.command)

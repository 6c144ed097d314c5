"""How a worker reaches others: its link to the orchestrator, and the one to the next stage, over what both ends have.

A plain socket where both offer one and the dial succeeds, else gRPC, else nothing (the orchestrator relays). A profile may
make links slow or forbid direct ones. Knows addresses and hellos; `agent` decides when to dial and what a broken link means.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

import grpc

from shoal import rpc
from shoal.config import WorkerConfig
from shoal.errors import ConnectionFailed
from shoal.types import PROTOCOL_VERSION, DeviceProfile, LinkProfile
from shoal.v1 import fleet_pb2, flow_pb2
from worker.emulation import LinkShaper
from worker.links import DelayLine, GrpcLink, Link, SocketLink, answers, dial, read_shaped, run_grpc_link, shaped

DIAL_TIMEOUT_S = 2.0
# The system of a peer that can be reached answers a dial, whatever its processes do, within milliseconds across a home; a
# dial that was lost is tried again after a second, which is not waited for.
PEER_TIMEOUT_S = 0.5
# Long enough for a second try of the system: who is silent then is not waited for when a pipeline comes up in mid-answer.
TRY_TIMEOUT_S = 2.5
# A network that comes back tells nobody. Those that were silent last are tried, as the others may be gone for good.
TRY_AGAIN_S = 10.0
MAX_SILENT = 32


@dataclass(frozen=True, slots=True)
class Opened:
    """A link that was opened.

    carrying: what has to run as a task as long as a gRPC link lives. connection: the socket to read from, if somebody has
    to: of the uplink, the compute thread. inbound: delays what comes in, if the link is emulated.
    """

    link: Link
    carrying: Coroutine[None, None, None] | None = None
    connection: socket.socket | None = None
    inbound: DelayLine | None = None


class Dialer:
    """Opens the links of one worker; `deliver` takes frames that come in, from any thread.

    uplink_kind: of the latest link to the orchestrator.
    Invariant: `_silent` are the peers, by host, whose socket did not answer the latest dial, or trial, that there was time
    for: no word, not even a refusal. They are reached by way of the orchestrator until a trial finds that they answer.
    At most MAX_SILENT, those that were last.
    """

    def __init__(
        self,
        config: WorkerConfig,
        profile: DeviceProfile,
        worker_id: str,
        incarnation: int,
        deliver: Callable[[flow_pb2.Frame], None],
    ) -> None:
        self._config = config
        self._profile = profile
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._deliver = deliver
        self.uplink_kind = ""
        self._silent: dict[tuple[str, str], fleet_pb2.StageAddress] = {}
        self._is_shaped = profile.link != LinkProfile()

    def advertised_host(self) -> str:
        """The address peers can dial: our own, or, when we listen on all, the one that leads to the orchestrator.

        Raises ConnectionFailed where nothing leads there.
        """
        if self._config.host not in ("0.0.0.0", "::"):
            return self._config.host
        host, _, port = self._config.join.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, int(port)))  # sends nothing: only asks for the route
            except OSError as error:
                raise ConnectionFailed(f"no way leads to {self._config.join}: {error.strerror}") from error
            return str(probe.getsockname()[0])

    async def open_uplink(
        self, channel: grpc.aio.Channel, welcome: fleet_pb2.Welcome, on_closed: Callable[[str], None]
    ) -> Opened:
        """Open the link to the orchestrator; on_closed tells, from another thread, that an emulated one ended."""
        hello = self._hello("", welcome.link_token)
        inbound = DelayLine(self._deliver, LinkShaper(self._profile.link)) if self._is_shaped else None
        link: SocketLink | None = None
        if self._config.use_sockets and welcome.socket_port:
            host = self._config.join.rpartition(":")[0]
            link = await dial(f"{host}:{welcome.socket_port}", hello, DIAL_TIMEOUT_S)
        self.uplink_kind = SocketLink.kind if link is not None else GrpcLink.kind
        if link is None:
            carried = GrpcLink(asyncio.get_running_loop())
            carried.send(hello)
            on_frame = self._deliver if inbound is None else inbound.push
            return Opened(
                shaped(carried, self._profile.link), run_grpc_link(carried, channel, on_frame), inbound=inbound
            )
        if inbound is None:
            return Opened(link, connection=link.connection)
        threading.Thread(target=read_shaped, args=(link, inbound, on_closed), name="uplink", daemon=True).start()
        return Opened(shaped(link, self._profile.link), inbound=inbound)

    async def reach(self, command: fleet_pb2.LoadShard, stage: int) -> Opened | None:
        """Open a link to another stage of the pipeline; None if it cannot be reached directly."""
        return await self.reach_peer(
            command.stages[stage], command.pipeline_id, command.link_token, lambda _frame: None
        )

    async def reach_peer(
        self, peer: fleet_pb2.StageAddress, pipeline_id: str, token: bytes, on_frame: Callable[[flow_pb2.Frame], None]
    ) -> Opened | None:
        """Open a link to a peer; None if it cannot be reached directly. on_frame: takes what comes back by gRPC."""
        if not self._profile.allow_direct_links:
            return None
        if _host(peer) in self._silent:
            return None
        hello = self._hello(pipeline_id, token)
        if self._config.use_sockets and peer.socket_address:
            link = await self._dial_peer(peer, hello)
            if link is not None:
                return Opened(shaped(link, self._profile.link), connection=link.connection)
            if _host(peer) in self._silent:
                return None  # Its other port would be as silent.
        return await self._reach_by_grpc(peer.flow_address, hello, on_frame) if peer.flow_address else None

    async def try_peers(self, peers: Iterable[fleet_pb2.StageAddress]) -> None:
        """Find out who is silent, one after the other, before anybody has to wait for that."""
        if not (self._profile.allow_direct_links and self._config.use_sockets):
            return
        for peer in peers:
            if peer.socket_address and await answers(peer.socket_address, TRY_TIMEOUT_S):
                self._silent.pop(_host(peer), None)
            elif peer.socket_address:
                self._remember_silent(peer)

    async def keep_trying(self) -> None:
        """Find out from time to time, until cancelled, who of the silent answers by now."""
        while True:
            await asyncio.sleep(TRY_AGAIN_S)
            await self.try_peers(list(self._silent.values()))

    def _remember_silent(self, peer: fleet_pb2.StageAddress) -> None:
        self._silent.pop(_host(peer), None)
        self._silent[_host(peer)] = peer
        if len(self._silent) > MAX_SILENT:
            del self._silent[next(iter(self._silent))]

    async def _dial_peer(self, peer: fleet_pb2.StageAddress, hello: flow_pb2.Frame) -> SocketLink | None:
        """None if it cannot be reached, which is remembered if it did not even refuse."""
        began = time.monotonic()
        link = await dial(peer.socket_address, hello, PEER_TIMEOUT_S)
        if link is None:
            left_s = PEER_TIMEOUT_S - (time.monotonic() - began)
            if left_s <= 0.0 or not await answers(peer.socket_address, left_s):
                self._remember_silent(peer)
        return link

    async def _reach_by_grpc(
        self, address: str, hello: flow_pb2.Frame, on_frame: Callable[[flow_pb2.Frame], None]
    ) -> Opened | None:
        channel = grpc.aio.insecure_channel(address, options=rpc.FLEET_OPTIONS)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await channel.channel_ready()
        except TimeoutError:
            await channel.close(None)
            return None
        link = GrpcLink(asyncio.get_running_loop())
        link.send(hello)

        async def carry() -> None:
            try:
                await run_grpc_link(link, channel, on_frame)
            finally:
                await channel.close(None)

        return Opened(shaped(link, self._profile.link), carry())

    def _hello(self, pipeline_id: str, token: bytes) -> flow_pb2.Frame:
        hello = flow_pb2.LinkHello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            link_token=token,
        )
        return flow_pb2.Frame(pipeline_id=pipeline_id, link_hello=hello)


def _host(peer: fleet_pb2.StageAddress) -> tuple[str, str]:
    """Who is where: several workers of one host are several peers."""
    return peer.worker_id, peer.socket_address.rpartition(":")[0]

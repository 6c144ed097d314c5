"""What the orchestrator asks a device about itself before it gives it layers: how fast it computes, how far others are.

Answers Measure and ProbeLinks, and says which times are known already; refuses while the worker holds a shard, so that no
stage waits for it. The compute thread does the work; here it is asked for, remembered and reported. `agent` owns it and
passes on what concerns it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Protocol

import grpc

from shoal.errors import ConnectionFailed, NotReady
from shoal.types import DeviceProfile
from shoal.v1 import fleet_pb2
from worker.dialing import Dialer
from worker.listener import PeerListener
from worker.probing import PROBES, EchoCame, PeerEcho, SendEcho, UplinkEcho, answer_echoes, measure_link
from worker.profiling import HOLDS_LAYERS, KnownTimes, MeasureShape, ShapeMeasured, times_of_device

# So long peers may open links with the token of a ProbeLinks.
TOKEN_S = 10.0
# Devices are told to probe at the same time, but do not hear of it at the same time.
HEARD_S = 0.02


class Report(Protocol):
    def __call__(self, **event: object) -> None: ...


class Survey:
    """Invariants: at most one probe is under way; the token of the latest ProbeLinks is the only one that opens links."""

    def __init__(
        self,
        profile: DeviceProfile,
        folder: Path,
        dialer: Dialer,
        listener: PeerListener,
        post: Callable[[MeasureShape | SendEcho], None],
        report: Report,
        start: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        """folder: where times are kept. post: to the compute thread. start: runs a task as long as we are attached."""
        self._profile = profile
        self._folder = folder
        self._known = KnownTimes(folder, profile.num_threads)
        self._dialer = dialer
        self._listener = listener
        self._post = post
        self._report = report
        self._start = start
        self._uplink = UplinkEcho(lambda num_bytes: post(SendEcho(num_bytes)))
        self._probing: asyncio.Task[None] | None = None
        self._links: dict[str, fleet_pb2.LinkFigures] = {}

    def known_times(self) -> list[fleet_pb2.DeviceTimes]:
        """What was measured earlier, for the Hello."""
        return [times_of_device(times, self._profile) for times in self._known.all(time.time())]

    def known_links(self) -> list[fleet_pb2.LinkFigures]:
        """Each link as it was measured last, for the Hello."""
        return list(self._links.values())

    def obey(self, response: fleet_pb2.AttachResponse, *, is_free: bool) -> bool:
        """Act on a command if it is one of ours; is_free: the worker holds no shard."""
        match response.WhichOneof("command"):
            case "measure":
                self._measure(response.measure, is_free=is_free)
            case "probe_links":
                self.stop_probing()
                if is_free:
                    self._probing = self._start(self._probe(response.probe_links))
                else:
                    self._report(links_probed=fleet_pb2.LinksProbed())
            case _:
                return False
        return True

    def stop_probing(self) -> None:
        """A shard is to be loaded: links have other things to carry."""
        if self._probing is not None:
            self._probing.cancel()

    def _measure(self, command: fleet_pb2.Measure, *, is_free: bool) -> None:
        times = self._known.get(command.shape_digest, time.time())
        if times is not None or not is_free:
            busy = NotReady(HOLDS_LAYERS)
            self._on_measured(ShapeMeasured(command.shape_digest, times, busy.reason, busy.message))
        else:
            self._post(MeasureShape(command, self._folder))

    def on_compute(self, event: ShapeMeasured | EchoCame) -> None:
        """Take what the compute thread says."""
        match event:
            case ShapeMeasured(_, times):
                if times is not None:
                    self._known.keep(times)
                self._on_measured(event)
            case EchoCame():
                self._uplink.came(event)

    def _on_measured(self, event: ShapeMeasured) -> None:
        if event.times is not None:
            self._report(measured=fleet_pb2.Measured(times=times_of_device(event.times, self._profile)))
            return
        none = fleet_pb2.DeviceTimes(shape_digest=event.shape_digest)
        self._report(measured=fleet_pb2.Measured(times=none, reason=event.reason, message=event.message))

    def on_peer_socket(self, connection: socket.socket) -> None:
        """A peer wants to know how far we are."""
        threading.Thread(
            target=answer_echoes, args=(connection, self._profile.link), name="echoes", daemon=True
        ).start()

    async def _probe(self, command: fleet_pb2.ProbeLinks) -> None:
        """Report the links to the orchestrator and to the peers, as many as answer."""
        self._listener.tokens[PROBES] = command.link_token
        asyncio.get_running_loop().call_later(TOKEN_S, self._forget_token, command.link_token)
        links = []
        try:
            links.append(await measure_link(self._uplink, "", self._dialer.uplink_kind))
            await asyncio.sleep(HEARD_S)
            for peer in command.peers:
                figures = await self._probe_peer(peer, command.link_token)
                links += [figures] if figures is not None else []
        except ConnectionFailed:
            pass  # What was measured before counts.
        self._links |= {one.worker_id: one for one in links}
        self._report(links_probed=fleet_pb2.LinksProbed(links=links))

    async def _probe_peer(self, peer: fleet_pb2.StageAddress, token: bytes) -> fleet_pb2.LinkFigures | None:
        echo = PeerEcho()
        opened = await self._dialer.reach_peer(peer, PROBES, token, echo.replies.put)
        if opened is None:
            return None
        carrying = None if opened.carrying is None else self._start(_carry(opened.carrying))
        try:
            return await measure_link(echo.over(opened.link, opened.connection), peer.worker_id, opened.link.kind)
        except ConnectionFailed:
            return None
        finally:
            opened.link.close()
            if carrying is not None:
                carrying.cancel()

    def _forget_token(self, token: bytes) -> None:
        if self._listener.tokens.get(PROBES) == token:
            del self._listener.tokens[PROBES]


async def _carry(carrying: Coroutine[None, None, None]) -> None:
    try:
        await carrying
    except grpc.RpcError:
        return  # Whoever waits for an echo notices.

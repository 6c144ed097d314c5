"""Links measured by echoes: the figures that come out, over real sockets and gRPC on loopback, and who may have an echo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from shoal.codec import pack_frame
from shoal.config import WorkerConfig
from shoal.errors import ConnectionFailed
from shoal.types import LinkProfile
from shoal.v1 import fleet_pb2, flow_pb2
from tests.support.compute import Bench, bench, model, start
from tests.support.fleet import make_device
from tests.support.hub import HubBench
from tests.support.peers import HOST, WAIT_S, Peer, dial_raw, is_hung_up, make_hello
from worker.dialing import Dialer
from worker.listener import PeerListener
from worker.probing import (
    LEAST_S,
    NUM_SMALL,
    PAYLOADS_BYTES,
    PROBES,
    EchoCame,
    PeerEcho,
    SendEcho,
    UplinkEcho,
    answer_echoes,
    measure_link,
)

__all__ = ["bench", "model", "start"]

TOKEN = b"0123456789abcdef"
UNLIMITED = LinkProfile()


def echo_of(small_s: float, bytes_per_s: float, asked: list[int] | None = None) -> Callable[[int], Awaitable[float]]:
    """A link without noise."""

    async def echo(num_bytes: int) -> float:
        if asked is not None:
            asked.append(num_bytes)
        return small_s + num_bytes / bytes_per_s

    return echo


async def test_a_links_figures_are_its_round_trip_and_its_rate() -> None:
    figures = await measure_link(echo_of(0.004, 2.5e6), "w1", "socket")
    assert (figures.worker_id, figures.kind) == ("w1", "socket")
    assert figures.rtt_ms == pytest.approx(4.0)
    assert figures.mbit_s == pytest.approx(20.0)


async def test_a_slow_link_is_not_burdened_with_the_larger_message() -> None:
    asked: list[int] = []
    await measure_link(echo_of(0.004, 2.5e6, asked), "", "socket")
    assert asked == [0] * NUM_SMALL + [PAYLOADS_BYTES[0]]


async def test_a_fast_link_is_measured_with_the_larger_message() -> None:
    asked: list[int] = []
    figures = await measure_link(echo_of(0.001, 100e6, asked), "", "socket")
    assert asked[NUM_SMALL:] == list(PAYLOADS_BYTES)
    assert figures.mbit_s == pytest.approx(800.0)


async def test_a_link_that_limits_nothing_has_no_rate() -> None:
    figures = await measure_link(echo_of(0.001, 2 * PAYLOADS_BYTES[1] / LEAST_S), "", "socket")
    assert figures.mbit_s == 0.0


async def test_one_late_message_does_not_decide() -> None:
    trips = iter([0.002, 0.5, *[0.002] * 20])

    async def echo(num_bytes: int) -> float:
        return next(trips)

    assert (await measure_link(echo, "", "socket")).rtt_ms == pytest.approx(2.0)


async def test_what_small_messages_are_late_by_is_no_time_of_the_payload_s() -> None:
    trips = iter([0.001, *[0.003] * (NUM_SMALL - 1), 0.005])

    async def echo(num_bytes: int) -> float:
        return next(trips)

    figures = await measure_link(echo, "", "socket")
    assert figures.mbit_s == pytest.approx(PAYLOADS_BYTES[0] * 8 / 0.004 / 1e6)


async def test_an_uplink_echo_is_what_the_compute_thread_says() -> None:
    sent: list[int] = []
    echo = UplinkEcho(sent.append)
    waiting = asyncio.create_task(echo(17))
    await asyncio.sleep(0)
    echo.came(EchoCame(0.25))
    assert (await waiting, sent) == (0.25, [17])


async def test_an_echo_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.probing.ECHO_TIMEOUT_S", 0.01)
    with pytest.raises(ConnectionFailed, match="no echo from the orchestrator"):
        await UplinkEcho(lambda _: None)(0)


async def test_an_echo_that_comes_when_nobody_waits_is_no_harm() -> None:
    UplinkEcho(lambda _: None).came(EchoCame(0.1))


def test_the_compute_thread_sends_an_echo_and_tells_when_its_answer_came(bench: Bench) -> None:
    bench.compute.post(SendEcho(5))
    sent = bench.uplink.next()
    assert (len(sent.echo.payload), sent.to_stage, sent.echo.is_reply) == (5, -1, False)

    bench.compute.post(flow_pb2.Frame(echo=flow_pb2.Echo(sent_ns=sent.echo.sent_ns, is_reply=True)))

    event = bench.next_event()
    assert isinstance(event, EchoCame)
    assert 0.0 < event.round_trip_s < WAIT_S


@asynccontextmanager
async def probed_peer(link: LinkProfile) -> AsyncIterator[fleet_pb2.StageAddress]:
    """A worker's listener that answers echoes as slowly as this link."""
    connections: list[asyncio.Task[None]] = []

    def on_socket(pipeline_id: str, connection: object) -> None:
        assert pipeline_id == PROBES
        connections.append(asyncio.create_task(asyncio.to_thread(answer_echoes, connection, link)))  # type: ignore[arg-type]

    listener = PeerListener(HOST, lambda frame: None, on_socket, link)
    listener.tokens[PROBES] = TOKEN
    flow_port, socket_port = await listener.start(0, use_sockets=True)
    try:
        yield fleet_pb2.StageAddress(
            worker_id="peer", flow_address=f"{HOST}:{flow_port}", socket_address=f"{HOST}:{socket_port}"
        )
    finally:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*connections)
        await listener.stop()


async def probe(peer: fleet_pb2.StageAddress, link: LinkProfile = UNLIMITED, token: bytes = TOKEN) -> float | None:
    """Seconds that one echo takes from a device with this link; None if it cannot be reached."""
    dialer = Dialer(WorkerConfig(), make_device(link=link), "w0", 1, lambda frame: None)
    echo = PeerEcho()
    opened = await dialer.reach_peer(peer, PROBES, token, echo.replies.put)
    if opened is None:
        return None
    carrying = None if opened.carrying is None else asyncio.create_task(opened.carrying)
    try:
        return await echo.over(opened.link, opened.connection)(1000)
    finally:
        opened.link.close()
        if carrying is not None:
            carrying.cancel()
            with suppress(asyncio.CancelledError):
                await carrying


@pytest.mark.parametrize("kind", ["socket", "grpc"])
async def test_an_echo_of_a_peer_is_delayed_by_the_links_of_both(kind: str) -> None:
    async with probed_peer(LinkProfile(delay_ms=20.0)) as peer:
        if kind == "grpc":
            peer.socket_address = ""
        took_s = await probe(peer, LinkProfile(delay_ms=30.0))
    assert took_s is not None
    assert took_s >= 0.05


async def test_an_echo_with_a_wrong_token_is_refused() -> None:
    async with probed_peer(UNLIMITED) as peer:
        with pytest.raises(ConnectionFailed):
            await probe(peer, token=b"another")


async def test_a_peer_that_listens_no_more_is_not_reached() -> None:
    async with probed_peer(UNLIMITED) as peer:
        pass
    peer.flow_address = ""
    assert await probe(peer) is None


async def test_a_worker_that_was_not_asked_to_probe_answers_nobody() -> None:
    peer = Peer()
    await peer.start()
    with await dial_raw(peer.socket_address) as connection:
        hello = make_hello(pipeline_id=PROBES, token=b"")
        await asyncio.get_running_loop().sock_sendall(connection, pack_frame(hello))
        assert await is_hung_up(connection)
    await peer.close()


@pytest.mark.parametrize("kind", ["socket", "grpc"])
async def test_the_orchestrator_sends_an_echo_back_without_its_payload(kind: str) -> None:
    hub = HubBench()
    await hub.start()
    uplink = await hub.join(kind)

    await uplink.send(flow_pb2.Frame(to_stage=-1, echo=flow_pb2.Echo(sent_ns=7, payload=b"x" * 1000)))

    reply = await uplink.receive()
    assert reply is not None
    assert (reply.echo.sent_ns, reply.echo.is_reply, reply.echo.payload) == (7, True, b"")
    await hub.close()

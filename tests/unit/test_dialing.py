"""How long a worker waits for peers: a silent one costs a bound once, and little from then on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.config import WorkerConfig
from shoal.errors import ConnectionFailed
from shoal.v1 import fleet_pb2, flow_pb2
from tests.support.builders import make_profile
from worker import dialing
from worker.dialing import PEER_TIMEOUT_S, SILENT_TIMEOUT_S, Dialer, Opened
from worker.links import SocketLink


class Network:
    """Peers that refuse, or say nothing until the dial's time is up; a clock that only such dials move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.is_silent = True
        # (address, time-out) of each dial.
        self.dials: list[tuple[str, float]] = []
        self.num_grpc = 0
        monkeypatch.setattr(dialing, "dial", self._dial)
        monkeypatch.setattr(dialing, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.dialer = Dialer(WorkerConfig(), make_profile(), "w0", 1, lambda frame: None)
        monkeypatch.setattr(self.dialer, "_reach_by_grpc", self._by_grpc)

    async def _dial(self, address: str, hello: flow_pb2.Frame, timeout_s: float) -> SocketLink | None:
        self.dials.append((address, timeout_s))
        self.now += timeout_s if self.is_silent else 0.001
        return None

    async def _by_grpc(self, *_: object) -> Opened | None:
        self.num_grpc += 1
        return None

    async def reach(self, worker_id: str = "w1", address: str = "10.0.0.2:4000") -> None:
        peer = fleet_pb2.StageAddress(worker_id=worker_id, socket_address=address, flow_address="10.0.0.2:4001")
        assert await self.dialer.reach_peer(peer, "p1", b"token", lambda frame: None) is None


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


async def test_the_other_port_of_a_silent_peer_is_not_tried(network: Network) -> None:
    await network.reach()

    assert network.dials == [("10.0.0.2:4000", PEER_TIMEOUT_S)]
    assert network.num_grpc == 0


async def test_the_other_port_of_a_peer_that_refuses_is_tried(network: Network) -> None:
    network.is_silent = False

    await network.reach()

    assert network.num_grpc == 1


async def test_a_peer_that_was_silent_gets_less_time_though_its_port_is_another(network: Network) -> None:
    await network.reach()
    await network.reach(address="10.0.0.2:5000")

    assert network.dials[1] == ("10.0.0.2:5000", SILENT_TIMEOUT_S)


async def test_another_worker_of_that_host_gets_all_the_time(network: Network) -> None:
    await network.reach()
    await network.reach(worker_id="w2")

    assert network.dials[1][1] == PEER_TIMEOUT_S


async def test_a_peer_that_answers_again_gets_all_the_time_again(network: Network) -> None:
    await network.reach()
    network.is_silent = False
    await network.reach()
    await network.reach()

    assert [timeout_s for _, timeout_s in network.dials] == [PEER_TIMEOUT_S, SILENT_TIMEOUT_S, PEER_TIMEOUT_S]


def test_a_worker_that_nothing_leads_from_says_so() -> None:
    # An address of IPv6, which no socket of IPv4 finds a way to.
    config = WorkerConfig(host="0.0.0.0", join="::1:50070")
    dialer = Dialer(config, make_profile(), "w0", 1, lambda frame: None)

    with pytest.raises(ConnectionFailed, match=r"no way leads to ::1:50070"):
        dialer.advertised_host()

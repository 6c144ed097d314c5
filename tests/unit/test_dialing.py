"""How long a worker waits for peers: a silent one costs a bound once, and nothing from then on until it answers a trial."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from shoal.config import WorkerConfig
from shoal.errors import ConnectionFailed
from shoal.types import DeviceProfile
from shoal.v1 import fleet_pb2, flow_pb2
from tests.support.builders import make_profile
from worker import dialing
from worker.dialing import MAX_SILENT, PEER_TIMEOUT_S, TRY_AGAIN_S, TRY_TIMEOUT_S, Dialer, Opened
from worker.links import SocketLink


class Network:
    """Peers that refuse, or say nothing until the dial's time is up; a clock that only such dials move.

    has_way False: the system knows at once that nothing leads to them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, profile: DeviceProfile) -> None:
        self.now = 100.0
        self.is_silent = True
        self.has_way = True
        # (address, time-out) of each dial and of each trial.
        self.dials: list[tuple[str, float]] = []
        self.trials: list[tuple[str, float]] = []
        self.num_grpc = 0
        monkeypatch.setattr(dialing, "dial", self._dial)
        monkeypatch.setattr(dialing, "answers", self._answers)
        monkeypatch.setattr(dialing, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.dialer = Dialer(WorkerConfig(), profile, "w0", 1, lambda frame: None)
        monkeypatch.setattr(self.dialer, "_reach_by_grpc", self._by_grpc)

    async def _dial(self, address: str, hello: flow_pb2.Frame, timeout_s: float) -> SocketLink | None:
        self.dials.append((address, timeout_s))
        self._wait(timeout_s)
        return None

    async def _answers(self, address: str, timeout_s: float) -> bool:
        self.trials.append((address, timeout_s))
        self._wait(timeout_s)
        return self.has_way and not self.is_silent

    def _wait(self, timeout_s: float) -> None:
        self.now += timeout_s if self.is_silent and self.has_way else 0.001

    async def _by_grpc(self, *_: object) -> Opened | None:
        self.num_grpc += 1
        return None

    async def reach(self, worker_id: str = "w1", address: str = "10.0.0.2:4000") -> None:
        assert await self.dialer.reach_peer(_peer(worker_id, address), "p1", b"token", lambda frame: None) is None

    async def attempt(self, worker_id: str = "w1", address: str = "10.0.0.2:4000") -> None:
        await self.dialer.try_peers([_peer(worker_id, address)])


def _peer(worker_id: str, address: str) -> fleet_pb2.StageAddress:
    return fleet_pb2.StageAddress(worker_id=worker_id, socket_address=address, flow_address="10.0.0.2:4001")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch, make_profile())


async def test_the_other_port_of_a_silent_peer_is_not_tried(network: Network) -> None:
    await network.reach()

    assert network.dials == [("10.0.0.2:4000", PEER_TIMEOUT_S)]
    assert network.num_grpc == 0


async def test_the_other_port_of_a_peer_that_refuses_is_tried(network: Network) -> None:
    network.is_silent = False

    await network.reach()

    assert network.num_grpc == 1


async def test_the_other_port_of_a_peer_that_nothing_leads_to_is_not_tried(network: Network) -> None:
    network.has_way = False

    await network.reach()

    assert network.num_grpc == 0


async def test_a_peer_that_was_silent_is_not_dialled_again_though_its_port_is_another(network: Network) -> None:
    await network.reach()
    await network.reach(address="10.0.0.2:5000")

    assert network.dials == [("10.0.0.2:4000", PEER_TIMEOUT_S)]


async def test_another_worker_of_that_host_is_dialled(network: Network) -> None:
    await network.reach()
    await network.reach(worker_id="w2")

    assert len(network.dials) == 2


async def test_a_peer_that_a_trial_finds_silent_is_not_waited_for(network: Network) -> None:
    await network.attempt()
    await network.reach()

    assert network.trials == [("10.0.0.2:4000", TRY_TIMEOUT_S)]
    assert network.dials == []


async def test_a_peer_that_answers_a_trial_again_is_dialled_again(network: Network) -> None:
    await network.reach()
    network.is_silent = False
    await network.attempt()
    await network.reach()

    assert len(network.dials) == 2
    assert network.num_grpc == 1


class Enough(Exception):
    """Ends what goes on for ever."""


async def test_those_that_are_silent_are_tried_from_time_to_time_until_they_answer(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        network.is_silent = len(waits) < 2
        if len(waits) == 4:
            raise Enough

    monkeypatch.setattr(dialing, "asyncio", SimpleNamespace(sleep=wait))
    await network.reach()
    network.trials.clear()

    with pytest.raises(Enough):
        await network.dialer.keep_trying()

    assert waits == [TRY_AGAIN_S] * 4
    assert network.trials == [("10.0.0.2:4000", TRY_TIMEOUT_S)] * 2


async def test_a_peer_is_tried_at_the_address_that_it_was_told_to_have_last(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    await network.attempt()
    await network.attempt(address="10.0.0.2:5000")
    network.trials.clear()

    await _try_once(network, monkeypatch)

    assert network.trials == [("10.0.0.2:5000", TRY_TIMEOUT_S)]


async def test_of_very_many_that_are_silent_the_last_are_remembered(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (*range(MAX_SILENT), 0, *range(MAX_SILENT, MAX_SILENT + 2)):
        await network.attempt(worker_id=f"w{number}", address=f"10.0.0.2:{number}")
    network.trials.clear()

    await _try_once(network, monkeypatch)

    left = [*range(3, MAX_SILENT), 0, MAX_SILENT, MAX_SILENT + 1]
    assert [address for address, _ in network.trials] == [f"10.0.0.2:{number}" for number in left]


async def _try_once(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([None])

    async def wait(_: float) -> None:
        if next(waits, Enough) is Enough:
            raise Enough

    monkeypatch.setattr(dialing, "asyncio", SimpleNamespace(sleep=wait))
    with pytest.raises(Enough):
        await network.dialer.keep_trying()


async def test_a_device_that_may_not_reach_others_tries_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, replace(make_profile(), allow_direct_links=False))

    await network.attempt()

    assert network.trials == []


def test_a_worker_that_nothing_leads_from_says_so() -> None:
    # An address of IPv6, which no socket of IPv4 finds a way to.
    config = WorkerConfig(host="0.0.0.0", join="::1:50070")
    dialer = Dialer(config, make_profile(), "w0", 1, lambda frame: None)

    with pytest.raises(ConnectionFailed, match=r"no way leads to ::1:50070"):
        dialer.advertised_host()

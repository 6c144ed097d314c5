"""A running compute thread with real shards of a tiny model, what it tells its agent, and links that keep what is sent.

`start` starts threads that end with the test, `bench` is one of them: import them and `model` into a module.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest

from shoal.errors import ConnectionFailed
from shoal.types import LayerRange
from shoal.v1 import flow_pb2
from tests.support.fleet import make_device
from tests.support.shards import TinyModel, make_tiny_model
from tests.support.stages import graph_of, make_spec
from worker.commands import Event, LoadStage, SetUplink
from worker.compute import Compute
from worker.kv.fetches import LowerTier

WAIT_S = 20.0
NUM_LAYERS = 3
ALL_LAYERS = LayerRange(0, NUM_LAYERS)


class FakeLink:
    """Keeps what is sent on it; broken: refuses it."""

    kind = "fake"

    def __init__(self, *, is_broken: bool = False) -> None:
        self.sent: queue.Queue[flow_pb2.Frame] = queue.Queue()
        self.closed: queue.Queue[None] = queue.Queue()
        self._is_broken = is_broken

    def send(self, frame: flow_pb2.Frame) -> None:
        if self._is_broken:
            raise ConnectionFailed("the peer is gone")
        self.sent.put(frame)

    def close(self) -> None:
        self.closed.put(None)

    def next(self) -> flow_pb2.Frame:
        return self.sent.get(timeout=WAIT_S)


class Bench:
    """A running compute thread, what it told its agent, and its link to the orchestrator."""

    def __init__(self, model: TinyModel, *, lower: LowerTier | None = None, **profile: object) -> None:
        self.model = model
        self.events: queue.Queue[Event] = queue.Queue()
        device = make_device(**profile)  # type: ignore[arg-type]
        self.compute = Compute(device, self.events.put, lower=lower)
        self.compute.start()
        self.uplink = FakeLink()
        self.compute.post(SetUplink(self.uplink))

    def next_event(self) -> Event:
        return self.events.get(timeout=WAIT_S)

    def load(
        self, layers: LayerRange = ALL_LAYERS, stage: int = 0, num_stages: int = 1, slot_tokens: int = 128
    ) -> Event:
        spec = make_spec(self.model, layers, stage, num_stages, slot_tokens=slot_tokens)
        self.compute.post(LoadStage(spec, graph_of(self.model, layers), self.model.blob_directory))
        return self.next_event()

    def close(self) -> None:
        assert self.compute.stop(WAIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("compute"), num_layers=NUM_LAYERS)


@pytest.fixture
def start(model: TinyModel) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def start_with(*, lower: LowerTier | None = None, **profile: object) -> Bench:
        benches.append(Bench(model, lower=lower, **profile))
        return benches[-1]

    yield start_with
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(start: Callable[..., Bench]) -> Bench:
    return start()


def run_badly(*_: object, **__: object) -> None:
    raise ZeroDivisionError("oops")

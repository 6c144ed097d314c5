"""The same frames for stages of a real tiny model and for simulated ones, and what of both can be compared.

Tokens differ, for one model is real: each chain is fed what it drew itself. All else must be alike: what is sent to whom,
what slots hold, what is checkpointed. Used by the suite that ties the simulated stage to the real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from shoal.types import LayerRange
from shoal.v1 import flow_pb2
from tests.simulation.layers import NUM_LAYERS
from tests.simulation.stage import SimulatedStage
from tests.simulation.store import HostBlocks, SimulatedRedis, WriteBehind
from tests.support.lower_tier import MemoryLowerTier
from tests.support.shards import TinyModel
from tests.support.stages import KVKeeping, StageChain, make_spec
from worker.kv.trail import Segment
from worker.stage import NO_EPOCH, ORCHESTRATOR

EVERYTHING = 1 << 30
SLOT_TOKENS = 256
# By trail, its segments: layers, begin and end.
Trails = dict[bytes, list[tuple[int, int, int]]]


class Chain(Protocol):
    """Stages, and what they have sent; `keep_up` has all that waits to be kept written."""

    def send(self, *frames: flow_pb2.Frame) -> None: ...

    def newest(self, sequence_id: int) -> flow_pb2.SampledToken: ...

    def restored(self) -> flow_pb2.RestoredBlocks: ...

    def sent(self) -> list[str]: ...

    def held(self) -> list[dict[int, int]]: ...

    def owners(self) -> list[dict[int, int]]: ...

    def trails(self) -> Trails: ...

    def keep_up(self) -> None: ...

    def rebase(self) -> None: ...

    def replace(self, stage: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def described(frame: flow_pb2.Frame) -> str:
    """A frame without what depends on the model: tokens, activations, times."""
    plain = flow_pb2.Frame()
    plain.CopyFrom(frame)
    match plain.WhichOneof("body"):
        case "step":
            plain.step.ClearField("stamps_ns")
            plain.step.activations = b"some" if plain.step.activations else b""
            plain.step.token_ids[:] = [0] * len(plain.step.token_ids)
        case "step_result":
            plain.step_result.ClearField("stamps_ns")
            for token in plain.step_result.tokens:
                token.token_id = 0
                token.ClearField("logprobs")
        case "restore":
            plain.restore.fetch_timeout_ms = 0.0
    return str(plain)


def _newest(frames: Sequence[flow_pb2.Frame], sequence_id: int) -> flow_pb2.SampledToken:
    tokens = [token for frame in frames for token in frame.step_result.tokens]
    return [token for token in tokens if token.sequence_id == sequence_id][-1]


def _restored(frames: Sequence[flow_pb2.Frame]) -> flow_pb2.RestoredBlocks:
    """The newest report of a restore."""
    return [frame.restored.restored for frame in frames if frame.HasField("restored")][-1]


def _trails(stored: Mapping[bytes, Iterable[Segment]]) -> Trails:
    found = {
        trail_id: sorted((one.layers.start, one.start, one.stop) for one in segments)
        for trail_id, segments in sorted(stored.items())
    }
    return {trail_id: segments for trail_id, segments in found.items() if segments}


class RealChain:
    """Stages of a tiny model that keep blocks in memory, and blocks and trails in a tier below."""

    def __init__(self, model: TinyModel, cuts: Sequence[int], kv_tokens: int | None = None) -> None:
        assert model.manifest.config.num_layers == NUM_LAYERS
        self._lower = MemoryLowerTier()
        keeping = KVKeeping(EVERYTHING, lower=self._lower, slot_tokens=SLOT_TOKENS, kv_tokens=kv_tokens)
        self._chain = StageChain(model, cuts, keeping)

    def send(self, *frames: flow_pb2.Frame) -> None:
        self._chain.send(*frames)

    def newest(self, sequence_id: int) -> flow_pb2.SampledToken:
        return _newest(self._chain.results, sequence_id)

    def restored(self) -> flow_pb2.RestoredBlocks:
        return _restored(self._chain.results)

    def sent(self) -> list[str]:
        # A Prefetch only tells stages earlier what they are asked for anyway.
        passed = [frame for frame in self._chain.passed if not frame.HasField("prefetch")]
        return [described(frame) for frame in (*passed, *self._chain.results)]

    def held(self) -> list[dict[int, int]]:
        arenas = [shard.arena for shard in self._chain.shards]
        return [{slot: arena.length(slot) for slot in range(arena.num_slots) if arena.length(slot)} for arena in arenas]

    def owners(self) -> list[dict[int, int]]:
        return [{slot: active.sequence_id for slot, active in runner._active.items()} for runner in self._chain.stages]

    def trails(self) -> Trails:
        return _trails(self._lower.trails)

    def keep_up(self) -> None:
        self._chain.keep_up()

    def rebase(self) -> None:
        self._chain.rebase()

    def replace(self, stage: int) -> None:
        self._chain.replace(stage)

    def flush(self) -> None:
        self._lower.values.clear()
        self._lower.trails.clear()

    def close(self) -> None:
        self._chain.close()


class SimulatedChain:
    """Simulated stages with the same cuts; what is to be fetched comes when nothing else is left to do."""

    def __init__(self, model: TinyModel, cuts: Sequence[int], kv_tokens: int | None = None) -> None:
        self._redis = SimulatedRedis()
        self._waiting: deque[flow_pb2.Frame] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._passed: list[flow_pb2.Frame] = []
        self._results: list[flow_pb2.Frame] = []
        edges = list(pairwise([0, *cuts, NUM_LAYERS]))
        self._specs = [
            make_spec(model, LayerRange(*edge), stage, len(edges), slot_tokens=SLOT_TOKENS)
            for stage, edge in enumerate(edges)
        ]
        if kv_tokens is not None:
            self._specs = [replace(spec, shape=replace(spec.shape, kv_tokens=kv_tokens)) for spec in self._specs]
        self._stages = [self._open(stage) for stage in range(len(edges))]

    def _open(self, stage: int) -> SimulatedStage:
        writes = WriteBehind(self._redis, lambda _, action: action())
        return SimulatedStage(
            self._specs[stage], self._take, HostBlocks(1000), writes, lambda _, action: self._later.append(action)
        )

    def _take(self, frame: flow_pb2.Frame) -> None:
        if frame.to_stage == ORCHESTRATOR:
            self._results.append(frame)
        else:
            self._passed.append(frame)
            self._waiting.append(frame)

    def send(self, *frames: flow_pb2.Frame) -> None:
        self._waiting.extend(frames)
        while self._waiting or self._later:
            if self._waiting:
                frame = self._waiting.popleft()
                self._stages[frame.to_stage].handle(frame)
            else:
                self._later.popleft()()

    def newest(self, sequence_id: int) -> flow_pb2.SampledToken:
        return _newest(self._results, sequence_id)

    def restored(self) -> flow_pb2.RestoredBlocks:
        return _restored(self._results)

    def sent(self) -> list[str]:
        return [described(frame) for frame in (*self._passed, *self._results)]

    def held(self) -> list[dict[int, int]]:
        return [
            {number: slot.num_tokens for number, slot in sorted(stage.slots.items()) if slot.num_tokens}
            for stage in self._stages
        ]

    def owners(self) -> list[dict[int, int]]:
        return [
            {number: slot.run_id for number, slot in stage.slots.items() if not slot.is_retained}
            for stage in self._stages
        ]

    def trails(self) -> Trails:
        return _trails(self._redis.trails)

    def keep_up(self) -> None:
        for stage in self._stages:
            while stage.checkpoint():
                pass
            stage.check_invariants()

    def rebase(self) -> None:
        for stage in self._stages:
            spec = stage.spec
            stage.rebase(replace(spec, epoch=NO_EPOCH))
            stage.rebase(spec)

    def replace(self, stage: int) -> None:
        self._stages[stage] = self._open(stage)

    def flush(self) -> None:
        self._redis.flush()

    def close(self) -> None:
        pass


class Pair:
    """Both chains; whatever is done is done to both, and compared."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains

    def do(self, act: Callable[[Chain], None]) -> None:
        """Act on both, and find them alike."""
        for chain in self._chains:
            act(chain)
            chain.keep_up()
        real, simulated = self._chains
        _check_alike("sent", real.sent(), simulated.sent())
        _check_alike("held", real.held(), simulated.held())
        _check_alike("owners", real.owners(), simulated.owners())
        _check_alike("trails", list(real.trails().items()), list(simulated.trails().items()))

    def send(self, *frames: flow_pb2.Frame) -> None:
        self.do(lambda chain: chain.send(*[_copy(frame) for frame in frames]))

    @property
    def real(self) -> Chain:
        return self._chains[0]

    def restored(self) -> flow_pb2.RestoredBlocks:
        """What was reported last of a restore."""
        return self.real.restored()


def _check_alike(what: str, real: Sequence[object], simulated: Sequence[object]) -> None:
    """Say where two lists differ first, if they do."""
    for index, (one, other) in enumerate(zip(real, simulated, strict=False)):
        assert one == other, f"{what} {index}: really\n{one}\nsimulated\n{other}"
    assert len(real) == len(simulated), f"{what}: really {real[len(simulated) :]}, simulated {simulated[len(real) :]}"


def _copy(frame: flow_pb2.Frame) -> flow_pb2.Frame:
    copy = flow_pb2.Frame()
    copy.CopyFrom(frame)
    return copy

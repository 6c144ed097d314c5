"""Measures what layers of a model's shape take on this device, with the shard code that serves, and remembers it.

Weights are holes: files of the right sizes that nobody wrote, for kernels know no shortcut for zeros (measured: the same
times within noise) and nothing has to be downloaded. What is kept is the machine's, so that devices emulated on one
machine measure once; a profile's speed is applied when it is told. Runs on the compute thread, and never beside a shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shoal.codec import pack_activations, pack_frame, unpack_activations
from shoal.errors import InvalidRequest
from shoal.messages import shape_from_proto
from shoal.types import DeviceProfile, SamplingParams, ShardShape
from shoal.v1 import fleet_pb2, flow_pb2
from worker.blobs import need_of
from worker.emulation import SlowDown, check_fits
from worker.sampling import Sampler
from worker.session import runtime_summary
from worker.shard import ShardBatch, ShardRow, open_shard

# One row is of class SOLO; a SHARED row that is alone is computed as two.
ROWS = (1, 2, 4, 8, 16)
# Tokens that each slot holds: the middle of a short conversation.
CONTEXT_TOKENS = 256
CHUNK_TOKENS = 64
NUM_REPEATS = 3
# Of so many rows two will do, the faster of which counts: no first one is given away.
MANY_ROWS, MANY_REPEATS = 8, 2
# A device that is slower than this in all gets one look at each of what is left.
BUDGET_S = 0.6
# Between two steps of a pipeline the caches fill with other things; weights that a short shard left there would make it look
# a third faster than it serves (measured: 1.1 instead of 1.6 ms for four layers). As large as last-level caches are here.
DIRT_BYTES = 32 << 20
MAX_AGE_S = 7 * 24 * 3600.0
# A clock that was set back makes a file look younger than it can be.
MAX_AHEAD_S = 3600.0
MAX_KEPT = 16
# Why a device is not measured now.
HOLDS_LAYERS = "the device holds layers; it is measured when it does not"

_DIGEST = re.compile("[0-9a-f]{8,128}")

RowTimes = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """What a shape takes on this machine, unhindered, in seconds.

    layer_s, head_s: of one layer and of the head, by rows. sample_s: of one row's token. prefill_token_s: of one layer, a
    token of a chunk. pass_s: of taking a step up and handing it on. measured_at_s: since the epoch.
    """

    shape_digest: str
    measured_at_s: float
    layer_s: RowTimes
    head_s: RowTimes
    sample_s: float
    prefill_token_s: float
    pass_s: float


@dataclass(frozen=True, slots=True)
class MeasureShape:
    """Tells the compute thread to measure; folder: where there is room for the holes."""

    command: fleet_pb2.Measure
    folder: Path


@dataclass(frozen=True, slots=True)
class ShapeMeasured:
    """How a measurement of the compute thread ended. error: why there are no times."""

    shape_digest: str
    times: MachineTimes | None
    reason: str = ""
    message: str = ""


def times_of_device(times: MachineTimes, profile: DeviceProfile) -> fleet_pb2.DeviceTimes:
    """What the shape takes on the device of a profile, at its base clock, and the memory that it has for a shard now.

    Emulation stretches the shard's runs only, so it does here.
    """
    speed = profile.speed if profile.is_emulated else 1.0
    stretch = 1.0 + SlowDown(speed).extra_seconds(1.0)
    head = [(rows, seconds * stretch + rows * times.sample_s) for rows, seconds in times.head_s]
    return fleet_pb2.DeviceTimes(
        shape_digest=times.shape_digest,
        measured_at_s=times.measured_at_s,
        layer=[fleet_pb2.RowsTime(rows=rows, seconds=seconds * stretch) for rows, seconds in times.layer_s],
        head=[fleet_pb2.RowsTime(rows=rows, seconds=seconds) for rows, seconds in head],
        prefill_token_s=times.prefill_token_s * stretch,
        pass_s=times.pass_s,
        free_bytes=free_bytes(profile),
    )


def free_bytes(profile: DeviceProfile) -> int:
    """Memory that a shard may take: what the profile allows, or less if less is free beside this process."""
    available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    return min(profile.shard_bytes, int(available))


def measure(command: fleet_pb2.Measure, profile: DeviceProfile, folder: Path, now_s: float) -> MachineTimes:
    """Measure a shape; now_s: since the epoch. Takes well under a second where a decode step takes some milliseconds.

    Raises InvalidRequest for a command that makes no sense, and ShardDoesNotFit.
    """
    _check(command, profile)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="measure-") as scratch:
        blobs = Path(scratch)
        for blob in command.blobs:
            with (blobs / blob.digest).open("wb") as file:
                file.truncate(blob.num_bytes)
        watch = _Watch(BUDGET_S)
        layers = _time(command.layers_graph, shape_from_proto(command.layers_shape), blobs, profile.num_threads, watch)
        head = _time(command.head_graph, shape_from_proto(command.head_shape), blobs, profile.num_threads, watch)
    layer_s = tuple((rows, seconds / layers.num_layers) for rows, seconds in layers.decode_s)
    beside = dict(layer_s)
    head_s = tuple((rows, max(s - head.num_layers * beside[rows], 0.0)) for rows, s in head.decode_s)
    return MachineTimes(
        shape_digest=command.shape_digest,
        measured_at_s=now_s,
        layer_s=layer_s,
        head_s=head_s,
        sample_s=_sample_seconds(command.head_shape.vocab_size),
        prefill_token_s=layers.chunk_s / CHUNK_TOKENS / layers.num_layers,
        pass_s=_pass_seconds(command.layers_shape.hidden_size),
    )


def _check(command: fleet_pb2.Measure, profile: DeviceProfile) -> None:
    names = [command.shape_digest, *(blob.digest for blob in command.blobs)]
    if not all(_DIGEST.fullmatch(name) for name in names):
        raise InvalidRequest("measure.blobs", "a digest is lower-case hex")
    for shape in (command.layers_shape, command.head_shape):
        if not shape.num_layers or shape.num_slots < ROWS[-1] or shape.slot_tokens < CHUNK_TOKENS:
            raise InvalidRequest("measure.layers_shape", f"needs layers, and {ROWS[-1]} slots of {CHUNK_TOKENS} tokens")
    need = need_of(command.blobs, 0)
    check_fits(profile, need, "measuring a few layers")


class _Watch:
    """Says how often to repeat, given what has been taken of a budget."""

    def __init__(self, budget_s: float) -> None:
        self._ends_at = time.monotonic() + budget_s

    def num_repeats(self, num_tokens: int) -> int:
        if time.monotonic() >= self._ends_at:
            return 1
        return NUM_REPEATS if num_tokens < MANY_ROWS else MANY_REPEATS


@dataclass(frozen=True, slots=True)
class _ShardTimes:
    """Of passes through a whole shard; chunk_s: 0 for one with the head, which a chunk does not pass."""

    num_layers: int
    decode_s: RowTimes
    chunk_s: float


def _time(graph: bytes, shape: ShardShape, blobs: Path, num_threads: int, watch: _Watch) -> _ShardTimes:
    shard = open_shard(shape, graph, blobs, num_threads=num_threads)
    try:
        held = min(CONTEXT_TOKENS, shape.slot_tokens - CHUNK_TOKENS)
        # Memory that was never written is all one page, which is always in the cache.
        shard.arena.array[:, :, : ROWS[-1], :, :held] = 0.0
        hidden = np.ones((max(ROWS[-1], CHUNK_TOKENS), shape.hidden_size), np.float32)  # [T, E]
        dirt = np.zeros(DIRT_BYTES, np.uint8)

        def passes(num_rows: int, num_tokens: int) -> Callable[[], object]:
            rows = tuple(ShardRow(slot, held, num_tokens, shape.is_last) for slot in range(num_rows))
            batch = ShardBatch(rows, hidden[: num_rows * num_tokens], solo=num_rows * num_tokens == 1)
            return lambda: shard.run(batch)

        for slot in range(ROWS[-1]):
            shard.arena.set_length(slot, held)
        decode_s = [_median_s(passes(rows, 1), watch.num_repeats(rows), dirt) for rows in ROWS]
        # More rows never take less: what other programs took the core for is left out.
        least_s = list(accumulate(reversed(decode_s), min))[::-1]
        chunk_s = 0.0 if shape.is_last else _median_s(passes(1, CHUNK_TOKENS), watch.num_repeats(CHUNK_TOKENS), dirt)
        return _ShardTimes(shape.num_layers, tuple(zip(ROWS, least_s, strict=True)), chunk_s)
    finally:
        shard.close()


def _median_s(work: Callable[[], object], num_repeats: int, dirt: np.ndarray[Any, Any] | None = None) -> float:
    """Seconds that work takes; the first of many times, when it allocates and binds, does not count."""
    if num_repeats > MANY_REPEATS:
        work()
    taken = []
    for count in range(num_repeats):
        if dirt is not None:
            dirt.fill(count)
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median_low(taken)


def _sample_seconds(vocab_size: int) -> float:
    sampler, logits = Sampler(SamplingParams()), np.zeros(vocab_size, np.float32)
    return _median_s(lambda: sampler.sample(logits, 0), NUM_REPEATS)


def _pass_seconds(hidden_size: int) -> float:
    """Decoding a frame of one row, taking its activations out and putting them into the next one's bytes."""
    hidden = np.ones((1, hidden_size), np.float32)
    row = flow_pb2.StepRow(position=CONTEXT_TOKENS, num_tokens=1)
    body = flow_pb2.Frame(step=flow_pb2.Step(rows=[row], activations=pack_activations(hidden))).SerializeToString()

    def hand_on() -> None:
        step = flow_pb2.Frame.FromString(body).step
        values = unpack_activations(step.activations, 1, hidden_size)
        pack_frame(flow_pb2.Frame(step=flow_pb2.Step(rows=step.rows, activations=pack_activations(values))))

    return _median_s(hand_on, NUM_REPEATS)


class KnownTimes:
    """The times that were measured on this machine, as files of a folder that its devices share.

    A file that is too old, or cannot be read, counts as not there.
    """

    def __init__(self, folder: Path, num_threads: int) -> None:
        self.folder = folder
        summary = runtime_summary()
        facts = [platform.node(), summary.name, summary.version, summary.kernel_fingerprint, num_threads]
        self._machine = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def get(self, shape_digest: str, now_s: float) -> MachineTimes | None:
        if not _DIGEST.fullmatch(shape_digest):
            return None
        return _read(self._path(shape_digest), now_s)

    def all(self, now_s: float) -> list[MachineTimes]:
        """Those of this machine, the newest first, at most MAX_KEPT."""
        found = [_read(path, now_s) for path in self.folder.glob(f"*-{self._machine}.json")]
        known = sorted((one for one in found if one is not None), key=lambda one: -one.measured_at_s)
        return known[:MAX_KEPT]

    def keep(self, times: MachineTimes) -> None:
        """Remember times; a folder that cannot be written to only means measuring again."""
        part = self.folder / f"{os.getpid()}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(asdict(times)), encoding="utf-8")
            os.replace(part, self._path(times.shape_digest))
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()

    def _path(self, shape_digest: str) -> Path:
        return self.folder / f"{shape_digest}-{self._machine}.json"


def _read(path: Path, now_s: float) -> MachineTimes | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        times = MachineTimes(**{field.name: _frozen(content[field.name]) for field in fields(MachineTimes)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    age_s = now_s - times.measured_at_s
    return times if -MAX_AHEAD_S <= age_s <= MAX_AGE_S else None


def _frozen(value: Any) -> Any:
    return tuple((int(rows), float(seconds)) for rows, seconds in value) if isinstance(value, list) else value

"""How fast devices and links are, as the planner reads it: measured where that was done, else declared by a profile.

Values and arithmetic on them; who measures, and when, is `orchestrator.measuring`'s. All times are of one model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.footprint import ModelFootprint
from shoal.types import DeviceProfile, LinkProfile, WorkerId

# Seconds at so many rows. The last pair of points gives the slope beyond them.
RowTimes = tuple[tuple[int, float], ...]

# A layer and the head of the default model on one thread at speed 1. Source: docs/results/bench.md (layers by differences
# of stages; the head is what is left of a step).
REFERENCE_LAYER_BYTES = 2_740_224
REFERENCE_HEAD_BYTES = 31_852_800
REFERENCE_LAYER_S: RowTimes = ((1, 0.00036), (2, 0.00038), (4, 0.00075), (8, 0.00145), (16, 0.0028))
REFERENCE_HEAD_S: RowTimes = ((1, 0.0035), (2, 0.0043), (4, 0.006), (8, 0.009), (16, 0.017))
REFERENCE_PREFILL_TOKEN_S = 0.000115
# Taking a frame up, packing rows and handing on: what a worker adds to its compute.
REFERENCE_PASS_S = 0.0004
# One way between two processes that sleep in between, whatever lies between their devices (facts: 0.27 ms on loopback).
HOP_S = 0.0003


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What one model takes on one device, in seconds.

    layer_s, head_s: of one layer, and of the head with its sampling, by rows of a decode step, ascending and not empty.
    prefill_token_s: one layer, one token of a chunk. pass_s: of a pass, whatever it holds.
    """

    layer_s: RowTimes
    head_s: RowTimes
    prefill_token_s: float
    pass_s: float = 0.0

    def layer_at(self, rows: int) -> float:
        return _at(self.layer_s, rows)

    def head_at(self, rows: int) -> float:
        return _at(self.head_s, rows)

    def stage_s(self, num_layers: int, has_head: bool, rows: int) -> float:
        """A decode pass of a stage."""
        return self.pass_s + num_layers * self.layer_at(rows) + (self.head_at(rows) if has_head else 0.0)

    def scaled(self, factor: float) -> LayerTimes:
        """All times multiplied, as of a device that slowed down evenly."""
        return LayerTimes(
            tuple((rows, seconds * factor) for rows, seconds in self.layer_s),
            tuple((rows, seconds * factor) for rows, seconds in self.head_s),
            self.prefill_token_s * factor,
            self.pass_s * factor,
        )


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device as the planner sees it. is_declared: times were not measured. free_bytes: for a shard; 0: see the profile."""

    worker_id: WorkerId
    profile: DeviceProfile
    times: LayerTimes
    is_declared: bool = True
    free_bytes: int = 0

    @property
    def shard_bytes(self) -> int:
        """What a shard with its KV may take: what the profile allows, or less if less was found free."""
        return min(self.profile.shard_bytes, self.free_bytes or self.profile.shard_bytes)


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """One direction. delay_s: of a small message, one way, from compute to compute. bytes_per_s: inf is not limited."""

    delay_s: float = HOP_S
    bytes_per_s: float = math.inf

    def sending_s(self, num_bytes: float) -> float:
        """How long a message occupies the link."""
        return num_bytes / self.bytes_per_s

    def transfer_s(self, num_bytes: float) -> float:
        return self.delay_s + num_bytes / self.bytes_per_s

    def then(self, other: LinkFigures) -> LinkFigures:
        """Both, one behind the other."""
        return LinkFigures(self.delay_s + other.delay_s, min(self.bytes_per_s, other.bytes_per_s))


# None: the orchestrator. (from, to)
LinkEnds = tuple[WorkerId | None, WorkerId | None]


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Devices in any order, and links where they are known; default_link: of the pairs that are not."""

    devices: tuple[DeviceFigures, ...]
    links: Mapping[LinkEnds, LinkFigures] = field(default_factory=dict)
    default_link: LinkFigures = LinkFigures()

    def link(self, source: WorkerId | None, target: WorkerId | None) -> LinkFigures:
        """The link between two, measured in this or in the other direction. A device to itself: no link at all."""
        if source == target:
            return LinkFigures(0.0)
        known = self.links.get((source, target)) or self.links.get((target, source))
        return known or self.default_link


def declared_times(profile: DeviceProfile, model: ModelFootprint) -> LayerTimes:
    """What a device that was not measured is expected to take: the reference scaled by bytes of weights and speed.

    A speed of 0 or less makes all times infinite: such a device is of no use.
    """
    slowness = 1 / profile.speed if profile.speed > 0 else math.inf
    layer = sum(model.layer_bytes) / model.num_layers / REFERENCE_LAYER_BYTES * slowness
    head_bytes = model.head_bytes + model.embedding_bytes * model.is_head_tied
    head = head_bytes / REFERENCE_HEAD_BYTES * slowness if head_bytes else 0.0
    return LayerTimes(
        layer_s=tuple((rows, seconds * layer) for rows, seconds in REFERENCE_LAYER_S),
        head_s=tuple((rows, seconds * head) for rows, seconds in REFERENCE_HEAD_S),
        prefill_token_s=REFERENCE_PREFILL_TOKEN_S * layer,
        pass_s=REFERENCE_PASS_S * layer,
    )


def declared_fleet(
    model: ModelFootprint, workers: Iterable[tuple[WorkerId, DeviceProfile]], known: FleetFigures | None = None
) -> FleetFigures:
    """Figures of these workers: what is known, and what their profiles declare of the others.

    Where nothing is known of links, they are taken to cost nothing.
    """
    known = known or FleetFigures((), default_link=LinkFigures(0.0))
    measured = {device.worker_id: device for device in known.devices}
    devices = (
        measured.get(worker_id) or DeviceFigures(worker_id, profile, declared_times(profile, model))
        for worker_id, profile in workers
    )
    return replace(known, devices=tuple(devices))


def declared_link(source: LinkProfile, hop_s: float = HOP_S) -> LinkFigures:
    """What messages of a device take whose profile declares its link: emulation delays what a device sends."""
    rate = source.rate_mbit_s * 1e6 / 8
    return LinkFigures(hop_s + source.delay_ms / 1e3, rate or math.inf)


def _at(times: RowTimes, rows: int) -> float:
    """Between two points a straight line; beyond the last one too; below the first one its value."""
    index = bisect_left(times, (rows, -math.inf))
    if index < len(times) and times[index][0] == rows:
        return times[index][1]
    if index == 0 or len(times) == 1:
        return times[0][1]
    (x0, y0), (x1, y1) = times[min(index, len(times) - 1) - 1], times[min(index, len(times) - 1)]
    return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), 0.0)

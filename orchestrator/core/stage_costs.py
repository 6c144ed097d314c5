"""What a stage takes on each device of a fleet: time at a batch size, memory with an amount of KV, links between devices.

Tables that the searches of `cuts`, `exact` and `large_fleets` read; devices are numbers, in the order of the fleet. Layers
are equally fast on a device and may differ in bytes. They decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from orchestrator.core.figures import FleetFigures, LinkFigures
from orchestrator.core.footprint import ModelFootprint
from shoal.memory import need_bytes
from shoal.types import WorkerId

# Better by less is not better: sums of the same times in another order are.
TOLERANCE = 1e-9
# A bisection for the shortest time between two batches may end this close to its bound.
GAP = 0.003


@dataclass(frozen=True, slots=True)
class Route:
    """One pipeline as the searches see it: devices by number, and where their layers end.

    stops: the last is the number of layers. total_s: of a pass through all stages and links, and back. slowest_s: of the
    slowest stage, or of the link that messages occupy longest.
    """

    order: tuple[int, ...]
    stops: tuple[int, ...]
    total_s: float
    slowest_s: float

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *self.stops[:-1])


@dataclass(frozen=True, slots=True)
class Room:
    """What fits a memory.

    reach: by start, the largest stop of a stage that is not the last one; the start itself where no layer fits.
    last_start: the least start above 0 of a last stage; the number of layers where none fits. holds_all: the whole model.
    max_layers: the most of any stage.
    """

    reach: tuple[int, ...]
    last_start: int
    holds_all: bool
    max_layers: int


@lru_cache(maxsize=4096)
def room_for(model: ModelFootprint, shard_bytes: int, kv_tokens: int) -> Room:
    """See which stages fit: two pointers, because a longer stage never takes less."""
    num_layers = model.num_layers
    ends = [0, *accumulate(model.layer_bytes)]
    kv_bytes = kv_tokens * model.kv_bytes_per_token_per_layer

    # As model.need_bytes() of a stage that does not have both ends, without adding up its layers each time.
    def fits(start: int, stop: int) -> bool:
        packed_bytes = ends[stop] - ends[start] + (model.last_bytes if stop == num_layers else 0)
        mapped_bytes = model.shared_bytes + (model.embedding_bytes if start == 0 else 0)
        return need_bytes(packed_bytes, mapped_bytes, (stop - start) * kv_bytes) <= shard_bytes

    reach, stop = [], 0
    for start in range(num_layers):
        stop = max(stop, start)
        while stop + 1 < num_layers and fits(start, stop + 1):
            stop += 1
        reach.append(stop)
    last_start = num_layers
    while last_start > 1 and fits(last_start - 1, num_layers):
        last_start -= 1
    max_layers = max(num_layers - last_start, *(stop - start for start, stop in enumerate(reach)))
    return Room(tuple(reach), last_start, model.need_bytes(0, num_layers, kv_tokens) <= shard_bytes, max_layers)


@dataclass(frozen=True, slots=True)
class Members:
    """Which devices a pipeline may have, as bits. barred: none of these. wanted: one of these at least; 0: any will do."""

    barred: int = 0
    wanted: int = 0

    def allow(self, devices: int) -> bool:
        """Whether a pipeline may be of these devices, as bits."""
        return not devices & self.barred and (not self.wanted or bool(devices & self.wanted))

    def of(self, num_devices: int) -> list[int]:
        return [device for device in range(num_devices) if not self.barred >> device & 1]


ANYBODY = Members()


_Matrix = list[list[float]]


class Links:
    """Link figures of a fleet as matrices of seconds, for messages of one size.

    hop_s[a][b], sending_s[a][b]: from a to b, in all, and as long as the link is occupied. enter_s, leave_s: from and to
    the orchestrator. Devices that do not take links of others are reached by way of the orchestrator.
    """

    __slots__ = ("_fleet", "_indirect", "_matrix", "_seconds", "enter_s", "leave_s")

    def __init__(self, fleet: FleetFigures) -> None:
        self._fleet = fleet
        ids = [device.worker_id for device in fleet.devices]
        self._indirect = {device.worker_id for device in fleet.devices if not device.profile.allow_direct_links}
        self.enter_s = [fleet.link(None, one).delay_s for one in ids]
        self.leave_s = [fleet.link(one, None).delay_s for one in ids]
        self._seconds: dict[float, tuple[_Matrix, _Matrix, float]] = {}
        self._matrix = [[self._between(one, other) for other in ids] for one in ids]

    def _between(self, one: WorkerId, other: WorkerId) -> LinkFigures:
        fleet = self._fleet
        is_known = (one, other) in fleet.links or (other, one) in fleet.links
        if one == other or is_known or not {one, other} & self._indirect:
            return fleet.link(one, other)
        return fleet.link(one, None).then(fleet.link(None, other))

    def between(self, one: int, other: int) -> LinkFigures:
        return self._matrix[one][other]

    def seconds(self, num_bytes: float) -> tuple[_Matrix, _Matrix, float]:
        """Hops and sendings of messages of a size, and the least of the hops between two. Not to be written to."""
        known = self._seconds.get(num_bytes)
        if known is None:
            hop_s = [[link.transfer_s(num_bytes) for link in row] for row in self._matrix]
            sending_s = [[link.sending_s(num_bytes) for link in row] for row in self._matrix]
            others = (hop for one, row in enumerate(hop_s) for other, hop in enumerate(row) if one != other)
            known = self._seconds[num_bytes] = hop_s, sending_s, min(others, default=0.0)
        return known


class StageCosts:
    """Times at `rows` decode rows and room for kv_tokens, of the devices of a fleet.

    twin_before: of each device the one before it in the fleet that is alike in all that counts here, or -1: of twins the
    earlier one is taken first.
    """

    __slots__ = (
        "_twin_before", "enter_s", "head_s", "hop_s", "layer_s", "least_hop_s", "leave_s", "max_batch", "max_layers",
        "num_devices", "num_layers", "pass_s", "rooms", "sending_s",
    )  # fmt: skip

    def __init__(
        self, model: ModelFootprint, fleet: FleetFigures, links: Links, rooms: Sequence[Room], rows: int
    ) -> None:
        """rooms: of each device, with the KV that is wanted."""
        self.num_layers = model.num_layers
        self.num_devices = len(fleet.devices)
        times = [device.times for device in fleet.devices]
        self.layer_s = [one.layer_at(rows) for one in times]
        self.head_s = [one.head_at(rows) for one in times]
        self.pass_s = [one.pass_s for one in times]
        self.max_batch = [device.profile.max_batch for device in fleet.devices]
        self.rooms = rooms
        self.max_layers = [room.max_layers for room in rooms]
        self.hop_s, self.sending_s, self.least_hop_s = links.seconds(rows * model.activation_bytes)
        self.enter_s, self.leave_s = links.enter_s, links.leave_s
        self._twin_before: list[int] | None = None

    @property
    def twin_before(self) -> list[int]:
        if self._twin_before is None:
            self._twin_before = self._twins()
        return self._twin_before

    def stage_s(self, device: int, num_layers: int, is_last: bool) -> float:
        return self.pass_s[device] + num_layers * self.layer_s[device] + (self.head_s[device] if is_last else 0.0)

    def most_layers_within(self, device: int, limit_s: float, is_last: bool) -> int:
        """How many layers a stage may have to take at most limit_s; less than 0 if not even the rest of it does."""
        spare_s = limit_s - self.pass_s[device] - (self.head_s[device] if is_last else 0.0)
        if spare_s == math.inf:
            return self.num_layers
        if self.layer_s[device] == 0.0:
            return self.num_layers if spare_s >= 0 else -1
        # What fits exactly must not be lost to rounding.
        return min(int(spare_s / self.layer_s[device] + 1e-11), self.num_layers) if spare_s >= 0 else -1

    def least_total_s(self, num_stages: int, limit_s: float) -> float:
        """A bound: no route of so many stages, none of which takes longer than limit_s, takes less in all; inf: none is.

        The fastest devices hold as many layers as memory and limit allow, wherever they stand.
        """
        most = sorted(
            (self.layer_s[device], min(self.max_layers[device], self.most_layers_within(device, limit_s, False)))
            for device in range(self.num_devices)
        )
        left, total_s, counts = self.num_layers, 0.0, sorted((count for _, count in most), reverse=True)
        if num_stages == 1:
            left -= max((self.num_layers for room in self.rooms if room.holds_all), default=0)
            total_s = self.num_layers * min(self.layer_s) if left == 0 else math.inf
        elif sum(counts[:num_stages]) < left:
            return math.inf
        else:
            for layer_s, count in most:
                taken = min(left, max(count, 0))
                total_s, left = total_s + taken * layer_s, left - taken
        passes_s = sum(sorted(self.pass_s)[:num_stages])
        return total_s + passes_s + min(self.head_s) + (num_stages - 1) * self.least_hop_s

    def may_have_period(self, num_stages: int, period_s: float, share: float) -> bool:
        """Whether bounds allow a batch every period_s on so many stages, each `share` of a pass behind the one before."""
        return self.least_total_s(num_stages, period_s) * share < period_s

    def least_period_s(self, num_stages: int, share: float) -> float:
        """A period that none is shorter than; inf if no route of so many stages has room. Some percent below the bound."""
        low_s, high_s = 0.0, math.inf
        total_s = self.least_total_s(num_stages, math.inf)
        if total_s == math.inf:
            return math.inf
        # Some period is possible: no stage takes longer than all of them one after the other.
        high_s = max(total_s * share, 1e-9)
        while not self.may_have_period(num_stages, high_s, share):
            low_s, high_s = high_s, high_s * 2
        for _ in range(5):
            middle_s = (low_s + high_s) / 2
            if self.may_have_period(num_stages, middle_s, share):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _twins(self) -> list[int]:
        found: list[int] = []
        for device in range(self.num_devices):
            twins = (other for other in range(device - 1, -1, -1) if self._are_twins(other, device))
            found.append(next(twins, -1))
        return found

    def _are_twins(self, one: int, other: int) -> bool:
        if self._traits(one) != self._traits(other):
            return False
        hop_s, sending_s = self.hop_s, self.sending_s
        if (hop_s[one][other], sending_s[one][other]) != (hop_s[other][one], sending_s[other][one]):
            return False
        return all(
            (hop_s[one][third], hop_s[third][one], sending_s[one][third], sending_s[third][one])
            == (hop_s[other][third], hop_s[third][other], sending_s[other][third], sending_s[third][other])
            for third in range(self.num_devices)
            if third not in (one, other)
        )

    def _traits(self, device: int) -> tuple[object, ...]:
        return (
            self.layer_s[device], self.head_s[device], self.pass_s[device], self.max_batch[device], self.rooms[device],
            self.enter_s[device], self.leave_s[device],
        )  # fmt: skip


def route_of(
    costs: StageCosts,
    order: tuple[int, ...],
    stops: tuple[int, ...],
    enter_s: Sequence[float],
    leave_s: Sequence[float],
) -> Route:
    """Add up what a route takes."""
    total_s, slowest_s, start = enter_s[order[0]] + leave_s[order[-1]], 0.0, 0
    for index, (device, stop) in enumerate(zip(order, stops, strict=True)):
        stage_s = costs.stage_s(device, stop - start, stop == costs.num_layers)
        total_s, slowest_s, start = total_s + stage_s, max(slowest_s, stage_s), stop
        if index:
            total_s += costs.hop_s[order[index - 1]][device]
            slowest_s = max(slowest_s, costs.sending_s[order[index - 1]][device])
    return Route(order, stops, total_s, slowest_s)

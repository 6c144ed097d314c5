"""The best single pipeline of a fleet: for one stream's tokens, or for most tokens of many streams.

Says what is best and lets `exact` or, for many devices, `large_fleets` find it. It does not know what devices are for,
nor how many pipelines there are to be: that is `grouping`'s.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from orchestrator.core.cuts import cut
from orchestrator.core.exact import can_cover, fastest_ring, fastest_within
from orchestrator.core.figures import FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.large_fleets import ends, good_period, good_ring, stage_counts
from orchestrator.core.limits import LEAST_ROWS, even_rows
from orchestrator.core.slots import PAGE_TOKENS
from orchestrator.core.stage_costs import (
    ANYBODY,
    GAP,
    TOLERANCE,
    Links,
    Members,
    Room,
    Route,
    StageCosts,
    room_for,
)

# Up to so many devices every order is looked at; each further one doubles the time, which is tens of milliseconds here.
MAX_EXACT_DEVICES = 8
# The rows of a lone stream of class LATENCY.
SOLO_ROWS = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline that was found.

    rows: of a batch with num_streams. tokens_per_s: of all streams together. kv_tokens: what it has room for at least.
    is_ring: found for a lone stream.
    """

    route: Route
    rows: int
    num_streams: int
    kv_tokens: int
    tokens_per_s: float
    is_ring: bool


@dataclass(frozen=True, slots=True)
class _Shape:
    """How many stages, and the rows of a batch.

    share: of a pass, that a batch may be behind another: the time between two is that of the slowest stage, or so much that
    no stream has two tokens on the way. least_s: a bound of that time.
    """

    num_stages: int
    rows: int
    share: float
    least_s: float


def batch_rows(num_streams: int, num_stages: int, max_rows: int) -> int:
    """Of a batch, as the scheduler makes them; one that is not full has as many as there are streams."""
    return max(min(even_rows(num_streams, num_stages, max_rows), num_streams), min(LEAST_ROWS, max_rows))


def tokens_per_s(rows: int, num_stages: int, num_streams: int, slowest_s: float, total_s: float) -> float:
    """All streams together: a batch after the other leaves the slowest stage, and no stream has two tokens on the way.

    slowest_s, total_s: at that many rows, by way of the orchestrator.
    """
    in_flight = min(num_streams, rows * num_stages)
    return min(rows / slowest_s, in_flight / total_s) if total_s > 0 else math.inf


class Solver:
    """Finds pipelines in one fleet; remembers tables, not results. Devices of no use (infinite times) never get a layer."""

    def __init__(self, model: ModelFootprint, fleet: FleetFigures, *, is_exact: bool = True) -> None:
        """is_exact: as far as the fleet is small enough."""
        self.model = model
        self.fleet = fleet
        self.is_exact = is_exact and len(fleet.devices) <= MAX_EXACT_DEVICES
        self._links = Links(fleet)
        self._max_batches = {device.profile.max_batch for device in fleet.devices}
        self._least_passes_s: dict[int, float] = {}
        self._rooms: dict[tuple[int, int], Room] = {}
        self._costs: dict[tuple[int, int], StageCosts] = {}

    def costs(self, rows: int, kv_tokens: int) -> StageCosts:
        key = rows, kv_tokens
        if key not in self._costs:
            rooms = [self._room(device.shard_bytes, kv_tokens) for device in self.fleet.devices]
            self._costs[key] = StageCosts(self.model, self.fleet, self._links, rooms, rows)
        return self._costs[key]

    def _room(self, shard_bytes: int, kv_tokens: int) -> Room:
        key = shard_bytes, kv_tokens
        if key not in self._rooms:
            self._rooms[key] = room_for(self.model, shard_bytes, kv_tokens)
        return self._rooms[key]

    def for_latency(self, kv_tokens: int, num_stages: int | None = None) -> Candidate | None:
        """The least time from a token to the next one of a lone stream, which goes round the stages as in a burst."""
        costs = self.costs(SOLO_ROWS, kv_tokens)
        found = fastest_ring(costs, num_stages) if self.is_exact else good_ring(costs, num_stages)
        return None if found is None else Candidate(found, SOLO_ROWS, 1, kv_tokens, 1 / found.total_s, True)

    def for_throughput(
        self, num_streams: int, kv_tokens: int, num_stages: int | None = None, above: float = 0.0
    ) -> Candidate | None:
        """The most tokens per second of so many streams, None if none has more than `above`.

        Batches have the rows that the scheduler will give them: they depend on the number of stages, and on the least
        max_batch among the devices.
        """
        best: Candidate | None = None
        for shape in self._shapes(num_streams, kv_tokens, num_stages, above):
            if above and shape.rows / above <= shape.least_s:
                continue
            find = self._least_period if self.is_exact else self._good_period
            found = find(shape, kv_tokens, num_streams, shape.rows / above if above else math.inf)
            if found is None:
                continue
            rate = tokens_per_s(shape.rows, shape.num_stages, num_streams, found.slowest_s, found.total_s)
            if rate > above:
                best = Candidate(found, shape.rows, num_streams, kv_tokens, rate, False)
                above = rate * (1 + TOLERANCE)
        return best

    def _shapes(self, num_streams: int, kv_tokens: int, num_stages: int | None, above: float) -> list[_Shape]:
        """Numbers of stages and rows that may have more than `above`, those that promise most first, then the shortest."""
        shapes = []
        for number in [num_stages] if num_stages else self._stage_counts():
            for rows in sorted({batch_rows(num_streams, number, most) for most in self._max_batches}):
                share = rows / min(num_streams, rows * number)
                if above and self._least_pass_s(rows) * share >= rows / above:
                    continue
                costs = self.costs(rows, kv_tokens)
                if above and not costs.may_have_period(number, rows / above, share):
                    continue
                shapes.append(_Shape(number, rows, share, costs.least_period_s(number, share)))
        shapes.sort(key=lambda shape: (shape.least_s / shape.rows, shape.num_stages))
        return shapes

    def _least_pass_s(self, rows: int) -> float:
        """A bound that is known before memory is looked at: all layers and the head on whom they take least."""
        known = self._least_passes_s.get(rows)
        if known is None:
            times = [device.times for device in self.fleet.devices]
            layer_s, head_s = min(one.layer_at(rows) for one in times), min(one.head_at(rows) for one in times)
            known = self._least_passes_s[rows] = self.model.num_layers * layer_s + head_s
        return known

    def is_possible(self, kv_tokens: int) -> bool:
        """Whether any pipeline has the memory."""
        costs = self.costs(SOLO_ROWS, kv_tokens)
        if not self.is_exact:
            return good_ring(costs) is not None
        counts = range(1, min(self.num_devices, self.model.num_layers) + 1)
        return any(can_cover(costs, math.inf, number, ANYBODY) for number in counts)

    @property
    def num_devices(self) -> int:
        return len(self.fleet.devices)

    def _stage_counts(self) -> list[int]:
        most = min(self.num_devices, self.model.num_layers)
        return list(range(1, most + 1)) if self.is_exact else stage_counts(most)

    def _rows(self, num_stages: int, num_streams: int, device: int) -> int:
        return batch_rows(num_streams, num_stages, self.fleet.devices[device].profile.max_batch)

    def _least_period(self, shape: _Shape, kv_tokens: int, num_streams: int, below_s: float) -> Route | None:
        """The least time between two batches; None if none is less than below_s."""
        costs, share = self.costs(shape.rows, kv_tokens), shape.share
        members = self._members(shape.num_stages, shape.rows, num_streams)

        def look(period_s: float) -> Route | None:
            if not costs.may_have_period(shape.num_stages, period_s, share):
                return None
            return fastest_within(costs, period_s, period_s / share, shape.num_stages, members)

        # No period is less than low_s: what the slowest stage takes at least; then also `share` of the least that passes
        # take whose stages are fast enough to be better than the best that is known.
        low_s = self._least_slowest_s(costs, shape, below_s, members)
        best, period_s = None, below_s
        target_s = low_s * (1 + 2 * TOLERANCE) if below_s == math.inf else below_s * (1 - TOLERANCE)
        while low_s < period_s * (1 - TOLERANCE):
            found = look(target_s)
            if found is not None:
                found_s = max(found.slowest_s, found.total_s * share)
                if found_s >= period_s:
                    break
                best, period_s, low_s = found, found_s, max(low_s, found.total_s * share)
            elif target_s >= period_s * (1 - 2 * TOLERANCE):
                break
            else:
                low_s = target_s
            # What is left of the gap is closed by steps.
            is_close = period_s == math.inf or period_s - low_s <= GAP * period_s
            target_s = period_s * (1 - TOLERANCE) if is_close else (low_s + period_s) / 2
        return best

    def _good_period(self, shape: _Shape, kv_tokens: int, num_streams: int, below_s: float) -> Route | None:
        """Nearly the same; below_s is left to the caller, so that what is found for a shape is always the same."""
        members = self._members(shape.num_stages, shape.rows, num_streams)
        costs = self.costs(shape.rows, kv_tokens)
        return good_period(costs, shape.num_stages, shape.share, shape.least_s, members)

    def _least_slowest_s(self, costs: StageCosts, shape: _Shape, below_s: float, members: Members) -> float:
        """What the slowest of so many stages takes at least; below_s if not less. Links are not looked at."""
        times_s = sorted(
            {
                costs.stage_s(device, num_layers, is_last)
                for device in members.of(self.num_devices)
                for num_layers in range(1, costs.num_layers + 1)
                for is_last in (False, True)
            }
        )
        times_s = times_s[: bisect_left(times_s, below_s)]
        first = bisect_left(times_s, True, key=lambda limit_s: can_cover(costs, limit_s, shape.num_stages, members))
        return max(times_s[first] * (1 - TOLERANCE), shape.least_s) if first < len(times_s) else below_s

    def _members(self, num_stages: int, rows: int, num_streams: int) -> Members:
        """Whose batches will have so many rows: those of the device that allows the fewest."""
        rows_of = [self._rows(num_stages, num_streams, device) for device in range(self.num_devices)]
        barred = sum(1 << device for device, its_rows in enumerate(rows_of) if its_rows < rows)
        wanted = sum(1 << device for device, its_rows in enumerate(rows_of) if its_rows == rows)
        return Members(barred, wanted)

    def most_kv(self, candidate: Candidate, most_tokens: int) -> tuple[Route, int]:
        """Cut anew so that most KV fits, up to most_tokens, and nothing is slower; the route and its KV in tokens."""
        route, share = (
            candidate.route,
            candidate.rows / min(candidate.num_streams, candidate.rows * len(candidate.route.order)),
        )
        limit_s = math.inf if candidate.is_ring else max(route.slowest_s, route.total_s * share)
        total_s = route.total_s if candidate.is_ring else limit_s / share
        members = replace(self.fleet, devices=tuple(self.fleet.devices[device] for device in route.order))
        solver, order = Solver(self.model, members), range(len(route.order))
        low, high = candidate.kv_tokens // PAGE_TOKENS, most_tokens // PAGE_TOKENS
        stops = route.stops
        while low < high:
            middle = (low + high + 1) // 2
            costs = solver.costs(candidate.rows, middle * PAGE_TOKENS)
            enter_s, leave_s = ends(costs, 0, candidate.is_ring)
            found = cut(costs, order, limit_s * (1 + TOLERANCE), enter_s=enter_s, leave_s=leave_s)
            if found is None or found.total_s > total_s * (1 + TOLERANCE):
                high = middle - 1
            else:
                stops, low = found.stops, middle
        return replace(route, stops=stops), max(low * PAGE_TOKENS, candidate.kv_tokens)

"""The best cut of the layers where devices and their order are given: exact, and fast enough for a hundred devices.

Used to refine what searches over orders propose, and to find how much KV a pipeline can hold without being slower.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from orchestrator.core.stage_costs import Route, StageCosts, route_of


def cut(
    costs: StageCosts,
    order: Sequence[int],
    limit_s: float = math.inf,
    below_s: float = math.inf,
    *,
    enter_s: Sequence[float],
    leave_s: Sequence[float],
) -> Route | None:
    """The cut with the least total_s in which every device has a layer and no stage or link takes longer than limit_s.

    None if none takes less than below_s.
    """
    if any(costs.sending_s[one][other] > limit_s for one, other in pairwise(order)):
        return None
    num_layers, num_stages = costs.num_layers, len(order)
    if num_stages == 1:
        return _alone(costs, order[0], limit_s, below_s, enter_s, leave_s)
    caps = _caps(costs, order, limit_s)
    if min(caps) < 1 or sum(caps) < num_layers:
        return None
    fastest = route_of(costs, tuple(order), tuple(accumulate(_greedy(costs, order, caps))), enter_s, leave_s)
    if fastest.total_s >= below_s:
        return None
    return fastest if _has_room(costs, fastest) else _by_bytes(costs, order, caps, limit_s, below_s, enter_s, leave_s)


def _by_bytes(
    costs: StageCosts,
    order: Sequence[int],
    caps: Sequence[int],
    limit_s: float,
    below_s: float,
    enter_s: Sequence[float],
    leave_s: Sequence[float],
) -> Route | None:
    """The same where it matters which layers a stage gets, because they differ in bytes: by stages and where they end."""
    num_layers, num_stages, last = costs.num_layers, len(order), order[-1]
    first_start, layer_s = max(num_layers - caps[-1], num_stages - 1), costs.layer_s[last]
    most = _most_stops(costs, order, caps)
    least = _least_stops(costs, order, caps, first_start)
    if any(low > high for low, high in zip(least, most, strict=True)):
        return None
    # By stage and where it ends, the start of its layers that is fastest.
    starts: list[list[int]] = []
    times = _first(costs, order[0], limit_s)
    ends = [range(max(low, index + 1), high + 1) for index, (low, high) in enumerate(zip(least, most, strict=True))]
    for device, (before, after) in zip(order[1:-1], pairwise(ends), strict=True):
        times, origins = _middle(costs, device, times, before, after, limit_s)
        starts.append(origins)
    best_s, start = min((times[start] - start * layer_s, start) for start in range(first_start, num_layers))
    if best_s == math.inf:
        return None
    stops = [num_layers, start]
    for origins in reversed(starts):
        stops.append(origins[stops[-1]])
    found = route_of(costs, tuple(order), tuple(reversed(stops)), enter_s, leave_s)
    return found if found.total_s < below_s else None


def _alone(
    costs: StageCosts,
    device: int,
    limit_s: float,
    below_s: float,
    enter_s: Sequence[float],
    leave_s: Sequence[float],
) -> Route | None:
    if not costs.rooms[device].holds_all or costs.most_layers_within(device, limit_s, True) < costs.num_layers:
        return None
    found = route_of(costs, (device,), (costs.num_layers,), enter_s, leave_s)
    return found if found.total_s < below_s else None


def _most_stops(costs: StageCosts, order: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Where each stage but the last ends at most, if all before it hold what they can: who starts later gets farther."""
    stops, stop = [], 0
    for index, device in enumerate(order[:-1]):
        stop = min(costs.rooms[device].reach[stop], stop + caps[index], costs.num_layers - len(order) + index + 1)
        stops.append(stop)
    return stops


def _least_stops(costs: StageCosts, order: Sequence[int], caps: Sequence[int], last_start: int) -> list[int]:
    """Where each stage but the last must end at least, or the stages behind it have no room for the rest."""
    stops = [last_start]
    for index in range(len(order) - 2, 0, -1):
        reach, cap, stop = costs.rooms[order[index]].reach, caps[index], stops[-1]
        first = max(stop - cap, index)
        stops.append(max(bisect_left(reach, stop, lo=min(first, len(reach))), first))
    return stops[::-1]


def _caps(costs: StageCosts, order: Sequence[int], limit_s: float) -> list[int]:
    """The most layers of each stage, by time and by memory wherever its layers are."""
    first, last = order[0], order[-1]
    caps = [
        min(costs.max_layers[device], costs.most_layers_within(device, limit_s, device == last)) for device in order
    ]
    caps[0] = min(caps[0], costs.rooms[first].reach[0])
    caps[-1] = min(caps[-1], costs.num_layers - costs.rooms[last].last_start)
    return caps


def _greedy(costs: StageCosts, order: Sequence[int], caps: Sequence[int]) -> list[int]:
    """How many layers each stage has if the fastest have as many as they can: no cut takes less in all."""
    counts = [1] * len(order)
    left = costs.num_layers - len(order)
    for _, index in sorted((costs.layer_s[device], index) for index, device in enumerate(order)):
        more = min(left, caps[index] - 1)
        counts[index] += more
        left -= more
    return counts


def _has_room(costs: StageCosts, route: Route) -> bool:
    """Whether the layers of all stages but the last one fit: those of the last one do, by its cap."""
    parts = zip(route.order[:-1], route.starts, route.stops, strict=False)
    return all(costs.rooms[device].reach[start] >= stop for device, start, stop in parts)


def _first(costs: StageCosts, device: int, limit_s: float) -> list[float]:
    times = [math.inf] * (costs.num_layers + 1)
    most = costs.most_layers_within(device, limit_s, False)
    for stop in range(1, min(costs.rooms[device].reach[0], most) + 1):
        times[stop] = stop * costs.layer_s[device]
    return times


def _middle(
    costs: StageCosts, device: int, before: list[float], starts: range, stops: range, limit_s: float
) -> tuple[list[float], list[int]]:
    """Times by where the stage ends, as far as that is in `stops`, and the start of each: a minimum over a sliding window.

    before: times by where the stage before it ends, which is in `starts`. Links add the same to all.
    """
    num_layers, layer_s = costs.num_layers, costs.layer_s[device]
    most, reach = costs.most_layers_within(device, limit_s, False), costs.rooms[device].reach
    times, origins = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
    # Starts that may be the best of a later stop, and what each takes apart from the stop; the best of them at `head`.
    window: list[int] = []
    based: list[float] = []
    head, oldest, next_start = 0, starts.start, starts.start
    for stop in stops:
        while oldest < stop and (reach[oldest] < stop or oldest + most < stop):
            oldest += 1
        for start in range(max(next_start, oldest), min(stop, starts.stop)):
            newest = before[start] - start * layer_s
            if newest < math.inf:
                while len(window) > head and based[-1] > newest:
                    window.pop()
                    based.pop()
                window.append(start)
                based.append(newest)
        next_start = stop
        while head < len(window) and window[head] < oldest:
            head += 1
        if head < len(window):
            times[stop], origins[stop] = based[head] + stop * layer_s, window[head]
    return times, origins

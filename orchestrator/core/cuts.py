"""The best cut of the layers where devices and their order are given: exact, and fast enough for a hundred devices.

Used to refine what searches over orders propose, and to find how much KV a pipeline can hold without being slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from orchestrator.core.stage_costs import Route, StageCosts, route_of


def cut(
    costs: StageCosts,
    order: Sequence[int],
    limit_s: float = math.inf,
    *,
    enter_s: Sequence[float],
    leave_s: Sequence[float],
) -> Route | None:
    """The cut with the least total_s in which every device has a layer and no stage or link takes longer than limit_s.

    None if there is none.
    """
    if any(costs.sending_s[one][other] > limit_s for one, other in pairwise(order)):
        return None
    num_layers, num_stages = costs.num_layers, len(order)
    if num_stages == 1:
        return _alone(costs, order[0], limit_s, enter_s, leave_s)
    last = order[-1]
    # Where each stage must end at least, or the stages behind it have no room for the rest; and at most, for its own.
    caps = [
        min(costs.max_layers[device], costs.most_layers_within(device, limit_s, device == last)) for device in order
    ]
    least = [num_layers - behind for behind in accumulate(reversed(caps[1:]))][::-1]
    most = [min(held, num_layers - num_stages + index) for index, held in enumerate(accumulate(caps), start=1)]
    if least[0] > caps[0] or min(caps) < 1:
        return None
    # By stage and where it ends, the start of its layers that is fastest.
    starts: list[list[int]] = []
    times = _first(costs, order[0], limit_s)
    for index, device in enumerate(order[1:-1], start=1):
        times, origins = _middle(costs, device, times, range(max(least[index], index + 1), most[index] + 1), limit_s)
        starts.append(origins)
    most_of_last = costs.most_layers_within(last, limit_s, True)
    first_start = max(costs.rooms[last].last_start, num_layers - most_of_last, num_stages - 1)
    layer_s = costs.layer_s[last]
    if first_start >= num_layers:
        return None
    best_s, start = min((times[start] - start * layer_s, start) for start in range(first_start, num_layers))
    if best_s == math.inf:
        return None
    stops = [num_layers, start]
    for origins in reversed(starts):
        stops.append(origins[stops[-1]])
    return route_of(costs, tuple(order), tuple(reversed(stops)), enter_s, leave_s)


def _alone(
    costs: StageCosts, device: int, limit_s: float, enter_s: Sequence[float], leave_s: Sequence[float]
) -> Route | None:
    is_able = costs.rooms[device].holds_all and costs.most_layers_within(device, limit_s, True) >= costs.num_layers
    return route_of(costs, (device,), (costs.num_layers,), enter_s, leave_s) if is_able else None


def _first(costs: StageCosts, device: int, limit_s: float) -> list[float]:
    times = [math.inf] * (costs.num_layers + 1)
    most = costs.most_layers_within(device, limit_s, False)
    for stop in range(1, min(costs.rooms[device].reach[0], most) + 1):
        times[stop] = stop * costs.layer_s[device]
    return times


def _middle(
    costs: StageCosts, device: int, before: list[float], stops: range, limit_s: float
) -> tuple[list[float], list[int]]:
    """Times by where the stage ends, as far as that is in `stops`, and the start of each: a minimum over a sliding window.

    Links add the same to all.
    """
    num_layers, layer_s = costs.num_layers, costs.layer_s[device]
    most, reach = costs.most_layers_within(device, limit_s, False), costs.rooms[device].reach
    times, origins = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
    window: list[int] = []
    head, oldest, next_start = 0, 1, 1
    based = [time - start * layer_s for start, time in enumerate(before)]
    for stop in stops:
        while oldest < stop and (reach[oldest] < stop or oldest + most < stop):
            oldest += 1
        for start in range(max(next_start, oldest), stop):
            newest = based[start]
            if newest < math.inf:
                while len(window) > head and based[window[-1]] > newest:
                    window.pop()
                window.append(start)
        next_start = stop
        while head < len(window) and window[head] < oldest:
            head += 1
        if head < len(window):
            times[stop], origins[stop] = based[window[head]] + stop * layer_s, window[head]
    return times, origins

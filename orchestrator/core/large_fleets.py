"""A good pipeline where there are too many devices to look at every order: chosen greedily, cut exactly, then improved.

The same questions as `exact` answers, so that a search can use either. Never worse than the best device by itself, because
routes of one stage are all looked at. Deterministic: the same fleet gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from orchestrator.core.cuts import cut
from orchestrator.core.stage_costs import Route, StageCosts

# How many other devices are tried in the place of each one, and how many changes of a route at most. With these, 100
# devices and 80 layers are planned in a second.
NUM_SUBSTITUTES = 2
MAX_CUTS = 10


def good_ring(costs: StageCosts, below_s: float = math.inf, num_stages: int | None = None) -> Route | None:
    """As `exact.fastest_ring`, nearly."""
    best: Route | None = None
    for number in [num_stages] if num_stages else stage_counts(costs):
        found = _improve(costs, number, math.inf, below_s, is_ring=True, is_allowed=lambda _: True)
        if found is not None:
            best, below_s = found, found.total_s * (1 - 1e-9)
    return best


def good_within(
    costs: StageCosts, limit_s: float, below_s: float, num_stages: int, is_allowed: Callable[[int], bool]
) -> Route | None:
    """As `exact.fastest_within`, nearly: what it does not find may exist."""
    return _improve(costs, num_stages, limit_s, below_s, is_ring=False, is_allowed=is_allowed)


def stage_counts(costs: StageCosts) -> list[int]:
    """Numbers of stages to try: all small ones, then each a quarter larger, as far as devices and layers go."""
    most, counts = min(costs.num_devices, costs.num_layers), [1]
    while counts[-1] < most:
        counts.append(min(max(counts[-1] + 1, counts[-1] * 5 // 4), most))
    return counts


def _improve(
    costs: StageCosts,
    num_stages: int,
    limit_s: float,
    below_s: float,
    *,
    is_ring: bool,
    is_allowed: Callable[[int], bool],
) -> Route | None:
    """Start with greedy choices, then take every change that makes a route faster until none does, or MAX_CUTS."""
    best: Route | None = None
    num_left = MAX_CUTS

    def better(order: Sequence[int]) -> Route | None:
        """The cut of an order if it is the fastest so far."""
        nonlocal best, below_s, num_left
        num_left -= 1
        if not is_allowed(sum(1 << device for device in order)):
            return None
        enter_s, leave_s = ends(costs, order[0], is_ring)
        found = cut(costs, order, limit_s, enter_s=enter_s, leave_s=leave_s)
        if found is None or found.total_s >= below_s:
            return None
        best, below_s = found, found.total_s * (1 - 1e-9)
        return found

    if num_stages == 1:
        num_left += costs.num_devices
        for device in range(costs.num_devices):
            better([device])
        return best
    for order in _first_orders(costs, num_stages, limit_s):
        better(order)
    has_changed = best is not None
    while has_changed and best is not None and num_left > 0:
        has_changed = False
        for order in _changes(costs, best.order, limit_s):
            if num_left <= 0:
                break
            if better(order) is not None:
                has_changed = True
                break
    return best


def ends(costs: StageCosts, first: int, is_ring: bool) -> tuple[Sequence[float], Sequence[float]]:
    """What entering the first stage takes, and leaving the last: to the first one in a ring, else to the orchestrator."""
    if is_ring:
        return [0.0] * costs.num_devices, [row[first] for row in costs.hop_s]
    return costs.enter_s, costs.leave_s


def _first_orders(costs: StageCosts, num_stages: int, limit_s: float) -> Iterator[list[int]]:
    """The fastest, and those with most room, each made large enough for all layers, the end first and the rest by hops."""
    caps = _caps(costs, limit_s)
    able = [device for device in range(costs.num_devices) if caps[device] > 0]
    if len(able) < num_stages:
        return
    seen = set()
    rank: Sequence[float]
    for rank in (costs.layer_s, [-cap for cap in caps]):
        ranked = sorted((rank[device], costs.layer_s[device], device) for device in able)
        chosen = [device for _, _, device in ranked]
        members = _with_room(chosen[:num_stages], chosen[num_stages:], caps, costs.num_layers)
        if members is None or frozenset(members) in seen:
            continue
        seen.add(frozenset(members))
        for last in sorted(members, key=lambda device: (costs.rooms[device].last_start, costs.head_s[device]))[:2]:
            for first in sorted((one for one in members if one != last), key=lambda one: -costs.rooms[one].reach[0])[
                :2
            ]:
                yield _by_hops(costs, first, last, members)
        yield sorted(members)


def _caps(costs: StageCosts, limit_s: float) -> list[int]:
    return [
        min(costs.max_layers[device], max(costs.most_layers_within(device, limit_s, False), 0))
        for device in range(costs.num_devices)
    ]


def _with_room(members: list[int], others: list[int], caps: Sequence[int], num_layers: int) -> list[int] | None:
    """Put devices with more room in the place of those with the least until all layers fit."""
    members, others = sorted(members, key=lambda one: caps[one]), sorted(others, key=lambda one: -caps[one])
    held = sum(caps[one] for one in members)
    for index, other in enumerate(others[: len(members)]):
        if held >= num_layers or caps[other] <= caps[members[index]]:
            break
        held += caps[other] - caps[members[index]]
        members[index] = other
    return members if held >= num_layers else None


def _by_hops(costs: StageCosts, first: int, last: int, members: Sequence[int]) -> list[int]:
    order, left = [first], set(members) - {first, last}
    while left:
        hop_s = costs.hop_s[order[-1]]
        nearest = min(left, key=lambda device: (hop_s[device], device))
        order.append(nearest)
        left.remove(nearest)
    return [*order, last]


def _changes(costs: StageCosts, order: tuple[int, ...], limit_s: float) -> Iterator[list[int]]:
    """Another device in the place of one, those that pay most first; then two that change places."""
    caps, members = _caps(costs, limit_s), set(order)
    others = [device for device in range(costs.num_devices) if device not in members and caps[device] > 0]
    substitutes = sorted(others, key=lambda device: (costs.layer_s[device], device))[:NUM_SUBSTITUTES]
    slowest_first = sorted(range(len(order)), key=lambda index: -costs.layer_s[order[index]])
    for index in slowest_first:
        for other in substitutes:
            yield [*order[:index], other, *order[index + 1 :]]
    ends_first = sorted(range(len(order)), key=lambda index: min(index, len(order) - 1 - index))
    for place, index in enumerate(ends_first):
        for other in ends_first[place + 1 :]:
            changed = list(order)
            changed[index], changed[other] = changed[other], changed[index]
            yield changed

"""A good pipeline where there are too many devices to look at every order: chosen greedily, cut exactly, then improved.

Of many devices it looks at some hundreds of orders, of a dozen at some thousands, each with its best cut. Never worse than
the best device by itself, because routes of one stage are all looked at. Deterministic: the same fleet gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from orchestrator.core.cuts import cut
from orchestrator.core.stage_costs import ANYBODY, Members, Route, StageCosts

# What the orders of one search that are cut may have together, in layers times stages: some 20 ms.
MAX_WORK = 20_000
# How many other devices are tried in the place of each one.
NUM_SUBSTITUTES = 4
# A period this close to its bound is not made shorter.
GAP = 0.003

# The best cut of an order and its seconds, if they are less than so many.
_Judge = Callable[[Sequence[int], float], tuple[float, Route] | None]


def good_ring(costs: StageCosts, num_stages: int | None = None) -> Route | None:
    """As `exact.fastest_ring`, nearly."""

    def judge(order: Sequence[int], below_s: float) -> tuple[float, Route] | None:
        enter_s, leave_s = ends(costs, order[0], is_ring=True)
        found = cut(costs, order, enter_s=enter_s, leave_s=leave_s)
        return None if found is None or found.total_s >= below_s else (found.total_s, found)

    best: Route | None = None
    for number in [num_stages] if num_stages else stage_counts(costs):
        if best is None or costs.least_total_s(number, math.inf) < best.total_s:
            found = _climb(costs, number, ANYBODY, judge)
            if found is not None and (best is None or found.total_s < best.total_s * (1 - 1e-9)):
                best = found
    return best


def good_period(costs: StageCosts, num_stages: int, share: float, least_s: float, members: Members) -> Route | None:
    """Nearly the route of so many stages with the least time between two batches, by way of the orchestrator.

    share: of a pass, that a batch is behind another at least. least_s: a bound of that time.
    """

    def judge(order: Sequence[int], below_s: float) -> tuple[float, Route] | None:
        """Bisect between what is known to be too short and what was reached."""
        best, low_s, limit_s = None, least_s, below_s
        while low_s < below_s * (1 - GAP) or best is None:
            found = cut(costs, order, limit_s, enter_s=costs.enter_s, leave_s=costs.leave_s)
            if found is not None:
                # No shorter limit makes a pass faster.
                low_s = max(low_s, found.total_s * share)
                period_s = max(found.slowest_s, found.total_s * share)
            if found is not None and period_s < below_s:
                best, below_s = found, period_s
            elif best is None:
                return None
            else:
                low_s = max(low_s, limit_s)
            limit_s = (low_s + below_s) / 2
        return below_s, best

    return _climb(costs, num_stages, members, judge)


def stage_counts(costs: StageCosts) -> list[int]:
    """Numbers of stages to try: all up to 16, then each an eighth larger, as far as devices and layers go."""
    most, counts = min(costs.num_devices, costs.num_layers), [1]
    while counts[-1] < most:
        counts.append(min(counts[-1] + max(1, counts[-1] // 8), most))
    return counts


def ends(costs: StageCosts, first: int, is_ring: bool) -> tuple[Sequence[float], Sequence[float]]:
    """What entering the first stage takes, and leaving the last: to the first one in a ring, else to the orchestrator."""
    if is_ring:
        return [0.0] * costs.num_devices, [row[first] for row in costs.hop_s]
    return costs.enter_s, costs.leave_s


def _climb(costs: StageCosts, num_stages: int, members: Members, judge: _Judge) -> Route | None:
    """Start with greedy choices, then take every change of the best that is better until none is, or MAX_WORK is done."""
    best: Route | None = None
    best_s, seen = math.inf, set[tuple[int, ...]]()
    most = max(MAX_WORK // (num_stages * costs.num_layers), 1)

    def is_better(order: Sequence[int]) -> bool:
        nonlocal best, best_s
        known = tuple(order)
        if known in seen or not members.allow(sum(1 << device for device in order)):
            return False
        seen.add(known)
        found = judge(order, best_s * (1 - 1e-9))
        if found is not None:
            best_s, best = found
        return found is not None

    if num_stages == 1:
        for device in range(costs.num_devices):
            is_better([device])
        return best
    for order in _first_orders(costs, num_stages, members):
        is_better(order)
    has_changed = best is not None
    while has_changed and best is not None:
        has_changed = False
        for order in _changes(costs, best.order, members):
            if len(seen) >= most:
                return best
            if is_better(order):
                has_changed = True
                break
    return best


def _first_orders(costs: StageCosts, num_stages: int, members: Members) -> Iterator[list[int]]:
    """The fastest, and those with most room, each made large enough for all layers, the end first and the rest by hops."""
    caps = costs.max_layers
    able = [device for device in members.of(costs.num_devices) if caps[device] > 0]
    if len(able) < num_stages:
        return
    rank: Sequence[float]
    for rank in (costs.layer_s, [-cap for cap in caps]):
        ranked = sorted((rank[device], costs.layer_s[device], device) for device in able)
        ordered = [device for _, _, device in ranked]
        chosen = _with_room(ordered[:num_stages], ordered[num_stages:], caps, costs.num_layers)
        if chosen is None:
            continue
        lasts = sorted(chosen, key=lambda device: (costs.rooms[device].last_start, costs.head_s[device]))[:2]
        for last in lasts:
            firsts = sorted((one for one in chosen if one != last), key=lambda one: -costs.rooms[one].reach[0])[:2]
            yield from (_by_hops(costs, first, last, chosen) for first in firsts)
        yield sorted(chosen)


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


def _changes(costs: StageCosts, order: tuple[int, ...], members: Members) -> Iterator[list[int]]:
    """Another device in the place of one, those that pay most first; two that change places; one that goes elsewhere."""
    others = [one for one in members.of(costs.num_devices) if one not in order and costs.max_layers[one] > 0]
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
    for index, other in permutations(ends_first, 2):
        moved = [one for one in order if one != order[index]]
        yield [*moved[:other], order[index], *moved[other:]]

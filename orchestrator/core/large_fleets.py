"""A good pipeline where there are too many devices to look at every order: chosen greedily, cut exactly, then improved.

Of many devices it looks at some hundreds of orders, of a dozen at some thousands, each with its best cut. Never worse than
the best device by itself, because routes of one stage are all looked at. Deterministic: the same fleet gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from orchestrator.core.cuts import cut
from orchestrator.core.stage_costs import ANYBODY, GAP, TOLERANCE, Members, Route, StageCosts

# What the orders of one search that are cut may have together, in layers times stages: some 20 ms.
MAX_WORK = 20_000
# How many other devices are tried in the place of each one.
NUM_SUBSTITUTES = 4

# The best cut of an order and its seconds, if they are less than so many.
_Judge = Callable[[Sequence[int], float], tuple[float, Route] | None]


def good_ring(costs: StageCosts, num_stages: int | None = None) -> Route | None:
    """As `exact.fastest_ring`, nearly."""

    def judge(order: Sequence[int], below_s: float) -> tuple[float, Route] | None:
        enter_s, leave_s = ends(costs, order[0], is_ring=True)
        found = cut(costs, order, below_s=below_s, enter_s=enter_s, leave_s=leave_s)
        return None if found is None else (found.total_s, found)

    best: Route | None = None
    for number in [num_stages] if num_stages else stage_counts(min(costs.num_devices, costs.num_layers)):
        if best is None or costs.least_total_s(number, math.inf) < best.total_s:
            found = _climb(costs, number, ANYBODY, judge)
            if found is not None and (best is None or found.total_s < best.total_s * (1 - TOLERANCE)):
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
            found = cut(costs, order, limit_s, limit_s / share, enter_s=costs.enter_s, leave_s=costs.leave_s)
            if found is not None:
                best, below_s = found, max(found.slowest_s, found.total_s * share)
                # No shorter limit makes a pass faster.
                low_s = max(low_s, found.total_s * share)
            elif best is None:
                return None
            else:
                low_s = limit_s
            limit_s = (low_s + below_s) / 2
        return below_s, best

    return _climb(costs, num_stages, members, judge)


def stage_counts(most: int) -> list[int]:
    """Numbers of stages to try: all up to 16, then each an eighth larger."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(counts[-1] + max(1, counts[-1] // 8), most))
    return counts


def ends(costs: StageCosts, first: int, is_ring: bool) -> tuple[Sequence[float], Sequence[float]]:
    """What entering the first stage takes, and leaving the last: to the first one in a ring, else to the orchestrator."""
    if is_ring:
        return [0.0] * costs.num_devices, [row[first] for row in costs.hop_s]
    return costs.enter_s, costs.leave_s


def _climb(costs: StageCosts, num_stages: int, members: Members, judge: _Judge) -> Route | None:
    """Climb from the best of the greedy choices, then from the others, as long as MAX_WORK allows; the best of all."""
    alone = ((device,) for device in range(costs.num_devices))
    firsts = alone if num_stages == 1 else map(tuple, _first_orders(costs, num_stages, members))
    orders = [order for order in dict.fromkeys(firsts) if members.allow(_bits(order))]
    best: tuple[float, Route] | None = None
    for order in orders:
        best = judge(order, best[0] * (1 - TOLERANCE) if best else math.inf) or best
    if best is None or num_stages == 1:
        return None if best is None else best[1]
    climber = _Climber(costs, members, judge, MAX_WORK // (num_stages * costs.num_layers) - len(orders))
    others = [order for order in orders if order != best[1].order]
    best = climber.climb(*best, set(orders))
    for order in others:
        start = judge(order, math.inf) if climber.num_left > 0 else None
        best = min(best, climber.climb(*start, {order}), key=lambda top: top[0]) if start else best
    return best[1]


class _Climber:
    """Takes every change of a route that is better, until none is. Invariant: num_left is how many may still be judged."""

    def __init__(self, costs: StageCosts, members: Members, judge: _Judge, num_left: int) -> None:
        self._costs = costs
        self._members = members
        self._judge = judge
        self.num_left = num_left

    def climb(self, best_s: float, best: Route, seen: set[tuple[int, ...]]) -> tuple[float, Route]:
        """As far as it goes from a route and its seconds; seen: orders to pass over, to which it adds."""
        is_better = True
        while is_better:
            is_better = False
            for order in _changes(self._costs, best.order, self._members):
                if tuple(order) in seen or not self._members.allow(_bits(order)):
                    continue
                if self.num_left <= 0:
                    return best_s, best
                seen.add(tuple(order))
                self.num_left -= 1
                found = self._judge(order, best_s * (1 - TOLERANCE))
                if found is not None:
                    best_s, best = found
                    is_better = True
                    break
        return best_s, best


def _bits(order: Sequence[int]) -> int:
    return sum(1 << device for device in order)


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

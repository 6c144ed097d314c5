"""The best pipeline over every choice, order and cut: exact, by dynamic programming over sets of devices.

For each set of devices and the last of them it keeps, by the layers they hold, the least time until there. Sets that can no
longer beat what is known are dropped. Twice as many sets a device: for small fleets; `large_fleets` is for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.core.stage_costs import ANYBODY, TOLERANCE, Members, Route, StageCosts, route_of

# By the layers held so far, the least seconds until there; inf: it cannot be.
_Times = list[float]


def fastest_ring(costs: StageCosts, num_stages: int | None = None) -> Route | None:
    """The route with the least total_s, from the last stage back to the first; None if there is none."""
    best, below_s = None, math.inf
    by_speed = sorted(range(costs.num_devices), key=lambda device: (costs.layer_s[device], device))
    for first in by_speed:
        twin = costs.twin_before[first]
        if twin >= 0:
            continue  # A ring that begins with a twin is the same ring.
        back_s = [row[first] for row in costs.hop_s]
        search = _Search(costs, [first], [0.0] * costs.num_devices, back_s, math.inf, num_stages)
        found = search.run(below_s)
        if found is not None:
            best, below_s = found, found.total_s * (1 - TOLERANCE)
    return best


def fastest_within(
    costs: StageCosts, limit_s: float, below_s: float, num_stages: int, members: Members
) -> Route | None:
    """The route of so many stages with the least total_s, none of whose stages or links takes longer than limit_s.

    From the orchestrator and back to it. None if none takes less than below_s.
    """
    firsts = list(range(costs.num_devices))
    search = _Search(costs, firsts, costs.enter_s, costs.leave_s, limit_s, num_stages, members)
    return search.run(below_s)


def can_cover(costs: StageCosts, limit_s: float, num_stages: int, members: Members) -> bool:
    """Whether so many stages, none of which takes longer than limit_s, can hold all layers; links are not looked at.

    For each set of devices, how far it gets in its best order: farther is never worse, so one number a set is enough.
    """
    num_layers, twins = costs.num_layers, costs.twin_before
    devices = members.of(costs.num_devices)
    most = {device: costs.most_layers_within(device, limit_s, False) for device in devices}
    starts = {device: first_start(costs, device, limit_s) for device in devices}
    if num_stages == 1:
        return any(starts[device] == 0 and members.allow(1 << device) for device in devices)
    farthest = {0: 0}
    for num_held in range(1, num_stages):
        grown: dict[int, int] = {}
        for held, start in farthest.items():
            for device in devices:
                if held >> device & 1 or (twins[device] >= 0 and not held >> twins[device] & 1):
                    continue
                stop = min(costs.rooms[device].reach[start], start + most[device], num_layers - num_stages + num_held)
                more = held | 1 << device
                if stop > start and stop > grown.get(more, 0):
                    grown[more] = stop
        farthest = grown
    return any(
        start >= starts[device] and members.allow(held | 1 << device)
        for held, start in farthest.items()
        for device in devices
        if not held >> device & 1
    )


def first_start(costs: StageCosts, device: int, limit_s: float) -> int:
    """The least start of a last stage on a device; 0 only if it holds the whole model."""
    most = costs.most_layers_within(device, limit_s, True)
    if most >= costs.num_layers and costs.rooms[device].holds_all:
        return 0
    return max(costs.rooms[device].last_start, costs.num_layers - most, 1) if most > 0 else costs.num_layers


class _Search:
    """One search. `_times[devices][last]`: of the sets that were not dropped, devices as bits."""

    def __init__(
        self,
        costs: StageCosts,
        firsts: Sequence[int],
        enter_s: Sequence[float],
        leave_s: Sequence[float],
        limit_s: float,
        num_stages: int | None,
        members: Members = ANYBODY,
    ) -> None:
        self._costs = costs
        self._firsts = firsts
        self._enter_s = enter_s
        self._leave_s = leave_s
        self._limit_s = limit_s
        self._num_stages = num_stages
        self._members = members
        self._able = members.of(costs.num_devices)
        self._most = [costs.most_layers_within(device, limit_s, False) for device in range(costs.num_devices)]
        self._caps = [min(most, max(within, 0)) for most, within in zip(costs.max_layers, self._most, strict=True)]
        self._times: dict[int, dict[int, _Times]] = {}
        self._rests: dict[int, _Times] = {}
        self._below_s = math.inf
        # The set, the last device and the start of its layers.
        self._best: tuple[int, int, int] | None = None

    def run(self, below_s: float) -> Route | None:
        self._below_s = below_s
        costs = self._costs
        if self._num_stages in (None, 1):
            for device in self._firsts:
                self._finish_alone(device)
        level = self._begin() if self._num_stages != 1 else {}
        most = min(self._num_stages or len(self._able), len(self._able), costs.num_layers)
        for num_held in range(1, most):
            self._times.update(level)
            is_end = self._num_stages in (None, num_held + 1)
            grown: dict[int, dict[int, _Times]] = {}
            for devices in sorted(level):
                for device in self._next(devices):
                    joined = self._join(level[devices], device)
                    if is_end and self._members.allow(devices | 1 << device):
                        self._finish(devices, device, joined)
                    if num_held + 1 < most:
                        more = devices | 1 << device
                        times = self._extend(device, joined, self._rest_s(more, num_held + 1))
                        if times is not None:
                            grown.setdefault(more, {})[device] = times
            level = grown
        return None if self._best is None else self._trace(*self._best)

    def _next(self, devices: int) -> list[int]:
        """Who may come next: none before its twin."""
        twins = self._costs.twin_before
        return [
            device
            for device in reversed(self._able)
            if not devices >> device & 1 and (twins[device] < 0 or devices >> twins[device] & 1)
        ]

    def _begin(self) -> dict[int, dict[int, _Times]]:
        level: dict[int, dict[int, _Times]] = {}
        for device in self._firsts:
            if self._costs.twin_before[device] >= 0 or device not in self._able:
                continue
            times, rest_s = [math.inf] * (self._costs.num_layers + 1), self._rest_s(1 << device, 1)
            before_s = self._enter_s[device] + self._costs.pass_s[device]
            for stop in range(1, min(self._costs.rooms[device].reach[0], self._most[device]) + 1):
                if before_s + stop * self._costs.layer_s[device] + rest_s[stop] < self._below_s:
                    times[stop] = before_s + stop * self._costs.layer_s[device]
            if min(times) < math.inf:
                level[1 << device] = {device: times}
        return level

    def _join(self, lasts: dict[int, _Times], device: int) -> _Times:
        """The least time until a device takes up after any of those that may be the last of a set."""
        hop_s, sending_s = self._costs.hop_s, self._costs.sending_s
        arrivals = [
            [time + hop_s[last][device] for time in times]
            for last, times in lasts.items()
            if sending_s[last][device] <= self._limit_s
        ]
        if len(arrivals) > 1:
            return list(map(min, *arrivals))
        return arrivals[0] if arrivals else [math.inf] * (self._costs.num_layers + 1)

    def _extend(self, device: int, joined: _Times, rest_s: _Times) -> _Times | None:
        """The least time until a device is through with its layers, by where they end: a minimum over a sliding window.

        None if with what the rest takes at least, nothing can come of it.
        """
        layer_s, pass_s, most = self._costs.layer_s[device], self._costs.pass_s[device], self._most[device]
        reach, num_layers, below_s = self._costs.rooms[device].reach, self._costs.num_layers, self._below_s
        based = [time - start * layer_s for start, time in enumerate(joined)]
        times: _Times | None = None
        window: list[int] = []
        head, oldest, next_start = 0, 1, 1
        for stop in range(2, num_layers):
            if rest_s[stop] == math.inf:
                continue
            while oldest < stop and (reach[oldest] < stop or oldest + most < stop):
                oldest += 1
            for start in range(max(next_start, oldest), stop):
                newest = based[start]
                if newest == math.inf:
                    continue
                while len(window) > head and based[window[-1]] >= newest:
                    window.pop()
                window.append(start)
            next_start = stop
            while head < len(window) and window[head] < oldest:
                head += 1
            if head < len(window):
                time = based[window[head]] + stop * layer_s + pass_s
                if time + rest_s[stop] < below_s:
                    times = times or [math.inf] * (num_layers + 1)
                    times[stop] = time
        return times

    def _rest_s(self, devices: int, num_held: int) -> _Times:
        """By the layers a set holds, what the others take at least for the rest; inf where they have no room for it.

        As if each had its place for free and the fastest held as many layers as they can.
        """
        known = self._rests.get(devices)
        if known is not None:
            return known
        costs, num_layers = self._costs, self._costs.num_layers
        others = [device for device in self._able if not devices >> device & 1]
        num_more = (self._num_stages or num_held + 1) - num_held
        most = (self._num_stages or costs.num_devices) - num_held
        end_s = min((costs.head_s[one] + costs.pass_s[one] + self._leave_s[one] for one in others), default=math.inf)
        end_s += num_more * costs.least_hop_s + (num_more - 1) * min((costs.pass_s[one] for one in others), default=0.0)
        room = sum(sorted((self._caps[one] for one in others), reverse=True)[:most])
        rests = [math.inf] * (num_layers + 1)
        stop, seconds = num_layers, end_s
        for layer_s, cap in sorted((costs.layer_s[one], self._caps[one]) for one in others):
            for _ in range(min(cap, room - (num_layers - stop))):
                stop, seconds = stop - 1, seconds + layer_s
                if stop < 0:
                    break
                rests[stop] = seconds
        self._rests[devices] = rests
        return rests

    def _finish_alone(self, device: int) -> None:
        costs = self._costs
        total_s = self._enter_s[device] + costs.stage_s(device, costs.num_layers, True) + self._leave_s[device]
        is_able = first_start(costs, device, self._limit_s) == 0
        if is_able and self._members.allow(1 << device) and total_s < self._below_s:
            self._below_s, self._best = total_s * (1 - TOLERANCE), (0, device, 0)

    def _finish(self, devices: int, device: int, joined: _Times) -> None:
        costs, layer_s = self._costs, self._costs.layer_s[device]
        first = max(first_start(costs, device, self._limit_s), 1)
        if first >= costs.num_layers:
            return
        rest_s = costs.stage_s(device, costs.num_layers, True) + self._leave_s[device]
        total_s, start = min((joined[start] - start * layer_s, start) for start in range(first, costs.num_layers))
        if total_s + rest_s < self._below_s:
            self._below_s, self._best = (total_s + rest_s) * (1 - TOLERANCE), (devices, device, start)

    def _trace(self, devices: int, last: int, start: int) -> Route:
        """Walk back from the end: at each stage, the start and the device before it that its time comes from."""
        order, stops = [last], [self._costs.num_layers]
        while devices:
            stops.append(start)
            last = self._came_from(self._times[devices], order[-1], start)
            order.append(last)
            devices &= ~(1 << last)
            start = self._start_of(devices, last, self._times[devices | 1 << last][last][start], start)
        return route_of(self._costs, tuple(reversed(order)), tuple(reversed(stops)), self._enter_s, self._leave_s)

    def _came_from(self, lasts: dict[int, _Times], device: int, stop: int) -> int:
        hop_s, sending_s = self._costs.hop_s, self._costs.sending_s
        able = [last for last in lasts if sending_s[last][device] <= self._limit_s]
        return min(able, key=lambda last: (lasts[last][stop] + hop_s[last][device], -last))

    def _start_of(self, devices: int, last: int, time: float, stop: int) -> int:
        if not devices:
            return 0
        joined = self._join(self._times[devices], last)
        layer_s, most = self._costs.layer_s[last], self._most[last]
        reach, rest_s = self._costs.rooms[last].reach, self._costs.pass_s[last]
        able = (start for start in range(1, stop) if min(reach[start], start + most) >= stop)
        return min(able, key=lambda start: (abs(joined[start] + (stop - start) * layer_s + rest_s - time), start))

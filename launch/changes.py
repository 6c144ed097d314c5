"""Changes a fleet while it serves: more devices or fewer, or all workers started anew, so that no answer ends for it.

What goes is drained first, what comes is waited for; the launcher, told by its desk, starts and ends processes. Called by
`shoal scale` and `shoal roll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from launch.desk import Desk, Wanted
from launch.roster import absolute, named_devices
from launch.scaling import scaled
from shoal.client import Client
from shoal.errors import InvalidRequest, NotReady, ShoalError
from shoal.status import DeviceStatus, Drained, FleetStatus

# A node that has run nothing yet takes seconds, and layers have to be loaded.
JOIN_S = 120.0
GONE_S = 60.0
LET_IN_TIMEOUT_S = 1.0
# The launcher looks at its desk several times a second.
TAKEN_S = 30.0
POLL_S = 0.2

Say = Callable[[str], None]


class Change:
    """Changes of one fleet. say: told of each step."""

    def __init__(self, client: Client, desk: Desk, say: Say) -> None:
        self._client = client
        self._desk = desk
        self._say = say

    def scale(self, counts: Mapping[str, int]) -> None:
        """Have so many devices of each name.

        Raises PlacementImpossible, with nothing changed, if those that stay cannot hold the model, and ConfigError if none
        would stay.
        """
        with self._letting_in():
            self._scale(counts)

    def _scale(self, counts: Mapping[str, int]) -> None:
        before = self._look()
        after = list(before.devices)
        for name, count in counts.items():
            after = scaled(after, absolute(name), count)
        old, new = _ids(before.devices), _ids(after)
        leaving = [worker_id for worker_id in old if worker_id not in new]
        self._drain(leaving)
        self._ask(replace(before, devices=tuple(after)))
        # They go for good, and their names are free, whoever had cordoned them.
        self._desk.cordoned = (*self._desk.cordoned, *leaving)
        for worker_id in leaving:
            self._await_gone(worker_id)
            let_in(self._client, self._desk)
            self._say(f"{worker_id} has gone")
        for worker_id in new:
            if worker_id not in old:
                self._await_there(worker_id)
                self._say(f"{worker_id} has joined")

    def roll(self) -> None:
        """Start all workers anew, those of one pipeline after those of another, and one at a time.

        Raises PlacementImpossible, at the first one that the others cannot do without.
        """
        with self._letting_in():
            self._roll()

    def _roll(self) -> None:
        wanted = self._look()
        ids = _ids(wanted.devices)
        for worker_id in _by_pipeline(self._client.status(), ids):
            self._drain([worker_id])
            generations = {**wanted.generations, worker_id: wanted.generations.get(worker_id, 0) + 1}
            wanted = replace(wanted, generations=generations)
            self._ask(wanted)
            self._await_gone(worker_id)
            self._await_there(worker_id)
            let_in(self._client, self._desk)
            self._await_serving()
            self._say(f"{worker_id} runs anew")

    def _look(self) -> Wanted:
        """What there is. Raises ConfigError where nothing can be changed, NotReady for a fleet that does not serve."""
        there = self._desk.look()
        status = self._client.status()
        if not status.ready:
            self._say(f"the fleet does not serve at the moment: {status.waiting_for}")
            self._await(
                lambda: self._client.status().ready,
                JOIN_S,
                f"it still does not serve, and is left as it is: {status.waiting_for}",
            )
        return there

    @contextmanager
    def _letting_in(self) -> Iterator[None]:
        """However a change ends, whom it has cordoned is let in again: by itself, else by the launcher."""
        try:
            yield
        finally:
            with suppress(ShoalError):
                let_in(self._client, self._desk)

    def _drain(self, worker_ids: Sequence[str]) -> None:
        """Drain those that are there. One that an operator has cordoned stays so."""
        for worker_id in worker_ids:
            device = self._find(worker_id)
            if device is None:
                continue
            if not device.is_cordoned:
                self._desk.cordoned = (*self._desk.cordoned, worker_id)
            moved = self._drained(worker_id).moved
            self._say(f"{worker_id} is drained" + (f": {moved}" if moved else ""))

    def _drained(self, worker_id: str) -> Drained:
        """Drain it when it can be: the fleet moves layers for reasons of its own, too, and is NotReady meanwhile."""
        deadline = time.monotonic() + JOIN_S
        while True:
            try:
                return self._client.drain(worker_id)
            except NotReady as error:
                if time.monotonic() > deadline:
                    raise
                time.sleep(max(POLL_S, error.retry_after_s))

    def _ask(self, wanted: Wanted) -> None:
        """Have the launcher have these devices. Whoever asks for the next builds on what it has then."""
        self._desk.ask(wanted)
        self._await(
            lambda: self._desk.look() == wanted, TAKEN_S, "the launcher has not taken it up: what it says tells why"
        )

    def _find(self, worker_id: str) -> DeviceStatus | None:
        return next((one for one in self._client.status().devices if one.worker_id == worker_id), None)

    def _await_gone(self, worker_id: str) -> None:
        self._await(
            lambda: self._find(worker_id) is None, GONE_S, f"{worker_id} has not gone: what the launcher says tells why"
        )

    def _await_there(self, worker_id: str) -> None:
        self._await(
            lambda: self._find(worker_id) is not None,
            JOIN_S,
            f"{worker_id} has not come: what the launcher says tells why",
        )

    def _await_serving(self) -> None:
        self._await(
            lambda: self._client.status().is_complete, JOIN_S, "the fleet does not serve with all pipelines again"
        )

    def _await(self, is_so: Callable[[], bool], bound_s: float, problem: str) -> None:
        deadline = time.monotonic() + bound_s
        while not is_so():
            if time.monotonic() > deadline:
                raise NotReady(f"after {bound_s:g} s {problem}")
            time.sleep(POLL_S)


def let_in(client: Client, desk: Desk) -> list[str]:
    """Uncordon whom a change has cordoned, but for those that still have to go; return whom."""
    noted = desk.cordoned
    if not noted:
        return []
    going = {device.worker_id for device in client.status().devices} - set(_ids(desk.look().devices))
    done = []
    for worker_id in noted:
        if worker_id not in going:
            # One that is unknown by now is not cordoned either.
            with suppress(InvalidRequest):
                client.cordon(worker_id, False)
            done.append(worker_id)
            desk.cordoned = set(desk.cordoned) - {worker_id}
    return done


def let_in_after_others(address: str, desk: Desk) -> list[str]:
    """As let_in(), for the launcher: where a change was cut short, and none is under way."""
    if not desk.cordoned:
        return []
    try:
        with desk.changing(), Client(address, timeout_s=LET_IN_TIMEOUT_S) as client:
            return let_in(client, desk)
    except ShoalError:
        # Somebody is at it, or nobody answers now: another time.
        return []


def _ids(devices: Sequence[str]) -> list[str]:
    return [worker_id for worker_id, _ in named_devices(devices)]


def _by_pipeline(status: FleetStatus, worker_ids: Sequence[str]) -> list[str]:
    """Those on standby first, who cost nothing and can then stand in; then pipeline by pipeline."""
    in_pipelines = [worker_id for pipeline in status.pipelines for worker_id in pipeline.worker_ids]
    ordered = [worker_id for worker_id in worker_ids if worker_id not in in_pipelines]
    return ordered + [worker_id for worker_id in in_pipelines if worker_id in worker_ids]

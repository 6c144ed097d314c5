"""Changes a fleet while it serves: more devices or fewer, or all workers started anew, so that no answer ends for it.

What goes is drained first, what comes is waited for; the launcher, told by its desk, starts and ends processes. Called by
`shoal scale` and `shoal roll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from launch.desk import Desk, Wanted
from launch.roster import absolute, named_devices
from launch.scaling import scaled
from shoal.client import Client
from shoal.errors import NotReady, ShoalError
from shoal.status import DeviceStatus, FleetStatus

# A node that has run nothing yet takes seconds, and layers have to be loaded.
JOIN_S = 120.0
GONE_S = 60.0
POLL_S = 0.2

Say = Callable[[str], None]


class Change:
    """Changes of one fleet. say: told of each step."""

    def __init__(self, client: Client, desk: Desk, say: Say) -> None:
        self._client = client
        self._desk = desk
        self._say = say

    def scale(self, name: str, count: int) -> None:
        """Have so many devices of a name.

        Raises PlacementImpossible, with nothing changed, if those that stay cannot hold the model.
        """
        before = self._look()
        after = scaled(before.devices, absolute(name), count)
        old, new = _ids(before.devices), _ids(after)
        leaving = [worker_id for worker_id in old if worker_id not in new]
        drained = self._drain(leaving)
        self._desk.ask(replace(before, devices=tuple(after)))
        for worker_id in leaving:
            self._await_gone(worker_id)
            # Its name may be wanted again, and is then free.
            if worker_id in drained:
                self._client.cordon(worker_id, False)
            self._say(f"{worker_id} has gone")
        for worker_id in new:
            if worker_id not in old:
                self._await(worker_id, lambda device: device is not None)
                self._say(f"{worker_id} has joined")

    def roll(self) -> None:
        """Start all workers anew, those of one pipeline after those of another, and one at a time.

        Raises PlacementImpossible, at the first one that the others cannot do without.
        """
        wanted = self._look()
        ids = _ids(wanted.devices)
        for worker_id in _by_pipeline(self._client.status(), ids):
            drained = self._drain([worker_id])
            generations = {**wanted.generations, worker_id: wanted.generations.get(worker_id, 0) + 1}
            wanted = replace(wanted, generations=generations)
            self._desk.ask(wanted)
            self._await_gone(worker_id)
            self._await(worker_id, lambda device: device is not None)
            for name in drained:
                self._client.cordon(name, False)
            self._await_serving()
            self._say(f"{worker_id} runs anew")

    def _look(self) -> Wanted:
        """What there is. Raises ConfigError where nothing can be changed, NotReady for a fleet that still starts."""
        there = self._desk.look()
        status = self._client.status()
        if not status.ready:
            raise NotReady(f"the fleet does not serve yet, or just now: {status.waiting_for}")
        return there

    def _drain(self, worker_ids: Sequence[str]) -> list[str]:
        """Drain those that are there, or none of them; return whom."""
        drained: list[str] = []
        try:
            for worker_id in worker_ids:
                if self._find(worker_id) is not None:
                    moved = self._client.drain(worker_id).moved
                    drained.append(worker_id)
                    self._say(f"{worker_id} is drained" + (f": {moved}" if moved else ""))
        except ShoalError:
            for worker_id in drained:
                self._client.cordon(worker_id, False)
            raise
        return drained

    def _find(self, worker_id: str) -> DeviceStatus | None:
        return next((one for one in self._client.status().devices if one.worker_id == worker_id), None)

    def _await_gone(self, worker_id: str) -> None:
        self._await(worker_id, lambda device: device is None, GONE_S)

    def _await_serving(self) -> None:
        deadline = time.monotonic() + JOIN_S
        while not self._client.status().is_complete:
            if time.monotonic() > deadline:
                raise NotReady(f"the fleet does not serve with all pipelines again after {JOIN_S:g} s")
            time.sleep(POLL_S)

    def _await(self, worker_id: str, is_so: Callable[[DeviceStatus | None], bool], bound_s: float = JOIN_S) -> None:
        deadline = time.monotonic() + bound_s
        while not is_so(self._find(worker_id)):
            if time.monotonic() > deadline:
                raise NotReady(
                    f"{worker_id} has not come or gone after {bound_s:g} s: what the launcher says tells why"
                )
            time.sleep(POLL_S)


def _ids(devices: Sequence[str]) -> list[str]:
    return [worker_id for worker_id, _ in named_devices(devices)]


def _by_pipeline(status: FleetStatus, worker_ids: Sequence[str]) -> list[str]:
    """Those on standby first, who cost nothing and can then stand in; then pipeline by pipeline."""
    in_pipelines = [worker_id for pipeline in status.pipelines for worker_id in pipeline.worker_ids]
    ordered = [worker_id for worker_id in worker_ids if worker_id not in in_pipelines]
    return ordered + [worker_id for worker_id in in_pipelines if worker_id in worker_ids]

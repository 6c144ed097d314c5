"""What `shoal up` tells of its fleet while it runs: processes that end and start again, devices and layers that come and go.

Asks the fleet's own status once a second; decides nothing. Called by `cli.serve`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cli.changes import changes
from cli.terminal import note
from shoal.client import Client

if TYPE_CHECKING:
    from launch.local import LocalFleet
    from shoal.status import FleetStatus

WATCH_S = 0.2
STATUS_S = 1.0
# A status comes in milliseconds; who waits for one longer is asked again.
STATUS_TIMEOUT_S = 2.0


class StatusWatch:
    """Tells what has changed since the last look, at most once in STATUS_S."""

    def __init__(
        self, first: FleetStatus, ask: Callable[[], FleetStatus | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """ask: for the status; None: nobody answers just now."""
        self._seen = first
        self._ask = ask
        self._clock = clock
        self._seen_at = clock()
        self._look_at = self._seen_at

    @property
    def is_deserted(self) -> bool:
        """Whether no device was attached at the last look, be it of this machine or of another."""
        return not self._seen.devices

    def look(self, told: set[str]) -> list[str]:
        """What is to be told; told: devices whose end was told already, without those that have joined again."""
        now = self._clock()
        if now < self._look_at:
            return []
        self._look_at = now + STATUS_S
        status = self._ask()
        if status is None:
            return []
        lines = changes(self._seen, status, told, between_s=now - self._seen_at)
        self._seen, self._seen_at = status, now
        return lines


def watch(fleet: LocalFleet, first: FleetStatus, hear: Callable[[], None]) -> NoReturn:
    """Tell what happens until interrupted; raise LaunchFailed when its devices have all ended and no other is there.

    hear: tells what others have to say.
    """
    from launch.local import failure_of_all, how_it_ended, try_status

    told: set[str] = set()
    with Client(fleet.address, timeout_s=STATUS_TIMEOUT_S) as client:
        status = StatusWatch(first, lambda: try_status(client))
        while True:
            lost = [child for child in fleet.ended() if child.profile is not None]
            are_all = len(lost) == len(fleet.worker_ids)
            # Others may have joined from elsewhere, or been started again by hand.
            if lost and are_all and status.is_deserted:
                raise failure_of_all(lost)
            for child in lost:
                if child.name not in told:
                    others = "" if are_all else "; the others go on without it"
                    note(f"{child.name} {how_it_ended(child)}{others} (log: {child.log_path})")
                    told.add(child.name)
            for line in (fleet.revive(), "" if fleet.redis is None else fleet.redis.revive(), *status.look(told)):
                if line:
                    note(line)
            hear()
            time.sleep(WATCH_S)

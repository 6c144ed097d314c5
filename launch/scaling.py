"""How many devices of a kind a fleet is to have: as an operator says, or by how many requests wait.

Pure: knows names, numbers and times. `changes` carries it out, the launcher asks the scaler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError

MAX_DEVICES = 256
# So many waiting requests a device are worth another one, once they have waited for so long.
WAITING_A_DEVICE = 2.0
UP_S = 5.0
# A device goes after a good while without any: coming and going moves layers.
DOWN_S = 120.0
# What a change does shows when layers have moved.
SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the devices of one name."""

    name: str
    least: int
    most: int


def parse_count(text: str) -> tuple[str, int]:
    """Read NAME=COUNT. Raises ConfigError."""
    name, equals, count = text.partition("=")
    if not (equals and name and count.isascii() and count.isdigit() and int(count) <= MAX_DEVICES):
        raise ConfigError(
            f"{text!r} does not say how many are wanted: write NAME=COUNT as in tablet=4, of 0 to {MAX_DEVICES}",
            field="count",
        )
    return name, int(count)


def parse_bounds(text: str) -> Bounds:
    """Read NAME=LEAST..MOST. Raises ConfigError."""
    name, _, counts = text.partition("=")
    least, dots, most = counts.partition("..")
    is_sound = bool(name and dots) and all(part.isascii() and part.isdigit() for part in (least, most))
    if not is_sound or not int(least) <= int(most) <= MAX_DEVICES or int(most) == 0:
        raise ConfigError(
            f"{text!r} is not allowed; it must be NAME=LEAST..MOST such as tablet=1..4, of at most {MAX_DEVICES}",
            field="autoscale",
        )
    return Bounds(name, int(least), int(most))


def count_of(devices: Sequence[str], name: str) -> int:
    return sum(device == name for device in devices)


def scaled(devices: Sequence[str], name: str, count: int) -> list[str]:
    """The devices with so many of a name: further ones at the end, and the last of them go first.

    So the workers of those that stay keep their names. Raises ConfigError if none would be left.
    """
    there = count_of(devices, name)
    if there == len(devices) and count == 0:
        raise ConfigError(f"{name}=0 would leave no device; stop the fleet instead", field="count")
    seen = 0
    kept = []
    for device in devices:
        seen += device == name
        if device != name or seen <= count:
            kept.append(device)
    return kept + [name] * max(0, count - there)


class QueueScaler:
    """Decides the number of devices of one name from what waits.

    Invariant: what it decides is within its bounds and differs by one at most from what there is, once that is within them.
    """

    __slots__ = ("_bounds", "_changed_at", "_full_since", "_idle_since")

    def __init__(self, bounds: Bounds, now: float) -> None:
        self._bounds = bounds
        self._changed_at = now
        self._full_since: float | None = None
        self._idle_since: float | None = None

    def decide(self, count: int, num_devices: int, num_waiting: int, num_running: int, now: float) -> int:
        """How many there should be. count: there are now; num_devices: of all names."""
        bounds = self._bounds
        if not bounds.least <= count <= bounds.most:
            return self._change(min(max(count, bounds.least), bounds.most), now)
        is_full = num_waiting > WAITING_A_DEVICE * num_devices
        is_idle = num_waiting == 0 and num_running < num_devices
        self._full_since = (now if self._full_since is None else self._full_since) if is_full else None
        self._idle_since = (now if self._idle_since is None else self._idle_since) if is_idle else None
        if now - self._changed_at < SETTLE_S:
            return count
        if self._full_since is not None and now - self._full_since >= UP_S and count < bounds.most:
            return self._change(count + 1, now)
        if self._idle_since is not None and now - self._idle_since >= DOWN_S and count > bounds.least:
            return self._change(count - 1, now)
        return count

    def _change(self, count: int, now: float) -> int:
        self._changed_at, self._full_since, self._idle_since = now, None, None
        return count

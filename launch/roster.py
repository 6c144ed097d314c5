"""Which devices a fleet has: how they are named on a command line, and what their workers are called.

Knows profiles and nothing of processes. Used by all launchers, and by what only plans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.profiles import SHIPPED, load_profile
from shoal.errors import ConfigError
from shoal.shipped import meant
from shoal.types import DeviceMode, DeviceProfile, WorkerId


@dataclass(frozen=True, slots=True)
class Device:
    """A device to emulate. source: where its worker reads the profile, empty if nowhere yet; mode: in place of its own."""

    profile: DeviceProfile
    source: str = ""
    mode: str = ""

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read NAME, PATH, NAME:MODE or PATH:MODE. Raises ConfigError."""
        source, colon, mode = text.rpartition(":")
        if not colon or mode.endswith(".toml") or "/" in mode or "\\" in mode:
            return cls(load_profile(text), text)
        modes = [mode.value for mode in DeviceMode]
        if mode not in modes:
            raise ConfigError(
                f"device {text!r}: {mode!r} is not a mode{meant(mode, modes)}; it must be one of {', '.join(modes)}",
                field="devices",
            )
        return cls(replace(load_profile(source), mode=DeviceMode(mode)), source, mode)


def absolute(device: str) -> str:
    """A device as it can be said anywhere on this machine: paths from the root on. Raises ConfigError."""
    parsed = Device.parse(device)
    if parsed.source in SHIPPED.names():
        return device
    return str(Path(parsed.source).absolute()) + (f":{parsed.mode}" if parsed.mode else "")


def named_devices(devices: Sequence[str]) -> list[tuple[WorkerId, DeviceProfile]]:
    """The devices of a fleet before its start: names or paths of profiles as LocalFleet takes them. Raises ConfigError."""
    profiles = [Device.parse(device).profile for device in devices]
    return [(WorkerId(worker_id), profile) for worker_id, profile in zip(worker_ids(profiles), profiles, strict=True)]


def worker_ids(profiles: Sequence[DeviceProfile]) -> Iterator[str]:
    """phone-1, phone-2, tablet-1: also names of folders, hence of harmless characters only."""
    counts: Counter[str] = Counter()
    for profile in profiles:
        name = re.sub(r"[^A-Za-z0-9_-]", "-", profile.name)
        counts[name] += 1
        yield f"{name}-{counts[name]}"

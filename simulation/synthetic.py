"""Fleets that nobody has: devices of the kinds that profiles describe, in stated shares, and the sites they are in.

Draws from a seed alone. Whose profiles they are, and what links of theirs take, is said elsewhere: `launch.profiles`,
`orchestrator.what_if`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from shoal.errors import ConfigError
from shoal.types import DeviceProfile, WorkerId

# What people have at home and in offices (assumption).
KIND_SHARES = {
    "phone": 0.40, "flagship-phone": 0.15, "tablet": 0.15, "laptop": 0.15, "sbc": 0.10, "edge-box": 0.05,
}  # fmt: skip
# Two devices of a kind are not equally fast (assumption).
SPEED_SPREAD = 0.2
# With one orchestrator: weighing all pipelines for each request, and planning them, take time that grows with them.
SITE_DEVICES = 25
MAX_DEVICES = 10_000


def make_devices(
    profiles: Mapping[str, DeviceProfile], number: int, seed: int, shares: Mapping[str, float] = KIND_SHARES
) -> list[tuple[WorkerId, DeviceProfile]]:
    """Draw devices; profiles: by kind. Raises ConfigError for a number out of range."""
    if not 1 <= number <= MAX_DEVICES:
        raise ConfigError(f"fleet = {number} is not allowed; it must be from 1 to {MAX_DEVICES} devices", field="fleet")
    random = Random(f"{seed}:fleet")
    kinds = [
        kind for kind, count in zip(shares, dealt(number, list(shares.values())), strict=True) for _ in range(count)
    ]
    random.shuffle(kinds)
    devices = []
    for index, kind in enumerate(kinds):
        speed = round(profiles[kind].speed * random.uniform(1 - SPEED_SPREAD, 1 + SPEED_SPREAD), 3)
        devices.append((WorkerId(f"{kind}-{index + 1}"), replace(profiles[kind], speed=speed)))
    return devices


def in_sites(
    devices: Sequence[tuple[WorkerId, DeviceProfile]], most: int = SITE_DEVICES
) -> list[Sequence[tuple[WorkerId, DeviceProfile]]]:
    """As few sites as can be with at most so many devices each."""
    num_sites = -(-len(devices) // most)
    return [devices[first::num_sites] for first in range(num_sites)]


def dealt(number: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in these shares, which sum up to 1, and the number in all: one more where most is missing."""
    counts = [int(number * share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda index: counts[index] - number * shares[index])
    for index in by_rest[: number - sum(counts)]:
        counts[index] += 1
    return counts

"""A device that warms up is spared: its streams slow down to what its state allows, and operators see why."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from shoal import Client
from shoal.types import BatteryModel, DeviceLimits, DeviceProfile, ThermalModel
from tests.e2e.conftest import StartFleet
from tests.support.commands import WAIT_S, run_shoal

pytestmark = pytest.mark.e2e

STEPS_PER_S = 4.0
# Warm after two seconds of work; at the pace it is then allowed it gets warmer still, so that it stays limited.
WARMS_FAST = DeviceProfile(
    name="hot",
    kind="phone",
    memory_bytes=1 << 30,
    max_batch=8,
    is_emulated=True,
    limits=DeviceLimits(moderate_c=35.0, max_batch=(8, 6, 4, 2), steps_per_s=(0.0, STEPS_PER_S, 2.0, 1.0)),
    thermal=ThermalModel(ambient_c=25.0, heat_c_per_s=5.0, cooling_per_s=0.01),
)
LOW_BATTERY = DeviceProfile(
    name="empty",
    kind="phone",
    memory_bytes=1 << 30,
    max_batch=8,
    is_emulated=True,
    limits=DeviceLimits(low_battery_percent=20.0, critical_battery_percent=10.0),
    battery=BatteryModel(capacity_wh=10.0, start_percent=9.0, active_w=1.0, idle_w=1.0),
)
PROMPT = "A very long story. Once upon a time"
NUM_GAPS = 5
BURST_STEPS = 4


def gaps_s(tokens: Iterator[object], count: int) -> list[float]:
    """The times between the next tokens of a stream."""
    came_at = []
    for _ in range(count + 1):
        next(tokens)
        came_at.append(time.monotonic())
    return [later - earlier for earlier, later in pairwise(came_at)]


def device_of(address: str, home: Path) -> dict[str, object]:
    """The one device of a fleet, as `shoal status` tells of it."""
    shown = run_shoal("status", "--json", "--server", address, home=home)
    assert shown.code == 0, shown.err
    (device,) = json.loads(shown.out)["devices"]
    return dict(device)


def test_a_stream_slows_down_to_the_pace_of_a_device_that_has_warmed_up(start_fleet: StartFleet, home: Path) -> None:
    fleet = start_fleet(WARMS_FAST, heartbeat_s=0.2, burst_steps=BURST_STEPS)
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        stream = client.stream(PROMPT, max_tokens=4000, ignore_eos=True)
        tokens = iter(stream)
        cool = gaps_s(tokens, NUM_GAPS)
        while client.status().devices[0].thermal_state == "nominal":
            next(tokens)
        # What was granted before the limit came: a burst that ran and one that waited.
        gaps_s(tokens, 2 * BURST_STEPS)
        warm = gaps_s(tokens, NUM_GAPS)
        device = device_of(fleet.address, home)
        stream.cancel()

    assert median(warm) > 0.9 / STEPS_PER_S
    # However busy this machine is: without a limit it is far from 4 steps a second.
    assert median(cool) < 0.5 * median(warm)
    assert (device["thermal_state"], device["steps_per_s"], device["max_batch"]) == ("moderate", STEPS_PER_S, 6)
    assert str(device["thermal_cause"]).endswith(" C")
    telemetry = device["telemetry"]
    assert isinstance(telemetry, dict)
    assert telemetry["temperature_c"] > 35.0


def test_a_device_with_an_empty_battery_serves_slowly_from_the_start(start_fleet: StartFleet, home: Path) -> None:
    fleet = start_fleet(LOW_BATTERY, heartbeat_s=0.2)
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        stream = client.stream(PROMPT, max_tokens=100, ignore_eos=True)
        gaps = gaps_s(iter(stream), 4)
        stream.cancel()
    device = device_of(fleet.address, home)

    assert median(gaps) > 0.9 / 3.0
    assert (device["thermal_state"], device["thermal_cause"]) == ("critical", "battery at 9 %")

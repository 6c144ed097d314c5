"""What the options of a worker change of its device's profile."""

from __future__ import annotations

from dataclasses import replace

from shoal.config import WorkerConfig
from shoal.types import DeviceMode
from tests.support.builders import make_profile
from worker.app import with_options

PROFILE = replace(make_profile(), mode=DeviceMode.THROUGHPUT, num_threads=2)


def test_without_options_a_profile_stays_as_it_is() -> None:
    assert with_options(PROFILE, WorkerConfig()) == PROFILE


def test_options_go_before_the_profile() -> None:
    device = with_options(PROFILE, WorkerConfig(mode="latency", threads=3))

    assert device == replace(PROFILE, mode=DeviceMode.LATENCY, num_threads=3)

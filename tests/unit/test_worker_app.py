"""What the options of a worker change of its device's profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.config import WorkerConfig
from shoal.errors import ConfigError
from shoal.types import DeviceMode, LinkProfile
from tests.support.builders import make_profile
from worker.app import lower_tier, with_options
from worker.kv.redis_tier import RedisTier

PROFILE = replace(make_profile(), mode=DeviceMode.THROUGHPUT, num_threads=2)


def test_without_options_a_profile_stays_as_it_is() -> None:
    assert with_options(PROFILE, WorkerConfig()) == PROFILE


def test_options_go_before_the_profile() -> None:
    device = with_options(PROFILE, WorkerConfig(mode="latency", threads=3))

    assert device == replace(PROFILE, mode=DeviceMode.LATENCY, num_threads=3)


def test_a_link_goes_before_that_of_the_profile_of_an_emulated_device() -> None:
    emulated = replace(PROFILE, is_emulated=True, link=LinkProfile(1.0, 200.0))

    assert with_options(emulated, WorkerConfig(link="40ms")).link == LinkProfile(40.0, 0.0)
    assert with_options(emulated, WorkerConfig()).link == LinkProfile(1.0, 200.0)


def test_the_link_of_a_real_device_cannot_be_set() -> None:
    with pytest.raises(ConfigError, match="is not emulated"):
        with_options(PROFILE, WorkerConfig(link="40ms"))


KEEPING = replace(PROFILE, host_kv_bytes=1 << 20)


def test_kv_goes_to_redis_where_there_is_one() -> None:
    tier = lower_tier(WorkerConfig(redis_url="unix:///nowhere.sock"), KEEPING)
    assert isinstance(tier, RedisTier)
    # It has what only its thread gives back.
    tier.start()
    tier.stop(5.0)
    assert lower_tier(WorkerConfig(redis_url=""), KEEPING) is None


def test_a_device_that_keeps_no_kv_gives_none_to_redis_either() -> None:
    assert lower_tier(WorkerConfig(redis_url="unix:///nowhere.sock"), PROFILE) is None

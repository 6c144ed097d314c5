"""Which Redis a fleet of the command line gets."""

from __future__ import annotations

import pytest

from cli.serve import is_redis_away, redis_url
from shoal.status import status_from_proto
from shoal.v1 import admin_pb2, fleet_pb2
from tests.unit.conftest import Run


@pytest.mark.parametrize(
    ("choice", "environ", "url"),
    [
        ("auto", {}, ""),
        ("auto", {"REDIS_URL": "redis://a"}, "redis://a"),
        ("auto", {"REDIS_URL": "redis://a", "SHOAL_REDIS_URL": "redis://b"}, "redis://b"),
        ("auto", {"SHOAL_REDIS_URL": ""}, ""),
        ("none", {"SHOAL_REDIS_URL": "redis://b"}, ""),
        ("rediss://c", {"SHOAL_REDIS_URL": "redis://b"}, "rediss://c"),
    ],
)
def test_a_choice_of_redis_is_an_url_or_none(choice: str, environ: dict[str, str], url: str) -> None:
    assert redis_url(choice, environ) == url


def test_up_with_an_url_that_is_none_says_which_there_are_and_no_password(run: Run) -> None:
    outcome = run("up", "--port", "0", "--redis", "http://:hush@host")

    assert outcome.code == 1
    assert "redis://HOST:PORT/DB" in outcome.err
    assert "hush" not in outcome.err


@pytest.mark.parametrize(
    ("state", "host_kv_bytes", "is_away"),
    [
        ("ok", 64, False),
        ("slow", 64, False),
        ("connecting", 64, False),
        ("open", 64, True),
        ("off", 64, True),
        ("off", 0, False),
    ],
)
def test_redis_is_away_if_a_device_that_keeps_kv_tried_it_in_vain(
    state: str, host_kv_bytes: int, is_away: bool
) -> None:
    tiers = [fleet_pb2.KVTierStatus(tier="host", state="ok"), fleet_pb2.KVTierStatus(tier="redis", state=state)]
    device = admin_pb2.DeviceStatus(
        profile=fleet_pb2.DeviceProfile(host_kv_bytes=host_kv_bytes), telemetry=fleet_pb2.Telemetry(kv_tiers=tiers)
    )

    status = status_from_proto(admin_pb2.GetStatusResponse(devices=[device]))

    assert is_redis_away(status) is is_away

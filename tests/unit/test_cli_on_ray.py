"""Which options belong to which kind of fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.on_ray import On, RayChoice, choice_of
from shoal.errors import ConfigError


def test_a_fleet_of_this_machine_has_nothing_of_ray() -> None:
    assert choice_of(On.LOCAL, "auto", None, "", None) is None


def test_what_is_said_of_ray_is_kept() -> None:
    choice = choice_of(On.RAY, "head:6379", Path("nodes.toml"), "tablet=1..2", None)

    assert choice == RayChoice("head:6379", Path("nodes.toml"), "tablet=1..2")


@pytest.mark.parametrize(
    ("on", "ray_map", "autoscale", "kv_trace", "said"),
    [
        (On.LOCAL, Path("nodes.toml"), "", None, "--ray-map is for"),
        (On.LOCAL, None, "tablet=1..2", None, "--autoscale is for"),
        (On.RAY, None, "", Path("traces"), "--kv-trace is for"),
    ],
)
def test_an_option_of_the_other_kind_is_refused_and_not_ignored(
    on: On, ray_map: Path | None, autoscale: str, kv_trace: Path | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        choice_of(on, "auto", ray_map, autoscale, kv_trace)

"""Who shapes the links of the lab: the kernel what it can, the device's emulation the rest."""

from __future__ import annotations

import pytest

from launch.links import CLEAR, Abilities, Shape, in_force, shaping
from shoal.errors import ConfigError

ALL = Abilities(has_netem=True, has_tbf=True, has_statistic=True)
NO_DELAY = Abilities(has_netem=False, has_tbf=True, has_statistic=True)
NOTHING = Abilities(has_netem=False, has_tbf=False, has_statistic=False)


def commands_of(script: str) -> list[str]:
    """What a script does beside taking away what there was."""
    assert script.startswith(CLEAR)
    return [one for one in script.removeprefix(CLEAR).split("; ") if one]


def test_netem_does_all_at_once() -> None:
    chosen = shaping(Shape(delay_ms=40.0, rate_mbit_s=10.0, loss_percent=1.5), ALL)

    assert commands_of(chosen.by_kernel) == ["tc qdisc add dev eth0 root netem delay 40ms rate 10mbit loss 1.5%"]
    assert chosen.by_device == ""


def test_a_kernel_without_netem_limits_the_rate_and_loses() -> None:
    chosen = shaping(Shape(rate_mbit_s=10.0, loss_percent=2.0), NO_DELAY)

    assert commands_of(chosen.by_kernel) == [
        "tc qdisc add dev eth0 root tbf rate 10mbit burst 16kb latency 300ms",
        "iptables -A OUTPUT -o eth0 -m statistic --mode random --probability 0.02 -j DROP",
    ]
    assert chosen.by_device == ""


def test_what_such_a_kernel_cannot_delay_the_device_delays_and_limits() -> None:
    chosen = shaping(Shape(delay_ms=40.0, rate_mbit_s=10.0), NO_DELAY)

    assert commands_of(chosen.by_kernel) == []
    assert chosen.by_device == "40ms,10mbit"


def test_without_anything_in_the_kernel_the_device_does_it() -> None:
    assert shaping(Shape(rate_mbit_s=10.0), NOTHING).by_device == "0ms,10mbit"


def test_a_loss_that_nobody_can_make_is_refused() -> None:
    with pytest.raises(ConfigError, match="can lose no packets"):
        shaping(Shape(loss_percent=1.0), NOTHING)


@pytest.mark.parametrize("abilities", [ALL, NO_DELAY, NOTHING])
def test_a_link_as_it_was_takes_away_what_there_was(abilities: Abilities) -> None:
    chosen = shaping(Shape(), abilities)

    assert (commands_of(chosen.by_kernel), chosen.by_device) == ([], "")


@pytest.mark.parametrize("wrong", [{"delay_ms": -1.0}, {"rate_mbit_s": 2e6}, {"loss_percent": 100.0}])
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        Shape(**wrong)


def test_a_kernel_says_what_it_has() -> None:
    assert Abilities.parse("tbf\nstatistic\n") == NO_DELAY
    assert Abilities.parse("") == NOTHING


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("qdisc noqueue 0: root refcnt 2 \n", ""),
        ("qdisc netem 8001: root refcnt 2 limit 1000 delay 40ms\n", "netem limit 1000 delay 40ms"),
        (
            "qdisc tbf 8002: root refcnt 2 rate 10Mbit burst 16Kb lat 300ms \n"
            "-A OUTPUT -o eth0 -m statistic --mode random --probability 0.01999999955 -j DROP\n",
            "tbf rate 10Mbit burst 16Kb lat 300ms, loss 2%",
        ),
    ],
)
def test_what_is_in_force_is_read_from_what_the_tools_print(printed: str, expected: str) -> None:
    assert in_force(printed) == expected

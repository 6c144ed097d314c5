"""How the link of a device in the lab is made slow: by the kernel where it can do that, else by the device's own emulation.

Decides, from what is wanted and what a kernel has, which commands of tc and iptables shape what a device sends, and what is
left to the emulation, for which the device has to start again. Pure: `compose` runs the commands, `shoal lab links` shows
what came of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import ConfigError

INTERFACE = "eth0"
# A bucket of packets for tbf, and how long one may wait for it: short, so that a queue shows as loss of rate, not as delay.
BURST, LATENCY = "16kb", "300ms"
# Prints a word for each thing that a kernel has, in a network of its own.
PROBE = (
    "tc qdisc add dev lo root netem delay 1ms 2>/dev/null && echo netem && tc qdisc del dev lo root; "
    "tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 50ms 2>/dev/null && echo tbf && tc qdisc del dev lo root; "
    "iptables -A OUTPUT -m statistic --mode random --probability 0.01 -j DROP 2>/dev/null && echo statistic; true"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a link adds to what a device sends: a delay, a limit (0: none), a share of packets that are lost."""

    delay_ms: float = 0.0
    rate_mbit_s: float = 0.0
    loss_percent: float = 0.0

    def __post_init__(self) -> None:
        if not (
            0.0 <= self.delay_ms <= 60_000.0 and 0.0 <= self.rate_mbit_s <= 1e6 and 0.0 <= self.loss_percent < 100.0
        ):
            raise ConfigError(
                f"{self} cannot be: a delay is up to 60000 ms, a rate up to 1000000 Mbit/s, a loss below 100 percent",
                field="link",
            )


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a kernel has: netem (all), tbf (rate), statistic (loss)."""

    has_netem: bool
    has_tbf: bool
    has_statistic: bool

    @classmethod
    def parse(cls, printed: str) -> Abilities:
        """Read what PROBE printed."""
        words = printed.split()
        return cls("netem" in words, "tbf" in words, "statistic" in words)


@dataclass(frozen=True, slots=True)
class Shaping:
    """What gives a link its shape.

    by_kernel: a script for the device's network, which first takes away what there was. by_device: its option `link`; empty:
    as its profile says.
    """

    by_kernel: str
    by_device: str


CLEAR = (
    f"tc qdisc del dev {INTERFACE} root 2>/dev/null; "
    "iptables -F OUTPUT 2>/dev/null; true"
)  # fmt: skip


def shaping(shape: Shape, abilities: Abilities) -> Shaping:
    """Choose who does what. Raises ConfigError for a loss that this kernel cannot make: emulation loses nothing."""
    if abilities.has_netem:
        return Shaping("; ".join([CLEAR, *_netem(shape)]), "")
    if shape.loss_percent and not abilities.has_statistic:
        raise ConfigError(
            "this kernel can lose no packets (it has neither netem nor the statistic match): set no loss",
            field="loss_percent",
        )
    commands, by_device = [CLEAR], ""
    if shape.delay_ms or (shape.rate_mbit_s and not abilities.has_tbf):
        parts = [f"{shape.delay_ms:g}ms"] + ([f"{shape.rate_mbit_s:g}mbit"] if shape.rate_mbit_s else [])
        by_device = ",".join(parts)
    elif shape.rate_mbit_s:
        limit = f"rate {shape.rate_mbit_s:g}mbit burst {BURST} latency {LATENCY}"
        commands.append(f"tc qdisc add dev {INTERFACE} root tbf {limit}")
    if shape.loss_percent:
        chance = f"--mode random --probability {shape.loss_percent / 100.0:g}"
        commands.append(f"iptables -A OUTPUT -o {INTERFACE} -m statistic {chance} -j DROP")
    return Shaping("; ".join(commands), by_device)


def _netem(shape: Shape) -> list[str]:
    words = [f"delay {shape.delay_ms:g}ms"] if shape.delay_ms else []
    words += [f"rate {shape.rate_mbit_s:g}mbit"] if shape.rate_mbit_s else []
    words += [f"loss {shape.loss_percent:g}%"] if shape.loss_percent else []
    return [f"tc qdisc add dev {INTERFACE} root netem {' '.join(words)}"] if words else []


SHOW = f"tc qdisc show dev {INTERFACE} root; iptables -S OUTPUT 2>/dev/null | grep statistic; true"


def in_force(printed: str) -> str:
    """What the kernel does to a link, of what SHOW printed; empty: nothing."""
    found = []
    for line in printed.splitlines():
        if qdisc := re.match(r"qdisc (netem|tbf) \S+ root(?: refcnt \d+)? (.*)", line.strip()):
            found.append(f"{qdisc[1]} {qdisc[2].strip()}")
        elif chance := re.search(r"--probability (\S+)", line):
            found.append(f"loss {float(chance[1]) * 100:.3g}%")
    return ", ".join(found)

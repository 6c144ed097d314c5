"""`shoal drain`, `shoal cordon`, `shoal uncordon`: take a device of a running fleet out of use, and into it again."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.terminal import say, waiting

TIMEOUT_S = 10.0
# Weights may have to go over a slow link first.
DRAIN_TIMEOUT_S = 600.0

Device = Annotated[str, typer.Argument(help="Its name, as in `shoal status`.")]


def drain(device: Device, server: Server = DEFAULT_SERVER) -> None:
    """Move everything off a device, so that it can be stopped; no answer ends for it, and it is cordoned then."""
    from shoal.client import Client

    with Client(server, timeout_s=DRAIN_TIMEOUT_S) as client, waiting(f"moving everything off {device}"):
        drained = client.drain(device)
    if not drained.moved:
        say(f"{device} holds no layers and is given none: it can be stopped")
        return
    answers = {0: "no answers", 1: "1 answer"}.get(drained.num_sequences, f"{drained.num_sequences} answers")
    say(
        f"{device} is drained after {drained.took_s:.1f} s: {drained.moved}, with {answers} under way; it can be stopped"
    )
    say(f"it is given no layers until `shoal uncordon {device}`")


def cordon(device: Device, server: Server = DEFAULT_SERVER) -> None:
    """Give a device no further layers; what it computes goes on."""
    _cordon(device, server, is_cordoned=True)
    say(f"{device} is given no layers until `shoal uncordon {device}`; what it holds goes on")


def uncordon(device: Device, server: Server = DEFAULT_SERVER) -> None:
    """Let a device be given layers again."""
    _cordon(device, server, is_cordoned=False)
    say(f"{device} may be given layers again")


def _cordon(device: str, server: str, *, is_cordoned: bool) -> None:
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        client.cordon(device, is_cordoned)

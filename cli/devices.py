"""`shoal drain`, `shoal cordon`, `shoal uncordon`: take a device of a running fleet out of use, and into it again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.terminal import tell, waiting, write_json

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.status import DeviceStatus, FleetStatus

TIMEOUT_S = 10.0
# Weights may have to go over a slow link first.
DRAIN_TIMEOUT_S = 600.0
# A device that may be given layers again gets them within a second or two, or not now.
SETTLE_S = 3.0
POLL_S = 0.25
INDENT = 2

Device = Annotated[str, typer.Argument(help="Its name, as in `shoal status`.")]
Json = Annotated[bool, typer.Option("--json", help="Print what came of it as one JSON object.")]


def drain(device: Device, json: Json = False, server: Server = DEFAULT_SERVER) -> None:
    """Move everything off a device, so that it can be stopped; no answer ends for it, and it is cordoned then."""
    from shoal.client import Client

    with Client(server, timeout_s=DRAIN_TIMEOUT_S) as client, waiting(f"moving everything off {device}"):
        drained = client.drain(device)
    if json:
        write_json(
            {
                "worker_id": device,
                "moved": drained.moved,
                "num_sequences": drained.num_sequences,
                "took_s": drained.took_s,
            }
        )
        return
    if not drained.moved:
        tell(f"{device} holds no layers and is given none: it can be stopped")
        return
    answers = {0: "no answers", 1: "1 answer"}.get(drained.num_sequences, f"{drained.num_sequences} answers")
    tell(f"{device} is drained after {drained.took_s:.1f} s: {drained.moved}, with {answers} under way", INDENT)
    tell(f"it can be stopped; it is given no layers until `shoal uncordon {device}`")


def cordon(device: Device, json: Json = False, server: Server = DEFAULT_SERVER) -> None:
    """Give a device no further layers; what it computes goes on."""
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        client.cordon(device, True)
        after = client.status()
    seen = _find(after, device)
    if json:
        write_json(_outcome(device, seen, is_cordoned=True))
        return
    tell(f"{device} is given no layers until `shoal uncordon {device}`")
    if seen is None or seen.layers is None:
        tell("it holds none: all goes on without it")
    else:
        tell(f"it goes on with layers {seen.layers} of {seen.pipeline_id}: `shoal drain {device}` would move them")


def uncordon(device: Device, json: Json = False, server: Server = DEFAULT_SERVER) -> None:
    """Let a device be given layers again, and tell whether it is."""
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        before = _find(client.status(), device)
        client.cordon(device, False)
        with waiting(f"waiting whether {device} is given layers"):
            seen = _settled(client, device)
    if json:
        write_json(_outcome(device, seen, is_cordoned=False))
        return
    if seen is None or seen.layers is None:
        tell(f"{device} may be given layers again; it stands by until that gains enough and disturbs nobody")
    elif before is not None and before.layers == seen.layers:
        tell(f"{device} may be given layers again; it goes on with layers {seen.layers} of {seen.pipeline_id}")
    else:
        tell(f"{device} may be given layers again, and is: layers {seen.layers} of {seen.pipeline_id} ({seen.state})")


def _settled(client: Client, device: str) -> DeviceStatus | None:
    """The device as soon as it has layers, or after SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    while True:
        seen = _find(client.status(), device)
        if seen is None or seen.layers is not None or time.monotonic() >= until:
            return seen
        time.sleep(POLL_S)


def _find(fleet: FleetStatus, device: str) -> DeviceStatus | None:
    return next((one for one in fleet.devices if one.worker_id == device), None)


def _outcome(device: str, seen: DeviceStatus | None, *, is_cordoned: bool) -> dict[str, object]:
    """layers: what it holds now, or loads."""
    return {
        "worker_id": device,
        "is_cordoned": is_cordoned,
        "state": "" if seen is None else seen.state,
        "pipeline_id": "" if seen is None else seen.pipeline_id,
        "layers": None if seen is None else seen.layers,
    }

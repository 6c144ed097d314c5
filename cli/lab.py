"""`shoal lab`: the five devices of docker-compose.yml, on a Docker engine: up, down, and how slow their links are.

Runs in a checkout. What containers and links need is `launch.compose`'s to know.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.columns import NOTHING
from cli.terminal import note, say, waiting
from shoal.config import OrchestratorConfig, default_home
from shoal.errors import ConfigError, ModelNotFound, ShoalError

if TYPE_CHECKING:
    from rich.table import Table

    from launch.compose import ComposeLab
    from shoal.v1.fleet_pb2 import LinkFigures

app = typer.Typer(no_args_is_help=True, help="Run the lab of docker-compose.yml: five devices in containers.")

UP_S = 300.0
TIMEOUT_S = 10.0

Folder = Annotated[Path, typer.Option(help="The checkout that docker-compose.yml is in.")]
HERE = Path()


@app.command("up")
def up(folder: Folder = HERE) -> None:
    """Build the images, copy the model into the lab if it is stored here, start all, wait until they serve."""
    from launch.compose import address

    lab = _lab(folder)
    model = OrchestratorConfig().model
    with waiting("building images: some minutes the first time"):
        lab.build()
    try:
        lab.seed(default_home(), model)
    except ModelNotFound:
        note(f"{model} is not stored here: the lab fetches it itself")
    with waiting("starting five devices"):
        lab.up(UP_S)
    say(f"the lab serves at {address()}; try `shoal status`, and `shoal lab down` when done")


@app.command("down")
def down(
    folder: Folder = HERE,
    volumes: Annotated[
        bool, typer.Option("--volumes/--keep-volumes", help="Delete / keep the model, and what devices have stored.")
    ] = True,
) -> None:
    """Stop all and remove it."""
    with waiting("taking the lab down"):
        _lab(folder).down(with_volumes=volumes)
    say("all is gone" if volumes else "all is gone but the volumes")


@app.command("links")
def links(
    device: Annotated[str, typer.Argument(help="Whose link to change; by default none, only show them.")] = "",
    delay_ms: Annotated[float | None, typer.Option(help="Delay of what it sends, in milliseconds.")] = None,
    rate_mbit_s: Annotated[float | None, typer.Option(help="Most that it sends, in Mbit/s; 0: no limit.")] = None,
    loss_percent: Annotated[float | None, typer.Option(help="Share of its packets that are lost.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="As it was at first.")] = False,
    folder: Folder = HERE,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show how slow the links of the devices are, as set and as the planner has measured them; or set one.

    What is not given is not slowed. By the kernel (netem, tbf, iptables) where it can; else the device starts anew.
    """
    given = [value for value in (delay_ms, rate_mbit_s, loss_percent) if value is not None]
    lab = _lab(folder)
    if device:
        if bool(given) == reset:
            raise ConfigError("say how the link is to be (--delay-ms, --rate-mbit-s, --loss-percent), or --reset")
        _set(lab, device, delay_ms or 0.0, rate_mbit_s or 0.0, loss_percent or 0.0)
    elif given or reset:
        raise ConfigError("say whose link: shoal lab links DEVICE ...", field="device")
    say(_table(lab.links_in_force(), _measured(server)))


def _lab(folder: Path) -> ComposeLab:
    from launch.compose import ComposeLab

    return ComposeLab(folder)


def _set(lab: ComposeLab, device: str, delay_ms: float, rate_mbit_s: float, loss_percent: float) -> None:
    from launch.compose import DEVICES
    from launch.links import Shape

    if device not in DEVICES:
        raise ConfigError(f"{device} is none of {', '.join(DEVICES)}", field="device")
    with waiting(f"changing the link of {device}"):
        chosen = lab.shape(device, Shape(delay_ms, rate_mbit_s, loss_percent))
    if chosen.by_device:
        note(f"this kernel cannot delay: {device} does it itself, and was started anew for it")


def _measured(server: str) -> dict[str, LinkFigures]:
    """Of each device to the orchestrator, as the planner takes it; nothing if that cannot be asked."""
    from shoal.client import Client

    try:
        with Client(server, timeout_s=TIMEOUT_S) as client:
            planned = client.plan().devices
    except ShoalError as error:
        note(f"what the planner has measured is not known: {error.message}")
        return {}
    return {one.worker_id: link for one in planned for link in one.links if not link.worker_id}


def _table(in_force: dict[str, str], measured: dict[str, LinkFigures]) -> Table:
    from rich import box
    from rich.table import Table

    from launch.compose import DEVICES

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("device", "network", "set", "round trip", "rate"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("round trip", "rate") else "left")
    for device, network in DEVICES.items():
        link = measured.get(device)
        trip = f"{link.rtt_ms:.1f} ms" if link else NOTHING
        rate = f"{link.mbit_s:.0f} Mbit/s" if link and link.mbit_s else NOTHING
        table.add_row(device, network, in_force.get(device, "not running") or "as its profile says", trip, rate)
    return table

"""What `shoal up --on ray` has beyond a local fleet: the devices on Ray's nodes, news of them, and how many there are to be.

Knows options and what is shown. Called by `cli.serve`; the dispatcher is a process that `launch.ray_fleet` starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal import note
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from launch.autoscaling import Autoscaler
    from launch.desk import Desk
    from launch.local import LocalFleet
    from launch.ray_fleet import RayDevices


# The address of whichever cluster runs here.
THIS_MACHINE = "auto"


@contextmanager
def needing_ray() -> Iterator[None]:
    """A block that imports what needs Ray. Raises ConfigError where that is not installed."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"Ray is not there ({error}); install it with: pip install 'shoal[ray]'") from None


class On(Enum):
    """Who starts the devices' workers."""

    LOCAL = "local"
    RAY = "ray"


Where = Annotated[On, typer.Option("--on", help="Where the devices' workers run: on this machine, or on Ray's nodes.")]
RayAddress = Annotated[
    str, typer.Option(help="With --on ray: the cluster's head, HOST:PORT; auto: the one that runs on this machine.")
]
RayMap = Annotated[
    Path | None,
    typer.Option(help="With --on ray: a TOML file that says which devices go on which nodes.", dir_okay=False),
]
Autoscale = Annotated[
    str, typer.Option(help="With --on ray: how many devices of a name there may be, by the queue, as tablet=1..4.")
]


@dataclass(frozen=True, slots=True)
class RayChoice:
    """Which Ray cluster, the operator's file of what goes where, and how many there may be."""

    address: str
    map_path: Path | None
    autoscale: str = ""


class Elsewhere:
    """The devices of a fleet that are on Ray's nodes."""

    def __init__(self, fleet: LocalFleet, devices: RayDevices, desk: Desk, scaler: Autoscaler | None) -> None:
        self._fleet = fleet
        self._desk = desk
        self._devices = devices
        self._scaler = scaler

    @property
    def worker_ids(self) -> list[str]:
        return self._devices.worker_ids

    def hear(self) -> None:
        """Tell what has happened to them."""
        for line in self._devices.hear():
            note(line)
        # An orchestrator that is started again waits for those who are left.
        self._fleet.num_elsewhere = len(self.worker_ids)

    def step(self) -> None:
        """As hear(), and have more of them or fewer; for when the fleet serves."""
        from launch.changes import let_in_after_others

        self.hear()
        for worker_id in let_in_after_others(self._fleet.address, self._desk):
            note(f"{worker_id} was left cordoned by a change that was cut short; it is given layers again")
        for line in () if self._scaler is None else self._scaler.step():
            note(line)


def devices_of(
    choice: RayChoice | None, fleet: LocalFleet, names: Sequence[str]
) -> AbstractContextManager[Elsewhere | None]:
    """Of a fleet's devices, a block that runs them on Ray, if that was chosen. Raises ConfigError before that begins."""
    if choice is None:
        return nullcontext()
    from launch.autoscaling import Autoscaler
    from launch.desk import Desk
    from launch.ray_fleet import RayDevices
    from launch.ray_nodes import load_map
    from launch.scaling import parse_bounds

    bounds = parse_bounds(choice.autoscale) if choice.autoscale else None
    devices = RayDevices(
        fleet.config,
        names,
        ray_address=choice.address,
        node_map=load_map(choice.map_path),
        redis_url=fleet.redis_url,
    )
    home = fleet.config.home
    desk = Desk(home, fleet.config.port)
    scaler = None if bounds is None else Autoscaler(fleet.address, home, desk, bounds)
    return _running(fleet, devices, desk, scaler)


@contextmanager
def _running(fleet: LocalFleet, devices: RayDevices, desk: Desk, scaler: Autoscaler | None) -> Iterator[Elsewhere]:
    from launch.detached import LINGER_S

    with devices:
        try:
            yield Elsewhere(fleet, devices, desk, scaler)
        finally:
            if scaler is not None:
                scaler.stop()
            if devices.is_lost:
                note(
                    f"Ray is lost: its workers, which have no orchestrator now, end by themselves within {LINGER_S:g} s"
                )


def choice_of(on: On, address: str, ray_map: Path | None, autoscale: str, kv_trace: Path | None) -> RayChoice | None:
    """None: devices run here. Raises ConfigError for options that hold for one kind of fleet, given with the other."""
    if on is On.RAY:
        if kv_trace is not None:
            raise ConfigError(
                "--kv-trace is for devices of this machine; with --on ray it would be elsewhere", field="kv_trace"
            )
        return RayChoice(address, ray_map, autoscale)
    given = {"--address": address != THIS_MACHINE, "--ray-map": ray_map is not None, "--autoscale": bool(autoscale)}
    for flag, is_given in given.items():
        if is_given:
            raise ConfigError(f"{flag} is for fleets of --on ray", field=flag[2:].replace("-", "_"))
    return None


def ray_dispatcher(address: RayAddress = THIS_MACHINE) -> None:
    """Place workers on the nodes of a Ray cluster as standard input says."""
    with needing_ray():
        from launch.ray_cluster.dispatcher import run
    raise typer.Exit(run(address))

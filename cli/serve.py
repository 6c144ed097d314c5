"""`shoal up`, `shoal orchestrator`, `shoal worker`: start what serves.

Flags, environment names and help of a process derive from the fields of its configuration in `shoal.config`.
"""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.models import fetch, open_store
from cli.on_ray import (
    THIS_MACHINE,
    Autoscale,
    Elsewhere,
    On,
    RayAddress,
    RayChoice,
    RayMap,
    Where,
    choice_of,
    devices_of,
)
from cli.parameters import with_parameters
from cli.show import device_table
from cli.terminal import note, say, waiting
from shoal.config import DEFAULT_PORT, Config, Option, OrchestratorConfig, WorkerConfig, from_environment, options
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from launch.local import LocalFleet
    from shoal.status import FleetStatus

DEFAULT_DEVICES = "phone,phone,tablet"
START_S = 60.0
# Nodes that have run nothing yet take seconds more.
RAY_START_S = 120.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_REDIS = "auto"
DEFAULT_REDIS_MIB = 512
# A TiB: what is more is a slip of the pen.
MAX_REDIS_MIB = 2**20
# Of redis_url, and as others name it.
REDIS_URL_ENVS = ("SHOAL_REDIS_URL", "REDIS_URL")
REDIS_AWAY_STATES = ("open", "off")

Devices = Annotated[
    str,
    typer.Option(
        help="Device profiles to emulate, by name or path, with commas between; tablet:latency is a tablet kept for latency."
    ),
]
RedisChoice = Annotated[
    str,
    typer.Option(
        help="Where KV and sessions outlive the fleet: auto is SHOAL_REDIS_URL or REDIS_URL where one is set, else a "
        "server of its own; none; or an URL.",
    ),
]
RedisMib = Annotated[int, typer.Option(help="Memory in MiB of a Redis server of its own.", min=16, max=MAX_REDIS_MIB)]
KVTrace = Annotated[
    Path | None, typer.Option(help="Folder where each device tells the life of its KV blocks, for `shoal kv --trace`.")
]
StopOnStdinEof = Annotated[bool, typer.Option("--stop-on-stdin-eof", hidden=True)]


def with_options(
    config: type[Config], *, without: tuple[str, ...] = (), aliases: dict[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each field of a configuration; the values come as **values, None if not given."""
    return with_parameters(
        [
            _parameter(option, (aliases or {}).get(option.name))
            for option in options(config)
            if option.name not in without
        ]
    )


def _parameter(option: Option, alias: str | None) -> inspect.Parameter:
    flag = f"{option.flag}/--no-{option.flag[2:]}" if option.type is bool else option.flag
    default = "" if option.default in ("", None) else f"default {option.default}; "
    declaration = typer.Option(
        *(name for name in (flag, alias) if name),
        help=f"{option.help} [{default}env {option.env}]",
        show_default=False,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[option.type | None, declaration],
    )


@with_options(OrchestratorConfig)
def orchestrator(stop_on_stdin_eof: StopOnStdinEof = False, **values: Any) -> None:
    """Run an orchestrator, which devices join."""
    config = from_environment(OrchestratorConfig, values)
    from orchestrator.app import run

    raise typer.Exit(run(config, stop_on_stdin_eof=stop_on_stdin_eof))


@with_options(WorkerConfig, aliases={"worker_id": "--id"})
def worker(
    profile: Annotated[str, typer.Option(help="Device profile: a name like phone or tablet, or a path.")] = "host",
    stop_on_stdin_eof: StopOnStdinEof = False,
    linger_s: Annotated[float | None, typer.Option(hidden=True)] = None,
    **values: Any,
) -> None:
    """Run a worker on this device and join an orchestrator."""
    config = from_environment(WorkerConfig, values)
    from launch.profiles import load_profile
    from worker.app import run

    raise typer.Exit(run(config, load_profile(profile), stop_on_stdin_eof=stop_on_stdin_eof, linger_s=linger_s))


@with_options(OrchestratorConfig, without=("expect_workers", "redis_url"))
def up(
    devices: Devices = DEFAULT_DEVICES,
    redis: RedisChoice = DEFAULT_REDIS,
    kv_redis_mib: RedisMib = DEFAULT_REDIS_MIB,
    kv_trace: KVTrace = None,
    on: Where = On.LOCAL,
    address: RayAddress = THIS_MACHINE,
    ray_map: RayMap = None,
    autoscale: Autoscale = "",
    **values: Any,
) -> None:
    """Run a whole fleet until Ctrl-C, on this machine or on the nodes of a Ray cluster."""
    from cli.watching import watch

    config = from_environment(OrchestratorConfig, values)
    ray = choice_of(on, address, ray_map, autoscale, kv_trace)
    with (
        running_fleet(config, devices, redis, kv_redis_mib, kv_trace, ray) as (fleet, status, elsewhere),
        suppress(KeyboardInterrupt),
    ):
        say(device_table(status))
        say(f"{status.model} is ready at {fleet.address}; logs are in {fleet.log_directory}")
        server = "" if fleet.config.port == DEFAULT_PORT else f" --server {fleet.address}"
        say(f'try: shoal generate{server} "What is a shoal?"   (Ctrl-C here stops the fleet)')
        if config.discoverable:
            is_here_only = config.host in LOOPBACK
            say(
                "workers find it: shoal worker --join discover" + "   (on this machine alone: no --host)" * is_here_only
            )
        watch(fleet, status, (lambda: None) if elsewhere is None else elsewhere.step)
    say("all stopped")


@contextmanager
def running_fleet(
    config: OrchestratorConfig,
    devices: str,
    redis: str = DEFAULT_REDIS,
    kv_redis_mib: int = DEFAULT_REDIS_MIB,
    kv_trace: Path | None = None,
    ray: RayChoice | None = None,
) -> Iterator[tuple[LocalFleet, FleetStatus, Elsewhere | None]]:
    """Get the model if need be, start a fleet, wait until it is ready; stop it at the end, also on SIGTERM.

    Yields with it the devices that are Ray's to run, if that was asked for.
    """
    from launch.local import LocalFleet
    from launch.redis_server import EmbeddedRedis
    from shoal.redis_connection import RedisAddress

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [name.strip() for name in devices.split(",")]
    _check(config, len(names))
    url = redis_url(redis)
    if url:
        RedisAddress(url)
    server = None if redis != "auto" or url else EmbeddedRedis(config.home / "redis", kv_redis_mib * 2**20)
    worker = WorkerConfig(use_sockets=config.use_sockets)
    config = replace(config, redis_url=url)
    if ray is None:
        fleet = LocalFleet(config, names, worker=worker, redis=server, kv_trace=kv_trace)
    else:
        fleet = LocalFleet(config, [], redis=server, num_elsewhere=len(names))
    on_ray = devices_of(ray, fleet, names)
    _require_model(config)
    started_at = time.monotonic()
    # Ray's devices end last: the orchestrator first lets answers end.
    with on_ray as elsewhere, fleet:
        worker_ids = fleet.worker_ids if elsewhere is None else elsewhere.worker_ids
        with waiting(f"starting {', '.join(worker_ids)}") as update:

            def show(seen: FleetStatus) -> None:
                update(_describe_start(seen))
                if elsewhere is not None:
                    elsewhere.hear()

            status = fleet.wait_ready(START_S if elsewhere is None else RAY_START_S, on_status=show)
        devices_ready = "1 device" if len(names) == 1 else f"{len(names)} devices"
        say(f"{devices_ready} ready after {time.monotonic() - started_at:.1f} s", style="bold")
        _note_redis(fleet, status)
        yield fleet, status, elsewhere


def _note_redis(fleet: LocalFleet, status: FleetStatus) -> None:
    if fleet.redis_failure:
        note(
            f"going on without Redis: KV ends with the fleet, sessions are kept in a file alone: {fleet.redis_failure}"
        )
    elif fleet.config.redis_url and is_redis_away(status):
        note(
            "Redis does not answer, or not us (see the logs): until it does, no KV outlives the fleet, and sessions are "
            "kept in a file alone"
        )


def is_redis_away(status: FleetStatus) -> bool:
    """Whether a device that keeps KV has tried its Redis in vain."""
    tiers = [tier for device in status.devices if device.host_kv_bytes for tier in device.telemetry.kv_tiers]
    return any(tier.tier == "redis" and tier.state in REDIS_AWAY_STATES for tier in tiers)


def redis_url(choice: str, environ: Mapping[str, str] = os.environ) -> str:
    """The URL that a choice of --redis stands for; empty for none, and for a server that is to be started."""
    if choice == "auto":
        return next((environ[name] for name in REDIS_URL_ENVS if environ.get(name)), "")
    return "" if choice == "none" else choice


def _check(config: OrchestratorConfig, num_devices: int) -> None:
    """Raise ConfigError for what the orchestrator would only say in its log, or not at all."""
    from orchestrator.core.tenants import parse_weights

    parse_weights(config.tenant_weights)
    if config.discoverable:
        from shoal import discovery

        discovery.require()
    if config.replicas > num_devices:
        raise ConfigError(
            f"replicas = {config.replicas} with {num_devices} devices: a pipeline needs one at least", field="replicas"
        )


def _require_model(config: OrchestratorConfig) -> None:
    """Pull a model of the catalogue; any other must be stored."""
    from modelstore.catalog import CATALOG

    store = open_store(config.home)
    if config.model in CATALOG:
        fetch(store, config.model)
    else:
        store.open(config.model)


def _describe_start(status: FleetStatus) -> str:
    if status.ready:
        return "ready"
    return f"starting: {status.waiting_for}"

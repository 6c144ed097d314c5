"""`shoal kv` and `shoal warm`: what devices keep of KV (its traces: `kv_trace`), and prompts whose KV is computed ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server, System, Tenant, messages_of, read_prompt
from cli.columns import NOTHING, Column, device_rows, short_count, short_time
from cli.kv_trace import show_trace
from cli.terminal import console, note, say, write_json
from shoal.types import KVTierStatus

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.status import DeviceStatus, FleetStatus

TIMEOUT_S = 10.0
# Warming may take as long as the prompt does, behind all other requests.
WARM_TIMEOUT_S = 600.0
DEVICE, REDIS = "device", "redis"


def kv(
    trace: Annotated[
        Path | None,
        typer.Option(help="Show the lives of blocks from the traces in this folder, of `shoal up --kv-trace`."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="With --trace: write all events to this file, to plot them.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all figures as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show what KV each device keeps in which tier, and how often it was of use."""
    if trace is not None:
        show_trace(trace, csv, is_json=json)
        return
    if csv is not None:
        raise typer.BadParameter("--csv goes with --trace")
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        fleet = client.status()
    devices = [device for device in fleet.devices if device.telemetry.kv_tiers]
    if json:
        write_json({"devices": [_to_jsonable(device) for device in devices]})
    elif not devices:
        say(f"{fleet.model} at {server}: no device has told of KV yet")
    else:
        say(tier_table(devices))
        for line in tier_lines(fleet):
            say(line)


def warm(
    prompt: Annotated[str | None, typer.Argument(help="Text to compute ahead; - reads it from standard input.")] = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw/--chat", help="The text as it is / as the beginning of a chat.")] = False,
    tenant: Tenant = None,
    ttl: Annotated[float, typer.Option(help="Pin it in the devices' memory for so many seconds; 0: not.")] = 0.0,
    public: Annotated[bool, typer.Option(help="For all tenants, who can tell then that it was warmed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Compute the KV of a prompt or a system message ahead of its use."""
    text = read_prompt(prompt) if prompt is not None else None
    if raw and (system is not None or text is None):
        raise typer.BadParameter("--raw takes a text and no system message")
    if text is None and system is None:
        raise typer.BadParameter("give a text, --system, or both")
    from shoal.client import Client

    with Client(server, timeout_s=WARM_TIMEOUT_S) as client:
        warmed = client.warm(
            text if raw else None,
            messages=None if raw else messages_of(system, text),
            tenant=tenant or "",
            ttl_s=ttl,
            is_public=public,
        )
    if json:
        write_json(warmed)
        return
    say(f"{warmed.kept_tokens} of {warmed.prompt_tokens} tokens are kept, {warmed.cached_tokens} were there already")
    if warmed.kept_tokens < warmed.prompt_tokens:
        note("what is left after the last full block is computed with each request")


def _to_jsonable(device: DeviceStatus) -> dict[str, object]:
    return {
        "worker_id": device.worker_id,
        "host_kv_bytes": device.host_kv_bytes,
        "kv_policy": device.kv_policy,
        "tiers": device.telemetry.kv_tiers,
    }


# What the breaker of a link calls it, and what a user does.
OPEN, AWAY = "open", "away"

COLUMNS: tuple[Column[KVTierStatus], ...] = (
    Column("tier", lambda tier: tier.tier, is_number=False),
    Column("state", lambda tier: AWAY if tier.state == OPEN else tier.state, is_number=False),
    Column("MiB used", lambda tier: _of_budget(tier)),
    Column("blocks", lambda tier: _blocks(tier)),
    Column("hits", lambda tier: _if_known(tier.hits, tier, DEVICE)),
    Column("misses", lambda tier: _if_known(tier.misses, tier, DEVICE)),
    Column("evicted", lambda tier: _if_known(tier.evictions, tier, DEVICE, REDIS), rank=1),
    Column(
        "age", lambda tier: short_time(tier.mean_age_s) if tier.num_blocks and tier.tier != DEVICE else NOTHING, rank=3
    ),
    Column("MB/s", lambda tier: _bandwidth(tier), rank=2),
)


def tier_table(devices: list[DeviceStatus]) -> Table:
    """One row a device and tier; columns as far as there is room."""
    rows = [(device.worker_id, device.telemetry.kv_tiers) for device in devices]
    return device_rows(rows, COLUMNS, console().width)


def tier_lines(fleet: FleetStatus) -> Iterator[str]:
    """What the table has no room for: writes that wait or were given up, bytes that were not as they should be, policies."""
    if any(
        tier.tier == REDIS and tier.state != "off" for device in fleet.devices for tier in device.telemetry.kv_tiers
    ):
        yield "redis: blocks that the device has stored there since it started"
    for device in fleet.devices:
        for tier in device.telemetry.kv_tiers:
            if tier.queued_bytes:
                waiting = f"{_mib(tier.queued_bytes)} of at most {_mib(tier.max_queued_bytes)} MiB wait to be written"
                yield f"{device.worker_id}, {tier.tier}: {waiting}"
            if tier.dropped_writes:
                yield f"{device.worker_id}, {tier.tier}: {tier.dropped_writes} writes given up"
            if tier.mismatches:
                reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tier.mismatches.items()))
                yield f"{device.worker_id}, {tier.tier}: stored bytes that were not the block: {reasons}"
        if device.telemetry.kv_tiers and device.kv_policy != "exact":
            yield f"{device.worker_id} keeps KV by the policy {device.kv_policy}: reused, it is not exact"


def _of_budget(tier: KVTierStatus) -> str:
    if tier.tier == REDIS:
        return NOTHING
    used = _mib(tier.used_bytes)
    return f"{used} of {_mib(tier.budget_bytes)}" if tier.budget_bytes else used


def _mib(num_bytes: int) -> str:
    size = num_bytes / 2**20
    return f"{size:.1f}" if 0 < size < 10 else f"{size:.0f}"


def _blocks(tier: KVTierStatus) -> str:
    """Those in the tier; of redis, which may lose any of them, those that the device has stored there."""
    return _if_known(tier.puts if tier.tier == REDIS else tier.num_blocks, tier)


def _if_known(count: int, tier: KVTierStatus, *unknown_to: str) -> str:
    """A count, unless it means nothing in this tier, or the tier is not there."""
    return NOTHING if tier.tier in unknown_to or (tier.state == "off" and not count) else short_count(count)


def _bandwidth(tier: KVTierStatus) -> str:
    """Read and write."""
    speeds = (tier.read_mb_s, tier.write_mb_s)
    return "/".join(f"{speed:.0f}" if speed else NOTHING for speed in speeds) if any(speeds) else NOTHING

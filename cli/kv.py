"""`shoal kv` and `shoal warm`: what devices keep of KV, and prompts whose KV is computed ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server, System, Tenant, messages_of, read_prompt
from cli.terminal import console, note, say, write_json
from shoal.types import KVTierStatus

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.status import DeviceStatus, FleetStatus

TIMEOUT_S = 10.0
# Warming may take as long as the prompt does, behind all other requests.
WARM_TIMEOUT_S = 600.0


def kv(
    json: Annotated[bool, typer.Option("--json", help="Print all figures as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show what KV each device keeps in which tier, and how often it was of use."""
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


@dataclass(frozen=True, slots=True)
class Column:
    """rank: of those above 0, the highest is the first to be left out where the terminal is too narrow."""

    title: str
    cell: Callable[[KVTierStatus], str]
    rank: int = 0
    is_number: bool = True


COLUMNS = (
    Column("tier", lambda tier: tier.tier, is_number=False),
    Column("state", lambda tier: tier.state, is_number=False),
    Column("MiB used", lambda tier: _of_budget(tier)),
    Column("blocks", lambda tier: _short(tier.num_blocks)),
    Column("hits", lambda tier: _short(tier.hits)),
    Column("misses", lambda tier: _short(tier.misses)),
    Column("evicted", lambda tier: _short(tier.evictions), rank=1),
    Column("age", lambda tier: _age(tier), rank=3),
    Column("MB/s", lambda tier: _bandwidth(tier), rank=2),
)


def tier_table(devices: list[DeviceStatus]) -> Table:
    """One row a device and tier; columns as far as there is room."""
    from rich import box
    from rich.table import Table

    tiers = [tier for device in devices for tier in device.telemetry.kv_tiers]
    columns = list(COLUMNS)
    names = max(len(text) for text in ("device", *(device.worker_id for device in devices)))
    while names + sum(_width(column, tiers) for column in columns) > console().width:
        least = max(columns, key=lambda column: column.rank)
        if least.rank == 0:
            break
        columns.remove(least)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("device", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for device in devices:
        for index, tier in enumerate(device.telemetry.kv_tiers):
            is_last = index == len(device.telemetry.kv_tiers) - 1
            cells = (column.cell(tier) for column in columns)
            table.add_row("" if index else device.worker_id, *cells, end_section=is_last)
    return table


def tier_lines(fleet: FleetStatus) -> Iterator[str]:
    """What the table has no room for: writes that were given up, bytes that were not what they should be, policies."""
    for device in fleet.devices:
        for tier in device.telemetry.kv_tiers:
            if tier.dropped_writes:
                yield f"{device.worker_id}, {tier.tier}: {tier.dropped_writes} writes given up"
            if tier.mismatches:
                reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tier.mismatches.items()))
                yield f"{device.worker_id}, {tier.tier}: stored bytes that were not the block: {reasons}"
        if device.telemetry.kv_tiers and device.kv_policy != "exact":
            yield f"{device.worker_id} keeps KV by the policy {device.kv_policy}, so answers may differ in their last bits"


def _width(column: Column, tiers: list[KVTierStatus]) -> int:
    """Characters it takes, with the space before it."""
    return max(len(text) for text in (column.title, *map(column.cell, tiers))) + 2


def _of_budget(tier: KVTierStatus) -> str:
    used = _mib(tier.used_bytes)
    return f"{used} of {_mib(tier.budget_bytes)}" if tier.budget_bytes else used


def _mib(num_bytes: int) -> str:
    size = num_bytes / 2**20
    return f"{size:.1f}" if 0 < size < 10 else f"{size:.0f}"


def _short(count: int) -> str:
    """At most five characters."""
    for unit in ("", "k", "M", "G"):
        if count < 10_000:
            return f"{count}{unit}"
        count //= 1000
    return f"{count}T"


def _age(tier: KVTierStatus) -> str:
    """The mean time since the last use."""
    if not tier.num_blocks:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if tier.mean_age_s >= 2 * size:
            return f"{tier.mean_age_s / size:.0f}{unit}"
    return f"{tier.mean_age_s:.0f}s"


def _bandwidth(tier: KVTierStatus) -> str:
    """Read and write."""
    speeds = (tier.read_mb_s, tier.write_mb_s)
    return "/".join(f"{speed:.0f}" if speed else "-" for speed in speeds) if any(speeds) else "-"

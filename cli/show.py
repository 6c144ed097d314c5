"""`shoal status`: what a fleet is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.terminal import format_bytes, say, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.status import DeviceStatus, FleetStatus

TIMEOUT_S = 10.0


def status(
    json: Annotated[bool, typer.Option("--json", help="Print the whole status as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show devices, layers, memory and speed."""
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        fleet = client.status()
    if json:
        write_json(fleet)
        return
    state = "ready" if fleet.ready else f"not ready, waiting for {fleet.waiting_for}"
    say(f"{fleet.model} at {server}: {state} (version {fleet.version}, up {fleet.uptime_s:.0f} s)")
    if fleet.devices:
        say(device_table(fleet))
    for line in pipeline_lines(fleet):
        say(line)


def device_table(fleet: FleetStatus) -> Table:
    """One row a device."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("device", "kind", "state", "layers", "memory", "decode", "link to next"):
        is_number = title in ("layers", "memory", "decode")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    for device in sorted(fleet.devices, key=_by_stage):
        table.add_row(*_row(device))
    return table


def _by_stage(device: DeviceStatus) -> tuple[bool, int, str]:
    return (device.layers is None, device.layers.start if device.layers else 0, device.worker_id)


def _row(device: DeviceStatus) -> tuple[str, ...]:
    # Text of devices goes into cells as it is: the console reads no markup.
    return (
        device.worker_id,
        device.kind,
        device.state,
        str(device.layers or "-"),
        f"{format_bytes(device.used_bytes)} of {format_bytes(device.memory_bytes)}",
        f"{device.decode_ms:.1f} ms" if device.decode_ms else "-",
        device.link_to_next or "-",
    )


def pipeline_lines(fleet: FleetStatus) -> list[str]:
    """Load and speed; nothing before the first placement."""
    pipeline = fleet.pipeline
    if pipeline is None:
        return []
    return [
        f"pipeline {pipeline.pipeline_id} (epoch {pipeline.epoch}): "
        f"{pipeline.used_slots} of {pipeline.num_slots} slots, "
        f"{pipeline.used_kv_tokens} of {pipeline.kv_tokens} KV tokens, context {pipeline.context_tokens}",
        f"{fleet.num_running} running, {fleet.num_waiting} waiting; "
        f"decode {pipeline.decode_tokens_per_s:.1f}, prefill {pipeline.prefill_tokens_per_s:.1f} tokens/s; "
        f"{pipeline.completion_tokens_total} tokens since the start",
    ]

"""`shoal status`: what a fleet is doing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.columns import short_time
from cli.terminal import console, format_bytes, say, tell, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.status import DeviceStatus, FleetStatus, PipelineStatus

TIMEOUT_S = 10.0
INDENT = 2


def status(
    json: Annotated[bool, typer.Option("--json", help="Print the whole status as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show devices, layers, memory, heat and speed."""
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        fleet = client.status()
    if json:
        write_json(fleet)
        return
    state = "ready" if fleet.ready else f"not ready: {fleet.waiting_for}"
    tell(f"{fleet.model} at {server}: {state} (version {fleet.version}, up {fleet.uptime_s:.0f} s)", INDENT)
    if fleet.devices:
        say(device_table(fleet))
    for line in pipeline_lines(fleet):
        tell(line, 2 * INDENT)
    for line in (*standby_lines(fleet), *departed_lines(fleet)):
        tell(line, INDENT)


def device_table(fleet: FleetStatus) -> Table:
    """One row a device, in the order of pipelines and stages; columns for what is known of any, as far as there is room."""
    from rich import box
    from rich.table import Table

    devices = sorted(fleet.devices, key=lambda device: _place(fleet, device))
    columns = [column for column in COLUMNS if column.is_needed(fleet)]
    while sum(column.width(devices) for column in columns) > console().width:
        least = max(columns, key=lambda column: column.rank)
        if least.rank == 0:
            break
        columns.remove(least)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for device, following in zip(devices, [*devices[1:], None], strict=True):
        # Text of devices goes into cells as it is: the console reads no markup.
        is_last = following is not None and following.pipeline_id != device.pipeline_id
        table.add_row(*(column.cell(device) for column in columns), end_section=is_last)
    return table


def _place(fleet: FleetStatus, device: DeviceStatus) -> tuple[bool, int, str, int, str]:
    """By pipeline, those that serve in their order, then by stage; what stands by is last."""
    serving = [pipeline.pipeline_id for pipeline in fleet.pipelines]
    is_serving = device.pipeline_id in serving
    return (
        device.layers is None,
        serving.index(device.pipeline_id) if is_serving else len(serving),
        device.pipeline_id,
        device.layers.start if device.layers else 0,
        device.worker_id,
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of devices.

    rank: of those above 0, the highest is the first to be left out where the terminal is too narrow. is_needed: whether
    there is anything to show in it.
    """

    title: str
    cell: Callable[[DeviceStatus], str]
    is_number: bool = False
    rank: int = 0
    is_needed: Callable[[FleetStatus], bool] = lambda _: True

    def width(self, devices: Sequence[DeviceStatus]) -> int:
        """Characters it takes, with the space between columns."""
        return max(len(text) for text in (self.title, *map(self.cell, devices))) + 2


def _heat(device: DeviceStatus) -> str:
    temperature_c = device.telemetry.temperature_c
    return device.thermal_state + ("" if temperature_c is None else f" {temperature_c:.0f} C")


def _battery(device: DeviceStatus) -> str:
    percent = device.telemetry.battery_percent
    if percent is None:
        return "-"
    return f"{percent:.0f} %" + (" +" if device.telemetry.is_charging else "")


COLUMNS = (
    Column("pipeline", lambda device: device.pipeline_id or "-", is_needed=lambda fleet: len(_pipeline_ids(fleet)) > 1),
    Column("device", lambda device: device.worker_id),
    Column("kind", lambda device: device.kind, rank=4),
    Column("state", lambda device: device.state + ", cordoned" * device.is_cordoned),
    Column("layers", lambda device: str(device.layers or "-"), is_number=True),
    Column(
        "memory",
        lambda device: f"{format_bytes(device.used_bytes)} of {format_bytes(device.memory_bytes)}",
        is_number=True,
    ),
    Column("decode", lambda device: f"{device.decode_ms:.1f} ms" if device.decode_ms else "-", is_number=True, rank=2),
    Column("heat", _heat, is_needed=lambda fleet: any(device.thermal_state for device in fleet.devices)),
    Column(
        "battery",
        _battery,
        is_number=True,
        rank=1,
        is_needed=lambda fleet: any(device.telemetry.battery_percent is not None for device in fleet.devices),
    ),
    Column("link", lambda device: device.link_to_next or "-", rank=3),
)


def _pipeline_ids(fleet: FleetStatus) -> set[str]:
    return {device.pipeline_id for device in fleet.devices if device.pipeline_id}


def standby_lines(fleet: FleetStatus) -> list[str]:
    """What those who stand by would take over, and how much of its weights they have."""
    lines = []
    for device in fleet.devices:
        if device.standby_layers:
            layers = ", ".join(map(str, device.standby_layers))
            have, all_of_it = format_bytes(device.prefetched_bytes), format_bytes(device.prefetch_bytes)
            is_whole = device.prefetched_bytes >= device.prefetch_bytes
            weights = f"all {all_of_it} of their weights" if is_whole else f"{have} of {all_of_it} of their weights"
            lines.append(f"{device.worker_id} stands by for layers {layers}, and has {weights}")
    return lines


def departed_lines(fleet: FleetStatus) -> list[str]:
    """Who is gone, since when, and why."""
    return [
        f"{one.worker_id} left {short_time(one.ago_s)} ago"
        if one.has_left
        else f"{one.worker_id} is lost, since {short_time(one.ago_s)} ago: {one.why}"
        for one in fleet.departed
    ]


def pipeline_lines(fleet: FleetStatus) -> list[str]:
    """Load and speed of each pipeline; nothing before the first placement."""
    return [line for pipeline in fleet.pipelines for line in _lines_of(fleet, pipeline)]


def _lines_of(fleet: FleetStatus, pipeline: PipelineStatus) -> Iterator[str]:
    mode = f"{pipeline.mode}, " if pipeline.mode else ""
    yield (
        f"pipeline {pipeline.pipeline_id} ({mode}epoch {pipeline.epoch}): "
        f"{pipeline.used_slots} of {pipeline.num_slots} slots, "
        f"{pipeline.used_kv_tokens} of {pipeline.kv_tokens} KV tokens, context {pipeline.context_tokens}"
    )
    yield (
        f"  {pipeline.num_running} running, {pipeline.num_waiting} waiting; "
        f"decode {pipeline.decode_tokens_per_s:.1f}, prefill {pipeline.prefill_tokens_per_s:.1f} tokens/s; "
        f"{pipeline.completion_tokens_total} tokens since it came up"
    )
    spared = [
        f"{device.worker_id} is {device.thermal_state} ({device.thermal_cause})"
        for device in fleet.devices
        if device.pipeline_id == pipeline.pipeline_id and device.thermal_cause
    ]
    if spared:
        steps = f" and {pipeline.steps_per_s:g} steps/s" if pipeline.steps_per_s else ""
        yield f"  kept to batches of {pipeline.max_batch}{steps}: {', '.join(spared)}"

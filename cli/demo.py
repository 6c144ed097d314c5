"""`shoal demo`: the whole of Shoal in one command, and what `make demo` runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import summary
from cli.serve import DEFAULT_DEVICES, DEFAULT_REDIS, Devices, RedisChoice, running_fleet
from cli.terminal import format_bytes, say, write_text
from shoal.config import OrchestratorConfig, from_environment

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.generation import Generation
    from shoal.status import FleetStatus

DEFAULT_PROMPT = "List three facts about fish that swim in shoals."
MAX_TOKENS = 128


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = DEFAULT_PROMPT,
    devices: Devices = DEFAULT_DEVICES,
    model: Annotated[str | None, typer.Option(help="Name of the model.", show_default=False)] = None,
    redis: RedisChoice = DEFAULT_REDIS,
) -> None:
    """Pull a model, start a fleet, ask it, show who did what, stop."""
    # A port of its own: a fleet that is already up is not in the way.
    config = from_environment(OrchestratorConfig, {"model": model, "port": 0})
    with running_fleet(config, devices, redis) as (fleet, _, _):
        say()
        say(f"> {prompt}", style="bold")
        answer, status = _ask(fleet.address, prompt)
        say()
        say(_plan(answer, status))
        say(summary(answer))
        stopping_at = time.monotonic()
    say(f"all stopped after {time.monotonic() - stopping_at:.1f} s")


def _ask(address: str, prompt: str) -> tuple[Generation, FleetStatus]:
    """Show the answer as it comes; return it and the state of the fleet after it."""
    from shoal.client import Client

    messages = [{"role": "user", "content": prompt}]
    with Client(address) as client:
        with client.stream(messages=messages, max_tokens=MAX_TOKENS, temperature=0.0) as stream:
            for delta in stream:
                write_text(delta.text)
        write_text("\n")
        return stream.result, client.status()


def _plan(answer: Generation, status: FleetStatus) -> Table:
    """Who computed which layers of an answer, and the memory that takes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("stage", "device", "layers", "memory"):
        table.add_column(title, justify="left" if title == "device" else "right", no_wrap=True)
    devices = {device.worker_id: device for device in status.devices}
    for index, stage in enumerate(answer.pipeline):
        device = devices[stage.worker_id]
        memory = f"{format_bytes(device.used_bytes)} of {format_bytes(device.memory_bytes)}"
        table.add_row(str(index), stage.worker_id, str(stage.layers), memory)
    return table

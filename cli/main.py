"""The `shoal` command: which commands there are, and how what goes wrong is told.

An error is one line on stderr and exit code 1 (2 for wrong usage, 130 for an interrupt); tracebacks only with
SHOAL_DEBUG=1. What is heavy to import is imported inside the commands, so that help and errors come at once.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from types import TracebackType
from typing import Annotated

import typer
from typer.main import get_command

from cli import ask, batch, demo, devices, explain, kv, lab, load, models, on_ray, plan, scale, serve, sessions, show
from cli.terminal import report
from shoal.errors import ShoalError

app = typer.Typer(
    name="shoal",
    help="Phones, tablets, laptops and small boxes that act together as one LLM endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help and plain usage errors: they stay one line each, in a log too.
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("up")(serve.up)
app.command("generate")(ask.generate)
app.command("chat")(ask.chat)
app.command("status")(show.status)
app.command("plan")(plan.plan)
app.command("explain")(explain.explain)
app.command("drain")(devices.drain)
app.command("cordon")(devices.cordon)
app.command("uncordon")(devices.uncordon)
app.command("scale")(scale.scale)
app.command("roll")(scale.roll)
app.command("kv")(kv.kv)
app.command("warm")(kv.warm)
app.add_typer(sessions.app, name="sessions")
app.add_typer(models.app, name="models")
app.add_typer(load.app, name="load")
app.add_typer(lab.app, name="lab")
app.command("batch")(batch.batch)
app.command("orchestrator")(serve.orchestrator)
app.command("worker")(serve.worker)
app.command("ray-dispatcher", hidden=True)(on_ray.ray_dispatcher)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(version("shoal"))
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line."""
    is_debugging = os.environ.get("SHOAL_DEBUG") == "1"
    if not is_debugging:
        sys.excepthook = _tell
        # gRPC writes lines of its own about what our errors say in words.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        # Not app(), which would put a hook for tracebacks in the place of ours.
        get_command(app)()
    except ShoalError as error:
        if is_debugging:
            raise
        report(error)
        sys.exit(1)


def _tell(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """In place of a traceback."""
    if isinstance(error, OSError):
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
    elif not issubclass(kind, KeyboardInterrupt):
        print(f"error: a bug of Shoal: {kind.__name__}: {error}", file=sys.stderr)  # noqa: T201
        print("hint: SHOAL_DEBUG=1 shows where", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()

"""`shoal scale` and `shoal roll`: other devices for a fleet that serves, and all its workers started anew.

Owns options; what is done in which order is `launch.changes`'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.terminal import note, say
from shoal.config import default_home
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from launch.changes import Change

# Weights may have to go over a slow link first.
DRAIN_TIMEOUT_S = 600.0


def scale(
    counts: Annotated[
        list[str], typer.Argument(help="How many of which devices, as tablet=4.", metavar="NAME=COUNT...")
    ],
    server: Server = DEFAULT_SERVER,
) -> None:
    """Give a fleet of `shoal up --on ray` more devices, or fewer; no answer ends for it."""
    from launch.scaling import parse_count

    parsed = [parse_count(text) for text in counts]
    wanted = dict(parsed)
    if len(wanted) < len(parsed):
        raise ConfigError("a name is given more than once: say how many of it there are to be in all", field="count")
    with _changing(server) as change:
        change.scale(wanted)
    for name, count in wanted.items():
        say(f"{name}: {count}")


def roll(server: Server = DEFAULT_SERVER) -> None:
    """Start all workers of a fleet of `shoal up --on ray` anew, one after the other; no answer ends for it."""
    with _changing(server) as change:
        change.roll()
    say("all workers run anew")


@contextmanager
def _changing(server: str) -> Iterator[Change]:
    from launch.changes import Change
    from launch.desk import Desk
    from shoal.client import Client

    port = server.rpartition(":")[2]
    if not port.isdigit():
        raise ConfigError(f"{server!r} is no address; it must be HOST:PORT", field="server")
    desk = Desk(default_home(), int(port))
    with desk.changing(), Client(server, timeout_s=DRAIN_TIMEOUT_S) as client:
        yield Change(client, desk, lambda text: note(text, style=""))

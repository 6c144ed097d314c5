"""`shoal sessions`: the conversations that an orchestrator keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server, Tenant
from cli.columns import short_time
from cli.terminal import say, write_json
from shoal.errors import SessionNotFound

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.kept import SessionStatus

TIMEOUT_S = 10.0
# Deleting many blocks takes longer than a look.
DELETE_TIMEOUT_S = 60.0

app = typer.Typer(help="The conversations that an orchestrator keeps.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_sessions(
    tenant: Tenant = None,
    json: Annotated[bool, typer.Option("--json", help="Print them as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show the sessions of a tenant."""
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        sessions = client.sessions(tenant or "")
    if json:
        write_json({"sessions": sessions})
    elif not sessions:
        say("no sessions; `shoal chat --session NAME` begins one")
    else:
        say(session_table(sessions))


@app.command("show")
def show_session(
    session_id: Annotated[str, typer.Argument(help="Its name, as in the list.")],
    tenant: Tenant = None,
    json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Show one session: its turns, its tokens, and how many of them have KV that is kept."""
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        found = [one for one in client.sessions(tenant or "") if one.session_id == session_id]
    if not found:
        raise SessionNotFound(
            f"there is no session {session_id!r}; `shoal sessions list` shows which there are", field="session_id"
        )
    if json:
        write_json(found[0])
    else:
        say(describe(found[0]))


@app.command("delete")
def delete_session(
    session_id: Annotated[str, typer.Argument(help="Its name, as in the list.")],
    tenant: Tenant = None,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Delete a session, and its KV that no other one shares."""
    from shoal.client import Client

    with Client(server, timeout_s=DELETE_TIMEOUT_S) as client:
        deleted = client.delete_session(session_id, tenant or "")
    shared = f"; {deleted.num_blocks_shared} are used by others and stay" if deleted.num_blocks_shared else ""
    say(f"session {session_id} is deleted, with {deleted.num_blocks_deleted} blocks of KV{shared}")


def describe(session: SessionStatus) -> str:
    kept = f"{session.kept_tokens} of them with KV that is kept" if session.kept_tokens else "none with KV that is kept"
    return (
        f"{session.session_id}: {session.num_turns} turns, {session.num_tokens} tokens, {kept}; "
        f"last used {short_time(session.idle_s)} ago, ends in {short_time(session.expires_in_s)} if it is not used"
    )


def session_table(sessions: tuple[SessionStatus, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("session", overflow="fold")
    for title in ("turns", "tokens", "KV kept", "last used", "ends in"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in sessions:
        table.add_row(
            one.session_id,
            str(one.num_turns),
            str(one.num_tokens),
            str(one.kept_tokens),
            f"{short_time(one.idle_s)} ago",
            short_time(one.expires_in_s),
        )
    return table

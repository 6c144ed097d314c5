"""`shoal explain`: why a request ran where and when it did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.terminal import SENTENCE_WIDTH, console, say, tell, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.explanation import Explanation, RouteCandidate, RouteDecision

TIMEOUT_S = 10.0
INDENT = 2
# Behind the time.
EVENT_INDENT = 14
SCORES = (
    "scores are predicted times, the lowest wins: queue + prefill + 64 tokens for an answer (class throughput: their share "
    "of a batch; class latency: doubled where others share the pipeline)"
)


def explain(
    request_id: Annotated[str, typer.Argument(help="As `shoal generate --json` shows it; by default the newest.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the whole story as one JSON object.")] = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Tell why a request ran where and when it did: pipelines and their scores, waits, limits."""
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        story = client.explain(request_id)
    if json:
        write_json(story)
        return
    tell(headline(story), INDENT)
    if story.routes:
        tell(SCORES)
    for route in story.routes:
        say()
        tell(f"{_at(route.at_ms)}  {route.reason}: {_choice(route)}", EVENT_INDENT)
        say(candidate_table(route, min(console().width, SENTENCE_WIDTH)))
    if story.events:
        say()
    for event in story.events:
        tell(f"{_at(event.at_ms)}  {event.what}{': ' + event.detail if event.detail else ''}", EVENT_INDENT)


def headline(story: Explanation) -> str:
    end = f"ended: {story.finish}" if story.finish else story.state
    return (
        f"request {story.request_id} of tenant {story.tenant}, class {story.qos_class.value}: "
        f"{story.prompt_tokens} prompt and {story.completion_tokens} answer tokens, {end}"
    )


def candidate_table(route: RouteDecision, width: int) -> Table:
    """One row a pipeline, the chosen one marked; at most so wide."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("pipeline", no_wrap=True)
    for title in ("stages", "queue", "prefill", "per token", "cached", "score"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    rows = [_row(candidate, is_chosen=candidate.pipeline_id == route.pipeline_id) for candidate in route.candidates]
    if max((sum(len(cell) + 3 for cell in row) for row in rows), default=0) > width:
        table.width = width
    for row in rows:
        table.add_row(*row)
    return table


def _row(candidate: RouteCandidate, *, is_chosen: bool) -> tuple[str, ...]:
    times = (candidate.queue_ms, candidate.prefill_ms, candidate.inter_token_ms)
    return (
        candidate.pipeline_id,
        str(candidate.num_stages),
        *(f"{time:.0f} ms" for time in times),
        str(candidate.cached_tokens),
        "-" if candidate.ruled_out else f"{candidate.score_ms:.0f} ms",
        "chosen" if is_chosen else candidate.ruled_out,
    )


def _choice(route: RouteDecision) -> str:
    return f"pipeline {route.pipeline_id}" if route.pipeline_id else "no pipeline could take it"


def _at(at_ms: float) -> str:
    return f"{at_ms:9.1f} ms"

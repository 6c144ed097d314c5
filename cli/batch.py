"""`shoal batch`: have a file of prompts answered, and go on where it was interrupted.

Owns options and what is shown. What is asked, kept and asked again is decided in `batch`, which is imported on use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ask import DEFAULT_SERVER, Server, Tenant
from cli.terminal import following, note, say
from shoal.types import QosClass

if TYPE_CHECKING:
    from batch.answers import AnswerFile
    from batch.driver import Progress
    from batch.prompts import Prompt, Refusal
    from shoal.generation import Generation

DEFAULT_MAX_TOKENS = 256
# Several times what a small fleet computes at once, and fewer than may wait.
DEFAULT_CONCURRENCY = 64
DEFAULT_PATIENCE_S = 120.0


def batch(
    prompts: Annotated[
        Path,
        typer.Argument(help='JSON lines such as {"id": "1", "prompt": "..."}, or with "messages".', dir_okay=False),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Where the answers go; one that exists is gone on with.", dir_okay=False)
    ],
    server: Server = DEFAULT_SERVER,
    model: Annotated[str, typer.Option(help="Name of the model; by default the one that is served.")] = "",
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of answers whose line does not say.", min=1)
    ] = DEFAULT_MAX_TOKENS,
    tenant: Tenant = None,
    concurrency: Annotated[int, typer.Option(help="How many prompts at once.", min=1, max=4096)] = DEFAULT_CONCURRENCY,
    patience: Annotated[
        float, typer.Option(help="Give up when nobody has answered anything for so many seconds.", min=0.0)
    ] = DEFAULT_PATIENCE_S,
) -> None:
    """Answer a file of prompts in the background of others (class throughput)."""
    from batch.answers import AnswerFile
    from batch.driver import unanswered
    from batch.prompts import read_prompts

    defaults: dict[str, Any] = {"max_tokens": max_tokens, "qos_class": QosClass.THROUGHPUT}
    defaults |= {name: value for name, value in (("model", model), ("tenant", tenant)) if value}
    # Read first: a wrong path makes no file of answers.
    lines = list(read_prompts(prompts))
    with AnswerFile(out) as file:
        left = unanswered(lines, file)
        if file.num_repaired:
            note(f"{out}: the last line was cut off in the middle, and its prompt is asked again")
        if file.kept:
            note(f"{out}: {len(file.kept)} of {len(lines)} are answered already")
        progress = asyncio.run(_run(server, defaults, left, file, concurrency, patience))
        file.sort()
    _report(out, progress)
    raise typer.Exit(1 if progress.num_failed else 0)


async def _run(
    server: str,
    defaults: dict[str, Any],
    left: list[Prompt | Refusal],
    file: AnswerFile,
    concurrency: int,
    patience_s: float,
) -> Progress:
    from batch.driver import Batch
    from shoal.client import AsyncClient

    async with AsyncClient(server) as client:

        async def ask(prompt: Prompt) -> Generation:
            return await client.generate(prompt.text, messages=prompt.messages, **{**defaults, **prompt.options})

        with _progress() as show:
            run = Batch(left, file, ask, concurrency=concurrency, patience_s=patience_s, on_progress=show)
            await run.run()
            return run.progress()


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Show how far a batch is: all the time at a terminal, now and then in a log."""
    with following("asking") as show:
        yield lambda progress: show(partial(_describe, progress))


def _describe(progress: Progress) -> str:
    failed = f" ({progress.num_failed} with an error)" if progress.num_failed else ""
    num_new = progress.num_done - progress.num_kept
    rate = num_new / progress.elapsed_s if progress.elapsed_s else 0.0
    num_left = progress.num_prompts - progress.num_done
    rest = f", {num_left / rate:.0f} s to go" if rate and num_left else ""
    return (
        f"{progress.num_done} of {progress.num_prompts} answered{failed}, {progress.num_running} under way, "
        f"{progress.num_tokens / max(progress.elapsed_s, 0.001):.1f} tokens/s{rest}"
    )


def _report(out: Path, progress: Progress) -> None:
    num_new = progress.num_done - progress.num_kept
    rate = progress.num_tokens / max(progress.elapsed_s, 0.001)
    say(
        f"{out}: {progress.num_done} answers ({num_new} of this run: {progress.num_tokens} tokens in "
        f"{progress.elapsed_s:.1f} s, {rate:.1f} tokens/s)"
    )
    if progress.num_failed:
        note(
            f"{progress.num_failed} of them are errors: their lines have an object `error` with reason, field and message"
        )

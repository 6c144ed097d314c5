"""`shoal batch`: have a file of prompts answered, and go on where it was interrupted.

Owns options and what is shown. What is asked, kept and asked again is decided in `batch`, which is imported on use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.ask import DEFAULT_SERVER, Server, Tenant
from cli.on_ray import THIS_MACHINE, needing_ray
from cli.terminal import following, note, say
from shoal.types import QosClass

if TYPE_CHECKING:
    from batch.driver import Ask, Batch, Progress
    from batch.prompts import Prompt, Refusal

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
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Ask again what was answered with an error by an earlier run.")
    ] = False,
    ray: Annotated[
        int, typer.Option("--ray", help="Ask from so many helpers on a Ray cluster; 0: from here.", min=0, max=1024)
    ] = 0,
    ray_address: Annotated[
        str, typer.Option(help="With --ray: the cluster's head, HOST:PORT; auto: of this machine.")
    ] = THIS_MACHINE,
) -> None:
    """Answer a file of prompts in the background of others (class throughput)."""
    from batch.prompts import read_prompts

    defaults: dict[str, Any] = {"max_tokens": max_tokens, "qos_class": QosClass.THROUGHPUT}
    defaults |= {name: value for name, value in (("model", model), ("tenant", tenant)) if value}
    # Read first: a wrong path makes no file of answers.
    lines = list(read_prompts(prompts))
    how = _How(server, defaults, ray, ray_address, concurrency, patience)
    progress = _answer(lines, out, how, retry_errors=retry_errors)
    _report(out, progress)
    raise typer.Exit(1 if progress.num_failed else 0)


@dataclass(frozen=True, slots=True)
class _How:
    """Whom to ask, from where, and how many prompts at once. num_helpers, 0: from here."""

    server: str
    defaults: dict[str, Any]
    num_helpers: int
    ray_address: str
    concurrency: int
    patience_s: float


def _answer(lines: Sequence[Prompt | Refusal], out: Path, how: _How, *, retry_errors: bool) -> Progress:
    """Have those lines answered that the file has no answer to."""
    from batch.answers import AnswerFile
    from batch.driver import Batch, unanswered

    with AnswerFile(out) as file:
        left = unanswered(lines, file, is_error_kept=not retry_errors)
        if retry_errors and (num_dropped := file.drop_errors()):
            note(f"{out}: {num_dropped} answers are errors, and are asked again")
        if file.num_repaired:
            note(f"{out}: the last line was cut off in the middle, and its prompt is asked again")
        if file.kept:
            note(f"{out}: {len(file.kept)} of {len(lines)} are answered already")
        with _helpers(how) as ask, _progress() as show:
            make = partial(Batch, left, file, concurrency=how.concurrency, patience_s=how.patience_s, on_progress=show)
            progress = asyncio.run(_run_here(make, how) if ask is None else _run(make, ask))
        file.sort()
    return progress


async def _run_here(make: Callable[[Ask], Batch], how: _How) -> Progress:
    from batch.asking import Asker

    asker = Asker(how.server, how.defaults)
    try:
        return await _run(make, asker.ask)
    finally:
        await asker.close()


async def _run(make: Callable[[Ask], Batch], ask: Ask) -> Progress:
    batch = make(ask)
    await batch.run()
    return batch.progress()


@contextmanager
def _helpers(how: _How) -> Iterator[Ask | None]:
    """What asks one prompt from elsewhere; None: nobody is to."""
    if not how.num_helpers:
        yield None
        return
    from batch.asking import asking

    with needing_ray():
        from launch.ray_cluster.work import Helpers
    make = partial(asking, how.server, how.defaults)
    with Helpers(how.ray_address, make, how.num_helpers) as helpers:
        yield helpers.do


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
            f"of these, errors: {progress.num_failed}; their lines have an object `error` with reason, field and message"
        )

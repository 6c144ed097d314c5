"""What all commands share of the terminal: consoles, one-line errors, text of models, byte counts, progress.

Text of models and users is never read as markup; where nobody watches, nothing but sentences is wrapped and nothing is
animated; rich's own rules hold for NO_COLOR and COLUMNS. Knows nothing of fleets or models. rich is imported on use: the
children of a launcher do without.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from shoal.errors import ModelNotFound, ShoalError
from shoal.types import LayerRange

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Wide enough that rich, which would assume 80 columns for a file or a pipe, cuts nothing off.
WIDTH_OF_A_LOG = 200
# Where nobody watches, a line about how far something is comes so often.
LOG_S = 10.0

# Of an error, which may quote a file at length.
MAX_ERROR_CHARS = 2000
# Longer lines are hard to read, however wide a terminal is.
SENTENCE_WIDTH = 100

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_HINTS: dict[type[ShoalError], str] = {
    ModelNotFound: "`shoal models list` shows what is stored and what can be pulled",
}


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_OF_A_LOG
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width)


def say(text: RenderableType = "", *, style: str = "") -> None:
    """Print a line or a table on stdout."""
    plain = text.translate(_CONTROLS) if isinstance(text, str) else text
    console().print(plain, style=style, soft_wrap=isinstance(text, str))


def tell(text: str, indent: int = 0) -> None:
    """Print sentences on stdout, in lines that fit the terminal; from the second on they are indented so far."""
    import textwrap

    width = min(console().width, SENTENCE_WIDTH)
    say("\n".join(textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False)))


def note(text: str, *, style: str = "dim") -> None:
    """Print a line beside the result: on stderr."""
    console(stderr=True).print(text.translate(_CONTROLS), style=style, soft_wrap=True)


def write_text(text: str) -> None:
    """Write text of a model as it comes; control characters could command a terminal and do not get there."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def report(error: ShoalError) -> None:
    """Print an error as one line on stderr, and a second one with what to do where the error does not say.

    An error may quote files, models and servers: nothing in it commands the terminal.
    """
    message = " ".join(error.message[:MAX_ERROR_CHARS].splitlines()).translate(_CONTROLS)
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    hint = _HINTS.get(type(error))
    if hint:
        print(f"hint: {hint}", file=sys.stderr)  # noqa: T201


def write_json(value: object) -> None:
    """Print a value as one JSON object."""
    sys.stdout.write(json.dumps(to_jsonable(value), ensure_ascii=False) + "\n")


def to_jsonable(value: object) -> object:
    """Dataclasses become objects, layer ranges [start, stop], enums their values."""
    if isinstance(value, LayerRange):
        return [value.start, value.stop]
    if dataclasses.is_dataclass(value):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(entry) for entry in value]
    return value


def format_bytes(num_bytes: int) -> str:
    """Such as 700 MiB or 1.5 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit != "MiB" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar that counts bytes, or in a log a line a quarter; yields update(done, total, label)."""
    if not sys.stderr.isatty():
        yield _log_progress(title)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[label]}", style="dim", markup=False),
    )
    with Progress(*columns, console=console(stderr=True)) as bar:
        # Hidden until there is progress: what is there already needs no bar.
        task = bar.add_task(title, total=None, label="", visible=False)
        yield lambda done, total, label: bar.update(
            task, completed=done, total=total or None, label=label, visible=True
        )


def _log_progress(title: str) -> Callable[[int, int, str], None]:
    said: set[tuple[int, int | str]] = set()

    def update(done: int, total: int, label: str) -> None:
        quarter = 4 * done // total if total else 0
        # What cannot be counted is told apart by its label.
        key = (total, quarter if total else label)
        if key not in said:
            said.add(key)
            share = f"{25 * quarter} % of {format_bytes(total)}" if total else "..."
            note(f"{title}: {share} ({label})", style="")

    return update


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with a text that update(text) changes; in a log a line for each new text."""
    if not sys.stderr.isatty():
        said: set[str] = set()

        def log_once(new: str) -> None:
            if new not in said:
                said.add(new)
                note(new, style="")

        log_once(text)
        yield log_once
        return
    from rich.text import Text

    # Text, not str: a status reads its str as markup.
    with console(stderr=True).status(Text(text)) as status:
        yield lambda new: status.update(Text(new))


@contextmanager
def following(text: str) -> Iterator[Callable[[Callable[[], str]], None]]:
    """As waiting(), for what changes all the time: show(describe) asks for the text, in a log once in LOG_S at most."""
    is_watched = sys.stderr.isatty()
    due_at = 0.0 if is_watched else time.monotonic() + LOG_S
    with waiting(text) as update:

        def show(describe: Callable[[], str]) -> None:
            nonlocal due_at
            if time.monotonic() >= due_at:
                due_at = 0.0 if is_watched else time.monotonic() + LOG_S
                update(describe())

        yield show

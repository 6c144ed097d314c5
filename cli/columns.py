"""Tables whose rows go by device, with columns as far as the terminal has room, and figures short enough for them.

Knows nothing of what the rows are. Called by the commands that show KV and sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

Row = TypeVar("Row")
# Where a figure would mean nothing, or is not known.
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """rank: of those above 0, the highest is the first to be left out where the terminal is too narrow."""

    title: str
    cell: Callable[[Row], str]
    rank: int = 0
    is_number: bool = True


def device_rows(devices: Sequence[tuple[str, Sequence[Row]]], columns: Sequence[Column[Row]], width: int) -> Table:
    """A table of the rows of each device, which is named once; at most so wide, if that can be."""
    from rich import box
    from rich.table import Table

    columns = _fitting(devices, columns, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("device", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for name, rows in devices:
        for index, row in enumerate(rows):
            cells = (column.cell(row) for column in columns)
            table.add_row("" if index else name, *cells, end_section=index == len(rows) - 1)
    return table


def _fitting(
    devices: Sequence[tuple[str, Sequence[Row]]], columns: Sequence[Column[Row]], width: int
) -> list[Column[Row]]:
    names = max(len(text) for text in ("device", *(name for name, _ in devices)))
    left, rows = list(columns), [row for _, rows in devices for row in rows]
    while names + sum(_width(column, rows) for column in left) > width:
        least = max(left, key=lambda column: column.rank)
        if least.rank == 0:
            break
        left.remove(least)
    return left


def _width(column: Column[Row], rows: Sequence[Row]) -> int:
    """Characters it takes, with the space before it."""
    return max(len(text) for text in (column.title, *map(column.cell, rows))) + 2


def short_count(count: int) -> str:
    """At most five characters."""
    for unit in ("", "k", "M", "G"):
        if count < 10_000:
            return f"{count}{unit}"
        count //= 1000
    return f"{count}T"


def short_time(seconds: float) -> str:
    """As in 119s, 2m, 3h or 4d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"

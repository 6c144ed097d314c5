"""Options that several commands have alike: declared once, given to each.

Knows no option. Used by `cli.serve` and `cli.load`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

Command = Callable[..., None]


def with_parameters(more: Iterable[inspect.Parameter]) -> Callable[[Command], Command]:
    """Give a command further options, behind its own; their values come as **values."""

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *more)]
        command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        return command

    return decorate

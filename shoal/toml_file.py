"""A TOML file that people write: what it says, where it says it, and what its fields may hold.

Turns faults into ConfigErrors with file, line, field and allowed values. Knows no field: device profiles and workloads bring
their own rules.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import ConfigError

# Keys of tables, and places in arrays, on the way to a value.
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field may hold: its TOML types, its allowed values in words, and the check of them."""

    types: tuple[type, ...]
    allowed: str
    is_allowed: Callable[[Any], bool]

    def refusal(self, value: object) -> str:
        """What is wrong with a value, to be put behind the name of its field; empty if nothing is."""
        # bool is an int to isinstance, but `threads = true` is a mistake.
        if type(value) in self.types and self.is_allowed(value):
            return ""
        return f"= {shown(value)} is not allowed; it must be {self.allowed}"


def number(allowed: str, is_allowed: Callable[[Any], bool]) -> Rule:
    """A rule for a finite number: whole ones of TOML may be longer than any float, and it has inf and nan."""
    return Rule((int, float), allowed, lambda value: abs(value) <= sys.float_info.max and is_allowed(value))


def one_of(choices: Sequence[str]) -> Rule:
    return Rule((str,), "one of " + ", ".join(choices), lambda value: value in choices)


def shown(value: object) -> str:
    """A value as its file has it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


class TomlFile:
    """A file's text and its content; name: what to call it in messages."""

    __slots__ = ("content", "name", "text")

    def __init__(self, name: str, text: str, *, field: str) -> None:
        """Raise ConfigError with the line, for this field, if it is not TOML."""
        self.name = name
        self.text = text.replace("\r\n", "\n")
        try:
            self.content: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"at line (\d+)", str(error))
            lines = self.text.split("\n")
            line = int(found[1]) if found else len(lines)
            raise ConfigError(
                f"{name}:{line}: not valid TOML: {error} in: {lines[line - 1].strip()}", field=field
            ) from error
        except RecursionError:
            raise ConfigError(f"{name}: not valid TOML: nested too deeply", field=field) from None

    def position(self, path: KeyPath) -> str:
        """The file and, for a field or else the table it should be in, the line of the statement that sets it.

        That is the last one of the shortest text, cut between statements, that has the field in it: so the parser alone
        decides what a statement is, whichever way it is written.
        """
        while path and not _has(self.content, path):
            path = path[:-1]
        if not path:
            return self.name
        lines = self.text.split("\n")
        begin = 1
        for end in range(1, len(lines) + 1):
            try:
                content = tomllib.loads("\n".join(lines[:end]))
            except tomllib.TOMLDecodeError:
                continue  # cut within a statement
            if _has(content, path):
                return f"{self.name}:{begin}"
            begin = end + 1
        raise AssertionError(f"{path} is not in {self.name}")


def _has(content: Any, path: KeyPath) -> bool:
    for key in path:
        is_there = (
            0 <= key < len(content)
            if isinstance(key, int) and isinstance(content, list)
            else (isinstance(content, dict) and key in content)
        )
        if not is_there:
            return False
        content = content[key]
    return True

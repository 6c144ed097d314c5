"""The grid of a sweep: which settings take which values, by NAME=VALUE,VALUE words or a TOML file, and all their cells.

Knows what each setting may be, not what becomes of it. Called by the command line; `sweep` plays the cells.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.shipped import meant
from shoal.types import Objective

MAX_CELLS = 10_000
# Without a word about streams: of a drawn fleet for each device, else in all.
STREAMS_A_DEVICE = 4
DEFAULT_STREAMS = 16
# Tokens of a prompt.
DEFAULT_PROMPT = 256
# Joins the devices of one value, since a comma parts values.
PLUS = "+"


@dataclass(frozen=True, slots=True)
class Cell:
    """One plan or run. fleet: so many drawn devices; 0: those named in devices, or those that the sweep is given.

    streams, 0, and replicas, None: what is usual for such a fleet. seconds, 0: some seconds' work.
    """

    fleet: int = 0
    devices: str = ""
    objective: str = Objective.THROUGHPUT.value
    streams: int = 0
    replicas: int | None = None
    context: int = 0
    prompt: int = DEFAULT_PROMPT
    rate: float = 0.0
    churn: float = 0.0
    seconds: float = 0.0
    seed: int = 1
    is_played: bool = False

    @property
    def num_streams(self) -> int:
        return self.streams or STREAMS_A_DEVICE * self.fleet or DEFAULT_STREAMS

    @property
    def num_replicas(self) -> int:
        return self.replicas if self.replicas is not None else 0 if self.fleet else 1


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting, and the values it takes in turn."""

    name: str
    values: tuple[str | int | float, ...]

    @property
    def is_numeric(self) -> bool:
        return not any(isinstance(value, str) for value in self.values)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a value is read from text or TOML; what is allowed, in words. is_of_run: of simulations alone."""

    read: Callable[[Any], str | int | float]
    allowed: str
    is_allowed: Callable[[Any], bool]
    is_of_run: bool = False


def _whole(value: Any) -> int:
    if isinstance(value, bool | float):
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _within(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: least <= value <= most


_OBJECTIVES = tuple(objective.value for objective in Objective)
_RULES: Mapping[str, _Rule] = {
    "fleet": _Rule(_whole, "a number of devices from 1 to 10000", _within(1, 10_000)),
    "devices": _Rule(str, f"devices joined by {PLUS}, as phone{PLUS}tablet", lambda text: not text.isdigit() and text != ""),
    "objective": _Rule(str, f"one of {', '.join(_OBJECTIVES)}", lambda text: text in _OBJECTIVES),
    "streams": _Rule(_whole, "a number from 1 to 100000", _within(1, 100_000)),
    "replicas": _Rule(_whole, "a number from 0 to 64", _within(0, 64)),
    "context": _Rule(_whole, "a number of tokens, 0: what there is memory for", _within(0, 1e7)),
    "prompt": _Rule(_whole, "a number of tokens from 1 on", _within(1, 1e7)),
    "rate": _Rule(_number, "requests a second from 0 to 1000000", _within(0, 1e6), is_of_run=True),
    "churn": _Rule(_number, "times an hour from 0 to 3600", _within(0, 3600), is_of_run=True),
    "seconds": _Rule(_number, "seconds from 0 to 86400", _within(0, 86_400), is_of_run=True),
}  # fmt: skip


def read_axes(words: Iterable[str]) -> tuple[Axis, ...]:
    """Read NAME=VALUE,VALUE, or the path of a .toml file with lists of values by name. Raises ConfigError."""
    axes: list[Axis] = []
    for word in words:
        axes += _of_file(Path(word)) if word.endswith(".toml") and "=" not in word else [_of_word(word)]
    names = [axis.name for axis in axes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"sweep has {twice[0]} twice: give all its values at once", field="sweep")
    return tuple(axes)


def _of_word(word: str) -> Axis:
    name, equals, values = word.partition("=")
    if not (name and equals and values):
        raise ConfigError(
            f"sweep = {word!r} is not allowed; it must be NAME=VALUE,VALUE such as streams=1,8,64, or a .toml file",
            field="sweep",
        )
    return _axis(name.strip(), [value.strip() for value in values.split(",")], "")


def _of_file(path: Path) -> list[Axis]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="sweep") from None
    where = f"{path}: "
    for name, values in content.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}{name} must be a list of values such as {name} = [1, 8, 64]", field="sweep")
    return [_axis(name, values, where) for name, values in content.items()]


def _axis(name: str, values: Sequence[Any], where: str) -> Axis:
    if name not in _RULES:
        raise ConfigError(
            f"{where}{name!r} cannot be swept{meant(name, list(_RULES))}; there are {', '.join(_RULES)}", field="sweep"
        )
    read = [_value(name, value, where) for value in values]
    if len(set(read)) < len(read):
        raise ConfigError(f"{where}{name} has a value twice", field="sweep")
    return Axis(name, tuple(read))


def _value(name: str, value: Any, where: str) -> str | int | float:
    rule = _RULES[name]
    try:
        read = rule.read(value)
        is_allowed = rule.is_allowed(read)
    except (ValueError, TypeError, OverflowError):
        is_allowed = False
    if not is_allowed:
        hint = "; for a number of devices sweep fleet" if name == "devices" else ""
        raise ConfigError(f"{where}{name} = {value!r} is not allowed; it must be {rule.allowed}{hint}", field="sweep")
    return read


def cells_of(base: Cell, axes: Sequence[Axis], num_seeds: int) -> list[Cell]:
    """All combinations, the last axis first to change, each with so many seeds from the base's on. Raises ConfigError."""
    names = [axis.name for axis in axes]
    number = math.prod(len(axis.values) for axis in axes) * num_seeds
    if number > MAX_CELLS:
        raise ConfigError(f"the sweep has {number} cells; at most {MAX_CELLS} are played", field="sweep")
    if not base.is_played and (of_runs := [name for name in names if _RULES[name].is_of_run]):
        raise ConfigError(f"{', '.join(of_runs)}: of a simulation; add --simulate", field="sweep")
    if "fleet" in names and "devices" in names:
        raise ConfigError("fleet and devices are ways to say the same: sweep one of them", field="sweep")
    return [
        replace(base, **dict[str, Any](zip(names, values, strict=True)), seed=base.seed + more)
        for values in itertools.product(*(axis.values for axis in axes))
        for more in range(num_seeds)
    ]

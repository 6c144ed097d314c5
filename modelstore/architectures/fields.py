"""Reads named numbers of a model's header, whatever the format: keys of a GGUF file, entries of a config.json.

Decides what is believed: a value is of the kind asked for and within bounds far above any real model, or the error names it.
Knows no architecture; the architectures ask it, and readers make one of what they have read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from shoal.errors import BadModelFile, UnsupportedModel

T = TypeVar("T", str, int, float, bool, list[Any], dict[str, Any])

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_CONTEXT_TOKENS = 1 << 20
# So that neither a float32 nor an angle of the last position becomes infinite.
MIN_FLOAT, MAX_FLOAT = 1e-30, 1e30


class Fields:
    """Values by name; a name is looked up behind `prefix`. null is as good as absent, as in Hugging Face's files.

    where: what errors call a value, as "key" or "config.json:".
    """

    __slots__ = ("_values", "_where", "prefix")

    def __init__(self, values: Mapping[str, Any], *, prefix: str = "", where: str = "key") -> None:
        self._values = values
        self.prefix = prefix
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(self.prefix + name) is not None

    def is_stated(self, name: str) -> bool:
        """Whether the name is there, even as null."""
        return self.prefix + name in self._values

    def label(self, name: str) -> str:
        return f"{self._where} {self.prefix}{name}"

    def get(self, name: str, kind: type[T]) -> T:
        """A value of this kind; a whole number is also a float. Raises BadModelFile if it is missing or another kind."""
        if name not in self:
            raise BadModelFile(f"{self.label(name)} is missing")
        value = self._values[self.prefix + name]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        is_bool_for_number = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kind) or is_bool_for_number:
            raise BadModelFile(f"{self.label(name)} should be a {kind.__name__}, it is a {type(value).__name__}")
        return value

    def find(self, name: str, kind: type[T], default: T) -> T:
        return self.get(name, kind) if name in self else default

    def count(self, name: str, limit: int, default: int | None = None) -> int:
        """A whole number of [1, limit]."""
        return self._bounded(name, self.get(name, int) if default is None else self.find(name, int, default), limit)

    def positive(self, name: str, default: float | None = None) -> float:
        """A number of [MIN_FLOAT, MAX_FLOAT]; the default may be anything."""
        if default is not None and name not in self:
            return default
        value = self.get(name, float)
        if not MIN_FLOAT <= value <= MAX_FLOAT:
            raise BadModelFile(f"{self.label(name)} is {value}; it must be a positive number up to {MAX_FLOAT}")
        return value

    def counts(self, name: str, num_layers: int, limit: int, default: int | None = None) -> tuple[int, ...]:
        """A whole number of [1, limit] for each layer, given one by one or once for all."""
        value = self._values.get(self.prefix + name)
        if not isinstance(value, list | np.ndarray):
            return (self.count(name, limit, default),) * num_layers
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if len(values) != num_layers or not all(type(number) is int for number in values):
            raise BadModelFile(f"{self.label(name)} must be {num_layers} whole numbers, one a layer")
        return tuple(self._bounded(name, number, limit) for number in values)

    def uniform_count(self, name: str, num_layers: int, limit: int, default: int | None = None) -> int:
        """A count that must be the same in all layers; raises UnsupportedModel if it is not."""
        different = sorted(set(self.counts(name, num_layers, limit, default)))
        if len(different) > 1:
            raise UnsupportedModel(f"{self.label(name)} differs between layers ({different}), which is not supported")
        return different[0]

    def inner(self, name: str) -> Fields:
        """The values of a mapping inside; empty if there is none."""
        return Fields(self.find(name, dict, {}), where=f"{self.label(name)},")

    def require_one_of(self, name: str, allowed: tuple[str, ...], default: str) -> None:
        """Raise UnsupportedModel unless a text is one of these."""
        value = self.find(name, str, default)
        if value not in allowed:
            raise UnsupportedModel(f"{self.label(name)} is {value}; supported is {', '.join(allowed)}")

    def _bounded(self, name: str, value: int, limit: int) -> int:
        if not 1 <= value <= limit:
            raise BadModelFile(f"{self.label(name)} is {value}; it must be in [1, {limit}]")
        return value

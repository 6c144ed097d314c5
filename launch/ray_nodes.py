"""What a device asks of the Ray node that is to run it: custom resources, labels, processors, memory.

Decided by a TOML file of the operator's, with a table for each device profile; without one, by the profile alone. Knows
nothing of Ray itself. Called by `ray_fleet`; `ray_cluster` has Ray find the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.roster import Device
from shoal.errors import ConfigError
from shoal.toml_file import Rule, TomlFile, number

# Emulated devices share the cores of the machine that emulates them.
EMULATED_CPUS = 0.25
# The table for devices that have none of their own.
DEFAULT_TABLE = "default"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class NodeWish:
    """resources, labels: what the node must have; cpus and memory_bytes are Ray's book-keeping, 0 asks for none."""

    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 0.0
    memory_bytes: int = 0

    def __str__(self) -> str:
        parts = [f"{amount:g} {name}" for name, amount in self.resources.items()]
        parts += [f"label {name}={value}" for name, value in self.labels.items()]
        parts += [f"{self.cpus:g} CPUs"] if self.cpus else []
        parts += [f"{self.memory_bytes // _MIB} MiB"] if self.memory_bytes else []
        return ", ".join(parts) or "nothing"


def _are_resources(table: Mapping[Any, Any]) -> bool:
    return all(type(amount) in (int, float) and 0 < amount <= 1e6 for amount in table.values())


def _are_labels(table: Mapping[Any, Any]) -> bool:
    return all(isinstance(value, str) and value for value in table.values())


_RULES = {
    "resources": Rule((dict,), "a table of Ray's custom resources with amounts above 0", _are_resources),
    "labels": Rule((dict,), "a table of labels of Ray nodes with texts that are not empty", _are_labels),
    "cpus": number("a number of processors from 0 to 1024", lambda cpus: 0 <= cpus <= 1024),
    "memory_mib": Rule((int,), "a whole number of MiB, or 0 to ask for none", lambda mib: 0 <= mib < 2**40),
}


class NodeMap:
    """The tables of a file, or none."""

    __slots__ = ("_tables",)

    def __init__(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        self._tables = tables

    def wish(self, device: Device) -> NodeWish:
        """What a device asks for: its table says, then the default one; cpus and memory else as its profile has them."""
        profile = device.profile
        table = self._tables.get(profile.name, self._tables.get(DEFAULT_TABLE, {}))
        cpus = EMULATED_CPUS if profile.is_emulated else float(profile.num_threads)
        # Of a device that is not emulated, memory and threads were looked up here and mean nothing there.
        memory_mib = profile.memory_bytes // _MIB if profile.is_emulated else 0
        return NodeWish(
            resources={name: float(amount) for name, amount in table.get("resources", {}).items()},
            labels=dict(table.get("labels", {})),
            cpus=float(table.get("cpus", cpus)),
            memory_bytes=table.get("memory_mib", memory_mib) * _MIB,
        )


def load_map(path: Path | None) -> NodeMap:
    """Read the operator's file. Raises ConfigError that names file, line, field and what it may be."""
    if path is None:
        return NodeMap({})
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="ray_map") from error
    file = TomlFile(str(path), text, field="ray_map")
    for name, table in file.content.items():
        if not isinstance(table, dict):
            raise _refusal(file, (name,), f"is not a table; it must be a table [{name}] with {', '.join(_RULES)}")
        for key, value in table.items():
            if key not in _RULES:
                raise _refusal(file, (name, key), f"is not a field; fields are {', '.join(_RULES)}")
            if problem := _RULES[key].refusal(value):
                raise _refusal(file, (name, key), problem)
    return NodeMap(file.content)


def _refusal(file: TomlFile, path: Sequence[str], problem: str) -> ConfigError:
    name = ".".join(path)
    return ConfigError(f"{file.position(tuple(path))}: {name} {problem}", field=name)

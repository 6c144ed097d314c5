"""Reads device profiles: those shipped in `launch/devices` by their name, a user's own by its path.

Decides what a profile file may say, tells where it says something else, and fills in what a device that is not emulated
has: the memory and the cores of this machine. Knows nothing of workers: the command line and the launchers pass on the
DeviceProfile that comes out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import psutil

from shoal.errors import ConfigError
from shoal.shipped import Shipped
from shoal.toml_file import Rule, TomlFile, number, one_of
from shoal.types import (
    BatteryModel,
    DeviceLimits,
    DeviceMode,
    DeviceProfile,
    KVPolicy,
    LinkProfile,
    ThermalModel,
    ThermalState,
)

KINDS = ("phone", "tablet", "laptop", "sbc", "box", "host")

# The rest is for everything else that runs beside a worker.
MEMORY_SHARE = 0.8
# Of a device's memory, for KV blocks that no running sequence holds, where a profile does not say: on a machine with 8 GB
# free more than ten thousand tokens of a small model, and not enough to shorten what may run at the same time by much.
HOST_KV_SHARE = 0.1

_MIB = 2**20
SHIPPED = Shipped("launch", ("devices",), ".toml", "device profile", "profile")
_NUM_STATES = len(ThermalState)


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has to give."""

    available_bytes: int
    num_cores: int


def _is_name(name: str) -> bool:
    return bool(name) and name.isprintable() and not {"/", "\\"} & set(name)


def _falls(values: Sequence[float]) -> bool:
    return all(before >= after for before, after in pairwise(values))


def _is_batch_list(values: list[Any]) -> bool:
    is_list_of_rows = len(values) == _NUM_STATES and all(type(rows) is int and 1 <= rows <= 1024 for rows in values)
    return is_list_of_rows and _falls(values)


def _is_pace_list(values: list[Any]) -> bool:
    is_list_of_paces = len(values) == _NUM_STATES and all(
        type(steps) in (int, float) and (steps == 0 or 0.1 <= steps <= 1000.0) for steps in values
    )
    return is_list_of_paces and _falls([steps or float("inf") for steps in values])


_STATES = "nominal, moderate, hot and critical"
_DEGREES = number("a number of degrees Celsius above 0 and up to 150, or 0 for never", lambda least: 0 <= least <= 150)
_PERCENT = number("a number of percent from 0 to 100", lambda percent: 0 <= percent <= 100)
_WATTS = number("a number of watts from 0 to 1000", lambda watts: 0 <= watts <= 1000)

_RULES = {
    "name": Rule((str,), "a text that is not empty, of characters that can be shown, and without / or \\", _is_name),
    "kind": one_of(KINDS),
    "mode": one_of([mode.value for mode in DeviceMode]),
    "memory_mib": Rule(
        (int,), "a whole number of MiB, or 0 for what this machine has free", lambda mib: 0 <= mib < 2**40
    ),
    "host_kv_mib": Rule(
        (int,),
        "a whole number of MiB, or 0 to keep no KV; left out: a tenth of the memory",
        lambda mib: 0 <= mib < 2**40,
    ),
    "kv_policy": one_of([policy.value for policy in KVPolicy]),
    "speed": number("a number from 0.001 to 100", lambda speed: 0.001 <= speed <= 100.0),
    "threads": Rule((int,), "a whole number, or 0 for all cores of this machine", lambda count: 0 <= count <= 1024),
    "max_batch": Rule((int,), "a whole number from 1 to 1024", lambda rows: 1 <= rows <= 1024),
    "poll_ms": number("a number of milliseconds from 0 to 100", lambda poll: 0.0 <= poll <= 100.0),
    "allow_direct_links": Rule((bool,), "true or false", lambda _: True),
    "emulated": Rule((bool,), "true or false", lambda _: True),
}
_TABLE_RULES = {
    "fallback": {
        "timeout_ms": number("a number of milliseconds above 0 and up to 600000", lambda ms: 0.0 < ms <= 600_000.0),
    },
    "link": {
        "delay_ms": number("a number of milliseconds from 0 to 60000", lambda delay: 0.0 <= delay <= 60_000.0),
        "rate_mbit_s": number("a number of Mbit/s up to 1000000, or 0 for no limit", lambda rate: 0.0 <= rate <= 1e6),
    },
    "limits": {
        "moderate_c": _DEGREES,
        "hot_c": _DEGREES,
        "critical_c": _DEGREES,
        "low_battery_percent": _PERCENT,
        "critical_battery_percent": _PERCENT,
        "busy_load": number(
            "the share of its processors that other programs take, up to 1, or 0 for never", lambda load: 0 <= load <= 1
        ),
        "max_batch": Rule(
            (list,),
            f"four whole numbers from 1 to 1024, for {_STATES}, none above the one before it",
            _is_batch_list,
        ),
        "steps_per_s": Rule(
            (list,),
            f"four numbers from 0.1 to 1000, for {_STATES}, none above the one before it; 0, for no limit, only in front",
            _is_pace_list,
        ),
    },
    "thermal": {
        "ambient_c": number("a number of degrees Celsius from -40 to 60", lambda degrees: -40 <= degrees <= 60),
        "heat_c_per_s": number("a number of degrees Celsius a second from 0 to 100", lambda heat: 0 <= heat <= 100),
        "cooling_per_s": number("a number from 0.00001 to 10", lambda cooling: 1e-5 <= cooling <= 10),
    },
    "battery": {
        "capacity_wh": number("a number of Wh up to 100000, or 0 for none", lambda capacity: 0 <= capacity <= 1e5),
        "start_percent": _PERCENT,
        "active_w": _WATTS,
        "idle_w": _WATTS,
    },
}
_REQUIRED = ("name", "kind", "memory_mib")
# Kept by emulation only; table -> what it is when the file says nothing.
_EMULATED_TABLES = {"link": LinkProfile(), "thermal": ThermalModel(), "battery": BatteryModel()}


def measure_machine() -> Machine:
    """Look up free memory and usable cores."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Machine(psutil.virtual_memory().available, num_cores)


def load_profile(name_or_path: str, measure: Callable[[], Machine] = measure_machine) -> DeviceProfile:
    """Read a shipped profile by name, or a file whose path has a separator or ends in .toml.

    Raises ConfigError that names the file, the line, the field and what it may be.
    """
    file = TomlFile(*SHIPPED.read(name_or_path), field="profile")
    top = {field: value for field, value in file.content.items() if field not in _TABLE_RULES}
    for field, value in file.content.items():
        if field not in _TABLE_RULES:
            _check(file, (field,), value, _RULES)
            continue
        if not isinstance(value, dict):
            fields = ", ".join(_TABLE_RULES[field])
            raise _refusal(file, (field,), f"is not a table; it must be a table [{field}] with {fields}")
        for inner, inner_value in value.items():
            _check(file, (field, inner), inner_value, _TABLE_RULES[field])
    for field in _REQUIRED:
        if field not in top:
            raise ConfigError(f"{file.name}: {field} is missing; it must be {_RULES[field].allowed}", field=field)
    profile = _build(top, {table: file.content.get(table, {}) for table in _TABLE_RULES}, measure)
    _check_room(file, profile)
    _check_thresholds(file, profile.limits)
    _check_emulation(file, profile)
    return profile


def to_toml(profile: DeviceProfile) -> str:
    """The file from which load_profile reads this profile again; memory is rounded down to whole MiB."""
    fields = {
        "name": profile.name,
        "kind": profile.kind,
        "mode": profile.mode.value,
        "memory_mib": max(1, profile.memory_bytes // 2**20),
        "host_kv_mib": profile.host_kv_bytes // 2**20,
        "kv_policy": profile.kv_policy.value,
        "speed": profile.speed,
        "threads": profile.num_threads,
        "max_batch": profile.max_batch,
        "poll_ms": profile.poll_ms,
        "allow_direct_links": profile.allow_direct_links,
        "emulated": profile.is_emulated,
    }
    tables = {
        "fallback": {"timeout_ms": profile.fallback_timeout_ms},
        # A list that is empty says as much as one that is not there, which is how a file says it.
        "limits": {name: value for name, value in asdict(profile.limits).items() if value != ()},
        "link": asdict(profile.link),
        "thermal": asdict(profile.thermal),
        "battery": asdict(profile.battery),
    }
    return _to_lines(fields) + "".join(f"[{table}]\n{_to_lines(content)}" for table, content in tables.items())


def _to_lines(fields: Mapping[str, object]) -> str:
    # JSON's texts, numbers, lists and truth values are TOML's too.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


def _check(file: TomlFile, path: tuple[str, ...], value: Any, rules: Mapping[str, Rule]) -> None:
    key = path[-1]
    if key not in rules:
        raise _refusal(file, path, f"is not a field of {_fields_of(path[:-1])}{_right_place(key)}")
    if problem := rules[key].refusal(value):
        raise _refusal(file, path, problem)


def _refusal(file: TomlFile, path: tuple[str, ...], problem: str) -> ConfigError:
    field = ".".join(path)
    return ConfigError(f"{file.position(path)}: {field} {problem}", field=field)


def _fields_of(table: tuple[str, ...]) -> str:
    if table:
        return f"[{table[0]}]; fields are " + ", ".join(_TABLE_RULES[table[0]])
    tables = ", ".join(f"[{name}]" for name in _TABLE_RULES)
    return f"a profile; fields are {', '.join(_RULES)}, and tables {tables}"


def _right_place(key: str) -> str:
    """A field that was given elsewhere than where it belongs, as after a table that was to end."""
    places = [f"in [{table}]" for table, rules in _TABLE_RULES.items() if key in rules]
    places += ["before the first table"] if key in _RULES else []
    return f" ({key} belongs {' or '.join(places)})" if places else ""


def _build(top: Mapping[str, Any], tables: Mapping[str, Any], measure: Callable[[], Machine]) -> DeviceProfile:
    memory_bytes, num_threads = top["memory_mib"] * _MIB, top.get("threads", 1)
    if memory_bytes == 0 or num_threads == 0:
        machine = measure()
        memory_bytes = memory_bytes or int(machine.available_bytes * MEMORY_SHARE)
        num_threads = num_threads or machine.num_cores
    return DeviceProfile(
        name=top["name"],
        kind=top["kind"],
        mode=DeviceMode(top.get("mode", DeviceMode.MIXED.value)),
        memory_bytes=memory_bytes,
        host_kv_bytes=top.get("host_kv_mib", int(memory_bytes * HOST_KV_SHARE) // _MIB) * _MIB,
        kv_policy=KVPolicy(top.get("kv_policy", KVPolicy.EXACT)),
        speed=float(top.get("speed", 1.0)),
        num_threads=num_threads,
        max_batch=top.get("max_batch", 16),
        poll_ms=float(top.get("poll_ms", 0.0)),
        allow_direct_links=top.get("allow_direct_links", True),
        is_emulated=top.get("emulated", False),
        fallback_timeout_ms=float(tables["fallback"].get("timeout_ms", 200.0)),
        link=LinkProfile(**_floats(tables["link"])),
        limits=_limits(tables["limits"]),
        thermal=ThermalModel(**_floats(tables["thermal"])),
        battery=BatteryModel(**_floats(tables["battery"])),
    )


def _floats(table: Mapping[str, Any]) -> dict[str, float]:
    return {field: float(value) for field, value in table.items()}


def _limits(table: Mapping[str, Any]) -> DeviceLimits:
    given: dict[str, Any] = dict(_floats({field: value for field, value in table.items() if type(value) is not list}))
    if "max_batch" in table:
        given["max_batch"] = tuple(table["max_batch"])
    if "steps_per_s" in table:
        given["steps_per_s"] = tuple(float(steps) for steps in table["steps_per_s"])
    return DeviceLimits(**given)


def _check_room(file: TomlFile, profile: DeviceProfile) -> None:
    if profile.shard_bytes <= 0:
        raise _refusal(
            file,
            ("host_kv_mib",),
            f"= {profile.host_kv_bytes // _MIB} is not allowed; it is a part of the memory, which is "
            f"{profile.memory_bytes // _MIB} MiB, and must leave some of it",
        )


def _check_thresholds(file: TomlFile, limits: DeviceLimits) -> None:
    """A worse state must begin at a higher temperature, and at a lower battery, than a better one."""
    rising = [(field, getattr(limits, field)) for field in ("moderate_c", "hot_c", "critical_c")]
    for (milder, least), (worse, value) in pairwise([pair for pair in rising if pair[1] > 0.0]):
        if value <= least:
            raise _refusal(
                file, ("limits", worse), f"= {value:g} is not allowed; it must be above {milder}, which is {least:g}"
            )
    low, critical = limits.low_battery_percent, limits.critical_battery_percent
    if 0.0 < low <= critical:
        raise _refusal(
            file,
            ("limits", "critical_battery_percent"),
            f"= {critical:g} is not allowed; it must be below low_battery_percent, which is {low:g}",
        )


def _check_emulation(file: TomlFile, profile: DeviceProfile) -> None:
    if profile.is_emulated and profile.speed > 1.0:
        raise _refusal(
            file,
            ("speed",),
            f"= {profile.speed:g} cannot be emulated; it must be above 0 and at most 1, the speed of this machine",
        )
    for table, default in _EMULATED_TABLES.items():
        if not profile.is_emulated and getattr(profile, table) != default:
            raise _refusal(file, (table,), f"is kept by emulation only; set emulated = true or remove [{table}]")

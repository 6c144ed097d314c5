"""Reads device profiles: those shipped in `launch/devices` by their name, a user's own by its path.

Decides what a profile file may say, and fills in what a device that is not emulated has: the memory and the cores of
this machine. Knows nothing of workers: the command line and the launchers pass on the DeviceProfile that comes out.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil

from shoal.errors import ConfigError
from shoal.types import DeviceProfile, LinkProfile

KINDS = ("phone", "tablet", "laptop", "box", "host")

# The rest is for everything else that runs beside a worker.
MEMORY_SHARE = 0.8

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has to give."""

    available_bytes: int
    num_cores: int


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a field may hold: its TOML types, its allowed values in words, and the check of them."""

    types: tuple[type, ...]
    allowed: str
    is_allowed: Callable[[Any], bool]


_RULES = {
    "name": _Rule((str,), "a text that is not empty", bool),
    "kind": _Rule((str,), "one of " + ", ".join(KINDS), lambda kind: kind in KINDS),
    "memory_mib": _Rule(
        (int,), "a whole number of MiB, or 0 for what this machine has free", lambda mib: 0 <= mib < 2**40
    ),
    "speed": _Rule((int, float), "a number above 0 and at most 100", lambda speed: 0.0 < speed <= 100.0),
    "threads": _Rule((int,), "a whole number, or 0 for all cores of this machine", lambda count: 0 <= count <= 1024),
    "max_batch": _Rule((int,), "a whole number from 1 to 1024", lambda rows: 1 <= rows <= 1024),
    "poll_ms": _Rule((int, float), "a number of milliseconds from 0 to 100", lambda poll: 0.0 <= poll <= 100.0),
    "allow_direct_links": _Rule((bool,), "true or false", lambda _: True),
    "emulated": _Rule((bool,), "true or false", lambda _: True),
}
_LINK_RULES = {
    "delay_ms": _Rule((int, float), "a number of milliseconds from 0 to 60000", lambda delay: 0.0 <= delay <= 60_000.0),
    "rate_mbit_s": _Rule((int, float), "a number of Mbit/s, or 0 for no limit", lambda rate: 0.0 <= rate <= 1e6),
}
_REQUIRED = ("name", "kind", "memory_mib")


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with Shoal."""
    names = (entry.name for entry in _shipped().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def measure_machine() -> Machine:
    """Look up free memory and usable cores."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Machine(psutil.virtual_memory().available, num_cores)


def load_profile(name_or_path: str, measure: Callable[[], Machine] = measure_machine) -> DeviceProfile:
    """Read a shipped profile by name, or a file whose path has a separator or ends in .toml.

    Raises ConfigError that names the file, the field and what it may be.
    """
    where, text = _read(name_or_path)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    link = content.pop("link", {})
    if not isinstance(link, dict):
        raise ConfigError(f"{where}: link must be a table [link] with {_listed(_LINK_RULES)}", field="link")
    _check(where, content, _RULES, prefix="")
    _check(where, link, _LINK_RULES, prefix="link.")
    for field in _REQUIRED:
        if field not in content:
            raise ConfigError(f"{where}: {field} is missing; it must be {_RULES[field].allowed}", field=field)
    profile = _build(content, link, measure)
    _check_emulation(where, profile)
    return profile


def _shipped() -> Any:
    return files("launch").joinpath("devices")


def _read(name_or_path: str) -> tuple[str, str]:
    """Return what to call the file in messages, and its text."""
    is_path = name_or_path.endswith(".toml") or "/" in name_or_path or os.sep in name_or_path
    entry = Path(name_or_path) if is_path else _shipped().joinpath(f"{name_or_path}.toml")
    try:
        return str(entry), entry.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no device profile {name_or_path!r}; shipped are {', '.join(shipped_names())}, or give the path "
            "of a .toml file",
            field="profile",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{entry}: cannot be read: {error}", field="profile") from error


def _check(where: str, content: Mapping[str, Any], rules: Mapping[str, _Rule], *, prefix: str) -> None:
    for key, value in content.items():
        name = prefix + key
        if key not in rules:
            raise ConfigError(f"{where}: {name} is not a field of a profile; fields are {_listed(rules)}", field=name)
        # bool is an int to isinstance, but `threads = true` is a mistake.
        if type(value) not in rules[key].types or not rules[key].is_allowed(value):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ConfigError(f"{where}: {name} = {shown} is not allowed; it must be {rules[key].allowed}", field=name)


def _build(content: Mapping[str, Any], link: Mapping[str, Any], measure: Callable[[], Machine]) -> DeviceProfile:
    memory_bytes, num_threads = content["memory_mib"] * _MIB, content.get("threads", 1)
    if memory_bytes == 0 or num_threads == 0:
        machine = measure()
        memory_bytes = memory_bytes or int(machine.available_bytes * MEMORY_SHARE)
        num_threads = num_threads or machine.num_cores
    return DeviceProfile(
        name=content["name"],
        kind=content["kind"],
        memory_bytes=memory_bytes,
        speed=float(content.get("speed", 1.0)),
        num_threads=num_threads,
        max_batch=content.get("max_batch", 16),
        poll_ms=float(content.get("poll_ms", 0.0)),
        allow_direct_links=content.get("allow_direct_links", True),
        link=LinkProfile(float(link.get("delay_ms", 0.0)), float(link.get("rate_mbit_s", 0.0))),
        is_emulated=content.get("emulated", False),
    )


def _check_emulation(where: str, profile: DeviceProfile) -> None:
    if profile.is_emulated and profile.speed > 1.0:
        raise ConfigError(
            f"{where}: speed = {profile.speed} cannot be emulated; it must be above 0 and at most 1, the speed of this "
            "machine",
            field="speed",
        )
    if not profile.is_emulated and profile.link != LinkProfile():
        raise ConfigError(
            f"{where}: link limits are kept by emulation only; set emulated = true or remove [link]", field="link"
        )


def _listed(rules: Mapping[str, _Rule]) -> str:
    return ", ".join(rules)

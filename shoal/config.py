"""The options of orchestrator and worker: each field is the one definition of a flag, an environment name and its help.

Decides defaults, ranges and precedence (given by hand > SHOAL_<FIELD> > default). Knows nothing of command lines: `cli`
builds its flags from `options()`, and launchers and tests construct the dataclasses directly.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from platformdirs import user_data_path

from shoal.errors import ConfigError
from shoal.types import DeviceMode, LinkProfile, Objective, QosClass

DEFAULT_PORT = 50070
MAX_PORT = 65535
# In the place of an orchestrator's address: look for one on the network; with :NAME behind it, for that one.
DISCOVER = "discover"
# An hour: more is no target of an answer.
MAX_TARGET_MS = 3_600_000.0

# As in profiles.
MAX_DELAY_MS = 60_000.0
MAX_RATE_MBIT_S = 1e6
_LINK_PART = re.compile(r"^(\d+(?:\.\d+)?)(ms|mbit)$")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class Config(Protocol):
    """Any of the dataclasses below."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Option:
    """An option as a user meets it; env is read where the flag is not given."""

    name: str
    flag: str
    env: str
    type: type
    default: Any
    help: str


def default_home() -> Path:
    """Return where models and caches are kept: SHOAL_HOME, or this user's data directory."""
    home = os.environ.get("SHOAL_HOME")
    return Path(home) if home else user_data_path("shoal", appauthor=False)


def _help(
    text: str, *, at_least: float | None = None, at_most: float = math.inf, above: float | None = None
) -> dict[str, Any]:
    """Make a field's metadata: its help, and the range of a number; at_least=1 forbids an empty text."""
    return {"help": text, "at_least": at_least, "at_most": at_most, "above": above}


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """Options of the process that decides."""

    host: str = field(default="127.0.0.1", metadata=_help("Address to listen on.", at_least=1))
    port: int = field(
        default=DEFAULT_PORT, metadata=_help("Port to listen on; 0: any that is free.", at_least=0, at_most=MAX_PORT)
    )
    model: str = field(default="smollm2-135m", metadata=_help("Name of the stored model to serve.", at_least=1))
    home: Path = field(default_factory=default_home, metadata=_help("Where models and caches are kept."))
    expect_workers: int = field(
        default=1, metadata=_help("Devices to wait for before the layers are placed.", at_least=1, at_most=1024)
    )
    max_sequences: int = field(
        default=16, metadata=_help("Most sequences computed at the same time.", at_least=1, at_most=1024)
    )
    context_tokens: int = field(
        default=0, metadata=_help("Longest sequence, prompt and answer; 0: what model and memory allow.", at_least=0)
    )
    split: str = field(
        default="", metadata=_help("Layers of each stage, as 12,10,8; empty: by the devices' memory and speed.")
    )
    use_sockets: bool = field(
        default=True, metadata=_help("Plain sockets for activations where both ends have them; else gRPC alone.")
    )
    drain_s: float = field(
        default=10.0, metadata=_help("Seconds running answers get to end after SIGTERM.", at_least=0)
    )
    lease_s: float = field(
        default=5.0,
        metadata=_help("Seconds without a heartbeat until a device is lost; frozen ones take two.", above=0),
    )
    heartbeat_s: float = field(default=1.0, metadata=_help("Seconds between a device's heartbeats.", above=0))
    burst_steps: int = field(
        default=16, metadata=_help("Most decode steps granted at once while nobody waits.", at_least=1, at_most=1024)
    )
    qos: str = field(
        default="balanced",
        metadata=_help("Class of requests that name none: latency, balanced or throughput.", at_least=1),
    )
    max_waiting: int = field(
        default=256, metadata=_help("Most requests of one tenant that may wait.", at_least=1, at_most=100_000)
    )
    tenant_weights: str = field(
        default="", metadata=_help("Shares of tenants under load, as gold=4,free=1; 1 for those not named.")
    )
    objective: str = field(
        default="throughput",
        metadata=_help("What plans are good for: latency (a lone stream), throughput, or mixed (both).", at_least=1),
    )
    replicas: int = field(
        default=1,
        metadata=_help(
            "Pipelines of the devices not kept for latency; 0: as many as give most tokens.", at_least=0, at_most=64
        ),
    )
    ttft_ms: float = field(
        default=2000.0,
        metadata=_help("Milliseconds to the first token that class balanced aims at.", above=0, at_most=MAX_TARGET_MS),
    )
    inter_token_ms: float = field(
        default=100.0,
        metadata=_help("Milliseconds between tokens that class balanced aims at.", above=0, at_most=MAX_TARGET_MS),
    )
    chunk_tokens: int = field(default=64, metadata=_help("Most prompt tokens in one step.", at_least=8, at_most=4096))
    redis_url: str = field(
        default="",
        # It may have a password: not shown where the configuration is.
        repr=False,
        metadata=_help(
            "Redis that keeps KV and sessions, as unix://PATH, redis:// or rediss://HOST:PORT/DB; empty: none."
        ),
    )

    discoverable: bool = field(
        default=False,
        metadata=_help("Let workers on this network find it by --join discover; takes the extra shoal[discovery]."),
    )
    session_ttl_s: float = field(
        default=7 * 86400.0,
        metadata=_help("Seconds until a session that nobody uses is deleted.", above=0, at_most=10 * 365 * 86400.0),
    )

    def __post_init__(self) -> None:
        _check_ranges(self)
        if self.context_tokens == 1:
            raise _refusal("context_tokens", 1, "0 or at least 2: a token of a prompt and one of its answer")
        _check_choice("qos", self.qos, [qos.value for qos in QosClass])
        _check_choice("objective", self.objective, [objective.value for objective in Objective])
        if self.lease_s <= self.heartbeat_s:
            raise ConfigError(
                f"lease_s = {self.lease_s} must be more than heartbeat_s = {self.heartbeat_s}, or every device is lost "
                "between two heartbeats",
                field="lease_s",
            )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Options of the process that computes."""

    join: str = field(
        default=f"127.0.0.1:{DEFAULT_PORT}",
        metadata=_help(
            "The orchestrator's address, HOST:PORT; discover: look on this network; discover:NAME: for that one.",
            at_least=1,
        ),
    )
    worker_id: str = field(default="", metadata=_help("Name in the fleet; empty: made from the device's name."))
    home: Path = field(default_factory=default_home, metadata=_help("Where downloaded weights are kept."))
    host: str = field(default="127.0.0.1", metadata=_help("Address to listen on for other devices.", at_least=1))
    port: int = field(
        default=0, metadata=_help("Port to listen on; 0: any that is free.", at_least=0, at_most=MAX_PORT)
    )
    mode: str = field(
        default="", metadata=_help("What the device is for: mixed, latency or throughput; empty: as its profile says.")
    )
    threads: int = field(
        default=0, metadata=_help("Compute threads; 0: as the device's profile says.", at_least=0, at_most=1024)
    )
    use_sockets: bool = field(
        default=True, metadata=_help("Plain sockets for activations where both ends have them; else gRPC alone.")
    )
    link: str = field(
        default="",
        metadata=_help("Delay and rate of the emulated link, as 40ms,10mbit or one of them; empty: the profile's."),
    )
    kv_trace: str = field(
        default="", metadata=_help("File to add what happens to each KV block to, a JSON object a line; empty: none.")
    )
    redis_url: str = field(
        default="",
        # It may have a password: not shown where the configuration is.
        repr=False,
        metadata=_help(
            "Redis that keeps KV and sessions, as unix://PATH, redis:// or rediss://HOST:PORT/DB; empty: none."
        ),
    )

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_choice("mode", self.mode, ["", *(mode.value for mode in DeviceMode)])
        parse_link(self.link)
        host, _, port = self.join.rpartition(":")
        is_address = host and port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT
        if not is_address and self.discovers is None:
            raise _refusal(
                "join", self.join, f"HOST:PORT, with a port from 1 to {MAX_PORT}, or {DISCOVER}, or {DISCOVER}:NAME"
            )

    @property
    def discovers(self) -> str | None:
        """The name of the orchestrator to look for on the network; empty: any. None: there is an address.

        A number behind the colon is a port, of a host of that name.
        """
        word, colon, name = self.join.partition(":")
        if word != DISCOVER or (colon and (not name or name.isdigit())):
            return None
        return name


def parse_link(text: str) -> LinkProfile | None:
    """Read delay and rate of an emulated link, as 40ms,10mbit or one of them; None: nothing is said. Raises ConfigError."""
    if not text:
        return None
    found = {unit: value for part in text.split(",") for value, unit in _LINK_PART.findall(part.strip())}
    link = LinkProfile(delay_ms=float(found.get("ms", 0.0)), rate_mbit_s=float(found.get("mbit", 0.0)))
    if len(found) != len(text.split(",")) or link.delay_ms > MAX_DELAY_MS or link.rate_mbit_s > MAX_RATE_MBIT_S:
        raise _refusal("link", text, "as 40ms,10mbit, or one of them: up to a minute, and up to 1000000 Mbit/s")
    return link


def options(cls: type[Config]) -> list[Option]:
    """Return every option of a configuration, in the order of its fields."""
    types = get_type_hints(cls)
    return [
        Option(
            name=item.name,
            flag=_flag(item.name),
            env=_env(item.name),
            type=types[item.name],
            default=item.default_factory() if item.default_factory is not MISSING else item.default,
            help=item.metadata["help"],
        )
        for item in fields(cls)
    ]


def from_environment(cls: type[C], overrides: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> C:
    """Build a configuration; an override that is None counts as not given, an empty variable as not set.

    A variable with _FILE behind its name says which file has the value: for what is secret, as container engines mount it.
    Raises ConfigError that names the flag or the variable, its value and what is allowed.
    """
    values: dict[str, Any] = {}
    for option in options(cls):
        override = overrides.get(option.name)
        if override is not None:
            values[option.name] = _checked(option, override)
        elif text := environ.get(option.env) or _read_file(option.env + "_FILE", environ):
            values[option.name] = _parsed(option, text)
    unknown = overrides.keys() - {option.name for option in options(cls)}
    if unknown:
        raise ConfigError(f"{', '.join(sorted(unknown))}: not an option of {cls.__name__}")
    return cls(**values)


def _read_file(variable: str, environ: Mapping[str, str]) -> str:
    """The content of the file that a variable names, without the space around it; empty if there is no variable."""
    path = environ.get(variable)
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{variable}: {path} cannot be read ({error}); it must be a text file with the value"
        ) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _env(name: str) -> str:
    return "SHOAL_" + name.upper()


def _refusal(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"{name} = {str(value)!r} is not allowed; it must be {allowed} (set by {_flag(name)} or {_env(name)})",
        field=name,
    )


def _checked(option: Option, value: object) -> object:
    """Let a value of the option's type pass, a whole number for a decimal one too; parse a text."""
    if option.type is Path and isinstance(value, str):
        return Path(value)
    if option.type is float and type(value) is int:
        return float(value)
    if type(value) is option.type or (option.type is Path and isinstance(value, Path)):
        return value
    if isinstance(value, str):
        return _parsed(option, value)
    raise _refusal(option.name, value, _form(option.type))


def _parsed(option: Option, text: str) -> object:
    if option.type is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise _refusal(option.name, text, _form(bool))
    try:
        return option.type(text)
    except ValueError as error:
        raise _refusal(option.name, text, _form(option.type)) from error


def _form(kind: type) -> str:
    forms = {bool: f"one of {', '.join(_TRUE + _FALSE)}", int: "a whole number", float: "a number", Path: "a path"}
    return forms.get(kind, "a text")


def _check_ranges(config: Config) -> None:
    for item in fields(config):
        at_least, above, at_most = (item.metadata[key] for key in ("at_least", "above", "at_most"))
        value = getattr(config, item.name)
        if isinstance(value, str) and at_least is not None and not value.strip():
            raise _refusal(item.name, value, "a text that is not empty")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        is_within = math.isfinite(value) and value <= at_most
        is_within = is_within and (at_least is None or value >= at_least) and (above is None or value > above)
        if not is_within:
            raise _refusal(item.name, value, _range(at_least, above, at_most))


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise _refusal(name, value, "one of " + ", ".join(choice for choice in choices if choice))


def _range(at_least: float | None, above: float | None, at_most: float) -> str:
    if not math.isfinite(at_most):
        return f"{at_least} or more" if above is None else f"more than {above}"
    return f"from {at_least} to {at_most}" if above is None else f"more than {above} and at most {at_most:.10g}"

"""What a load is made of: streams of requests of a class and tenant, their lengths, shared prefixes and turns.

Decides what a workload file (TOML) may say; shipped ones are in `loadtest/data/workloads`, found by name, a user's own by
its path. Knows nothing of arrivals, texts or targets: `scenarios` makes plans of a Workload, the command line loads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loadtest.amounts import Amount, Shape, fixed
from loadtest.plan import Slo
from loadtest.prompts import NUM_SERIAL_WORDS
from shoal.errors import ConfigError
from shoal.shipped import Shipped
from shoal.toml_file import Rule, TomlFile, number, one_of
from shoal.types import QosClass

# Source: MLPerf LoadGen, mlperf.conf of llama3.1-8b: interactive 500/30 ms and server 2000/100 ms, offline none.
DEFAULT_SLOS = {
    QosClass.LATENCY: Slo(ttft_s=0.5, tpot_s=0.03),
    QosClass.BALANCED: Slo(ttft_s=2.0, tpot_s=0.1),
    QosClass.THROUGHPUT: Slo(),
}

# A shorter prompt could not be unlike every other.
MIN_PROMPT_TOKENS = NUM_SERIAL_WORDS + 1
MAX_TOKENS = 131_072
MAX_TURNS = 100
# What a phone lab's models take at ease; longer conversations end early.
DEFAULT_MAX_PROMPT_TOKENS = 1024
# Time to read a short answer and type the next question (assumption).
DEFAULT_THINK_S = 5.0


ONE_TURN = fixed(1)


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one kind.

    share: of all requests, in any unit. prefix_tokens come first in every prompt, one of num_prefixes texts for each
    conversation; prompt_tokens are a turn's own. A turn's prompt is all that was said before, words of the planned length
    standing in for answers, and then its own. It is due think_s after the turn before, or later. A conversation ends
    early where its next prompt would be longer than max_prompt_tokens. max_tokens_per_s: pacing, 0 for none.
    """

    name: str
    prompt_tokens: Amount
    output_tokens: Amount
    share: float = 1.0
    qos: QosClass = QosClass.BALANCED
    tenant: str = ""
    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: Amount = ONE_TURN
    think_s: float = DEFAULT_THINK_S
    max_prompt_tokens: int = DEFAULT_MAX_PROMPT_TOKENS
    max_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams that make a load together. rate_per_s: of all requests, where the file gives rates; None if it gives shares.

    slos: of every class; what the file does not mention is as in DEFAULT_SLOS.
    """

    name: str
    streams: tuple[Stream, ...]
    slos: dict[QosClass, Slo]
    description: str = ""
    rate_per_s: float | None = None


def _whole(least: int, most: int, unit: str = "") -> Rule:
    unit = f" of {unit}" if unit else ""
    return Rule((int,), f"a whole number{unit} from {least} to {most}", lambda count: least <= count <= most)


SHIPPED = Shipped("loadtest", ("data", "workloads"), ".toml", "workload", "workload")
_CLASSES = tuple(qos.value for qos in QosClass)
_SHAPES = tuple(shape.value for shape in Shape)
_MILLISECONDS = number("a number of milliseconds, or 0 for none", lambda limit: limit >= 0.0)
_TEXT = Rule((str,), "a text that is not empty", bool)
# Lengths are amounts: they have rules of their own.
_ANY = Rule((int, dict), "a whole number or a table", lambda _: True)

_WORKLOAD_RULES = {
    "name": _TEXT,
    "description": Rule((str,), "a text", lambda _: True),
    "stream": Rule((list,), "tables [[stream]], at least one", lambda tables: bool(tables)),
    "slo": Rule((dict,), "tables [slo.CLASS] with CLASS one of " + ", ".join(_CLASSES), lambda _: True),
}
_STREAM_RULES = {
    "name": _TEXT,
    "share": number("a number above 0", lambda share: share > 0.0),
    "rate_per_s": number("a number of requests per second above 0", lambda rate: rate > 0.0),
    "qos": one_of(_CLASSES),
    "tenant": Rule((str,), "at most 64 printable characters", lambda name: len(name) <= 64 and name.isprintable()),
    "prompt_tokens": _ANY,
    "output_tokens": _ANY,
    "turns": _ANY,
    "prefix_tokens": _whole(0, MAX_TOKENS, "tokens"),
    "num_prefixes": _whole(1, 10_000),
    "think_s": number("a number of seconds, 0 or more", lambda seconds: seconds >= 0.0),
    "max_prompt_tokens": _whole(MIN_PROMPT_TOKENS, MAX_TOKENS, "tokens"),
    "max_tokens_per_s": number("a number from 0 (no pacing) to 1000", lambda rate: 0.0 <= rate <= 1000.0),
}
_SLO_RULES = {"ttft_ms": _MILLISECONDS, "tpot_ms": _MILLISECONDS, "e2e_ms": _MILLISECONDS}
_FIELDS_OF_SHAPE = {
    Shape.FIXED: ("tokens",),
    Shape.UNIFORM: ("min", "max"),
    Shape.LOGNORMAL: ("median", "sigma", "min", "max"),
}
_REQUIRED = ("name", "prompt_tokens", "output_tokens")


def load_workload(name_or_path: str) -> Workload:
    """Read a shipped workload by name, or a file whose path has a separator or ends in .toml.

    Raises ConfigError that names the file, the line, the field and what it may be.
    """
    where, text = SHIPPED.read(name_or_path)
    return parse_workload(text, where)


def parse_workload(text: str, where: str) -> Workload:
    """Read a workload from TOML; where: what to call the file in errors. Raises ConfigError as load_workload()."""
    file = TomlFile(where, text, field="workload")
    top = _Place(file)
    _check(top, file.content, _WORKLOAD_RULES)
    _require(top, file.content, ("name", "stream"), _WORKLOAD_RULES)
    tables = file.content["stream"]
    names = [_stream_name(top.of("stream"), index, table) for index, table in enumerate(tables)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _Place(file, ("stream", index, "name"), "stream.name").refusal(
                f"= {name!r}: two streams have one name; each needs its own"
            )
    shares, rate_per_s = _shares(file, tables)
    return Workload(
        name=file.content["name"],
        description=file.content.get("description", ""),
        streams=tuple(
            _stream(_stream_place(file, index, name), table, share)
            for index, (name, table, share) in enumerate(zip(names, tables, shares, strict=True))
        ),
        slos=_slos(top, file.content.get("slo", {})),
        rate_per_s=rate_per_s,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A field or table of a file. path: the keys that lead there; shown: what messages call it, "" for the file."""

    file: TomlFile
    path: tuple[str | int, ...] = ()
    shown: str = ""

    def of(self, key: str) -> _Place:
        """A field of this table."""
        # A stream is called by its name, which is no key: "stream a: share", but "slo.latency.ttft_ms".
        separator = ": " if self.path[:1] == ("stream",) and len(self.path) == 2 else "." if self.shown else ""
        return _Place(self.file, (*self.path, key), f"{self.shown}{separator}{key}")

    def refusal(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.file.position(self.path)}: {self.shown} {problem}", field=self.shown)

    def not_allowed(self, shown: str, allowed: str) -> ConfigError:
        return self.refusal(f"= {shown} is not allowed; it must be {allowed}")


def _stream_place(file: TomlFile, index: int, name: object) -> _Place:
    return _Place(file, ("stream", index), f"stream {name or index + 1}")


def _check(place: _Place, content: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for key, value in content.items():
        if key not in rules:
            raise place.of(key).refusal(f"is not a field of a workload; fields are {', '.join(rules)}")
        if problem := rules[key].refusal(value):
            raise place.of(key).refusal(problem)


def _require(place: _Place, content: Mapping[str, Any], names: tuple[str, ...], rules: Mapping[str, Rule]) -> None:
    for name in names:
        if name not in content:
            raise place.of(name).refusal(f"is missing; it must be {rules[name].allowed}")


def _stream_name(streams: _Place, index: int, table: object) -> str:
    """Check a stream's fields one by one; return its name."""
    if not isinstance(table, dict):
        raise streams.not_allowed(repr(table), _WORKLOAD_RULES["stream"].allowed)
    place = _stream_place(streams.file, index, table.get("name"))
    _check(place, table, _STREAM_RULES)
    _require(place, table, _REQUIRED, _STREAM_RULES)
    return str(table["name"])


def _shares(file: TomlFile, tables: list[dict[str, Any]]) -> tuple[list[float], float | None]:
    """Return the streams' shares, and the rate of all of them where the file has rates."""
    with_rate = [index for index, table in enumerate(tables) if "rate_per_s" in table]
    if with_rate and (len(with_rate) < len(tables) or any("share" in table for table in tables)):
        raise _Place(file, ("stream", with_rate[0], "rate_per_s"), "rate_per_s").refusal(
            "must be given for all streams and share for none, or the other way round"
        )
    field = "rate_per_s" if with_rate else "share"
    shares = [float(table.get(field, 1.0)) for table in tables]
    if math.isinf(sum(shares)):
        largest = shares.index(max(shares))
        raise (
            _stream_place(file, largest, tables[largest]["name"])
            .of(field)
            .not_allowed(repr(tables[largest][field]), "so small that all streams' have a finite sum")
        )
    return shares, sum(shares) if with_rate else None


def _stream(place: _Place, table: Mapping[str, Any], share: float) -> Stream:
    stream = Stream(
        name=table["name"],
        share=share,
        qos=QosClass(table.get("qos", QosClass.BALANCED.value)),
        tenant=table.get("tenant", ""),
        prompt_tokens=_amount(place.of("prompt_tokens"), table["prompt_tokens"], MIN_PROMPT_TOKENS, MAX_TOKENS),
        output_tokens=_amount(place.of("output_tokens"), table["output_tokens"], 1, MAX_TOKENS),
        prefix_tokens=table.get("prefix_tokens", 0),
        num_prefixes=table.get("num_prefixes", 1),
        turns=_amount(place.of("turns"), table.get("turns", 1), 1, MAX_TURNS),
        think_s=float(table.get("think_s", DEFAULT_THINK_S)),
        max_prompt_tokens=table.get("max_prompt_tokens", DEFAULT_MAX_PROMPT_TOKENS),
        max_tokens_per_s=float(table.get("max_tokens_per_s", 0.0)),
    )
    longest = stream.prefix_tokens + stream.prompt_tokens.maximum
    if longest > stream.max_prompt_tokens:
        allowed = f"at least prefix_tokens and the longest of prompt_tokens, {longest}"
        raise place.of("max_prompt_tokens").not_allowed(str(stream.max_prompt_tokens), allowed)
    if 0 < stream.prefix_tokens < MIN_PROMPT_TOKENS:
        allowed = f"0 or at least {MIN_PROMPT_TOKENS}"
        raise place.of("prefix_tokens").not_allowed(str(stream.prefix_tokens), allowed)
    return stream


def _amount(place: _Place, value: int | dict[str, Any], least: int, most: int) -> Amount:
    """Read a number, or a table with a distribution of numbers from `least` to `most`."""
    table: dict[str, Any] = {"distribution": "fixed", "tokens": value} if isinstance(value, int) else value
    named = table.get("distribution")
    if named not in _SHAPES:
        allowed = f"a whole number from {least} to {most}, or a table whose distribution is one of {', '.join(_SHAPES)}"
        raise place.of("distribution").not_allowed(repr(named), allowed)
    shape = Shape(named)
    bound = _whole(least, most)
    rules = {
        "distribution": _TEXT,
        "tokens": bound,
        "min": bound,
        "max": bound,
        "median": number("a number above 0", lambda median: median > 0.0),
        "sigma": number("a number from 0 to 4", lambda sigma: 0.0 <= sigma <= 4.0),
    }
    names = _FIELDS_OF_SHAPE[shape]
    rules = {name: rules[name] for name in ("distribution", *names)}
    _check(place, table, rules)
    _require(place, table, names, rules)
    if shape is Shape.FIXED:
        return fixed(table["tokens"])
    if table["max"] < table["min"]:
        raise place.of("max").not_allowed(str(table["max"]), f"at least min, {table['min']}")
    median, sigma = float(table.get("median", 0.0)), float(table.get("sigma", 0.0))
    return Amount(shape, table["min"], table["max"], median, sigma)


def _slos(top: _Place, tables: Mapping[str, Any]) -> dict[QosClass, Slo]:
    """Return every class's objectives: what the file says of them, and the default of what it does not mention."""
    slos = dict(DEFAULT_SLOS)
    for name, table in tables.items():
        place = top.of("slo").of(name)
        if name not in _CLASSES or not isinstance(table, dict):
            raise place.not_allowed(repr(table), _WORKLOAD_RULES["slo"].allowed)
        _check(place, table, _SLO_RULES)
        limits = {field.replace("_ms", "_s"): limit / 1000.0 if limit > 0 else None for field, limit in table.items()}
        slos[QosClass(name)] = replace(slos[QosClass(name)], **limits)
    return slos

"""Traces of requests: reads and writes them as JSON lines, converts Mooncake's, and makes synthetic ones from a seed.

A trace says when requests came, how long they and their answers were, and by hash ids which blocks of their prompts were
equal; it has no texts. Decides the format, which is Mooncake's (`timestamp` in ms, `input_length`, `output_length`,
`hash_ids`) with optional fields of ours. Knows nothing of plans: `scenarios` makes one of a Trace.
Source: github.com/kvcache-ai/Mooncake (Apache-2.0), FAST25-release; none of its data is here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.amounts import Amount, Shape
from loadtest.arrivals import make_arrivals
from loadtest.prompts import NUM_SERIAL_WORDS
from loadtest.seeds import Purpose, generator
from shoal.errors import ConfigError
from shoal.shipped import Shipped
from shoal.types import QosClass

# Of Mooncake's traces, and of a file that does not say.
MOONCAKE_BLOCK_TOKENS = 512

SHIPPED = Shipped("loadtest", ("data",), ".jsonl", "trace", "trace")

_HEADER = re.compile(r"# block_tokens = (\d{1,9})")
_ORIGIN = re.compile(r"# origin: (.+)")
_MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A request. hash_ids: of each block of its prompt, the last of which may be partial; those beyond it are its own.

    conversation: "" for none; entries of one conversation are its turns 0, 1, 2 and so on: each waits for the one before.
    """

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    qos: QosClass | None = None
    tenant: str = ""
    conversation: str = ""
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Entries in order of time. block_tokens: length of the blocks that hash ids stand for. origin: how it was made."""

    entries: tuple[TraceEntry, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    origin: str = "unknown"


@dataclass(frozen=True, slots=True)
class _Rule:
    allowed: str
    is_allowed: Callable[[Any], bool]


def _is_whole(value: object, least: int, most: int = _MAX_TOKENS) -> bool:
    # bool is an int to isinstance.
    return type(value) is int and least <= value <= most


def _is_time(value: object) -> bool:
    # Not NaN, nor infinite, which Python's JSON takes.
    return type(value) in (int, float) and 0 <= value < 1e15  # type: ignore[operator]


def _are_hash_ids(value: object) -> bool:
    return isinstance(value, list) and all(_is_whole(hash_id, 0, 2**64) for hash_id in value)


_CLASSES = tuple(qos.value for qos in QosClass)
_RULES = {
    "timestamp": _Rule("a number of milliseconds, 0 or more", _is_time),
    "input_length": _Rule(f"a whole number of tokens from 1 to {_MAX_TOKENS}", lambda value: _is_whole(value, 1)),
    "output_length": _Rule(f"a whole number of tokens from 0 to {_MAX_TOKENS}", lambda value: _is_whole(value, 0)),
    "hash_ids": _Rule("a list of whole numbers, 0 or more", _are_hash_ids),
    "qos": _Rule("one of " + ", ".join(_CLASSES), lambda value: value in _CLASSES),
    "tenant": _Rule(
        "at most 64 printable characters",
        lambda value: isinstance(value, str) and len(value) <= 64 and value.isprintable(),
    ),
    "conversation": _Rule("a text", lambda value: isinstance(value, str)),
    "turn": _Rule("a whole number, 0 or more", lambda value: _is_whole(value, 0)),
}
_REQUIRED = ("timestamp", "input_length", "output_length")


def read_trace(name_or_path: str) -> Trace:
    """Read a shipped trace by name, or a file whose path has a separator or ends in .jsonl.

    Raises ConfigError that names the file, the line, the field and what it may be.
    """
    where, text = SHIPPED.read(name_or_path)
    return parse_trace(text.split("\n"), where)


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as read_trace() reads it."""
    path.write_text(format_trace(trace), encoding="utf-8")


def format_trace(trace: Trace) -> str:
    """Return the text of a trace's file: comments that say what it is, then an object a line."""
    lines = [f"# block_tokens = {trace.block_tokens}", f"# origin: {' '.join(trace.origin.split())}"]
    lines.extend(json.dumps(_fields_of(entry)) for entry in trace.entries)
    return "\n".join(lines) + "\n"


def parse_trace(lines: Iterable[str], where: str) -> Trace:
    """Read a trace; where: what to call it in errors. Raises ConfigError as read_trace()."""
    block_tokens, origin = MOONCAKE_BLOCK_TOKENS, Path(where).name
    entries: list[TraceEntry] = []
    next_turn: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        at = f"{where}:{number}"
        text = line.strip()
        if header := _HEADER.fullmatch(text):
            block_tokens = int(header[1])
            if entries or block_tokens < 1:
                raise ConfigError(f"{at}: block_tokens must be 1 or more, and come before all requests", field="trace")
        elif said := _ORIGIN.fullmatch(text):
            origin = said[1]
        elif text and not text.startswith("#"):
            entry = _parse_entry(text, at)
            _check_order(entry, entries, next_turn, at)
            _check_blocks(entry, block_tokens, at)
            entries.append(entry)
    if not entries:
        raise ConfigError(f"{where}: there is no request in this trace", field="trace")
    return Trace(tuple(entries), block_tokens, origin)


def convert_mooncake(
    lines: Iterable[str],
    *,
    where: str = "Mooncake trace",
    scale: int = 64,
    output_scale: int | None = None,
    floor: int = 8,
    ceiling: int | None = None,
    speed_up: float = 1.0,
    max_requests: int | None = None,
) -> Trace:
    """Shrink a trace in Mooncake's format to what small devices can serve.

    Lengths are divided by scale (those of answers by output_scale, where given), rounded up, and held within floor and
    ceiling; gaps between arrivals are divided by speed_up and begin at 0. Blocks shrink with the lengths and keep their
    hash ids, so that prompts share what they shared: scale must divide the length of a block. Raises ConfigError naming
    the line.
    """
    if scale < 1 or MOONCAKE_BLOCK_TOKENS % scale or MOONCAKE_BLOCK_TOKENS // scale < NUM_SERIAL_WORDS:
        allowed = f"a divisor of {MOONCAKE_BLOCK_TOKENS} that leaves blocks of {NUM_SERIAL_WORDS} tokens or more"
        raise ConfigError(f"scale = {scale} is not allowed; it must be {allowed}", field="scale")
    _check_sizes(output_scale, floor, ceiling, speed_up, max_requests)
    read = [_parse_entry(line, f"{where}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not read:
        raise ConfigError(f"{where}: there is no request in this trace", field="trace")
    # Stable: requests of one time keep the order of the file.
    kept = sorted(read, key=lambda entry: entry.timestamp_ms)[:max_requests]
    start_ms = kept[0].timestamp_ms
    entries = [
        replace(
            entry,
            timestamp_ms=(entry.timestamp_ms - start_ms) / speed_up,
            input_tokens=(length := _scaled(entry.input_tokens, scale, floor, ceiling)),
            output_tokens=_scaled(entry.output_tokens, output_scale or scale, floor, ceiling),
            hash_ids=entry.hash_ids[: -(-length * scale // MOONCAKE_BLOCK_TOKENS)],
        )
        for entry in kept
    ]
    origin = f"{Path(where).name} in Mooncake's format, lengths / {scale} from {floor} up, speed-up {speed_up:g}"
    return Trace(tuple(entries), MOONCAKE_BLOCK_TOKENS // scale, origin)


def make_trace(
    seed: int,
    *,
    num_conversations: int = 24,
    rate_per_s: float = 0.5,
    max_turns: int = 4,
    block_tokens: int = 8,
    max_input_tokens: int = 256,
) -> Trace:
    """Make a small synthetic trace: conversations of two tenants that begin with one of two system prompts.

    A turn's prompt is the one before, the answer to it, and a new question; it shares all full blocks with the one before.
    """
    rng = generator(seed, Purpose.TRACE)
    starts_s = make_arrivals(rate_per_s, seed=seed, num_requests=num_conversations)
    drafts = [
        draft
        for index, start_s in enumerate(starts_s)
        for draft in _draft_conversation(rng, index, start_s, max_turns, block_tokens, max_input_tokens)
    ]
    origin = (
        f"loadtest.traces.make_trace({seed}, num_conversations={num_conversations}, rate_per_s={rate_per_s}, "
        f"max_turns={max_turns}, block_tokens={block_tokens}, max_input_tokens={max_input_tokens})"
    )
    return Trace(with_hash_ids(drafts), block_tokens, origin)


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry without hash ids, and what tells each of its blocks from others."""

    entry: TraceEntry
    blocks: tuple[tuple[object, ...], ...]


def with_hash_ids(drafts: Iterable[Draft]) -> tuple[TraceEntry, ...]:
    """The entries by time; as in Mooncake's, a block not seen before gets the next number."""
    block_to_hash_id: dict[tuple[object, ...], int] = {}
    return tuple(
        replace(
            draft.entry,
            hash_ids=tuple(block_to_hash_id.setdefault(block, len(block_to_hash_id)) for block in draft.blocks),
        )
        for draft in sorted(drafts, key=lambda draft: draft.entry.timestamp_ms)
    )


# What a synthetic conversation is like: its class, tenant, and the shares of each kind.
_KINDS = (
    (QosClass.LATENCY, "app", 0.3),
    (QosClass.BALANCED, "app", 0.5),
    (QosClass.THROUGHPUT, "batch", 0.2),
)
# In blocks: system prompts are made of whole ones, so that they are shared whole.
_SYSTEM_BLOCKS = (4, 6)
_QUESTION = Amount(Shape.LOGNORMAL, 8, 96, median=24.0, sigma=0.6)
_ANSWER = Amount(Shape.LOGNORMAL, 8, 128, median=32.0, sigma=0.5)
# To get an answer, read it and type (assumption).
_MEAN_THINK_S, _MIN_THINK_S = 4.0, 2.0


def _draft_conversation(
    rng: np.random.Generator, index: int, start_s: float, max_turns: int, block_tokens: int, max_input_tokens: int
) -> Iterator[Draft]:
    qos, tenant, _ = _KINDS[int(rng.choice(len(_KINDS), p=[share for *_, share in _KINDS]))]
    system = int(rng.integers(len(_SYSTEM_BLOCKS)))
    blocks: list[tuple[object, ...]] = [("system", system, place) for place in range(_SYSTEM_BLOCKS[system])]
    said, num_kept, at_s = len(blocks) * block_tokens, len(blocks), start_s
    for turn in range(int(rng.integers(1, max_turns, endpoint=True))):
        length = said + _QUESTION.draw(rng)
        if length > max_input_tokens:
            return
        blocks[num_kept:] = [(index, turn, place) for place in range(num_kept, -(-length // block_tokens))]
        answer = _ANSWER.draw(rng)
        entry = TraceEntry(float(round(at_s * 1000)), length, answer, (), qos, tenant, f"c{index}", turn)
        yield Draft(entry, tuple(blocks))
        # Full blocks stay; the last one, if partial, grows and is another.
        said, num_kept = length + answer, length // block_tokens
        at_s += _MIN_THINK_S + float(rng.exponential(_MEAN_THINK_S - _MIN_THINK_S))


def _check_sizes(
    output_scale: int | None, floor: int, ceiling: int | None, speed_up: float, max_requests: int | None
) -> None:
    checks = (
        ("output_scale", output_scale, output_scale is None or output_scale >= 1, "a whole number, 1 or more"),
        ("floor", floor, floor >= 1, "a whole number of tokens, 1 or more"),
        ("ceiling", ceiling, ceiling is None or ceiling >= floor, f"at least the floor, {floor}"),
        ("speed_up", speed_up, 0.0 < speed_up < math.inf, "a number above 0"),
        ("max_requests", max_requests, max_requests is None or max_requests >= 1, "a whole number, 1 or more"),
    )
    for name, value, is_valid, allowed in checks:
        if not is_valid:
            raise ConfigError(f"{name} = {value} is not allowed; it must be {allowed}", field=name)


def _scaled(length: int, scale: int, floor: int, ceiling: int | None) -> int:
    scaled = max(floor, -(-length // scale))
    return scaled if ceiling is None else min(scaled, ceiling)


def _fields_of(entry: TraceEntry) -> dict[str, object]:
    whole = entry.timestamp_ms.is_integer()
    fields: dict[str, object] = {
        "timestamp": int(entry.timestamp_ms) if whole else entry.timestamp_ms,
        "input_length": entry.input_tokens,
        "output_length": entry.output_tokens,
        "hash_ids": list(entry.hash_ids),
    }
    if entry.qos is not None:
        fields["qos"] = entry.qos.value
    if entry.tenant:
        fields["tenant"] = entry.tenant
    if entry.conversation:
        fields |= {"conversation": entry.conversation, "turn": entry.turn}
    return fields


def _parse_entry(line: str, at: str) -> TraceEntry:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{at}: not valid JSON: {error}", field="trace") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{at}: must be a JSON object with the fields {', '.join(_RULES)}", field="trace")
    _check_fields(fields, at)
    return TraceEntry(
        timestamp_ms=float(fields["timestamp"]),
        input_tokens=fields["input_length"],
        output_tokens=fields["output_length"],
        hash_ids=tuple(fields.get("hash_ids", ())),
        qos=QosClass(fields["qos"]) if "qos" in fields else None,
        tenant=fields.get("tenant", ""),
        conversation=fields.get("conversation", ""),
        turn=fields.get("turn", 0),
    )


def _check_fields(fields: Mapping[str, Any], at: str) -> None:
    """Refuse wrong values; fields that are not known belong to other tools and are passed over."""
    for name, rule in _RULES.items():
        if name in fields and not rule.is_allowed(fields[name]):
            shown = json.dumps(fields[name])[:80]
            raise ConfigError(f"{at}: {name} = {shown} is not allowed; it must be {rule.allowed}", field=name)
        if name in _REQUIRED and name not in fields:
            raise ConfigError(f"{at}: {name} is missing; it must be {rule.allowed}", field=name)


def _check_order(entry: TraceEntry, before: list[TraceEntry], next_turn: dict[str, int], at: str) -> None:
    """Refuse an entry that is earlier than the one before, or no next turn of its conversation; note its turn."""
    if before and entry.timestamp_ms < before[-1].timestamp_ms:
        raise ConfigError(
            f"{at}: timestamp = {entry.timestamp_ms:g} is not allowed; it must be at least that of the request before, "
            f"{before[-1].timestamp_ms:g}",
            field="timestamp",
        )
    expected = next_turn.get(entry.conversation, 0) if entry.conversation else 0
    if entry.turn != expected:
        where = (
            f"the next turn of conversation {entry.conversation}" if entry.conversation else "without a conversation"
        )
        raise ConfigError(f"{at}: turn = {entry.turn} is not allowed; it must be {expected}, {where}", field="turn")
    next_turn[entry.conversation] = expected + 1


def _check_blocks(entry: TraceEntry, block_tokens: int, at: str) -> None:
    most = -(-entry.input_tokens // block_tokens)
    if len(entry.hash_ids) > most:
        raise ConfigError(
            f"{at}: hash_ids has {len(entry.hash_ids)} blocks; it must have at most {most}: {entry.input_tokens} tokens in "
            f"blocks of {block_tokens}",
            field="hash_ids",
        )

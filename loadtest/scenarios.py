"""Makes plans: one request at a time, at a rate, all at once, or as a trace says; after MLPerf LoadGen's scenarios.

Decides which request belongs to which stream and conversation, and puts lengths, texts and times together. Pure: the same
arguments give the same Plan, on every machine. Knows neither targets nor clocks. Called by the command line and `ramp`.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.arrivals import MAX_REQUESTS, POISSON, make_arrivals
from loadtest.plan import Plan, PlannedRequest
from loadtest.prompts import TextWriter
from loadtest.seeds import Purpose, generator
from loadtest.traces import Trace, TraceEntry
from loadtest.workloads import Stream, Workload
from shoal.errors import ConfigError
from shoal.types import QosClass


def single_stream(workload: Workload, *, seed: int, num_requests: int) -> Plan:
    """Plan one request after the other, each sent when the one before has ended."""
    _check_count("num_requests", num_requests)
    requests = _compose(workload, seed, [None] * num_requests, num_between_turns=1)
    return Plan(requests, 1, seed, f"single-stream: {_named(workload)}, {num_requests} requests")


def server(
    workload: Workload,
    *,
    seed: int,
    rate_per_s: float | None = None,
    num_requests: int | None = None,
    duration_s: float | None = None,
    burstiness: float = POISSON,
) -> Plan:
    """Plan requests that come when they come, whatever the server does; see `make_arrivals` for rate and burstiness.

    rate_per_s: of all requests, turns of conversations included; without it, the workload's. Raises ConfigError if
    neither has a rate, or nothing is due within the duration.
    """
    rate_per_s = workload.rate_per_s if rate_per_s is None else rate_per_s
    if rate_per_s is None:
        raise ConfigError(f"workload {workload.name} has shares and no rates: give a rate", field="rate_per_s")
    due_s = make_arrivals(
        rate_per_s, seed=seed, burstiness=burstiness, num_requests=num_requests, duration_s=duration_s
    )
    if not due_s:
        raise ConfigError(f"at {rate_per_s} requests per second none is due within {duration_s} s", field="duration_s")
    size = f"{num_requests} requests" if duration_s is None else f"{_plain(duration_s)} s"
    description = (
        f"server: {_named(workload)}, {_plain(rate_per_s)} requests/s, burstiness {_plain(burstiness)}, {size}"
    )
    return Plan(_compose(workload, seed, due_s), 0, seed, description)


def offline(workload: Workload, *, seed: int, num_requests: int, concurrency: int | None = None) -> Plan:
    """Plan requests that are all there at the start, `concurrency` of them at once; without it, all."""
    _check_count("num_requests", num_requests)
    concurrency = num_requests if concurrency is None else concurrency
    _check_count("concurrency", concurrency)
    requests = _compose(workload, seed, [None] * num_requests, num_between_turns=concurrency)
    description = f"offline: {_named(workload)}, {num_requests} requests, concurrency {concurrency}"
    return Plan(requests, concurrency, seed, description)


def trace(
    recorded: Trace,
    *,
    seed: int,
    speed_up: float = 1.0,
    num_requests: int | None = None,
    qos: QosClass = QosClass.BALANCED,
) -> Plan:
    """Plan the requests of a trace, or the first num_requests of it, at its times divided by speed_up.

    Equal hash ids become equal blocks of text. qos: of entries that name no class.
    """
    if not 0.0 < speed_up < math.inf:
        raise ConfigError(f"speed_up = {speed_up} is not allowed; it must be a number above 0", field="speed_up")
    if num_requests is not None:
        _check_count("num_requests", num_requests)
    entries = recorded.entries[:num_requests]
    blocks = _Blocks(recorded.block_tokens, TextWriter(seed))
    last_of: dict[str, int] = {}
    requests = []
    for number, entry in enumerate(entries):
        after = last_of.get(entry.conversation)
        requests.append(_replayed(number, entry, blocks.prompt(entry), after=after, speed_up=speed_up, qos=qos))
        if entry.conversation:
            last_of[entry.conversation] = number
    description = (
        f"trace: {recorded.origin} ({_digest(entries)}), {len(entries)} requests, speed-up {_plain(speed_up)}, "
        f"class {qos.value} where it names none"
    )
    return Plan(tuple(requests), 0, seed, description)


def _replayed(
    number: int, entry: TraceEntry, prompt: str, *, after: int | None, speed_up: float, qos: QosClass
) -> PlannedRequest:
    return PlannedRequest(
        number=number,
        due_s=round(entry.timestamp_ms / 1000.0 / speed_up, 6),
        prompt=prompt,
        prompt_tokens=entry.input_tokens,
        max_tokens=max(1, entry.output_tokens),
        qos=entry.qos or qos,
        tenant=entry.tenant,
        stream="trace",
        after=after,
    )


class _Blocks:
    """The text of each hash id: written when it is first seen, the same from then on."""

    __slots__ = ("_block_tokens", "_hash_id_to_words", "_writer")

    def __init__(self, block_tokens: int, writer: TextWriter) -> None:
        self._block_tokens = block_tokens
        self._writer = writer
        self._hash_id_to_words: dict[int, tuple[str, ...]] = {}

    def prompt(self, entry: TraceEntry) -> str:
        """Join the blocks of an entry, cut to its length; what they do not cover is a text of its own."""
        words: list[str] = []
        for hash_id in entry.hash_ids:
            if hash_id not in self._hash_id_to_words:
                self._hash_id_to_words[hash_id] = self._writer.fresh(self._block_tokens)
            words.extend(self._hash_id_to_words[hash_id])
        del words[entry.input_tokens :]
        words.extend(self._writer.fresh(entry.input_tokens - len(words)))
        return " ".join(words)


@dataclass(slots=True)
class _Conversation:
    """What was said so far, with the stand-in of the last answer, and the turn that comes next."""

    words: tuple[str, ...]
    num_turns_left: int
    next_tokens: int
    last_number: int | None
    ready_at: float


class _StreamComposer:
    """Makes the requests of one stream, one after the other.

    `spacing` is the least distance between two turns of a conversation, in the unit of `position`: seconds in open loops,
    requests of this stream in closed ones.

    Conversations wait in the order in which they become ready, as spacing is the same for all.
    """

    __slots__ = ("_open", "_prefixes", "_rng", "_spacing", "_stream", "_writer")

    def __init__(self, stream: Stream, rng: np.random.Generator, writer: TextWriter, spacing: float) -> None:
        self._stream = stream
        self._rng = rng
        self._writer = writer
        self._spacing = spacing
        self._prefixes = [writer.fresh(stream.prefix_tokens) for _ in range(stream.num_prefixes)]
        self._open: deque[_Conversation] = deque()

    def make(self, number: int, due_s: float | None, position: float) -> PlannedRequest:
        """Make the next request: a turn of the conversation that has waited longest, or the first of a new one."""
        stream = self._stream
        is_ready = bool(self._open) and self._open[0].ready_at <= position
        conversation = self._open.popleft() if is_ready else self._begin()
        words = conversation.words + self._writer.fresh(conversation.next_tokens)
        max_tokens = stream.output_tokens.draw(self._rng)
        self._go_on(conversation, words, max_tokens, number, position)
        return PlannedRequest(
            number=number,
            due_s=due_s,
            prompt=" ".join(words),
            prompt_tokens=len(words),
            max_tokens=max_tokens,
            qos=stream.qos,
            tenant=stream.tenant,
            stream=stream.name,
            after=conversation.last_number,
            max_tokens_per_s=stream.max_tokens_per_s,
        )

    def _begin(self) -> _Conversation:
        prefix = self._prefixes[int(self._rng.integers(len(self._prefixes)))]
        num_turns = self._stream.turns.draw(self._rng)
        return _Conversation(prefix, num_turns, self._stream.prompt_tokens.draw(self._rng), None, 0.0)

    def _go_on(
        self, conversation: _Conversation, words: tuple[str, ...], max_tokens: int, number: int, position: float
    ) -> None:
        """Keep a conversation open for its next turn, unless it had all or would become too long."""
        if conversation.num_turns_left == 1:
            return
        next_tokens = self._stream.prompt_tokens.draw(self._rng)
        if len(words) + max_tokens + next_tokens > self._stream.max_prompt_tokens:
            return
        said = words + self._writer.fresh(max_tokens)
        ready_at = position + self._spacing
        self._open.append(_Conversation(said, conversation.num_turns_left - 1, next_tokens, number, ready_at))


def _compose(
    workload: Workload, seed: int, due_s: Sequence[float | None], *, num_between_turns: int = 0
) -> tuple[PlannedRequest, ...]:
    writer = TextWriter(seed)
    composers = [
        _StreamComposer(stream, generator(seed, Purpose.LENGTHS, index), writer, num_between_turns or stream.think_s)
        for index, stream in enumerate(workload.streams)
    ]
    num_made = [0] * len(composers)
    requests = []
    for number, (due, index) in enumerate(zip(due_s, _stream_order(workload, seed, len(due_s)), strict=True)):
        requests.append(composers[index].make(number, due, num_made[index] if due is None else due))
        num_made[index] += 1
    return tuple(requests)


def _stream_order(workload: Workload, seed: int, num_requests: int) -> list[int]:
    """Say which stream each request belongs to: exact shares (largest remainder), in an order drawn from the seed.

    Drawing each by itself would leave a stream with a small share out of a short run.
    """
    total = sum(stream.share for stream in workload.streams)
    exact = [stream.share / total * num_requests for stream in workload.streams]
    counts = [math.floor(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: num_requests - sum(counts)]:
        counts[index] += 1
    order = np.repeat(np.arange(len(counts)), counts)
    generator(seed, Purpose.STREAM_ORDER).shuffle(order)
    return [int(index) for index in order]


def _named(workload: Workload) -> str:
    return f"workload {workload.name} ({_digest(workload)})"


def _digest(value: object) -> str:
    """A few digits that differ where two workloads or traces of one name do."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def _plain(number: float) -> str:
    """All digits of a number, so that plans which differ are described differently."""
    return str(float(number)).removesuffix(".0")


def _check_count(field: str, count: int) -> None:
    if not 1 <= count <= MAX_REQUESTS:
        raise ConfigError(
            f"{field} = {count} is not allowed; it must be a whole number from 1 to {MAX_REQUESTS}", field=field
        )

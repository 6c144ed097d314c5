"""A request as it is kept while it is answered: what its sequence can be made from again, and what is known of its answer.

Values and the form they are stored in: who keeps them, where and for how long, is for `served` and `journal` to say. Times
are seconds of the wall clock, which another process and another machine understand. Knows no Redis and no engine.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from orchestrator.core.sequence import QosTargets, Sequence
from shoal import messages
from shoal.kv import BlockHash
from shoal.types import FinishReason, KVReuse, NumericClass, QosClass, SamplingParams, SequenceId
from shoal.v1 import types_pb2

# Magic and version, length of what is packed, its checksum.
_FRAME = struct.Struct("<4sII")
_MAGIC = b"SHJ1"
# Tokens that are stored as one value, which is written again until it is full.
SEGMENT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """An accepted request after all defaults.

    record_id: drawn at random, for the ids of clients may come twice. stops: the strings that end its text. deadline_at:
    None if it has none. num_dropped: tokens of its session that were left out. session: the session as it was before this
    turn, packed; empty if it is no turn.
    """

    record_id: bytes
    request_id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    stops: tuple[str, ...]
    numeric: NumericClass
    qos: QosClass
    targets: QosTargets
    max_tokens_per_s: float
    kv_reuse: KVReuse
    trail_id: bytes
    accepted_at: float
    deadline_at: float | None
    num_dropped: int = 0
    session: bytes = b""

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        *,
        record_id: bytes,
        request_id: str,
        stops: Seq[str],
        wall_s: float,
        num_dropped: int = 0,
        session: bytes = b"",
    ) -> RequestRecord:
        """Note a sequence that an engine has taken. wall_s: what the wall clock is ahead of the sequence's clock."""
        return cls(
            record_id=record_id,
            request_id=request_id,
            tenant=sequence.tenant,
            prompt_token_ids=sequence.prompt_token_ids,
            sampling=sequence.sampling,
            max_tokens=sequence.max_tokens,
            stop_ids=sequence.stop_ids,
            stops=tuple(stops),
            numeric=sequence.numeric,
            qos=sequence.qos,
            targets=sequence.targets,
            max_tokens_per_s=sequence.max_tokens_per_s,
            kv_reuse=sequence.kv_reuse,
            trail_id=sequence.trail_id,
            accepted_at=sequence.arrived_at + wall_s,
            deadline_at=None if sequence.deadline_at is None else sequence.deadline_at + wall_s,
            num_dropped=num_dropped,
            session=session,
        )

    def to_sequence(
        self, sequence_id: SequenceId, log: AnswerLog, blocks: tuple[BlockHash, ...], *, wall_s: float
    ) -> Sequence:
        """Make its sequence again, with the answer as far as it is known, to go on behind that."""
        return Sequence(
            sequence_id=sequence_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
            numeric=self.numeric,
            qos=self.qos,
            arrived_at=self.accepted_at - wall_s,
            tenant=self.tenant,
            targets=self.targets,
            deadline_at=None if self.deadline_at is None else self.deadline_at - wall_s,
            max_tokens_per_s=self.max_tokens_per_s,
            block_hashes=blocks,
            kv_reuse=self.kv_reuse,
            trail_id=self.trail_id,
            num_preemptions=log.num_preemptions,
            num_recoveries=log.num_recoveries,
            has_changed_kernels=log.has_changed_kernels,
            output_token_ids=list(log.token_ids),
        )

    def pack(self) -> bytes:
        sampling = messages.sampling_to_proto(self.sampling).SerializeToString()
        header = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "max_tokens": self.max_tokens,
            "stop_ids": sorted(self.stop_ids),
            "stops": self.stops,
            "numeric": self.numeric.value,
            "qos": self.qos.value,
            "targets": [self.targets.ttft_s, self.targets.inter_token_s],
            "max_tokens_per_s": self.max_tokens_per_s,
            "kv_reuse": self.kv_reuse.value,
            "trail_id": self.trail_id.hex(),
            "accepted_at": self.accepted_at,
            "deadline_at": self.deadline_at,
            "num_dropped": self.num_dropped,
        }
        prompt = struct.pack(f"<{len(self.prompt_token_ids)}I", *self.prompt_token_ids)
        return _framed(_joined(json.dumps(header).encode(), sampling, prompt, self.session))


def unpack_record(record_id: bytes, packed: bytes | None) -> RequestRecord | None:
    """Read a stored record; None for what is none, or one of another version."""
    try:
        header, sampling, prompt, session = _parted(_unframed(packed), 4)
        fields = json.loads(header)
        ttft_s, inter_token_s = fields["targets"]
        return RequestRecord(
            record_id=record_id,
            request_id=fields["request_id"],
            tenant=fields["tenant"],
            prompt_token_ids=_unpacked_ids(prompt),
            sampling=messages.sampling_from_proto(types_pb2.SamplingParams.FromString(sampling), seed=0),
            max_tokens=fields["max_tokens"],
            stop_ids=frozenset(fields["stop_ids"]),
            stops=tuple(fields["stops"]),
            numeric=NumericClass(fields["numeric"]),
            qos=QosClass(fields["qos"]),
            targets=QosTargets(ttft_s, inter_token_s),
            max_tokens_per_s=fields["max_tokens_per_s"],
            kv_reuse=KVReuse(fields["kv_reuse"]),
            trail_id=bytes.fromhex(fields["trail_id"]),
            accepted_at=fields["accepted_at"],
            deadline_at=fields["deadline_at"],
            num_dropped=fields["num_dropped"],
            session=session,
        )
    except (ValueError, KeyError, TypeError, struct.error, DecodeError):
        return None


@dataclass(slots=True)
class AnswerLog:
    """What is known of an answer.

    logprobs: one for each token, or none. finish: why it is complete; None if it is not. finished: the message that told its
    client so, if one did. is_left: its client left, and nobody computes it. num_left: tokens that were left to its session
    then. written_at: when it was stored last.

    Invariants: no logprobs, or as many as tokens; a complete answer has tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    finished: bytes = b""
    is_left: bool = False
    num_left: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    written_at: float = 0.0
    num_preemptions: int = 0
    num_recoveries: int = 0
    has_changed_kernels: bool = False

    def append(self, token_id: int, logprobs: types_pb2.TokenLogprobs | None, now: float) -> None:
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now

    def cut(self, num_tokens: int) -> None:
        """Forget all but so many tokens."""
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens:]

    def note(self, sequence: Sequence) -> None:
        """Take over what its sequence has counted, for the sequence that goes on with it."""
        self.num_preemptions, self.num_recoveries = sequence.num_preemptions, sequence.num_recoveries
        self.has_changed_kernels = sequence.has_changed_kernels

    def pack_state(self) -> bytes:
        """All but the tokens."""
        state = {
            "num_tokens": len(self.token_ids),
            "finish": None if self.finish is None else self.finish.value,
            "finished": self.finished.hex(),
            "is_left": self.is_left,
            "num_left": self.num_left,
            "first_token_at": self.first_token_at,
            "last_token_at": self.last_token_at,
            "written_at": self.written_at,
            "num_preemptions": self.num_preemptions,
            "num_recoveries": self.num_recoveries,
            "has_changed_kernels": self.has_changed_kernels,
        }
        return json.dumps(state).encode()

    def pack_segment(self, index: int) -> bytes:
        """Tokens [index, index + 1) * SEGMENT_TOKENS, as far as there are."""
        part = slice(index * SEGMENT_TOKENS, (index + 1) * SEGMENT_TOKENS)
        ids = self.token_ids[part]
        logprobs = [one.SerializeToString() for one in self.logprobs[part]]
        return _framed(_joined(struct.pack(f"<{len(ids)}I", *ids), *logprobs))

    def check_invariants(self) -> None:
        assert len(self.logprobs) in (0, len(self.token_ids))
        assert self.finish is None or self.token_ids


def unpack_log(state: bytes | None, segments: Seq[bytes | None]) -> AnswerLog:
    """Read a stored answer: of its tokens those that are there in one piece from the first on."""
    fields = _unpacked_state(state)
    num_tokens = fields.pop("num_tokens", 0)
    log = AnswerLog(**fields)
    for packed in segments:
        if len(log.token_ids) % SEGMENT_TOKENS:
            break
        try:
            ids, *logprobs = _parted(_unframed(packed))
            log.token_ids.extend(_unpacked_ids(ids))
            log.logprobs.extend(map(types_pb2.TokenLogprobs.FromString, logprobs))
        except (ValueError, struct.error, DecodeError):
            break
    if len(log.logprobs) != len(log.token_ids):
        log.logprobs.clear()
    if not log.token_ids or len(log.token_ids) < num_tokens:
        # What is missing is computed again, and with it why it is the end.
        log.finish, log.finished = None, b""
    return log


def _unpacked_state(packed: bytes | None) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(packed or b"")
        finish = state["finish"]
        return {
            "finish": None if finish is None else FinishReason(finish),
            "finished": bytes.fromhex(state["finished"]),
            "is_left": bool(state["is_left"]),
            "has_changed_kernels": bool(state["has_changed_kernels"]),
            **{name: float(state[name]) for name in ("first_token_at", "last_token_at", "written_at")},
            **{name: int(state[name]) for name in ("num_tokens", "num_left", "num_preemptions", "num_recoveries")},
        }
    except (ValueError, KeyError, TypeError):
        return {}


def _framed(body: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def _unframed(packed: bytes | None) -> bytes:
    """Raises ValueError and struct.error for what was not framed here."""
    magic, num_bytes, checksum = _FRAME.unpack_from(packed or b"")
    body = (packed or b"")[_FRAME.size :]
    if magic != _MAGIC or num_bytes != len(body) or zlib.crc32(body) != checksum:
        raise ValueError("not a part of a journal")
    return body


def _joined(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _parted(body: bytes, num_parts: int | None = None) -> list[bytes]:
    """Undo _joined. Raises ValueError and struct.error."""
    parts, at = [], 0
    while at < len(body):
        (num_bytes,) = struct.unpack_from("<I", body, at)
        parts.append(body[at + 4 : at + 4 + num_bytes])
        at += 4 + num_bytes
    if at != len(body) or not parts or len(parts) != (num_parts or len(parts)):
        raise ValueError("parts do not add up")
    return parts


def _unpacked_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)

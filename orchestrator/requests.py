"""What a client asked for, checked and as a sequence: model, prompt, block names, sampling, class, tenant, targets.

Raises a typed error that names the field, its value and what is allowed, for the first that cannot be served. Pure, so that
long prompts can be encoded in another thread; `server` draws what is random and submits what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelstore.manifest import Manifest
from orchestrator.block_names import BlockNames
from orchestrator.core.qos import default_targets
from orchestrator.core.sequence import DEFAULT_TENANT, QosTargets
from orchestrator.core.sequence import Sequence as AnswerSequence
from orchestrator.tokenizer import Tokenizer
from shoal import messages
from shoal.config import MAX_TARGET_MS
from shoal.errors import ContextExceeded, InvalidRequest, ModelNotFound
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.types import ContextOverflow, KVReuse, NumericClass, QosClass, SequenceId
from shoal.v1 import admin_pb2, inference_pb2

DEFAULT_MAX_TOKENS = 256
MAX_STOPS = 8
MAX_STOP_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
MAX_TENANT_CHARS = 64
# One block: what is kept of the begin of a session that has become too long.
SINK_TOKENS = BLOCK_TOKENS
MAX_SESSION_ID_CHARS = 128
# A month: what is to stay for longer is warmed again.
MAX_WARM_TTL_S = 30 * 86400.0
# A slower stream would hold its slot for longer than anybody reads; a faster one than this is not slowed by anything.
MIN_TOKENS_PER_S = 1.0
MAX_TOKENS_PER_S = 1000.0

_SESSION_ID = re.compile(r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """request_id: empty if the client chose none. stops: the strings that end the answer's text.

    num_dropped: tokens of its session that were left out.
    """

    request_id: str
    sequence: AnswerSequence
    stops: tuple[str, ...]
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class TypedPrompt:
    """A prompt that may become longer yet, and the names of its full blocks."""

    tenant: str
    token_ids: tuple[int, ...]
    blocks: tuple[BlockHash, ...]


class RequestDecoder:
    """Decodes requests for one model; default_qos: of requests that name no class; balanced: that class's targets."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        names: BlockNames,
        default_qos: QosClass,
        balanced: QosTargets,
    ) -> None:
        self._manifest = manifest
        self._names = names
        self._tokenizer = tokenizer
        self._default_qos = default_qos
        self._balanced = balanced

    def decode(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        sequence_id: SequenceId,
        seed: int,
        now: float,
        time_left_s: float | None,
        history: tuple[int, ...] = (),
        room_tokens: int = 0,
    ) -> DecodedRequest:
        """Make the sequence of a request that arrived `now`; seed: for one that brings none.

        history: the tokens of its session, which the input is the next turn of; none: the input is a whole prompt.
        room_tokens: what a sequence may have; 0: what the model can. Raises ModelNotFound, InvalidRequest or
        ContextExceeded; the servicer tells the client.
        """
        self._check_model(request.model)
        sampling = messages.sampling_from_proto(request.sampling, seed=seed)
        sampling.validate(self._manifest.config.vocab_size)
        qos = messages.qos_from_proto(request.qos_class, self._default_qos)
        sequence = AnswerSequence(
            sequence_id=sequence_id,
            prompt_token_ids=(),
            sampling=sampling,
            max_tokens=_max_tokens(request),
            stop_ids=frozenset() if request.ignore_eos else self._tokenizer.stop_ids,
            numeric=NumericClass.SOLO if qos is QosClass.LATENCY else NumericClass.SHARED,
            qos=qos,
            arrived_at=now,
            tenant=tenant_of(request.tenant),
            deadline_at=None if time_left_s is None else now + time_left_s,
            max_tokens_per_s=_tokens_per_s(request.max_tokens_per_s),
            targets=_targets(request, default_targets(qos, self._balanced)),
            kv_reuse=messages.kv_reuse_from_proto(request.kv_reuse),
        )
        overflow = messages.overflow_from_proto(request.context_overflow)
        decoded = DecodedRequest(_request_id(request.request_id), sequence, _stops(request.stop))
        # Last, for it is the most work.
        turn = tuple(self._token_ids(request, is_later_turn=bool(history)))
        if overflow is ContextOverflow.WINDOW:
            room_tokens = room_tokens or self._manifest.config.context_tokens
            kept = windowed(history, len(turn), sequence.max_tokens, room_tokens)
            decoded, history = replace(decoded, num_dropped=len(history) - len(kept)), kept
        sequence.prompt_token_ids = history + turn
        if sequence.kv_reuse is not KVReuse.NONE:
            sequence.block_hashes = self._names.names(sequence.tenant, sequence.prompt_token_ids)
        return decoded

    def warm_token_ids(self, request: admin_pb2.WarmRequest) -> tuple[int, ...]:
        """The tokens of a prompt that is to be computed ahead. Raises InvalidRequest or ContextExceeded."""
        return tuple(self._token_ids(request, opens_answer=False))

    def typed(
        self, request: inference_pb2.AnticipateRequest, tenant: str, history: tuple[int, ...] = ()
    ) -> TypedPrompt:
        """The prompt that is being typed, as far as it goes; history: the tokens of its session.

        Raises InvalidRequest or ContextExceeded; without an input only where there is no session to go on with.
        """
        has_input = request.WhichOneof("input") is not None or not request.session_id
        turn = self._token_ids(request, is_later_turn=bool(history), opens_answer=False) if has_input else ()
        token_ids = history + tuple(turn)
        return TypedPrompt(tenant, token_ids, self._names.names(tenant, token_ids))

    def _check_model(self, model: str) -> None:
        if model not in ("", self._manifest.name):
            raise ModelNotFound(f"model {model!r} is not served here; {self._manifest.name!r} is", field="model")

    def _token_ids(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.AnticipateRequest | admin_pb2.WarmRequest,
        *,
        is_later_turn: bool = False,
        opens_answer: bool = True,
    ) -> Sequence[int]:
        match request.WhichOneof("input"):
            case "prompt":
                self._check_length("prompt", len(request.prompt.encode()))
                token_ids: Sequence[int] = self._tokenizer.encode(
                    request.prompt, add_special=not is_later_turn, goes_on=is_later_turn
                )
            case "chat":
                messages = [{"role": one.role, "content": one.content} for one in request.chat.messages]
                self._check_length("chat", sum(len(one["content"].encode()) for one in messages))
                if is_later_turn:
                    token_ids = self._tokenizer.encode_turn(messages)
                else:
                    token_ids = self._tokenizer.encode_chat(messages, opens_answer=opens_answer)
            case "tokens":
                token_ids = request.tokens.token_ids
                vocab_size = self._manifest.config.vocab_size
                for token_id in token_ids:
                    if token_id >= vocab_size:
                        raise InvalidRequest("tokens.token_ids", f"{token_id} is not in the vocabulary of {vocab_size}")
            case _:
                raise InvalidRequest("input", "is missing: give prompt, chat or tokens")
        if not token_ids:
            raise InvalidRequest(request.WhichOneof("input") or "input", "is empty; it must have at least one token")
        return token_ids

    def _check_length(self, field: str, num_bytes: int) -> None:
        """Refuse, before any work goes into it, text that cannot fit the context however it is cut into tokens."""
        least_tokens = num_bytes // self._tokenizer.max_token_bytes
        if least_tokens >= self._manifest.config.context_tokens:
            raise ContextExceeded(
                f"the prompt has {num_bytes} bytes, which are {least_tokens} tokens or more; the context is "
                f"{self._manifest.config.context_tokens}: shorten the prompt",
                field=field,
            )


def windowed(history: tuple[int, ...], num_turn: int, max_tokens: int, room_tokens: int) -> tuple[int, ...]:
    """What a session goes on with where it, its next turn and the answer do not fit: its first tokens and its last.

    As they stand, if they fit or if dropping could not help. Half of the room at most is kept, for each time that something
    is dropped all that follows has to be computed anew. An answer is given up to a quarter of the room.

    Source: attention sinks, Xiao et al. 2023, arXiv:2309.17453. There positions are those in the cache; so they are here,
    where what is kept is computed as a prompt of its own.
    """
    room = room_tokens - num_turn - min(max_tokens, room_tokens // 4)
    num_last = min(room, room_tokens // 2) - SINK_TOKENS
    if len(history) <= room or num_last <= 0:
        return history
    return history[:SINK_TOKENS] + history[-num_last:]


def _max_tokens(request: inference_pb2.GenerateRequest) -> int:
    max_tokens = request.max_tokens if request.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    if max_tokens < 1:
        raise InvalidRequest("max_tokens", f"{max_tokens} is out of range; it must be at least 1")
    return max_tokens


def session_id_of(session_id: str) -> str:
    """Check a session's id. Raises InvalidRequest."""
    if len(session_id) > MAX_SESSION_ID_CHARS or not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            "session_id",
            f"{session_id[:80]!r} must be 1 to {MAX_SESSION_ID_CHARS} letters, digits and characters of - _ . :",
        )
    return session_id


def warm_ttl_s(ttl_s: float) -> float:
    """Check how long blocks are to be pinned; NaN is outside of every range. Raises InvalidRequest."""
    if 0 <= ttl_s <= MAX_WARM_TTL_S:
        return ttl_s
    raise InvalidRequest(
        "ttl_s", f"{ttl_s} is out of range; it must be from 0 (not pinned) to {MAX_WARM_TTL_S:.10g} seconds"
    )


def tenant_of(tenant: str) -> str:
    """Check a tenant's name; the empty one is the default tenant's. Raises InvalidRequest."""
    if len(tenant) > MAX_TENANT_CHARS or not tenant.isprintable():
        raise InvalidRequest("tenant", f"{tenant[:80]!r} must be at most {MAX_TENANT_CHARS} printable characters")
    return tenant or DEFAULT_TENANT


def _tokens_per_s(rate: float) -> float:
    """0, also where the field is absent, is no limit. NaN is outside of every range."""
    if rate == 0.0 or MIN_TOKENS_PER_S <= rate <= MAX_TOKENS_PER_S:
        return rate
    allowed = f"0 (no limit) or from {MIN_TOKENS_PER_S:g} to {MAX_TOKENS_PER_S:g}"
    raise InvalidRequest("max_tokens_per_s", f"{rate} is out of range; it must be {allowed}")


def _targets(request: inference_pb2.GenerateRequest, targets: QosTargets) -> QosTargets:
    """What the client would like, where it says so, instead of its class's targets."""
    if request.HasField("ttft_target_ms"):
        targets = replace(targets, ttft_s=_target_s("ttft_target_ms", request.ttft_target_ms))
    if request.HasField("inter_token_target_ms"):
        targets = replace(targets, inter_token_s=_target_s("inter_token_target_ms", request.inter_token_target_ms))
    return targets


def _target_s(field: str, value_ms: float) -> float:
    if not 0 < value_ms <= MAX_TARGET_MS:
        allowed = f"a number of milliseconds above 0 and at most {MAX_TARGET_MS:.10g}"
        raise InvalidRequest(field, f"{value_ms} is out of range; it must be {allowed}")
    return value_ms / 1e3


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                "stop", f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARS}"
            )
    return tuple(stops)


def _request_id(request_id: str) -> str:
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequest("request_id", f"must be at most {MAX_REQUEST_ID_CHARS} printable characters")
    return request_id

"""A request as the SDK's callers put it, and an answer as they get it.

Owns the building of GenerateRequest messages and the folding of a response stream into a Generation, once for the
synchronous and the asyncio client. Does no I/O and knows no channel. Called by `shoal.client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, TypeVar

from shoal.errors import InvalidRequest, ProtocolMismatch
from shoal.kept import CacheUse, cache_use_from_proto
from shoal.messages import (
    SAMPLING_FIELDS,
    finish_from_proto,
    kv_reuse_to_proto,
    layers_from_proto,
    overflow_to_proto,
    qos_to_proto,
)
from shoal.types import ContextOverflow, FinishReason, KVReuse, LayerRange, QosClass
from shoal.v1 import admin_pb2, inference_pb2, types_pb2

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]
E = TypeVar("E", bound=Enum)
# A year; gRPC takes no time that is much longer.
MAX_DEADLINE_S = 3.2e7


class GenerateOptions(TypedDict, total=False):
    """How to answer; what is left out takes the server's default (see proto/shoal/v1/inference.proto).

    deadline_s: the most that the whole answer may take, from now; the server refuses at once what cannot make it. The
    client's own timeout_s holds where it is left out. session_id: a conversation that the server keeps: prompt or messages
    are its next turn alone. kv_reuse: which stored KV the answer may use; "none": nor is any of its own stored.
    context_overflow: what to do with a session that has become too long; "window": go on with its first and last tokens.
    """

    model: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    num_logprobs: int
    qos_class: QosClass | Literal["latency", "balanced", "throughput"]
    request_id: str
    tenant: str
    max_tokens_per_s: float
    ttft_target_ms: float
    inter_token_target_ms: float
    deadline_s: float
    session_id: str
    kv_reuse: KVReuse | Literal["policy", "exact", "none"]
    context_overflow: ContextOverflow | Literal["refuse", "window"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probability of a chosen token; top: (token id, log probability) of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What an answer has grown by. index: position of token_ids[0] in the answer; text may be empty."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Who computed which layers of an answer."""

    worker_id: str
    device: str
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer, or what there was of one that was cancelled.

    ttft_ms: from acceptance to the first token, by the server's clock. tokens_per_s: after the first token. Both are 0,
    and pipeline is empty, if the client itself cancelled. queue_ms: time without a slot. num_preemptions: how often more
    urgent requests took its place; its text is the same. cache: what of the prompt did not have to be computed.
    dropped_tokens: those of the session that were left out, see context_overflow. num_recoveries: how often a device that
    computed it was lost and it went on; has_changed_kernels: on a processor of another kind, where near-ties may have fallen
    differently. num_resumes: how often its stream broke off and was gone on with.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    tokens_per_s: float
    pipeline: tuple[StageSummary, ...]
    request_id: str
    model: str
    seed: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    pipeline_id: str = ""
    queue_ms: float = 0.0
    num_preemptions: int = 0
    cache: CacheUse = field(default_factory=CacheUse)
    dropped_tokens: int = 0
    num_recoveries: int = 0
    has_changed_kernels: bool = False
    num_resumes: int = 0


class Answer:
    """Folds the events of one response stream.

    Invariant: events come as Accepted, Delta ..., Finished, and each Delta begins where the one before it ended. A stream
    that goes on with another one begins with Accepted, too.
    """

    __slots__ = ("_accepted", "_finished", "_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._accepted: inference_pb2.Accepted | None = None
        self._finished: inference_pb2.Finished | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def request_id(self) -> str:
        """Empty before the request was accepted."""
        return "" if self._accepted is None else self._accepted.request_id

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def is_finished(self) -> bool:
        return self._finished is not None

    def add(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Take in an event; return what the answer has grown by, if it has."""
        match response.WhichOneof("event"):
            case "accepted":
                self._accepted = response.accepted
            case "finished":
                self._finished = response.finished
            case "delta":
                return self._add_delta(response.delta)
        return None

    def _add_delta(self, message: inference_pb2.Delta) -> Delta:
        if message.index != len(self._token_ids):
            raise ProtocolMismatch(f"token {len(self._token_ids)} of the answer was due, {message.index} came")
        token_ids = tuple(message.token_ids)
        logprobs = tuple(
            TokenLogprobs(token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
            for token_id, entry in zip(token_ids, message.logprobs, strict=False)
        )
        self._texts.append(message.text)
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        return Delta(message.index, token_ids, message.text, logprobs)

    def to_generation(self) -> Generation:
        """The answer; one without a Finished event counts as cancelled."""
        accepted = self._accepted or inference_pb2.Accepted()
        finished = self._finished or inference_pb2.Finished(finish_reason=types_pb2.FINISH_REASON_CANCELLED)
        return Generation(
            text=self.text,
            token_ids=tuple(self._token_ids),
            finish_reason=finish_from_proto(finished.finish_reason),
            prompt_tokens=finished.prompt_tokens or accepted.prompt_tokens,
            completion_tokens=finished.completion_tokens or len(self._token_ids),
            ttft_ms=finished.ttft_ms,
            tokens_per_s=finished.tokens_per_s,
            pipeline=tuple(_stage(stage) for stage in finished.pipeline),
            request_id=accepted.request_id,
            model=accepted.model,
            seed=accepted.seed,
            dropped_tokens=accepted.dropped_tokens,
            logprobs=tuple(self._logprobs),
            pipeline_id=finished.pipeline_id,
            queue_ms=finished.queue_ms,
            num_preemptions=finished.num_preemptions,
            cache=cache_use_from_proto(finished.cache),
            num_recoveries=finished.num_recoveries,
            has_changed_kernels=finished.has_changed_kernels,
        )


def _stage(message: inference_pb2.StageSummary) -> StageSummary:
    layers = layers_from_proto(message.layers)
    if layers is None:
        raise ProtocolMismatch(f"stage on {message.worker_id} without layers")
    return StageSummary(message.worker_id, message.device, layers)


def build_request(
    prompt: Prompt | None, messages: Messages | None, options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """Make the message of a request.

    Raises TypeError for what has the wrong Python type, InvalidRequest for a number that no message can carry; all
    other limits are the server's to check.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {sorted(unknown)[0]!r}; there are: {', '.join(GenerateOptions.__annotations__)}"
        )
    request = inference_pb2.GenerateRequest(
        model=_text("model", options.get("model", "")),
        request_id=_text("request_id", options.get("request_id", "")),
        stop=_stop(options.get("stop", ())),
        ignore_eos=bool(options.get("ignore_eos", False)),
        tenant=_text("tenant", options.get("tenant", "")),
        session_id=_text("session_id", options.get("session_id", "")),
    )
    if "qos_class" in options:
        request.qos_class = qos_to_proto(_choice(QosClass, "qos_class", options["qos_class"]))
    if "kv_reuse" in options:
        request.kv_reuse = kv_reuse_to_proto(_choice(KVReuse, "kv_reuse", options["kv_reuse"]))
    if "context_overflow" in options:
        overflow = _choice(ContextOverflow, "context_overflow", options["context_overflow"])
        request.context_overflow = overflow_to_proto(overflow)
    _set_input(request, prompt, messages)
    for name in ("max_tokens", "max_tokens_per_s", "ttft_target_ms", "inter_token_target_ms"):
        _set_number(request, name, options.get(name), "")
    _set_sampling(request.sampling, options)
    return request


def build_warm_request(
    prompt: Prompt | None, messages: Messages | None, tenant: str, ttl_s: float, *, is_public: bool
) -> admin_pb2.WarmRequest:
    """Make the message that has a prompt computed ahead; raises as build_request does."""
    request = admin_pb2.WarmRequest(tenant=_text("tenant", tenant), is_public=is_public)
    _set_number(request, "ttl_s", ttl_s, "")
    _set_input(request, prompt, messages)
    return request


def build_anticipate_request(
    prompt: Prompt | None, messages: Messages | None, tenant: str, session_id: str
) -> inference_pb2.AnticipateRequest:
    """Make the message that tells of what is being typed; a session alone will do. Raises as build_request does."""
    request = inference_pb2.AnticipateRequest(
        tenant=_text("tenant", tenant), session_id=_text("session_id", session_id)
    )
    if prompt is not None or messages is not None or not session_id:
        _set_input(request, prompt, messages)
    return request


def deadline_s(options: GenerateOptions, otherwise: float | None) -> float | None:
    """What a call may take. Raises TypeError and InvalidRequest for what is no time above 0."""
    value: object = options.get("deadline_s")
    if value is None:
        return otherwise
    seconds = _number("deadline_s", value)
    if not 0 < seconds < MAX_DEADLINE_S:
        raise InvalidRequest("deadline_s", f"{value} is out of range; it must be above 0 and below {MAX_DEADLINE_S:g}")
    return float(seconds)


def _set_input(
    request: inference_pb2.GenerateRequest | inference_pb2.AnticipateRequest | admin_pb2.WarmRequest,
    prompt: Prompt | None,
    messages: Messages | None,
) -> None:
    if (prompt is None) == (messages is None):
        raise TypeError("give either a prompt or messages")
    if isinstance(prompt, str):
        request.prompt = _text("prompt", prompt)
    elif prompt is not None:
        request.tokens.token_ids.extend(prompt)
        request.tokens.SetInParent()
    elif messages is not None:
        request.chat.SetInParent()
        for message in messages:
            if not isinstance(message, Mapping):
                raise TypeError(f'a message must be like {{"role": "user", "content": "..."}}, not {message!r}')
            role, content = message.get("role"), message.get("content")
            request.chat.messages.add(role=_text("role", role), content=_text("content", content))


_INTEGERS = ("top_k", "seed", "num_logprobs", "max_tokens")


def _set_sampling(message: types_pb2.SamplingParams, options: GenerateOptions) -> None:
    for name in SAMPLING_FIELDS:
        _set_number(message, name, options.get(name), "sampling.")
    for token_id, bias in options.get("logit_bias", {}).items():
        try:
            message.logit_bias[token_id] = bias
        except ValueError:
            raise InvalidRequest("sampling.logit_bias", f"{token_id} cannot be a token id") from None


def _set_number(message: Any, name: str, value: object, path: str) -> None:
    if value is None:
        return
    try:
        setattr(message, name, _number(name, value))
    except ValueError:
        raise InvalidRequest(
            f"{path}{name}", f"{value} is out of range; it must be 0 or more and not so large"
        ) from None


def _number(name: str, value: object) -> Any:
    kind, called = (Integral, "an integer") if name in _INTEGERS else (Real, "a number")
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {called}, not {value!r}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, "it holds half a character (a lone surrogate); send valid Unicode") from None
    return value


def _stop(stop: str | Sequence[str]) -> list[str]:
    return [_text("stop", entry) for entry in ([stop] if isinstance(stop, str) else stop)]


def _choice(kind: type[E], name: str, value: object) -> E:
    if isinstance(value, kind):
        return value
    try:
        return kind(_text(name, value))
    except ValueError:
        names = ", ".join(known.value for known in kind)
        raise InvalidRequest(name, f"{value!r} is none of: {names}") from None

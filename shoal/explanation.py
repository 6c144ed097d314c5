"""Why a request ran where and when it did, as the SDK's callers get it.

Plain frozen values made from AdminService.Explain. Does no I/O. Called by `shoal.client`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.messages import qos_from_proto
from shoal.types import QosClass
from shoal.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """A pipeline as the router saw it: predictions in milliseconds, or why it was out of the question."""

    pipeline_id: str
    ruled_out: str
    score_ms: float
    queue_ms: float
    prefill_ms: float
    inter_token_ms: float
    cached_tokens: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """at_ms: since the request arrived. pipeline_id: empty if none could take it. reason: why something was to decide."""

    at_ms: float
    pipeline_id: str
    reason: str
    candidates: tuple[RouteCandidate, ...]


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something that happened to a request, at_ms after it arrived."""

    at_ms: float
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A request's story. finish: empty while it runs, else its finish reason or the reason of the error that ended it."""

    request_id: str
    tenant: str
    qos_class: QosClass
    state: str
    prompt_tokens: int
    completion_tokens: int
    finish: str
    routes: tuple[RouteDecision, ...]
    events: tuple[RequestEvent, ...]


def explanation_from_proto(message: admin_pb2.ExplainResponse) -> Explanation:
    return Explanation(
        request_id=message.request_id,
        tenant=message.tenant,
        qos_class=qos_from_proto(message.qos_class, QosClass.BALANCED),
        state=message.state,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        finish=message.finish,
        routes=tuple(_route(route) for route in message.routes),
        events=tuple(RequestEvent(event.at_ms, event.what, event.detail) for event in message.events),
    )


def _route(message: admin_pb2.RouteDecision) -> RouteDecision:
    candidates = tuple(_candidate(candidate) for candidate in message.candidates)
    return RouteDecision(message.at_ms, message.pipeline_id, message.reason, candidates)


def _candidate(message: admin_pb2.RouteCandidate) -> RouteCandidate:
    return RouteCandidate(
        pipeline_id=message.pipeline_id,
        ruled_out=message.ruled_out,
        score_ms=message.score_ms,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        inter_token_ms=message.inter_token_ms,
        cached_tokens=message.cached_tokens,
        num_stages=message.num_stages,
    )

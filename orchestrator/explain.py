"""Why recent requests ran where and when they did: kept while they run, and for the newest of them after their end.

Owns the stories that `shoal explain` shows, as messages. Decides nothing and knows neither lanes nor schedulers: the engine
adds decisions and ends, the scheduler's events are read from the sequence. `server` finds a story for a client.
"""

from __future__ import annotations

from collections import OrderedDict

from orchestrator.core.routing import Candidate, Decision
from orchestrator.core.sequence import Sequence
from shoal import messages
from shoal.errors import RequestNotFound
from shoal.v1 import admin_pb2

MAX_STORIES = 1000
# As many as a fleet that falls apart gives reason for; later ones are dropped.
MAX_DECISIONS = 32


class Story:
    """One request. What it is told from is the sequence while that lives, and a message once it has ended.

    Invariant: exactly one of the two is there; stories are many, and prompts long.
    """

    __slots__ = ("_closed", "_decisions", "_sequence", "request_id")

    def __init__(self, request_id: str, sequence: Sequence) -> None:
        self.request_id = request_id
        self._sequence: Sequence | None = sequence
        self._decisions: list[tuple[float, Decision]] = []
        self._closed: admin_pb2.ExplainResponse | None = None

    @property
    def is_over(self) -> bool:
        return self._closed is not None

    def decide(self, decision: Decision, now: float) -> None:
        """Remember what the router chose and why."""
        if len(self._decisions) < MAX_DECISIONS:
            self._decisions.append((now, decision))

    def end(self, finish: str) -> None:
        """Close the story with a finish reason or the reason of an error; only the first end counts."""
        if self._sequence is None:
            return
        self._closed = _to_proto(self.request_id, self._sequence, self._decisions)
        self._closed.state, self._closed.finish = "finished", finish
        self._sequence = None
        self._decisions = []

    def to_proto(self) -> admin_pb2.ExplainResponse:
        """All that is known of the request by now."""
        if self._sequence is not None:
            return _to_proto(self.request_id, self._sequence, self._decisions)
        assert self._closed is not None
        return self._closed


class Stories:
    """The newest MAX_STORIES requests by id; a newer one with the same id replaces the older."""

    def __init__(self) -> None:
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def open(self, request_id: str, sequence: Sequence) -> Story:
        """Begin the story of a request that has just arrived; one without an id is kept for nobody."""
        story = Story(request_id, sequence)
        if request_id:
            self._stories.pop(request_id, None)
            self._stories[request_id] = story
            if len(self._stories) > MAX_STORIES:
                self._forget_one()
        return story

    def _forget_one(self) -> None:
        """The oldest that is over; the oldest of all if there are more running than are kept."""
        over = (one for one, story in self._stories.items() if story.is_over)
        del self._stories[next(over, next(iter(self._stories)))]

    def find(self, request_id: str) -> Story:
        """The story of a request, or of the newest if no id is given; raises RequestNotFound."""
        if not request_id and self._stories:
            return next(reversed(self._stories.values()))
        story = self._stories.get(request_id)
        if story is None:
            what = f"request {request_id!r} is not" if request_id else "there is no request"
            raise RequestNotFound(f"{what} among the last {MAX_STORIES} of this orchestrator", field="request_id")
        return story


def _to_proto(
    request_id: str, sequence: Sequence, decisions: list[tuple[float, Decision]]
) -> admin_pb2.ExplainResponse:
    arrived_at = sequence.arrived_at
    return admin_pb2.ExplainResponse(
        request_id=request_id,
        tenant=sequence.tenant,
        qos_class=messages.qos_to_proto(sequence.qos),
        state=sequence.state.value,
        prompt_tokens=len(sequence.prompt_token_ids),
        completion_tokens=len(sequence.output_token_ids),
        routes=[_decision_to_proto(decision, at - arrived_at) for at, decision in decisions],
        events=[
            admin_pb2.RequestEvent(at_ms=(event.at - arrived_at) * 1e3, what=event.what, detail=event.detail)
            for event in sequence.events
        ],
    )


def _decision_to_proto(decision: Decision, at_s: float) -> admin_pb2.RouteDecision:
    return admin_pb2.RouteDecision(
        at_ms=at_s * 1e3,
        pipeline_id=decision.pipeline_id or "",
        reason=decision.reason,
        candidates=[_candidate_to_proto(candidate) for candidate in decision.candidates],
    )


def _candidate_to_proto(candidate: Candidate) -> admin_pb2.RouteCandidate:
    return admin_pb2.RouteCandidate(
        pipeline_id=candidate.pipeline_id,
        ruled_out=candidate.ruled_out,
        score_ms=candidate.score_s * 1e3,
        queue_ms=candidate.queue_s * 1e3,
        prefill_ms=candidate.prefill_s * 1e3,
        inter_token_ms=candidate.inter_token_s * 1e3,
        cached_tokens=candidate.cached_tokens,
        num_stages=candidate.num_stages,
    )

"""Decides which pipeline a request goes to, and says why: every candidate with its numbers, or what rules it out.

Scores are predicted seconds; the lowest wins. Pure: it sees a request's size and class and a snapshot of each pipeline, and
knows neither schedulers nor queues. The engine calls it for each request that arrives, that has not been started in time,
or whose pipeline was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.step_time import Prediction
from shoal.kv import BlockHash
from shoal.types import DeviceMode, PipelineId, QosClass

# What a pipeline's pace is weighed by: about the length of a short answer. How long it gets, nobody knows beforehand.
EXPECTED_TOKENS = 64
# How many requests of other classes an idle latency pipeline takes: as many as leave it soon when it is needed.
MAX_BORROWERS = 2
# A shared pipeline has to be predicted this much faster than a latency one that is in use: what is predicted of it holds
# only until others come.
SHARED_HANDICAP = 2.0
# A pipeline is crowded if it has both this much more than the one with the least to do, in batches of requests, and this
# many times as much. Source: the cache-aware policy of SGLang's router, which falls back to load at 64 requests more and 1.5
# times as many; Ray Serve's PrefixCacheAffinityRouter compares queue lengths first, too. Both count requests of equal
# workers; here a batch is what each pipeline takes at once, as warm as it is.
CROWD_BATCHES = 0.5
CROWD_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What matters of a request.

    has_answer: tokens of it were delivered, so all it was promised must fit elsewhere too. time_left_s: until its deadline,
    None if it has none. num_certain: answer tokens that it will surely have, and that must be there by then. period_s: the
    least time between two of them that its client wants. block_hashes: of its prompt, what need not be computed where it is
    kept; num_stored: how many of these, from the first on, are in Redis.
    """

    qos: QosClass
    num_prompt: int
    max_tokens: int
    has_answer: bool = False
    time_left_s: float | None = None
    num_certain: int = 1
    period_s: float = 0.0
    block_hashes: tuple[BlockHash, ...] = ()
    num_stored: int = 0


@dataclass(frozen=True, slots=True)
class PipelineView:
    """A pipeline at the moment of a decision.

    prediction: for this request, as much of its prompt being there as is believed: cached_tokens. saved_s: how much longer
    the prompt would take here without them. sequence_tokens: the most one sequence may have. has_latency: sequences
    of class LATENCY run or wait there. can_start: a slot and KV for this request are free, and nobody waits for them.
    max_batch, steps_per_s: the limits in force (steps_per_s 0: none). is_accepting: it is not about to go away.
    """

    pipeline_id: PipelineId
    mode: DeviceMode
    num_stages: int
    prediction: Prediction
    sequence_tokens: int
    num_running: int
    num_waiting: int
    has_latency: bool
    can_start: bool
    max_batch: int
    steps_per_s: float = 0.0
    cached_tokens: int = 0
    saved_s: float = 0.0
    is_accepting: bool = True

    @property
    def load(self) -> float:
        """Requests here, in batches."""
        return (self.num_running + self.num_waiting) / max(self.max_batch, 1)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline as it was weighed; times in seconds. ruled_out: why it was out of the question, empty if it was not.

    prefill_s: of what is not cached; of the whole prompt where the cache did not count because the pipeline is crowded.
    """

    pipeline_id: PipelineId
    ruled_out: str
    score_s: float
    queue_s: float
    prefill_s: float
    inter_token_s: float
    cached_tokens: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Decision:
    """candidates: the best first, those ruled out last. reason: what made a decision necessary."""

    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def ranking(self) -> tuple[PipelineId, ...]:
        """Those that can take it, the best first."""
        return tuple(one.pipeline_id for one in self.candidates if not one.ruled_out)

    @property
    def pipeline_id(self) -> PipelineId | None:
        """The chosen one; None if nobody can take it."""
        return next(iter(self.ranking), None)


def route(request: RouteRequest, views: Sequence[PipelineView], reason: str = "arrived") -> Decision:
    """Choose the pipeline for a request that has none."""
    accepting = [view for view in views if view.is_accepting]
    unfit = _too_small(request, accepting) | _kept(request, accepting)
    return _decide(request, views, unfit | _closed(views), reason)


def reroute(
    request: RouteRequest, current_id: PipelineId, views: Sequence[PipelineView], reason: str = "not started in time"
) -> Decision:
    """Choose another pipeline, which can start it now, for a request that waits at `current_id`; maybe there is none.

    An idle latency pipeline may be borrowed. What is predicted for the present one is not weighed: that is what failed.
    """
    accepting = [view for view in views if view.is_accepting]
    busy = {view.pipeline_id: "cannot start it now" for view in views if not view.can_start}
    unfit = busy | _late(request, views) | _too_small(request, accepting) | _lent(request, accepting) | _closed(views)
    return _decide(request, views, unfit | {current_id: "where it waits"}, reason)


def _decide(
    request: RouteRequest, views: Sequence[PipelineView], ruled_out: dict[PipelineId, str], reason: str
) -> Decision:
    def rank(weighed: tuple[PipelineView, Candidate]) -> tuple[bool, bool, float, int, int, str]:
        view, one = weighed
        # Predictions do not know of those who have just come; nor, at first, anything.
        ties = (view.num_running + view.num_waiting, one.num_stages, one.pipeline_id)
        return bool(one.ruled_out), not _is_dedicated(request, view), one.score_s, *ties

    least = min((view.load for view in views if view.pipeline_id not in ruled_out), default=0.0)
    weighed = [(view, _candidate(request, view, ruled_out.get(view.pipeline_id, ""), least)) for view in views]
    return Decision(tuple(one for _, one in sorted(weighed, key=rank)), reason)


def _is_dedicated(request: RouteRequest, view: PipelineView) -> bool:
    """A device that a LATENCY request would have to itself goes before all others, whatever is predicted of them."""
    is_latency = request.qos is QosClass.LATENCY and view.mode is DeviceMode.LATENCY
    return is_latency and view.can_start and not view.has_latency


def _is_crowded(view: PipelineView, least_load: float) -> bool:
    """Whether so much more goes on here than elsewhere that a cache is no reason to come: all who share it would."""
    return view.load > max(least_load + CROWD_BATCHES, least_load * CROWD_RATIO)


def _candidate(request: RouteRequest, view: PipelineView, ruled_out: str, least_load: float) -> Candidate:
    prefill_s = view.prediction.prefill_s + (view.saved_s if _is_crowded(view, least_load) else 0.0)
    least_gap_s = 1 / view.steps_per_s if view.steps_per_s else 0.0
    inter_token_s = max(view.prediction.inter_token_s, least_gap_s)
    return Candidate(
        pipeline_id=view.pipeline_id,
        ruled_out=ruled_out,
        score_s=_score_s(request, view, view.prediction.queue_s + prefill_s, inter_token_s),
        queue_s=view.prediction.queue_s,
        prefill_s=prefill_s,
        inter_token_s=inter_token_s,
        cached_tokens=view.cached_tokens,
        num_stages=view.num_stages,
    )


def _score_s(request: RouteRequest, view: PipelineView, first_token_s: float, inter_token_s: float) -> float:
    """Time to an answer of EXPECTED_TOKENS; for THROUGHPUT, the time of the pipeline that such an answer takes up.

    A pipeline of n stages computes n batches at once, so a token costs it only its share of all their rows.
    """
    if request.qos is QosClass.THROUGHPUT:
        return first_token_s + EXPECTED_TOKENS * inter_token_s / (view.num_stages * max(view.max_batch, 1))
    is_handicapped = request.qos is QosClass.LATENCY and view.mode is not DeviceMode.LATENCY
    return (first_token_s + EXPECTED_TOKENS * inter_token_s) * (SHARED_HANDICAP if is_handicapped else 1.0)


def _late(request: RouteRequest, views: Sequence[PipelineView]) -> dict[PipelineId, str]:
    """Those that would refuse it anyway; whoever went there in vain would have lost its place in the queue."""
    late = {}
    for view in views:
        need_s = view.prediction.answer_s(request.num_certain, request.period_s)
        if request.time_left_s is not None and need_s > request.time_left_s:
            late[view.pipeline_id] = f"would miss the deadline: takes {need_s:.1f} s of {request.time_left_s:.1f} s"
    return late


def _closed(views: Sequence[PipelineView]) -> dict[PipelineId, str]:
    return {view.pipeline_id: "takes no more requests: a device leaves" for view in views if not view.is_accepting}


def _too_small(request: RouteRequest, views: Sequence[PipelineView]) -> dict[PipelineId, str]:
    """Those that hold less of the request than another does, or not even what it must have."""
    wanted = request.num_prompt + request.max_tokens
    if not request.has_answer:
        largest = max((view.sequence_tokens for view in views), default=0)
        wanted = max(min(wanted, largest), request.num_prompt + 1)
    return {
        view.pipeline_id: f"holds {view.sequence_tokens} tokens of a sequence, this takes {wanted}"
        for view in views
        if view.sequence_tokens < wanted
    }


def _kept(request: RouteRequest, views: Sequence[PipelineView]) -> dict[PipelineId, str]:
    """Latency pipelines are not for other classes, unless there is nothing else that could hold the request."""
    unfit = _too_small(request, views)
    has_others = any(view.mode is not DeviceMode.LATENCY and view.pipeline_id not in unfit for view in views)
    if request.qos is QosClass.LATENCY or not has_others:
        return {}
    return {view.pipeline_id: "kept for class latency" for view in views if view.mode is DeviceMode.LATENCY}


def _lent(request: RouteRequest, views: Sequence[PipelineView]) -> dict[PipelineId, str]:
    """Of the latency pipelines that are kept, those that are in use or have lent all they can spare."""
    kept = _kept(request, views)
    reasons = {}
    for view in views:
        if view.pipeline_id not in kept:
            continue
        if view.has_latency:
            reasons[view.pipeline_id] = "kept for class latency, which it serves now"
        elif view.num_running + view.num_waiting >= MAX_BORROWERS:
            reasons[view.pipeline_id] = f"kept for class latency, and lent to {MAX_BORROWERS} others already"
    return reasons

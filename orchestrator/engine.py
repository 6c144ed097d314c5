"""The loop between requests and pipelines: routes what comes, makes batches, delivers tokens, moves what cannot stay.

A turn runs on the event loop whenever a request comes or goes, a frame arrives or an alarm rings, and waits for nothing.
Owns the lanes, a pipeline and its scheduler each, and the one ledger of tenants that all schedulers share; sequences whose
lane is gone wait in `core.parking` for one that takes them. Knows token ids, not text. `server` submits, `control` brings
pipelines up and down; `app` gives it the ledger with the tenants' weights.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from orchestrator.answer import Answer, TokenEvent, missed_deadline, poisonous
from orchestrator.clock import Alarm, Clock, LoopClock
from orchestrator.core.limits import Pace
from orchestrator.core.parking import Parking
from orchestrator.core.routing import PipelineView, RouteRequest, reroute, route
from orchestrator.core.sequence import Sequence
from orchestrator.core.tenants import TenantLedger
from orchestrator.explain import Stories, Story
from orchestrator.lane import EmittedToken, Lane, route_request
from orchestrator.pipeline import Pipeline
from shoal.errors import DeadlineUnmeetable, NotReady, Overloaded, ShoalError, WorkerLost, rebuild
from shoal.kv import BlockHash
from shoal.types import FinishReason, KVReuse, PipelineId, QosClass, SequenceId
from shoal.v1 import flow_pb2

logger = logging.getLogger(__name__)

# The loop's timers are about this fine; an alarm for what is past already must not keep it from everything else.
MIN_ALARM_S = 0.001
# A request that no other lane could take in time is offered again after this share of the timeout, so it is late by at most
# that; the floor keeps a timeout of 0 from polling.
FALLBACK_AGAIN = 0.5
MIN_FALLBACK_S = 0.02
TRAIL_ID_BYTES = 16
# Computing so few tokens again takes less than a checkpoint of them is worth.
MIN_TRAIL_TOKENS = 8
# How often the pipeline of an answer may be lost with no token between: it may be the request that devices die of.
MAX_VAIN_RECOVERIES = 3


class Engine:
    """Sequences in, tokens out.

    Invariants: an Answer is known exactly while its sequence waits or runs; then it does so in the lane of the answer's
    pipeline and in no other, or is parked and in none.
    """

    def __init__(self, ledger: TenantLedger | None = None, clock: Clock | None = None) -> None:
        self._ledger = TenantLedger() if ledger is None else ledger
        self._clock: Clock = LoopClock() if clock is None else clock
        self._lanes: dict[PipelineId, Lane] = {}
        self._parking = Parking()
        # Why no pipeline comes for those who are parked, as far as is known.
        self.parked_trouble = ""
        self._answers: dict[SequenceId, Answer] = {}
        self._numbers = itertools.count(1)
        self._alarm: Alarm | None = None
        self._alarm_at = 0.0
        self.stories = Stories()

    @property
    def pipelines(self) -> Mapping[PipelineId, Pipeline]:
        """Those that serve."""
        return {pipeline_id: lane.pipeline for pipeline_id, lane in self._lanes.items()}

    def lane(self, pipeline_id: PipelineId) -> Lane | None:
        """For reading only."""
        return self._lanes.get(pipeline_id)

    @property
    def sequence_tokens(self) -> int:
        """The most tokens that a sequence may have in any of the pipelines; 0 without one."""
        return max((lane.pipeline.limits.sequence_tokens for lane in self._lanes.values()), default=0)

    @property
    def is_idle(self) -> bool:
        return not self._answers

    @property
    def num_running(self) -> int:
        return sum(lane.scheduler.num_running for lane in self._lanes.values())

    @property
    def num_waiting(self) -> int:
        return sum(lane.scheduler.num_waiting for lane in self._lanes.values()) + len(self._parking)

    @property
    def num_parked(self) -> int:
        """Those that wait for a pipeline, whichever comes."""
        return len(self._parking)

    def new_sequence_id(self) -> SequenceId:
        return SequenceId(next(self._numbers))

    # What clients want

    def submit(self, sequence: Sequence, request_id: str = "") -> Answer:
        """Take a sequence; its story is kept under request_id. Raises NotReady, or what the schedulers refuse it with."""
        now = self._clock.now()
        story = self.stories.open(request_id, sequence)
        if sequence.kv_reuse is not KVReuse.NONE and sequence.max_tokens >= MIN_TRAIL_TOKENS:
            sequence.trail_id = secrets.token_bytes(TRAIL_ID_BYTES)
        try:
            lane = self._choose(sequence, story, now)
        except ShoalError as error:
            story.end(error.reason)
            raise
        answer = self._answers[sequence.sequence_id] = Answer(sequence, lane.pipeline, story)
        self._note_limits(sequence, lane, now)
        self._turn([lane], now)
        return answer

    def adopt(self, sequence: Sequence, request_id: str = "", wait_s: float | None = None) -> Answer:
        """Take a sequence that another orchestrator had, with what is known of its answer; only new tokens are delivered.

        It waits for a pipeline, if there is none now, for wait_s or as long as one is being built.
        """
        now = self._clock.now()
        answer = Answer(sequence, None, self.stories.open(request_id, sequence))
        self._answers[sequence.sequence_id] = answer
        self._parking.add(sequence, NotReady("no device computes this answer any more; ask again"), now, wait_s)
        self._offer_parked(now)
        self._turn(self._lanes.values(), now)
        return answer

    def abort(self, sequence_id: SequenceId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence whose client is gone or has enough; nothing if it ended already."""
        answer = self._answers.pop(sequence_id, None)
        if answer is None:
            return
        answer.story.end(reason.value)
        now = self._clock.now()
        if self._parking.remove(sequence_id, now):
            answer.sequence.finish(reason, now)
            return
        lane = self._lanes[answer.pipeline_id]
        lane.scheduler.abort(sequence_id, reason, now)
        self._turn([lane], now)

    def _choose(self, sequence: Sequence, story: Story, now: float) -> Lane:
        """Submit to the best lane that takes it. Raises what it was refused with, the soonest hope if by several."""
        accepting = [lane for lane in self._lanes.values() if lane.is_accepting]
        if not accepting:
            raise NotReady("no pipeline takes requests now; try again in a moment", retry_after_s=1.0)
        request = route_request(sequence, now)
        decision = route(request, self._views(request, now))
        story.decide(decision, now)
        # Where no lane can ever hold it, the largest says so, with the numbers.
        largest = max(accepting, key=lambda lane: lane.pipeline.limits.sequence_tokens)
        refusals: list[Overloaded | DeadlineUnmeetable] = []
        for pipeline_id in decision.ranking or (largest.pipeline_id,):
            try:
                self._lanes[pipeline_id].scheduler.submit(sequence, now)
            except (Overloaded, DeadlineUnmeetable) as error:
                sequence.note(now, "refused", f"by {pipeline_id}: {error.message}")
                refusals.append(error)
            else:
                return self._lanes[pipeline_id]
        raise min(refusals, key=lambda error: error.retry_after_s)

    def _views(self, request: RouteRequest, now: float) -> list[PipelineView]:
        """All lanes as the router sees them; what nobody has measured yet is expected to be like what is known."""
        known = [one for lane in self._lanes.values() if (one := lane.scheduler.times.slowness) is not None]
        for lane in self._lanes.values() if known else ():
            lane.scheduler.times.expect(sum(known) / len(known))
        return [lane.view(request, now) for lane in self._lanes.values()]

    # What is kept of prompts

    @property
    def keeps_blocks(self) -> bool:
        """Whether any pipeline keeps KV of prompts."""
        return any(lane.pipeline.limits.keeps_blocks for lane in self._lanes.values())

    def known_blocks(self, block_hashes: Seq[BlockHash]) -> int:
        """How many leading blocks of a prompt the pipeline that has most of them is believed to hold."""
        return max((lane.scheduler.restores.index.match(block_hashes) for lane in self._lanes.values()), default=0)

    def keep_blocks(self, block_hashes: Seq[BlockHash], ttl_s: float) -> None:
        """Pin blocks for so long wherever stages keep them."""
        for lane in self._lanes.values():
            lane.pipeline.keep(block_hashes, ttl_s)

    def prefetch_blocks(self, block_hashes: tuple[BlockHash, ...]) -> None:
        """Have all stages fetch the leading blocks of a prompt that may come into memory; nothing is believed for that."""
        now = self._clock.now()
        for lane in self._lanes.values():
            lane.prefetch_ahead(block_hashes, now)

    def forget_blocks(self, block_hashes: Seq[BlockHash]) -> None:
        """Delete blocks from the memory of all stages."""
        for lane in self._lanes.values():
            lane.scheduler.restores.index.forget(block_hashes)
            lane.pipeline.forget_blocks(block_hashes)

    # What control decides

    def pipeline_up(self, pipeline: Pipeline, fallback_s: float) -> None:
        """Serve with a further pipeline. fallback_s: how long a request may wait for its start there, others being free."""
        assert pipeline.pipeline_id not in self._lanes, f"two pipelines {pipeline.pipeline_id}"
        self._lanes[pipeline.pipeline_id] = Lane(pipeline, self._ledger, fallback_s)
        now = self._clock.now()
        self._offer_parked(now)
        self._turn(self._lanes.values(), now)

    def pipeline_down(self, pipeline_id: PipelineId, error: ShoalError, *, is_final: bool = False) -> None:
        """Serve with a pipeline no more: its sequences go on elsewhere, or wait for a pipeline that takes them.

        is_final: no other will come, so those who find no place end with the error at once.
        """
        lane, now = self._lanes.pop(pipeline_id, None), self._clock.now()
        if lane is not None:
            for sequence in lane.scheduler.take_all(now):
                self._move_or_park(sequence, lane, error, now, is_final=is_final)
        if is_final and not self._lanes:
            for sequence in self._parking.sequences():
                self._parking.remove(sequence.sequence_id, now)
                self._end(sequence.sequence_id, error)
        self._turn(self._lanes.values(), now)

    def hold_parked(self) -> None:
        """Let those who are parked wait on: a pipeline is being built."""
        self._parking.hold(self._clock.now())

    def _move_or_park(self, sequence: Sequence, lane: Lane, error: ShoalError, now: float, *, is_final: bool) -> None:
        reason = f"{lane.pipeline_id} is gone ({error.reason})"
        # Placed anew is not lost.
        if sequence.has_started and isinstance(error, WorkerLost):
            sequence.num_recoveries += 1
            sequence.num_vain_recoveries += 1
        if sequence.num_vain_recoveries > MAX_VAIN_RECOVERIES:
            self._end(sequence.sequence_id, poisonous(error, sequence.num_vain_recoveries))
            return
        if self._move(sequence, lane.pipeline_id, reason, now):
            return
        if is_final:
            self._end(sequence.sequence_id, error)
        else:
            sequence.note(now, "parked", reason)
            self._parking.add(sequence, error, now)

    def _offer_parked(self, now: float) -> None:
        """Let those who are parked go on where that is possible."""
        if not self._lanes:
            return
        for sequence in self._parking.sequences():
            answer = self._answers[sequence.sequence_id]
            if self._move(sequence, answer.pipeline_id, "a pipeline is there again", now):
                self._parking.remove(sequence.sequence_id, now)

    def is_busy(self, pipeline_id: PipelineId) -> bool:
        """Whether a pipeline has requests; one that does not serve yet has those that are parked."""
        lane = self._lanes.get(pipeline_id)
        if lane is None:
            return self.num_parked > 0
        return lane.scheduler.num_running + lane.scheduler.num_waiting > 0

    def set_accepting(self, pipeline_id: PipelineId, is_accepting: bool) -> None:
        """Let a pipeline that is about to go away take nothing more, or let it again; nothing if it is gone."""
        lane = self._lanes.get(pipeline_id)
        if lane is not None:
            lane.is_accepting = is_accepting

    def set_pace(self, pipeline_id: PipelineId, pace: Pace) -> None:
        """Limit a pipeline to what heat and battery of its devices allow now; nothing if it is gone."""
        lane, now = self._lanes.get(pipeline_id), self._clock.now()
        if lane is None or lane.scheduler.pace == pace:
            return
        lane.scheduler.set_pace(pace)
        for answer in self._answers.values():
            if answer.pipeline is lane.pipeline:
                answer.sequence.note(now, "limits", lane.limits_text())
        self._turn([lane], now)

    def _move(self, sequence: Sequence, source: PipelineId, reason: str, now: float) -> bool:
        """Find a lane for a sequence whose own is gone; False if there is none that can take it."""
        request, story = route_request(sequence, now), self._answers[sequence.sequence_id].story
        decision = route(request, self._views(request, now), reason)
        story.decide(decision, now)
        return any(self._hand_over(sequence, source, self._lanes[one], reason, now) for one in decision.ranking)

    def _hand_over(self, sequence: Sequence, source: PipelineId, target: Lane, reason: str, now: float) -> bool:
        """Submit a sequence that `source` has let go to a lane; False if that refuses it."""
        try:
            target.scheduler.submit(sequence, now)
        except ShoalError as error:
            sequence.note(now, "refused", f"by {target.pipeline_id}: {error.message}")
            return False
        answer = self._answers[sequence.sequence_id]
        before, answer.pipeline = answer.pipeline, target.pipeline
        if before is target.pipeline:
            return True
        if before is not None and sequence.output_token_ids and before.kernels != target.pipeline.kernels:
            sequence.has_changed_kernels = True
        sequence.note(now, "moved", f"{source or 'another orchestrator'} -> {target.pipeline_id}: {reason}")
        self._note_limits(sequence, target, now)
        logger.info(
            "sequence_moved sequence=%d from=%s to=%s tokens=%d reason=%r",
            sequence.sequence_id, source, target.pipeline_id, len(sequence.output_token_ids), reason,
        )  # fmt: skip
        return True

    @staticmethod
    def _note_limits(sequence: Sequence, lane: Lane, now: float) -> None:
        if lane.is_limited:
            sequence.note(now, "limits", lane.limits_text())

    # What stages report

    def on_frame(self, frame: flow_pb2.Frame) -> None:
        """Act on a frame from a stage; one of a pipeline that is gone is dropped."""
        lane, now = self._lanes.get(PipelineId(frame.pipeline_id)), self._clock.now()
        if lane is None or frame.epoch != lane.pipeline.epoch:
            return
        match frame.WhichOneof("body"):
            case "step_result":
                tokens = lane.on_result(frame.step_result, now)
                self._deliver(tokens)
                if frame.step_result.burst_steps and all(token.emitted.finish is None for token in tokens):
                    # Amid a burst: no credit, slot or row became free, so nothing else can be done than before.
                    return
            case "restored":
                lane.on_restored(frame.restored, now)
            case "step_failed":
                self._on_failed(lane, frame.step_failed, now)
            case body:
                logger.warning("unexpected_frame body=%s", body)
        self._turn([lane], now)

    def _deliver(self, tokens: list[EmittedToken]) -> None:
        for token in tokens:
            emitted = token.emitted
            answer = self._answers[emitted.sequence_id]
            if emitted.finish is not None:
                del self._answers[emitted.sequence_id]
                answer.story.end(emitted.finish.value)
            answer.put(TokenEvent(emitted.index, emitted.token_id, token.logprobs, emitted.finish))

    def _on_failed(self, lane: Lane, failed: flow_pb2.StepFailed, now: float) -> None:
        error = rebuild(failed.reason, f"stage {failed.stage} could not run a step: {failed.message}")
        logger.error(
            "step_failed pipeline=%s step=%d stage=%d error=%s",
            lane.pipeline_id, failed.step, failed.stage, failed.message,
        )  # fmt: skip
        for sequence_id in lane.on_failed(failed, now):
            self._end(sequence_id, error)

    def _end(self, sequence_id: SequenceId, error: ShoalError) -> None:
        answer = self._answers.pop(sequence_id)
        answer.story.end(error.reason)
        answer.put(error)

    # Turns and alarms

    def _turn(self, lanes: Iterable[Lane], now: float) -> None:
        """Make every batch that can be made now in these lanes, and see when to look again if nothing happens."""
        for lane in lanes:
            lane.send_all(now)
        self._set_alarm(now)

    def _set_alarm(self, now: float) -> None:
        """Have the alarm ring no later than something is due; one that is set earlier rings in vain, and is set anew."""
        for lane in self._lanes.values():
            self._plan_fallback(lane, now)
        due = [at for lane in self._lanes.values() for at in (lane.scheduler.wake_at(now), lane.fallback_at)]
        due.append(self._parking.wake_at())
        at = max(min((at for at in due if at is not None), default=math.inf), now + MIN_ALARM_S)
        if self._alarm is not None and (at < self._alarm_at or at == math.inf):
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None and at < math.inf:
            self._alarm, self._alarm_at = self._clock.call_at(at, self._ring), at

    def _plan_fallback(self, lane: Lane, now: float) -> None:
        if len(self._lanes) < 2 or lane.scheduler.num_waiting == 0:
            lane.fallback_at = None
        elif lane.fallback_at is None:
            lane.fallback_at = now + max(lane.fallback_s, MIN_FALLBACK_S)

    def _ring(self) -> None:
        """Do what has become due: end what has missed its deadline, move what waits too long, make batches again."""
        self._alarm, now = None, self._clock.now()
        for sequence, error in self._parking.take_late(now):
            self._end(sequence.sequence_id, missed_deadline(sequence, now) if error is None else self._given_up(error))
        for lane in self._lanes.values():
            self._expire(lane, now)
        for lane in self._lanes.values():
            if lane.fallback_at is not None and lane.fallback_at <= now:
                self._fall_back(lane, now)
        self._turn(self._lanes.values(), now)

    def _expire(self, lane: Lane, now: float) -> None:
        for sequence in lane.scheduler.expire(now):
            self._end(sequence.sequence_id, missed_deadline(sequence, now))

    def _given_up(self, error: ShoalError) -> ShoalError:
        """The error of one that no pipeline came for, with what is known of why."""
        if not self.parked_trouble:
            return error
        return WorkerLost(f"{error.message}; {self.parked_trouble}", retry_after_s=max(error.retry_after_s, 1.0))

    def _fall_back(self, lane: Lane, now: float) -> None:
        """Move what waits here too long to lanes that can start it at once."""
        lane.fallback_at = now + max(lane.fallback_s * FALLBACK_AGAIN, MIN_FALLBACK_S)
        others = [one for one in self._lanes.values() if one is not lane]
        if not any(one.has_room for one in others):
            return
        reason = f"not started within {lane.fallback_s * 1e3:.0f} ms"
        # Nobody slips by one of its class that has waited longer; and a long queue is not weighed one by one in vain.
        blocked: set[QosClass] = set()
        for sequence in lane.scheduler.overdue(now, lane.fallback_s):
            if sequence.qos in blocked:
                continue
            request = route_request(sequence, now)
            views = self._views(request, now)
            decision = reroute(request, lane.pipeline_id, views, reason)
            if decision.pipeline_id is None:
                blocked.add(sequence.qos)
            else:
                self._answers[sequence.sequence_id].story.decide(decision, now)
                self._take_over(sequence, lane, self._lanes[decision.pipeline_id], reason, now)

    def _take_over(self, sequence: Sequence, source: Lane, target: Lane, reason: str, now: float) -> None:
        if source.scheduler.withdraw(sequence.sequence_id, now) is None:
            return
        if self._hand_over(sequence, source.pipeline_id, target, reason, now):
            # So that the next one sees the slot taken.
            self._turn([target], now)
        elif not self._hand_over(sequence, source.pipeline_id, source, reason, now):
            self._end(sequence.sequence_id, Overloaded("no pipeline can take the request any more", retry_after_s=1.0))

    def check_invariants(self) -> None:
        """Assert the invariants of the class; costs time proportional to all sequences."""
        self._parking.check_invariants()
        for sequence_id, answer in self._answers.items():
            if sequence_id in self._parking:
                continue
            holders = [lane for lane in self._lanes.values() if lane.scheduler.get(sequence_id) is not None]
            assert [lane.pipeline for lane in holders] == [answer.pipeline], answer.sequence.story()
        assert self.num_running + self.num_waiting == len(self._answers)

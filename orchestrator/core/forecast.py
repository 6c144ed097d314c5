"""What a request that comes now may expect: until it has a slot, until its first token, between two tokens.

For routing, and to refuse at once what could not be ready before its deadline. It only reads what admission, decoding and
step times know; nothing walks over sequences.
"""

from __future__ import annotations

from orchestrator.core.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, Admission
from orchestrator.core.decoding import MIN_CHUNK_TOKENS, Decoding, Moment
from orchestrator.core.limits import STEP_TOKENS, SchedulerLimits
from orchestrator.core.sequence import Sequence
from orchestrator.core.step_time import Prediction, StepTimes
from shoal.errors import DeadlineUnmeetable
from shoal.types import QosClass


class Forecast:
    """Reads what the scheduler's parts know."""

    def __init__(self, limits: SchedulerLimits, times: StepTimes, admission: Admission, decoding: Decoding) -> None:
        self._limits = limits
        self._times = times
        self._admission = admission
        self._decoding = decoding

    def predict(self, num_prompt: int, qos: QosClass, moment: Moment) -> Prediction:
        """Assume that things go on as they are: the same rows, the same chunks, ends as often as before."""
        num_rows, middle = self._decoding.rows_per_batch(), num_prompt // 2
        num_tokens = max(
            self._decoding.prompt_room(num_rows, middle, moment),
            self._decoding.prompt_room(0, middle, moment),
            MIN_CHUNK_TOKENS,
        )
        rows = self._decoding.work_of_rows(num_rows)
        token_s = self._times.bottleneck_s(rows + self._limits.work_of(num_tokens, middle)) / num_tokens
        inter_token_s = self._decoding.gap_s(num_more=1 + moment.num_prompts)
        steps_per_s = self._decoding.pace.steps_per_s
        if steps_per_s:
            token_s = max(token_s, 1 / (STEP_TOKENS * steps_per_s))
            inter_token_s = max(inter_token_s, 1 / steps_per_s)
        ahead = self._admission.num_prompt_left + self._admission.queue.num_tokens_before(qos)
        first_chunk = min(num_prompt, num_tokens)
        return Prediction(
            queue_s=ahead * token_s + self._admission.slot_wait_s(qos, moment.now),
            prefill_s=(num_prompt - first_chunk) * token_s + self._times.latency_s(rows + first_chunk),
            inter_token_s=inter_token_s,
        )

    def check_deadline(self, sequence: Sequence, max_tokens: int, moment: Moment) -> None:
        """Raise DeadlineUnmeetable if the first token, or an answer whose length is certain, would come too late."""
        if sequence.deadline_at is None:
            return
        left_s = sequence.deadline_at - moment.now
        prediction = self.predict(len(sequence.prompt_token_ids), sequence.qos, moment)
        num_certain = 1 if sequence.stop_ids else max_tokens
        need_s = prediction.answer_s(num_certain, sequence.period_s)
        # What the client itself or a limited device prescribes is known before anything is measured.
        steps_per_s = self._decoding.pace.steps_per_s
        sure_s = (num_certain - 1) * max(sequence.period_s, 1 / steps_per_s if steps_per_s else 0.0)
        what = "the first token" if sequence.stop_ids else f"all {max_tokens} tokens"
        if left_s > sure_s and (need_s <= left_s or not self._times.is_known):
            return
        waiting = f"{prediction.queue_s:.2f} s of it waiting"
        message = f"{what} would take {need_s:.2f} s ({waiting}); the deadline is in {left_s:.2f} s"
        if need_s - prediction.queue_s > left_s:
            raise DeadlineUnmeetable(f"{message}: even without waiting that is too soon, so allow more time")
        raise DeadlineUnmeetable(
            message, retry_after_s=min(max(prediction.queue_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        )

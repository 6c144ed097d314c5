"""What a request that comes now may expect: until it has a slot, until its first token, between two tokens.

For routing, and to refuse at once what could not be ready before its deadline. It only reads what admission, decoding and
step times know; nothing walks over sequences.
"""

from __future__ import annotations

from orchestrator.core.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, Admission
from orchestrator.core.decoding import Decoding, Moment
from orchestrator.core.limits import STEP_TOKENS
from orchestrator.core.prompts import Prompts
from orchestrator.core.sequence import Sequence
from orchestrator.core.step_time import Prediction, StepTimes
from shoal.errors import DeadlineUnmeetable
from shoal.types import QosClass


class Forecast:
    """Reads what the scheduler's parts know."""

    def __init__(self, times: StepTimes, admission: Admission, decoding: Decoding, prompts: Prompts) -> None:
        self._times = times
        self._admission = admission
        self._decoding = decoding
        self._prompts = prompts

    def predict(self, num_prompt: int, qos: QosClass, moment: Moment) -> Prediction:
        """Assume that things go on as they are: the same rows, the same chunks, ends as often as before."""
        prompts = self._prompts.pace(num_prompt // 2, moment.num_prompts)
        period_s = self._decoding.pace.period_s
        token_s = max(prompts.period_s / prompts.num_tokens, period_s / STEP_TOKENS)
        ahead = self._admission.num_prompt_left + self._admission.queue.num_tokens_before(qos)
        last_chunk = min(num_prompt, prompts.num_tokens)
        last_s = self._prompts.pass_s(prompts.num_rows, last_chunk, num_prompt - last_chunk)
        return Prediction(
            queue_s=ahead * token_s + self._admission.slot_wait_s(qos, moment.now),
            prefill_s=(num_prompt - last_chunk) * token_s + last_s,
            inter_token_s=max(self._decoding.gap_s(num_more=1 + moment.num_prompts), period_s),
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
        sure_s = (num_certain - 1) * max(sequence.period_s, self._decoding.pace.period_s)
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

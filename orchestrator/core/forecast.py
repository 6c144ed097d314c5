"""What a request that comes now may expect: until it has a slot, until its first token, between two tokens.

For routing, and to refuse at once what could not be ready before its deadline. It only reads what admission, decoding and
step times know; nothing walks over sequences.
"""

from __future__ import annotations

from orchestrator.core.admission import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, Admission
from orchestrator.core.decoding import Decoding, Moment
from orchestrator.core.limits import STEP_TOKENS
from orchestrator.core.prompts import PromptPace, Prompts
from orchestrator.core.restores import Restores
from orchestrator.core.sequence import Sequence
from orchestrator.core.step_time import Prediction, StepTimes
from shoal.errors import DeadlineUnmeetable
from shoal.kv import BLOCK_TOKENS
from shoal.types import QosClass

# What fetching blocks may take of the time that computing them would: the rest pays for trying in vain.
FETCH_SHARE = 0.8
# Before it is known how long computing takes: a block at a speed of 640 tokens a second, and something for the way.
UNKNOWN_BLOCK_S = 0.1
UNKNOWN_FETCH_S = 0.2
# Of what is known of an answer that goes on: trails of several may have to come, one after the other. No stage that has lost
# the question is waited for longer than the most.
LEAST_TRAIL_S, MOST_TRAIL_S = 0.5, 30.0


class Forecast:
    """Reads what the scheduler's parts know."""

    def __init__(
        self, times: StepTimes, admission: Admission, decoding: Decoding, prompts: Prompts, restores: Restores
    ) -> None:
        self._times = times
        self._admission = admission
        self._decoding = decoding
        self._prompts = prompts
        self._restores = restores

    def predict(self, num_prompt: int, qos: QosClass, moment: Moment, num_cached: int = 0) -> Prediction:
        """Assume that things go on as they are: the same rows, the same chunks, ends as often as before.

        num_cached: leading tokens of the prompt that need not be computed; copying them takes no time worth counting.
        """
        pace = self._pace(num_cached, num_prompt, moment)
        under_way = self._admission.num_prompt_left + self._restores.num_prompt_left
        ahead = under_way + self._admission.queue.num_tokens_before(qos)
        period_s = self._decoding.pace.period_s
        return Prediction(
            queue_s=ahead * self._token_s(pace) + self._admission.slot_wait_s(qos, moment.now),
            prefill_s=self._prefill_s(num_cached, num_prompt, pace),
            inter_token_s=max(self._decoding.gap_s(num_more=1 + moment.num_prompts), period_s),
        )

    def _pace(self, start: int, stop: int, moment: Moment) -> PromptPace:
        """How the tokens [start, stop) of a prompt get on."""
        return self._prompts.pace((start + stop) // 2, moment.num_prompts)

    def _token_s(self, pace: PromptPace) -> float:
        return max(pace.period_s / pace.num_tokens, self._decoding.pace.period_s / STEP_TOKENS)

    def _prefill_s(self, start: int, stop: int, pace: PromptPace) -> float:
        """What the tokens [start, stop) of a prompt take: one chunk after the other, the last one through all stages."""
        last_chunk = min(stop - start, pace.num_tokens)
        last_s = self._prompts.pass_s(pace.num_rows, last_chunk, stop - last_chunk)
        return (stop - start - last_chunk) * self._token_s(pace) + last_s

    def fetch_s(self, first: int, stop: int, moment: Moment) -> float:
        """How long stages may try to fetch the blocks [first, stop) of a prompt instead of computing them."""
        if not self._times.is_known:
            return UNKNOWN_FETCH_S + (stop - first) * UNKNOWN_BLOCK_S
        start, end = first * BLOCK_TOKENS, stop * BLOCK_TOKENS
        return FETCH_SHARE * self._prefill_s(start, end, self._pace(start, end, moment))

    def trail_s(self, num_tokens: int) -> float:
        """How long stages may try to fetch the trail of so many answer tokens instead of computing one after the other."""
        return min(MOST_TRAIL_S, LEAST_TRAIL_S + FETCH_SHARE * num_tokens * self._times.latency_s(1))

    def check_deadline(self, sequence: Sequence, max_tokens: int, moment: Moment) -> None:
        """Raise DeadlineUnmeetable if the first token, or an answer whose length is certain, would come too late."""
        if sequence.deadline_at is None:
            return
        left_s = sequence.deadline_at - moment.now
        num_prompt = len(sequence.prompt_token_ids)
        prediction = self.predict(num_prompt, sequence.qos, moment, num_prompt - sequence.num_prompt_expected)
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

"""How prompts get on beside those who decode: in which batches, and by how many tokens, without stalling a stream.

Reads what Decoding and StepTimes know and owns nothing. Whose prompt is next is admission's; the scheduler asks for each
batch, forecasts ask for the usual case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.decoding import GAP_SLACK, Decoding, Moment
from orchestrator.core.limits import STEP_TOKENS, SchedulerLimits
from orchestrator.core.step_time import StepTimes

# Where more wait for their first token than get further ones, the former weigh more: up to this many times the gap.
MAX_CROWD = 4.0
# What a prompt gets on by at least, whatever the target: more would be a large part of a step of few rows.
MIN_CHUNK_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PromptPace:
    """How prompts get on: num_tokens in each pass, period_s from one such pass to the next, beside num_rows decode rows."""

    num_tokens: int
    period_s: float
    num_rows: int


class Prompts:
    """Decides for prompts on one pipeline."""

    def __init__(self, limits: SchedulerLimits, times: StepTimes, decoding: Decoding) -> None:
        self._limits = limits
        self._times = times
        self._decoding = decoding

    def room(self, num_rows: int, position: int, moment: Moment) -> int:
        """How many prompt tokens, the first of them at `position`, may join num_rows decode rows; 0: they go without any.

        No running stream is to be stalled, and prompts always get on: if nothing else, with one small chunk at a time.
        """
        if self._decoding.pace.steps_per_s and self._decoding.num_decoding:
            return self._tokens_of_step(num_rows, position)
        room = self._decoding.chunk_tokens - num_rows
        batches, solo_s = self._decoding.batches_of_round(num_rows, moment), self._decoding.solo_part_s()
        budget_s = self._budget_s(batches, solo_s, moment.num_prompts)
        if budget_s is None:
            return room
        is_apart = self._is_apart(batches, position, budget_s, budget_s - solo_s)
        if num_rows == 0 and not moment.num_soon_back == len(moment.rows_in_flight) > 0:
            # There is nothing to join, or not before a burst ends.
            is_apart = True
        if is_apart == (num_rows > 0):
            return 0
        if is_apart:
            # Chunks that are under way already are part of the round, too.
            in_flight_s = moment.busy_s - self._decoding.rows_s(Counter(moment.rows_in_flight))
            num_tokens = self._tokens_apart(batches, position, budget_s, budget_s - solo_s - in_flight_s)
        else:
            left_s = min((budget_s - solo_s) / max(batches.total(), 1), budget_s - moment.busy_s)
            num_tokens = self._tokens_beside(num_rows, position, budget_s, left_s)
        if num_tokens < MIN_CHUNK_TOKENS:
            return 0 if moment.has_chunk_in_flight else MIN_CHUNK_TOKENS
        return min(room, num_tokens)

    def pace(self, position: int, num_prompts: int) -> PromptPace:
        """How a prompt gets on at `position` beside those who decode now.

        What is in flight or ready does not count: it changes from one step to the next.
        """
        batches, solo_s = self._decoding.usual_batches(), self._decoding.solo_part_s()
        num_rows, num_batches = max(batches, default=0), batches.total()
        if self._decoding.pace.steps_per_s and self._decoding.num_decoding:
            num_tokens = self._tokens_of_step(num_rows, position)
            period_s = max(self._decoding.pace.period_s, self.pass_s(num_rows, num_tokens, position))
            return PromptPace(num_tokens, period_s, num_rows)
        budget_s = self._budget_s(batches, solo_s, num_prompts)
        num_tokens, is_apart = self._decoding.chunk_tokens, False
        if budget_s is not None:
            is_apart = self._is_apart(batches, position, budget_s, budget_s - solo_s)
            if is_apart:
                num_tokens = self._tokens_apart(batches, position, budget_s, budget_s - solo_s)
            else:
                left_s = (budget_s - solo_s) / max(num_batches, 1)
                num_tokens = self._tokens_beside(num_rows, position, budget_s, left_s)
        num_beside = 0 if is_apart else num_rows
        # With as little room as that, one chunk at a time goes along.
        num_chunks = 1 if is_apart or num_tokens < MIN_CHUNK_TOKENS else max(num_batches, 1)
        num_tokens = max(min(num_tokens, self._decoding.chunk_tokens - num_beside), MIN_CHUNK_TOKENS)
        rows = self._decoding.work_of_rows(num_beside)
        joined = rows + self._limits.work_of(num_tokens, position)
        more_s = self._times.bottleneck_s(joined) - (self._times.bottleneck_s(rows) if num_beside else 0.0)
        round_s = self._decoding.rows_s(batches) + solo_s + num_chunks * more_s
        if batches:
            round_s = max(round_s, self._times.latency_s(joined))
        return PromptPace(num_tokens, round_s / num_chunks, num_beside)

    def pass_s(self, num_rows: int, num_tokens: int, position: int) -> float:
        """What prompt tokens at `position` beside so many decode rows take through all stages."""
        return self._times.latency_s(self._decoding.work_of_rows(num_rows) + self._limits.work_of(num_tokens, position))

    def _tokens_of_step(self, num_rows: int, position: int) -> int:
        """Prompt tokens beside so many rows where steps are rationed: each counts, and batches do not meet.

        A pass of its own would be the rows' next step; with more tokens, it would count for two.
        """
        num_tokens = STEP_TOKENS - num_rows
        target_s = self._decoding.strictest_s()
        if target_s is not None:
            most_s = max(target_s, self._decoding.pace.period_s, GAP_SLACK * self._decoding.pass_s(num_rows))
            num_tokens = min(num_tokens, self._tokens_beside(num_rows, position, most_s, most_s))
        return max(num_tokens, MIN_CHUNK_TOKENS)

    def _budget_s(self, batches: Mapping[int, int], solo_s: float, num_prompts: int) -> float | None:
        """How long a round of such batches may take with prompts; None if nobody cares."""
        target_s = self._decoding.strictest_s()
        if target_s is None:
            return None
        crowd = min(max(num_prompts / max(self._decoding.num_decoding, 1), 1.0), MAX_CROWD)
        return crowd * max(target_s, GAP_SLACK * self._decoding.round_s(batches, solo_s))

    def _is_apart(self, batches: Counter[int], position: int, budget_s: float, round_s: float) -> bool:
        """Whether prompts get on better in passes of their own than beside rows.

        Beside rows they lengthen the way of these through all stages; apart, a stage works on others meanwhile.
        """
        if self._limits.num_stages == 1 or not batches:
            return False
        most, rows_s = max(batches), self._decoding.rows_s(batches)
        beside = self._tokens_beside(most, position, budget_s, round_s / batches.total()) * batches.total()
        apart = self._tokens_apart(batches, position, budget_s, round_s)
        if max(beside, apart) >= MIN_CHUNK_TOKENS:
            return apart > beside
        times, chunk = self._times, self._limits.work_of(MIN_CHUNK_TOKENS, position)
        row_s, joined = times.bottleneck_s(self._decoding.work_of_rows(most)), self._decoding.work_of_rows(most) + chunk
        beside_s = max(rows_s - row_s + times.bottleneck_s(joined), times.latency_s(joined))
        apart_s = max(rows_s + times.bottleneck_s(chunk), times.latency_s(chunk))
        return apart_s < beside_s

    def _tokens_beside(self, num_rows: int, position: int, latency_s: float, left_s: float) -> int:
        """Prompt tokens for a batch with rows, which takes at most latency_s in all and at each stage at most left_s."""
        work = self._times.work_within(latency_s, left_s) - self._decoding.work_of_rows(num_rows)
        return self._limits.tokens_of(work, position)

    def _tokens_apart(self, batches: Counter[int], position: int, budget_s: float, round_s: float) -> int:
        """Prompt tokens for a pass beside such batches, which take their part of round_s at each stage."""
        # Rows that come right behind it wait at each stage until it has left.
        work = self._times.work_within(budget_s, round_s - self._decoding.rows_s(batches))
        return self._limits.tokens_of(work, position)

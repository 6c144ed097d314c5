"""What stages fetch of a run's KV when it goes on, and how long that takes: each has its layers' part brought from Redis.

A link carries what one sequence needs after the other's. What is not there when the time for it is over is computed again.
Whose slots have outlived a loss is the lane's to say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from orchestrator.core.restores import Restore

# Beside the bytes, as tests/simulation has it.
FETCH_S = 0.03
# Stages write what they compute in segments of so many tokens; what is newer at a loss is computed again.
SEGMENT_TOKENS = 8


class Fetches:
    """Invariant: a link carries one fetch at a time."""

    def __init__(self, token_bytes: Sequence[int], bytes_per_s: Sequence[float]) -> None:
        """Of each stage: KV bytes of a token, and what its link carries."""
        self._token_bytes = token_bytes
        self._bytes_per_s = bytes_per_s
        self._free_at = [0.0] * len(token_bytes)

    def fetch(self, restore: Restore, stages: Collection[int], now: float) -> tuple[float, int]:
        """Have stages fetch what is asked for: when all have answered, and how many tokens are in the slot then."""
        there = restore.num_tokens - restore.num_tokens % SEGMENT_TOKENS
        give_up_at, there_at = now + restore.timeout_s, now + FETCH_S
        for index in stages:
            begin_at = max(now + FETCH_S, self._free_at[index])
            token_s = self._token_bytes[index] / self._bytes_per_s[index]
            num_tokens = there if token_s == 0 else int(min(max(give_up_at - begin_at, 0.0) / token_s, there))
            self._free_at[index] = begin_at + num_tokens * token_s
            there_at = max(there_at, self._free_at[index] if num_tokens == there else give_up_at)
            there = min(there, num_tokens)
        return there_at, there

"""What comes back from a target while it answers: Arrivals, then one End.

Plain values without times: whoever receives them has the clock. Made by `targets` and `openai`, read by `runner`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something of an answer came. num_tokens: how many; 1 where a server does not tell."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """An answer is complete. Counts are what the server says, 0 where it does not; served_by: which pipeline."""

    finish: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    served_by: str = ""
    num_preemptions: int = 0


Event = Arrival | End

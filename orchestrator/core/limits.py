"""What a pipeline allows: slots, KV, context, batch sizes; and whether a request can ever be served within that.

Fixed for the life of a pipeline. It knows nothing of what runs at the moment: that is the scheduler's, which reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.slots import PAGE_TOKENS, round_down_to_page
from shoal.errors import ConfigError, ContextExceeded, InvalidRequest

# Kept free of decode rows while a prompt waits for its turn. With room for 4 tokens a chunk is always possible: the
# worst case is 5 tokens left, cut into 3 and 2.
PREFILL_ROOM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may use.

    kv_tokens: for all slots together. max_batch: decode rows of a batch. chunk_tokens: tokens of a batch. burst_steps:
    decode steps of one grant, the first included. min_rows: batches are not made smaller than this for the sake of
    having more of them.
    """

    num_stages: int
    num_slots: int
    kv_tokens: int
    context_tokens: int
    max_batch: int = 16
    chunk_tokens: int = 64
    max_waiting: int = 256
    burst_steps: int = 16
    min_rows: int = 4

    def __post_init__(self) -> None:
        checks = (
            ("num_stages", self.num_stages, 1),
            ("num_slots", self.num_slots, 1),
            ("kv_tokens", self.kv_tokens, PAGE_TOKENS),
            ("context_tokens", self.context_tokens, 2),
            ("max_batch", self.max_batch, 1),
            # One half for prefill, so that neither phase can starve the other.
            ("chunk_tokens", self.chunk_tokens, 2 * PREFILL_ROOM_TOKENS),
            ("max_waiting", self.max_waiting, 1),
            ("burst_steps", self.burst_steps, 1),
            ("min_rows", self.min_rows, 1),
        )
        for name, value, minimum in checks:
            if value < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}", field=name)

    @property
    def sequence_tokens(self) -> int:
        """The most tokens one sequence may have, prompt and answer."""
        return min(self.context_tokens, round_down_to_page(self.kv_tokens))

    def check_request(self, num_prompt: int, max_tokens: int) -> None:
        """Raise InvalidRequest or ContextExceeded, with the numbers, for what could never be served."""
        if num_prompt == 0:
            raise InvalidRequest("prompt", "is empty; it must have at least one token")
        if max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{max_tokens} is out of range; it must be at least 1")
        if num_prompt < self.sequence_tokens:
            return
        advice = f"the answer needs at least one: shorten the prompt to {self.sequence_tokens - 1} tokens or less"
        if num_prompt >= self.context_tokens:
            raise ContextExceeded(
                f"the prompt has {num_prompt} tokens; the context is {self.context_tokens} and {advice}", field="prompt"
            )
        raise ContextExceeded(
            f"the prompt has {num_prompt} tokens; the KV memory of the whole pipeline holds {self.sequence_tokens} and "
            f"{advice}, or add devices",
            field="prompt",
        )

"""What a pipeline allows: slots, KV, context, batch sizes; and whether a request can ever be served within that.

Limits are fixed for the life of a pipeline, its pace follows the state of its devices. It knows nothing of what runs at
the moment: that is the scheduler's, which reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.core.slots import PAGE_TOKENS, round_down_to_page
from shoal.errors import ConfigError, ContextExceeded, InvalidRequest
from shoal.kv import BLOCK_TOKENS
from shoal.types import DeviceMode

# Kept free of decode rows while a prompt waits for its turn. With room for 4 tokens a chunk is always possible: the
# worst case is 5 tokens left, cut into 3 and 2.
PREFILL_ROOM_TOKENS = 4
# Blocks end at borders, so that what is computed behind restored ones is never a token alone before the next border.
CHUNK_BORDERS = (0, 16, 32, BLOCK_TOKENS)
# Prompt tokens that warm a device about as much as a decode step of a full batch.
STEP_TOKENS = 8
# Reading what a slot holds costs a pass as much as the attention of so many tokens. Source: the default model, chunks of 2
# to 64 tokens at 1,800 tokens held.
KV_READ_TOKENS = 6
# Kernels take one row as if it were two.
LEAST_ROWS = 2
# Smaller batches are inefficient, so they are made only where stages would be idle else.
MIN_ROWS = 4
# All tenants together: with prompts of the usual length that is some 100 MB of waiting requests.
MAX_WAITING_TOTAL = 20_000


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may use.

    kv_tokens: for all slots together. max_batch: decode rows of a batch. chunk_tokens: tokens of a batch. max_waiting:
    requests of one tenant. burst_steps: decode steps of one grant, the first included. min_rows: batches are not made
    smaller than this unless stages would be idle. mode: whom the pipeline is for. stage_costs: what each stage is expected
    to take before it is measured, 1 being the whole model at speed 1; empty: equal parts. attention_tokens: with so many
    tokens held, the attention of a token costs as much as all else of it; by default it costs nothing. keeps_blocks: all
    stages keep KV blocks of prompts. chunk_border: chunks of prompts end at its multiples at the latest; 0: anywhere.
    """

    num_stages: int
    num_slots: int
    kv_tokens: int
    context_tokens: int
    max_batch: int = 16
    chunk_tokens: int = 64
    max_waiting: int = 256
    burst_steps: int = 16
    min_rows: int = MIN_ROWS
    mode: DeviceMode = DeviceMode.MIXED
    stage_costs: tuple[float, ...] = ()
    attention_tokens: float = math.inf
    keeps_blocks: bool = True
    chunk_border: int = 0

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
            ("attention_tokens", self.attention_tokens, 1),
        )
        for name, value, minimum in checks:
            if value < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}", field=name)
        if self.chunk_border not in CHUNK_BORDERS:
            allowed = ", ".join(str(border) for border in CHUNK_BORDERS)
            raise ConfigError(f"chunk_border is {self.chunk_border}; it must be one of {allowed}", field="chunk_border")

    def before_border(self, num_left: int, position: int) -> int:
        """How many of num_left prompt tokens, the first of them at `position`, chunks may have until one has to end."""
        return min(num_left, self.chunk_border - position % self.chunk_border) if self.chunk_border else num_left

    def work_of(self, num_tokens: float, position: float) -> float:
        """What tokens at a position cost, in tokens of a slot that holds nothing yet."""
        return num_tokens + (num_tokens + KV_READ_TOKENS) * position / self.attention_tokens

    def tokens_of(self, work: float, position: float) -> int:
        """How many tokens at a position cost no more than that."""
        share = position / self.attention_tokens
        return max(int((work - KV_READ_TOKENS * share) / (1 + share)), 0)

    @property
    def is_reserved(self) -> bool:
        """Whether it is for class LATENCY, and others only borrow it."""
        return self.mode is DeviceMode.LATENCY

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


def even_rows(num_streams: int, num_stages: int, max_rows: int, min_rows: int = MIN_ROWS) -> int:
    """The rows of a batch if so many sequences decode: few small ones where large ones would leave stages idle."""
    share = -(-num_streams // num_stages)
    num_rows = max(min_rows, share)
    if -(-num_streams // num_rows) < num_stages:
        num_rows = max(share, LEAST_ROWS)
    return min(num_rows, max_rows)


@dataclass(frozen=True, slots=True)
class Pace:
    """What temperature, battery and other load of its devices allow a pipeline now.

    max_batch: decode rows of a batch. steps_per_s: decode steps, or prefill work of their size; 0: any number.
    """

    max_batch: int
    steps_per_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.max_batch >= 1, f"a pace must let something run: {self}"
        assert self.steps_per_s >= 0, f"steps per second cannot be negative: {self}"

    @property
    def period_s(self) -> float:
        """The least time between two decode steps."""
        return 1 / self.steps_per_s if self.steps_per_s else 0.0

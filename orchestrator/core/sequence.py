"""A sequence: what a request became, its tokens, and its state while it is computed.

Owns the state machine of one sequence and the arithmetic of its positions, also when it is computed again after its slot
was taken. It does not know of batches, other sequences or the clock: the scheduler, its only writer (the engine adds
events), tells it what happened and when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from shoal.errors import InternalError
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.types import FinishReason, KVReuse, NumericClass, QosClass, SamplingParams, SequenceId, SlotId

# One stay of a sequence in a slot. Stages and results name runs, so that those of an earlier run cannot be taken for it.
RunId = NewType("RunId", int)

# Of requests that name none.
DEFAULT_TENANT = "default"
# A run that computes the last of its prompt computes at least so many tokens of it: that one is sampled from, and none may
# be computed alone.
MIN_PREFILL_TOKENS = 2
# Enough for the story of an answer that is moved and preempted as often as is allowed.
MAX_EVENTS = 64


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILL, SequenceState.FINISHED}),
    SequenceState.PREFILL: frozenset({SequenceState.DECODE, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.DECODE: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class QosTargets:
    """What a sequence is to get: time to the first token, and the most time between two; None: no promise."""

    ttft_s: float | None = None
    inter_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """What happened to a sequence, for whoever asks why it took so long."""

    at: float
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class RestoredPrefix:
    """Leading blocks of a prompt that stages kept, so that a run need not compute them.

    num_from_redis: of these, how many a stage had to fetch. codec: the coarsest, empty without blocks. is_exact: nothing
    among them is lossy. num_tokens: of a sequence that ran before, tokens in the slot, of blocks and of its trail.
    """

    num_blocks: int
    num_from_redis: int = 0
    codec: str = ""
    is_exact: bool = True
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making.

    max_tokens: the most answer tokens; the scheduler lowers it to what the context leaves. deadline_at: the whole answer is
    of no use after it. max_tokens_per_s: 0 as fast as possible. num_dispatched: prompt tokens that batches of this run
    carry or have carried. num_to_replay: answer tokens that are known from an earlier run and that this one has yet to
    compute again. queued_at: when it last began to wait; queue_s: time without a slot before that. admitted_at: start of its
    latest run. next_token_at: with max_tokens_per_s, when the next token may be computed. finish_reason: None while it runs,
    and if an error ended it.

    block_hashes: names of the leading full blocks of the prompt. num_stored_blocks: how many of them Redis is believed to
    hold. num_blocks_expected: how many its lane expected to find when it came. num_blocks_asked, num_tokens_asked: what
    stages were asked to restore, blocks and all, and have not answered for yet. restored: what they did for the latest run.
    num_restored: tokens that the latest run did not have to compute. trail_id: under which stages checkpoint what it has in
    its slots, empty if they are not to. last_slot: of the run before. num_recoveries: how often its pipeline was lost and it
    went on; num_vain_recoveries: since its newest token; has_changed_kernels: once with another kind of processor.
    is_prompt_charged: its tenant was.

    Invariants: slot and run are held exactly in PREFILL and DECODE; in DECODE the whole prompt is dispatched; what a run
    has to compute again are the last of the answer tokens, all of them in PREFILL; never more than max_tokens of them; while
    something is asked for, which is in PREFILL only, nothing is dispatched; of a prompt that is not restored as a whole, at
    least MIN_PREFILL_TOKENS are not.
    """

    sequence_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    numeric: NumericClass
    qos: QosClass
    arrived_at: float
    tenant: str = DEFAULT_TENANT
    targets: QosTargets = QosTargets()
    deadline_at: float | None = None
    max_tokens_per_s: float = 0.0
    block_hashes: tuple[BlockHash, ...] = ()
    kv_reuse: KVReuse = KVReuse.POLICY
    num_stored_blocks: int = 0
    state: SequenceState = SequenceState.WAITING
    run_id: RunId | None = None
    slot: SlotId | None = None
    num_dispatched: int = 0
    num_to_replay: int = 0
    num_preemptions: int = 0
    num_blocks_expected: int = 0
    num_blocks_asked: int = 0
    num_tokens_asked: int = 0
    restored: RestoredPrefix | None = None
    num_restored: int = 0
    trail_id: bytes = b""
    last_slot: SlotId | None = None
    num_recoveries: int = 0
    num_vain_recoveries: int = 0
    has_changed_kernels: bool = False
    is_prompt_charged: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    queued_at: float = 0.0
    queue_s: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    next_token_at: float = 0.0
    events: list[SequenceEvent] = field(default_factory=list)

    @property
    def has_started(self) -> bool:
        """Whether it had a slot at least once."""
        return self.admitted_at is not None

    @property
    def is_paced(self) -> bool:
        return self.max_tokens_per_s > 0

    @property
    def period_s(self) -> float:
        """The least time between two tokens that its client wants; 0: none."""
        return 1 / self.max_tokens_per_s if self.is_paced else 0.0

    @property
    def num_tokens_max(self) -> int:
        """Tokens that KV is reserved for."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def restorable_blocks(self) -> tuple[BlockHash, ...]:
        """The blocks that need not be computed if they are kept somewhere."""
        if self.kv_reuse is KVReuse.NONE:
            return ()
        return self.block_hashes[: max(len(self.prompt_token_ids) - MIN_PREFILL_TOKENS, 0) // BLOCK_TOKENS]

    @property
    def is_restoring(self) -> bool:
        """Whether it has a slot, and waits for stages to say what they have put into it."""
        return self.num_tokens_asked > 0

    @property
    def num_resumable(self) -> int:
        """Tokens whose KV is of use to a run that goes on with the answer: all known ones but the newest."""
        if not (self.trail_id and self.output_token_ids):
            return 0
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    @property
    def is_kv_exact(self) -> bool:
        """Whether what is in its slot is what computing it would have given."""
        return self.num_restored == 0 or self.restored is None or self.restored.is_exact

    @property
    def num_prompt_expected(self) -> int:
        """Prompt tokens that it was expected to compute when it came."""
        return len(self.prompt_token_ids) - self.num_blocks_expected * BLOCK_TOKENS

    @property
    def num_prompt_left(self) -> int:
        return len(self.prompt_token_ids) - self.num_dispatched

    @property
    def num_output_left(self) -> int:
        return self.max_tokens - len(self.output_token_ids)

    @property
    def num_held(self) -> int:
        """Tokens of prompt and answer that are in its slot, or on their way there."""
        return self.num_dispatched + len(self.output_token_ids) - self.num_to_replay

    def next_input(self) -> tuple[int, int]:
        """Position and id of the answer token to be fed next: the newest, or while replaying the last computed again."""
        num_known = len(self.output_token_ids) - self.num_to_replay
        return len(self.prompt_token_ids) + num_known - 1, self.output_token_ids[num_known - 1]

    def move_to(self, state: SequenceState) -> None:
        """Change state; raises InternalError with the sequence's story if the table does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"{self.story()}: cannot become {state.value}")
        self.state = state

    def begin_run(self, run_id: RunId, slot: SlotId, now: float) -> None:
        """Take a slot: the prompt, and what is known of the answer, have to be computed (again)."""
        self.move_to(SequenceState.PREFILL)
        self.note(now, "resumed" if self.has_started else "admitted", f"run {run_id} in slot {slot}")
        self.run_id, self.slot, self.restored = run_id, slot, None
        self.num_dispatched, self.num_to_replay, self.num_restored = 0, len(self.output_token_ids), 0
        self.queue_s += now - self.queued_at
        self.admitted_at = now

    def begin_restore(self, num_blocks: int, num_tokens: int, now: float) -> None:
        """Wait for leading blocks of the prompt, and for num_tokens tokens with what is behind them, before going on."""
        self.num_blocks_asked, self.num_tokens_asked = num_blocks, num_tokens
        self.note(
            now, "restoring", f"{num_tokens} tokens are looked for, {num_blocks} blocks of {BLOCK_TOKENS} among them"
        )

    def end_restore(self, restored: RestoredPrefix, now: float) -> None:
        """Go on behind what was restored, which is no more than what was asked for.

        With the prompt, from the end of a block on, for chunks of it begin there; or with the answer, if all of the prompt
        is there: then what is known of the answer as far as it is not there is still to be computed again.
        """
        assert 0 <= restored.num_blocks <= self.num_blocks_asked, self.story()
        assert restored.num_tokens <= self.num_tokens_asked, self.story()
        num_prompt = len(self.prompt_token_ids)
        is_whole = num_prompt <= restored.num_tokens <= self.num_resumable
        self.num_restored = restored.num_tokens if is_whole else restored.num_blocks * BLOCK_TOKENS
        where = f", {restored.num_from_redis} of its blocks from Redis" if restored.num_from_redis else ""
        self.note(now, "restored", f"{self.num_restored} of {self.num_tokens_asked} tokens{where}")
        self.num_blocks_asked = self.num_tokens_asked = 0
        self.restored = restored
        self.num_dispatched = min(self.num_restored, num_prompt)
        if is_whole:
            self.num_to_replay = self.num_resumable - self.num_restored

    def stop_run(self, now: float) -> None:
        """Lose the slot and wait again, with the answer tokens so far."""
        self.move_to(SequenceState.WAITING)
        self.last_slot = self.slot
        self.run_id = self.slot = None
        self.num_dispatched = self.num_to_replay = self.num_blocks_asked = self.num_tokens_asked = 0
        self.queued_at = now

    def append(self, token_id: int, now: float) -> FinishReason | None:
        """Take an answer token; says why the sequence is at its end with it, or None."""
        if self.first_token_at is None:
            self.first_token_at = self.next_token_at = now
            self.note(now, "first_token")
        if self.is_paced:
            # A token that is late may be followed by the next at once, but what was missed before that is not made up for.
            self.next_token_at = max(self.next_token_at + self.period_s, now)
        self.output_token_ids.append(token_id)
        self.num_vain_recoveries = 0
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output_left == 0 else None

    def finish(self, reason: FinishReason | None, now: float) -> None:
        """End; reason None: by an error."""
        self.move_to(SequenceState.FINISHED)
        self.run_id = self.slot = None
        self.num_blocks_asked = self.num_tokens_asked = 0
        self.finish_reason = reason
        self.note(now, "ended", "error" if reason is None else reason.value)

    def replay(self, token_id: int) -> bool:
        """Count an answer token computed again; False if another one was drawn than before, which is not used."""
        known = self.output_token_ids[-self.num_to_replay]
        self.num_to_replay -= 1
        return token_id == known

    def note(self, at: float, what: str, detail: str = "") -> None:
        """Add an event to the story that users are told; beyond MAX_EVENTS none is kept."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(SequenceEvent(at, what, detail))

    def story(self) -> str:
        return (
            f"sequence {self.sequence_id} is {self.state.value} as run {self.run_id} in slot {self.slot}: "
            f"arrived {self.arrived_at}, admitted {self.admitted_at}, first token {self.first_token_at}, "
            f"{self.num_dispatched} of {len(self.prompt_token_ids)} prompt tokens dispatched, "
            f"{self.num_tokens_asked} tokens asked for, {self.num_restored} restored by {self.restored}, "
            f"{len(self.output_token_ids)} of {self.max_tokens} answer tokens, {self.num_to_replay} of them to be "
            f"computed again, preempted {self.num_preemptions} times"
        )

    def check_invariants(self) -> None:
        is_running = self.state in (SequenceState.PREFILL, SequenceState.DECODE)
        assert (self.slot is not None) == is_running, self.story()
        assert (self.run_id is not None) == is_running, self.story()
        assert 0 <= self.num_prompt_left <= len(self.prompt_token_ids), self.story()
        if self.state is SequenceState.DECODE:
            assert self.num_prompt_left == 0, self.story()
        if self.state is SequenceState.PREFILL:
            assert self.num_to_replay == len(self.output_token_ids), self.story()
            assert self.num_restored <= max(len(self.prompt_token_ids) - MIN_PREFILL_TOKENS, 0), self.story()
        assert 0 <= self.num_to_replay <= len(self.output_token_ids), self.story()
        assert self.num_output_left >= 0, self.story()
        if self.is_restoring:
            assert self.state is SequenceState.PREFILL, self.story()
            assert (self.num_dispatched, self.restored) == (0, None), self.story()
        if is_running:
            assert min(self.num_restored, len(self.prompt_token_ids)) <= self.num_dispatched, self.story()
            assert self.num_restored <= self.num_held, self.story()

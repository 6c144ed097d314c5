"""Whose prompts begin with KV that stages keep: what is asked of the stages, who awaits it, and what came.

Keeps what is believed of the pipeline's blocks. It decides neither who runs nor what is computed: the scheduler, its only
caller, asks for a run when it has its slot, and lets its prompt go on when the stages have answered.

Source: NVIDIA Dynamo's router has an approximate mode that learns from its own routing, with no events from workers.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from orchestrator.core.prefix import PrefixIndex
from orchestrator.core.sequence import RestoredPrefix, RunId, Sequence, SequenceState
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.types import KVReuse, SlotId

# How long stages may try to fetch the blocks [first, stop) of a prompt, in seconds.
FetchTime = Callable[[int, int], float]
# What is added for the trail of so many answer tokens.
TrailTime = Callable[[int], float]
# Beyond what fetching may take: a stage that has not answered by then has lost the question, and everything is computed.
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Restore:
    """Asks the stages for leading blocks of a run, and for what is behind them on its trail, num_tokens with both.

    timeout_s: what they may spend on fetching from lower tiers. trail_id: empty if it is a first run.
    """

    run_id: RunId
    slot: SlotId
    block_hashes: tuple[BlockHash, ...]
    is_exact_only: bool
    timeout_s: float
    trail_id: bytes = b""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Tells the stages of leading blocks that a waiting sequence will want, or (is_ahead) one that has not come yet may."""

    block_hashes: tuple[BlockHash, ...]
    timeout_s: float
    is_ahead: bool = False


class Restores:
    """Runs that await blocks, and the index of what there is. is_on False: stages keep no blocks, so none are asked for.

    Invariants: the awaiting are the running sequences that are restoring, each for a bounded time; what is to be sent is
    asked for some of them.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self.index = PrefixIndex()
        self._awaiting: dict[RunId, Sequence] = {}
        self._give_up_at: dict[RunId, float] = {}
        self._to_send: dict[RunId, Restore] = {}
        self._newcomers: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._awaiting)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that the awaiting will have to compute if all comes that was asked for."""
        return sum(max(len(one.prompt_token_ids) - one.num_tokens_asked, 0) for one in self._awaiting.values())

    def num_believed(self, block_hashes: Seq[BlockHash], num_stored: int) -> int:
        """How many leading blocks of a prompt may be there; num_stored: as many at least, for they are in Redis."""
        if not self._is_on:
            return 0
        return max(self.index.match(block_hashes), min(num_stored, len(block_hashes)))

    def expect(self, sequence: Sequence) -> None:
        """Note with a sequence that comes how many blocks it will find, as far as is believed now."""
        blocks = sequence.restorable_blocks
        sequence.num_blocks_expected = self.num_believed(blocks, sequence.num_stored_blocks)
        if sequence.num_blocks_expected > self.index.match(blocks):
            self._newcomers.append(sequence)

    def ask(self, sequence: Sequence, fetch_s: FetchTime, trail_s: TrailTime, now: float) -> bool:
        """Have the run of a sequence await the leading blocks that may be there; False if there is none.

        One that goes on with its answer asks for all that may be anywhere, of its trail too, and for nothing lossy: its
        answer shall be what it would have been.
        """
        assert sequence.run_id is not None, sequence.story()
        assert sequence.slot is not None, sequence.story()
        num_tokens = sequence.num_resumable
        num_blocks = self._num_to_ask(sequence)
        if num_blocks == num_tokens == 0:
            return False
        timeout_s = fetch_s(0, num_blocks) if num_blocks else 0.0
        timeout_s += trail_s(len(sequence.output_token_ids)) if num_tokens else 0.0
        sequence.begin_restore(num_blocks, max(num_blocks * BLOCK_TOKENS, num_tokens), now)
        self._awaiting[sequence.run_id] = sequence
        self._to_send[sequence.run_id] = restore = Restore(
            run_id=sequence.run_id,
            slot=sequence.slot,
            block_hashes=sequence.block_hashes[:num_blocks],
            is_exact_only=sequence.kv_reuse is KVReuse.EXACT or num_tokens > 0,
            timeout_s=timeout_s,
            trail_id=sequence.trail_id if num_tokens else b"",
            num_tokens=num_tokens,
        )
        self._give_up_at[sequence.run_id] = now + restore.timeout_s + ANSWER_S
        return True

    def _num_to_ask(self, sequence: Sequence) -> int:
        if sequence.num_resumable:
            return len(sequence.block_hashes) if self._is_on else 0
        return self.num_believed(sequence.restorable_blocks, sequence.num_stored_blocks)

    def take(self) -> list[Restore]:
        """What is to be sent since the last call."""
        restores = list(self._to_send.values())
        self._to_send.clear()
        return restores

    def take_prefetches(self, fetch_s: FetchTime) -> list[Prefetch]:
        """The leading blocks that those who came since the last call and wait still want, as far as Redis may have more."""
        newcomers, self._newcomers = self._newcomers, []
        prefetches = []
        for sequence in newcomers:
            blocks = sequence.restorable_blocks
            first, stop = self.index.match(blocks), min(sequence.num_stored_blocks, len(blocks))
            if sequence.state is SequenceState.WAITING and first < stop:
                prefetches.append(Prefetch(blocks[:stop], fetch_s(first, stop)))
        return prefetches

    def answer(self, run_id: RunId, prefix: RestoredPrefix, now: float) -> Sequence | None:
        """Take what stages have restored; returns whose it is, None if nobody awaits it (yet, or any more).

        No more counts than was asked for, whatever a stage says. What did not come is not believed any longer.
        """
        if run_id not in self._awaiting or run_id in self._to_send:
            return None
        sequence = self._awaiting.pop(run_id)
        del self._give_up_at[run_id]
        num_asked = sequence.num_blocks_asked
        num_blocks = max(min(prefix.num_blocks, num_asked), 0)
        self.index.learn(sequence.block_hashes[:num_blocks])
        num_tokens = max(min(prefix.num_tokens, sequence.num_resumable), 0)
        if num_tokens < len(sequence.prompt_token_ids):
            # The last of the prompt is computed, so that there is something to sample from.
            num_tokens, num_blocks = 0, min(num_blocks, len(sequence.restorable_blocks))
        num_from_redis = max(min(prefix.num_from_redis, num_blocks), 0)
        bounded = replace(prefix, num_blocks=num_blocks, num_from_redis=num_from_redis, num_tokens=num_tokens)
        sequence.end_restore(bounded, now)
        if num_blocks < num_asked:
            self.index.forget(sequence.block_hashes[num_blocks:num_asked])
            sequence.num_stored_blocks = min(sequence.num_stored_blocks, num_blocks)
        return sequence

    def late(self, now: float) -> list[RunId]:
        """Runs that have awaited an answer for too long."""
        return [run_id for run_id, at in self._give_up_at.items() if at <= now and run_id not in self._to_send]

    def late_at(self) -> list[float]:
        """When somebody will have awaited an answer for too long; nothing while nobody awaits one."""
        return [min(self._give_up_at.values())] if self._give_up_at else []

    def learn(self, sequence: Sequence, start: int, stop: int) -> None:
        """Note that the prompt tokens [start, stop) of a run were computed, and so what blocks they complete."""
        if self._is_on and start // BLOCK_TOKENS < stop // BLOCK_TOKENS:
            self.index.learn(sequence.block_hashes[: stop // BLOCK_TOKENS])

    def stop(self, run_id: RunId) -> bool:
        """Await nothing for a run any more; True if the stages have not heard of it, so that there is nothing to end."""
        self._awaiting.pop(run_id, None)
        self._give_up_at.pop(run_id, None)
        return self._to_send.pop(run_id, None) is not None

    def check_invariants(self, running: Seq[Sequence]) -> None:
        self.index.check_invariants()
        assert self._awaiting == {one.run_id: one for one in running if one.is_restoring}
        assert self._to_send.keys() <= self._awaiting.keys() == self._give_up_at.keys()
        assert self._is_on or all(one.num_blocks_asked == 0 for one in self._awaiting.values())

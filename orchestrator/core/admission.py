"""Who waits, who holds a slot, whose prompt is next, and who has to give up a slot for somebody of a higher class.

Keeps the accounts of slots, tenants and turns together. It does not know batches, nor how a run is stopped: the scheduler,
its only caller, carries out what is decided here.
"""

from __future__ import annotations

from collections import OrderedDict

from orchestrator.core.limits import MAX_WAITING_TOTAL, SchedulerLimits
from orchestrator.core.qos import CLASSES, PRIORITY, ClassTurns, WaitingQueue, outranks
from orchestrator.core.sequence import RunId, Sequence
from orchestrator.core.slots import SlotPool, round_up_to_page
from orchestrator.core.tenants import TenantLedger
from shoal.errors import Overloaded
from shoal.types import QosClass, SequenceId

# What a preempted answer costs is computed again: twice is a nuisance, more often would be starvation.
MAX_PREEMPTIONS = 2
DEFAULT_END_GAP_S = 1.0
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
# Weight of the newest gap in the running mean of the time between two ends.
END_GAP_WEIGHT = 0.2


class Admission:
    """The waiting, and the running as far as their slots and prompts are concerned.

    Invariants:
    - a sequence is in the queue, or running with a slot and room for num_tokens_max;
    - a running one is among the prompts of its class exactly while a part of its prompt is not dispatched, once it awaits
      no blocks; they are in the order in which they got their slots;
    - num_prompt_left is the sum over these;
    - a running one is takeable exactly if it was preempted less than MAX_PREEMPTIONS times.
    """

    def __init__(self, limits: SchedulerLimits, ledger: TenantLedger) -> None:
        self._limits = limits
        self._ledger = ledger
        self._turns = ClassTurns()
        self._num_running = dict.fromkeys(CLASSES, 0)
        # Running sequences whose slot a higher class may take, and the KV tokens reserved for them.
        self._takeable: dict[QosClass, dict[SequenceId, Sequence]] = {qos: {} for qos in CLASSES}
        self._takeable_tokens = dict.fromkeys(CLASSES, 0)
        self._prompts: dict[QosClass, OrderedDict[SequenceId, Sequence]] = {qos: OrderedDict() for qos in CLASSES}
        # Whether the last who tried to get a slot did not, and none was given back since.
        self._is_full = False
        self._last_end_at: float | None = None
        self._end_gap_s = DEFAULT_END_GAP_S
        self.queue = WaitingQueue(ledger, self._turns)
        self.slots = SlotPool(limits.num_slots, limits.kv_tokens)
        self.num_prompt_left = 0

    def num_running(self, qos: QosClass) -> int:
        return self._num_running[qos]

    def check_bounds(self, tenant: str, now: float) -> None:
        """Raise Overloaded if no more may wait, of a tenant or at all."""
        num_mine, num_all = self.queue.num_of_tenant(tenant), len(self.queue)
        if num_mine >= self._limits.max_waiting or num_all >= MAX_WAITING_TOTAL:
            is_mine = num_mine >= self._limits.max_waiting
            whose = f"{num_mine} requests wait already, the most allowed for one tenant ({tenant})"
            raise Overloaded(
                (whose if is_mine else f"{num_all} requests wait already, the most allowed") + "; try again later",
                retry_after_s=self.retry_after_s(now),
            )

    def enter(self, sequence: Sequence, now: float) -> None:
        """Let a sequence wait that comes from outside."""
        sequence.queued_at = now
        self._ledger.enter(sequence.tenant)
        self.queue.add(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        self.queue.discard(sequence)
        self._ledger.leave(sequence.tenant)

    def prompt_position(self) -> int:
        """How far the furthest of the prompts is whose turn it may be."""
        under_way = (next(iter(prompts.values())) for prompts in self._prompts.values() if prompts)
        return max((sequence.num_dispatched for sequence in under_way), default=0)

    def prompts_in_turn(self) -> list[tuple[float, Sequence]]:
        """With their ranks, the lowest first: of each class the prompt that is under way, or else who waits first."""
        found = []
        for qos, prompts in self._prompts.items():
            sequence = next(iter(prompts.values()), None)
            if sequence is not None:
                assert sequence.admitted_at is not None, sequence.story()
                found.append((self._turns.rank(qos, sequence.admitted_at, sequence.targets.ttft_s), sequence))
            elif (sequence := self.queue.head(qos)) is not None:
                found.append((self.queue.rank(qos), sequence))
        return sorted(found, key=lambda one: one[0])

    def prompt_rank(self) -> float | None:
        """The rank of the prompt whose turn is next: when its patience ends; None if there is no prompt."""
        return next((rank for rank, _ in self.prompts_in_turn()), None)

    def admit(self, sequence: Sequence, run_id: RunId, now: float) -> bool:
        """Give a waiting sequence a slot and KV for all its tokens; False if there is not enough.

        Its prompt joins the others with join(), at once or when what stages keep of it is in the slot.
        """
        slot = self.slots.acquire(sequence.sequence_id, sequence.num_tokens_max, sequence.last_slot)
        self._is_full = slot is None
        if slot is None:
            return False
        self.queue.discard(sequence)
        self._ledger.charge(sequence)
        sequence.begin_run(run_id, slot, now)
        self._num_running[sequence.qos] += 1
        if sequence.num_preemptions < MAX_PREEMPTIONS:
            self._takeable[sequence.qos][sequence.sequence_id] = sequence
            self._takeable_tokens[sequence.qos] += round_up_to_page(sequence.num_tokens_max)
        self._turns.served(sequence.qos, now)
        return True

    def join(self, sequence: Sequence) -> None:
        """Let the prompt of a running sequence be computed: before those that got their slots after it."""
        assert sequence.run_id is not None, sequence.story()
        prompts = self._prompts[sequence.qos]
        later = [one for one in prompts.values() if one.run_id is not None and one.run_id > sequence.run_id]
        prompts[sequence.sequence_id] = sequence
        for one in later:
            prompts.move_to_end(one.sequence_id)
        self._ledger.charge_prompt(sequence)
        self.num_prompt_left += sequence.num_prompt_left

    def dispatch(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Note that a batch takes the next num_tokens of a prompt."""
        sequence.num_dispatched += num_tokens
        self.num_prompt_left -= num_tokens
        self._turns.served(sequence.qos, now)
        if sequence.num_prompt_left == 0:
            del self._prompts[sequence.qos][sequence.sequence_id]

    def release(self, sequence: Sequence) -> None:
        """Take the slot of a running sequence, and give its tenant back what was granted and not delivered."""
        self._is_full = False
        self.slots.release(sequence.sequence_id)
        self._ledger.refund(sequence)
        self._num_running[sequence.qos] -= 1
        if self._takeable[sequence.qos].pop(sequence.sequence_id, None) is not None:
            self._takeable_tokens[sequence.qos] -= round_up_to_page(sequence.num_tokens_max)
        if self._prompts[sequence.qos].pop(sequence.sequence_id, None) is not None:
            self.num_prompt_left -= sequence.num_prompt_left

    def wait_again(self, sequence: Sequence) -> None:
        """Let a sequence wait whose slot was taken."""
        self.queue.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that neither waits nor runs any more."""
        self._ledger.leave(sequence.tenant)

    def victims(self, sequence: Sequence, now: float) -> list[Sequence]:
        """Whose slots to take for a waiting sequence that finds no room; nobody if that would not make enough.

        Of strictly lower classes, the lowest first and in it those that lose the least; no more than are needed, and none
        that got its slot just now.
        """
        need = round_up_to_page(sequence.num_tokens_max) - self.slots.free_tokens
        lower = [qos for qos in CLASSES if outranks(sequence.qos, qos)]
        # Told by sums: who waits in vain asks in every turn.
        if sum(self._takeable_tokens[qos] for qos in lower) < max(need, 1):
            return []
        candidates = sorted(
            (one for qos in lower for one in self._takeable[qos].values() if one.admitted_at != now),
            key=lambda one: (-PRIORITY[one.qos], one.num_held - one.num_restored),
        )
        chosen: list[Sequence] = []
        spare = -need
        for one in candidates:
            chosen.append(one)
            spare += round_up_to_page(one.num_tokens_max)
            if spare >= 0:
                return self._only_needed(chosen, spare)
        return []

    @staticmethod
    def _only_needed(chosen: list[Sequence], spare: int) -> list[Sequence]:
        """Leave out those without whom it would be enough, the costliest first; at least one stays, for its slot."""
        kept = list(chosen)
        for one in reversed(chosen):
            gain = round_up_to_page(one.num_tokens_max)
            if len(kept) > 1 and gain <= spare:
                kept.remove(one)
                spare -= gain
        return kept

    def on_end(self, now: float) -> None:
        """Keep count of how often a sequence ends: a place is expected when the next one does."""
        if self._last_end_at is not None:
            gap_s = min(now - self._last_end_at, MAX_RETRY_AFTER_S)
            self._end_gap_s += END_GAP_WEIGHT * (gap_s - self._end_gap_s)
        self._last_end_at = now

    def retry_after_s(self, now: float) -> float:
        since_end_s = 0.0 if self._last_end_at is None else now - self._last_end_at
        return min(max(self._end_gap_s - since_end_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def slot_wait_s(self, qos: QosClass, now: float) -> float:
        """How long somebody of this class who comes now would wait for a slot, if ends go on as they did."""
        num_free = 0 if self._is_full else self._limits.num_slots - self.slots.used_slots
        num_takeable = sum(len(self._takeable[one]) for one in CLASSES if outranks(qos, one))
        num_short = self.queue.num_before(qos) + 1 - num_free - num_takeable
        if num_short <= 0:
            return 0.0
        return self.retry_after_s(now) + (num_short - 1) * self._end_gap_s

    def check_invariants(self, running: list[Sequence]) -> None:
        self.slots.check_invariants()
        self.queue.check_invariants()
        assert self.slots.used_slots == len(running)
        for qos in CLASSES:
            of_class = [one for one in running if one.qos is qos]
            takeable = [one for one in of_class if one.num_preemptions < MAX_PREEMPTIONS]
            assert self._num_running[qos] == len(of_class)
            assert list(self._takeable[qos].values()) == takeable
            assert self._takeable_tokens[qos] == sum(round_up_to_page(one.num_tokens_max) for one in takeable)
        for sequence in running:
            reservation = self.slots.get(sequence.sequence_id)
            assert reservation is not None, sequence.story()
            assert reservation.slot == sequence.slot, sequence.story()
            assert reservation.num_tokens >= sequence.num_tokens_max, sequence.story()
            is_prompt = sequence.sequence_id in self._prompts[sequence.qos]
            assert is_prompt == (sequence.num_prompt_left > 0 and not sequence.is_restoring), sequence.story()
        assert all(one.slot is None for one in self.queue)
        prompts = [one for sequences in self._prompts.values() for one in sequences.values()]
        assert self.num_prompt_left == sum(one.num_prompt_left for one in prompts)
        for sequences in self._prompts.values():
            run_ids = [one.run_id or 0 for one in sequences.values()]
            assert run_ids == sorted(run_ids), "a prompt is before one that got its slot earlier"

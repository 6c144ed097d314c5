"""What the QoS classes mean: their targets, how long each waits for its turn, and who of the waiting is next.

Classes take turns by rank, tenants of a class by what they have had, requests of a tenant in order. It does not know
whether there is room for whoever is next: that is the scheduler's, which calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice, takewhile

from orchestrator.core.sequence import QosTargets, Sequence
from orchestrator.core.tenants import TenantHeap, TenantLedger
from shoal.types import QosClass, SequenceId

# Highest first: who of two goes first when both could, and who may take whose slot.
CLASSES = (QosClass.LATENCY, QosClass.BALANCED, QosClass.THROUGHPUT)
PRIORITY = {qos: number for number, qos in enumerate(CLASSES)}
# No more of the waiting than this are offered to other pipelines at once.
MAX_OVERDUE = 16
# How long a class goes without a turn before it comes before one of class LATENCY that is there just now: ageing without
# a timer. About four times what each aims at: a first token within seconds, or whenever it is convenient.
PATIENCE_S = {QosClass.LATENCY: 0.0, QosClass.BALANCED: 2.0, QosClass.THROUGHPUT: 10.0}
# Source: MLPerf Inference, llama3.1-8b interactive (500 ms to the first token, 30 ms a token), scaled to small devices.
LATENCY_TARGETS = QosTargets(ttft_s=0.5, inter_token_s=0.05)


def default_targets(qos: QosClass, balanced: QosTargets) -> QosTargets:
    """What a request of a class is to get if it says nothing else; `balanced` is a matter of configuration."""
    match qos:
        case QosClass.LATENCY:
            return LATENCY_TARGETS
        case QosClass.BALANCED:
            return balanced
        case QosClass.THROUGHPUT:
            return QosTargets()


def outranks(qos: QosClass, other: QosClass) -> bool:
    """Whether a class is strictly higher than another."""
    return PRIORITY[qos] < PRIORITY[other]


class ClassTurns:
    """When each class was last served.

    The rank of a class is the time at which its patience ends, counted from its last turn, or from when its oldest came if
    that is later. The lowest goes first. So one turn a patience is enough to end a wait: a long queue of a low class that
    has grown old does not shut out the others.
    """

    def __init__(self) -> None:
        self._served_at = dict.fromkeys(CLASSES, float("-inf"))

    def served(self, qos: QosClass, now: float) -> None:
        self._served_at[qos] = now

    def rank(self, qos: QosClass, oldest_at: float, ttft_s: float | None = None) -> float:
        """ttft_s: what the oldest asks for; its patience is at its end with it, if that is sooner."""
        return max(self._served_at[qos], oldest_at) + _patience_s(qos, ttft_s)


def _patience_s(qos: QosClass, ttft_s: float | None) -> float:
    return PATIENCE_S[qos] if ttft_s is None else min(PATIENCE_S[qos], ttft_s)


class _InOrder:
    """Sequences as they came, those who had a slot before first."""

    __slots__ = ("fresh", "started")

    def __init__(self) -> None:
        self.started: OrderedDict[SequenceId, Sequence] = OrderedDict()
        self.fresh: OrderedDict[SequenceId, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self.started) + len(self.fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.started.values()
        yield from self.fresh.values()

    def add(self, sequence: Sequence) -> None:
        (self.started if sequence.has_started else self.fresh)[sequence.sequence_id] = sequence

    def discard(self, sequence: Sequence) -> None:
        del (self.started if sequence.has_started else self.fresh)[sequence.sequence_id]

    def first(self) -> Sequence:
        return next(iter(self))


class _Line:
    """The waiting of one class."""

    __slots__ = ("by_tenant", "in_order", "num_tokens", "tenants")

    def __init__(self, ledger: TenantLedger) -> None:
        self.in_order = _InOrder()
        self.by_tenant: dict[str, _InOrder] = {}
        self.tenants = TenantHeap(ledger)
        self.num_tokens = 0

    def add(self, sequence: Sequence) -> None:
        if sequence.tenant not in self.by_tenant:
            self.by_tenant[sequence.tenant] = _InOrder()
            self.tenants.add(sequence.tenant)
        self.in_order.add(sequence)
        self.by_tenant[sequence.tenant].add(sequence)
        self.num_tokens += sequence.num_prompt_expected

    def discard(self, sequence: Sequence) -> None:
        self.in_order.discard(sequence)
        self.by_tenant[sequence.tenant].discard(sequence)
        if not self.by_tenant[sequence.tenant]:
            del self.by_tenant[sequence.tenant]
            self.tenants.discard(sequence.tenant)
        self.num_tokens -= sequence.num_prompt_expected

    def head(self) -> Sequence | None:
        tenant = self.tenants.first()
        return None if tenant is None else self.by_tenant[tenant].first()


class WaitingQueue:
    """Sequences without a slot.

    Each step costs time logarithmic in the tenants, whatever waits. The ledger must have been told of a sequence's tenant
    before the sequence comes in here, and until it is out.

    Invariants: a sequence is in its class's order and in its tenant's line, or in neither; a tenant is in the heap of a
    class exactly while it has a line there; num_tokens of a class is the sum of what its prompts
    are expected to have to compute.
    """

    def __init__(self, ledger: TenantLedger, turns: ClassTurns) -> None:
        self._turns = turns
        self._lines = {qos: _Line(ledger) for qos in CLASSES}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        """The higher classes first, in each as they came."""
        for line in self._lines.values():
            yield from line.in_order

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into its tenant's line: at the end, or before all that never had a slot if it had one."""
        self._lines[sequence.qos].add(sequence)
        self._num += 1

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be in."""
        self._lines[sequence.qos].discard(sequence)
        self._num -= 1

    def head(self, qos: QosClass) -> Sequence | None:
        """Who of a class is next: of the tenant that has had least, the first in line."""
        return self._lines[qos].head()

    def rank(self, qos: QosClass) -> float:
        """See ClassTurns; the class must have somebody waiting."""
        oldest = self._lines[qos].in_order.first()
        return self._turns.rank(qos, oldest.arrived_at, oldest.targets.ttft_s)

    def num_of(self, qos: QosClass) -> int:
        return len(self._lines[qos].in_order)

    def num_of_tenant(self, tenant: str) -> int:
        return sum(len(line.by_tenant.get(tenant, ())) for line in self._lines.values())

    def num_tokens_before(self, qos: QosClass) -> int:
        """Prompt tokens to compute of those who wait in this class and in higher ones."""
        return sum(line.num_tokens for one, line in self._lines.items() if not outranks(qos, one))

    def num_before(self, qos: QosClass) -> int:
        """How many wait in this class and in higher ones."""
        return sum(len(line.in_order) for one, line in self._lines.items() if not outranks(qos, one))

    def queued_before(self, at: float, at_most: int = MAX_OVERDUE) -> list[Sequence]:
        """Those who never had a slot and have waited here since `at` or longer, by rank; no more than at_most."""
        found: list[Sequence] = []
        for line in self._lines.values():
            longest = islice(line.in_order.fresh.values(), at_most)
            found += takewhile(lambda one: one.queued_at <= at, longest)
        return sorted(found, key=lambda one: one.arrived_at + _patience_s(one.qos, one.targets.ttft_s))[:at_most]

    def check_invariants(self) -> None:
        assert self._num == sum(len(line.in_order) for line in self._lines.values())
        for line in self._lines.values():
            line.tenants.check_invariants()
            in_order = {one.sequence_id for one in line.in_order}
            assert in_order == {one.sequence_id for tenant_line in line.by_tenant.values() for one in tenant_line}
            assert len(line.in_order) == len(in_order) == sum(len(one) for one in line.by_tenant.values())
            assert all(tenant in line.tenants for tenant in line.by_tenant)
            assert len(line.tenants) == len(line.by_tenant), "a tenant without a line is in the heap"
            assert all(line.by_tenant.values()), "an empty line was kept"
            assert line.num_tokens == sum(one.num_prompt_expected for one in line.in_order)

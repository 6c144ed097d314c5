"""Whose turn it is: classes by rank, tenants by what they have had, requests in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.qos import (
    CLASSES,
    LATENCY_TARGETS,
    PATIENCE_S,
    ClassTurns,
    WaitingQueue,
    default_targets,
    outranks,
)
from orchestrator.core.sequence import QosTargets, RunId, Sequence
from orchestrator.core.tenants import TenantLedger
from shoal.types import QosClass, SlotId
from tests.support.builders import make_sequence

LATENCY, BALANCED, THROUGHPUT = CLASSES


class Line:
    """A queue with its ledger; sequences are numbered as they come."""

    def __init__(self) -> None:
        self.ledger = TenantLedger()
        self.turns = ClassTurns()
        self.queue = WaitingQueue(self.ledger, self.turns)
        self.num_sequences = 0

    def add(self, tenant: str = "a", qos: QosClass = BALANCED, *, at: float = 0.0, max_tokens: int = 16) -> Sequence:
        self.num_sequences += 1
        sequence = make_sequence(self.num_sequences, tenant=tenant, qos=qos, arrived_at=at, max_tokens=max_tokens)
        sequence.queued_at = at
        self.ledger.enter(tenant)
        self.queue.add(sequence)
        return sequence

    def admit(self, qos: QosClass = BALANCED) -> Sequence:
        """Give the head of a class a slot."""
        sequence = self.queue.head(qos)
        assert sequence is not None
        self.queue.discard(sequence)
        self.ledger.charge(sequence)
        self.ledger.charge_prompt(sequence)
        sequence.begin_run(RunId(sequence.sequence_id), SlotId(0), 0.0)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        self.ledger.refund(sequence)
        sequence.stop_run(1.0)
        self.queue.add(sequence)
        self.queue.check_invariants()


class TestClasses:
    def test_a_class_outranks_those_below_it_and_not_itself(self) -> None:
        assert [outranks(LATENCY, one) for one in CLASSES] == [False, True, True]
        assert [outranks(THROUGHPUT, one) for one in CLASSES] == [False, False, False]

    def test_targets_of_balanced_are_configured_and_throughput_has_none(self) -> None:
        balanced = QosTargets(ttft_s=3.0, inter_token_s=0.2)
        assert default_targets(LATENCY, balanced) is LATENCY_TARGETS
        assert default_targets(BALANCED, balanced) is balanced
        assert default_targets(THROUGHPUT, balanced) == QosTargets(None, None)


class TestTurns:
    def test_a_class_that_has_waited_for_its_patience_goes_before_a_higher_one_that_comes_now(self) -> None:
        turns = ClassTurns()
        assert turns.rank(THROUGHPUT, oldest_at=0.0) < turns.rank(LATENCY, oldest_at=10.5)
        assert turns.rank(THROUGHPUT, oldest_at=0.0) > turns.rank(LATENCY, oldest_at=9.5)

    def test_a_turn_ends_the_wait_of_the_class_however_old_its_queue_is(self) -> None:
        turns = ClassTurns()
        turns.served(THROUGHPUT, 60.0)
        assert turns.rank(THROUGHPUT, oldest_at=0.0) == 60.0 + PATIENCE_S[THROUGHPUT]
        assert turns.rank(LATENCY, oldest_at=61.0) < turns.rank(THROUGHPUT, oldest_at=0.0)

    def test_who_asks_for_an_early_first_token_is_less_patient_and_never_more(self) -> None:
        turns = ClassTurns()
        assert turns.rank(BALANCED, oldest_at=1.0, ttft_s=0.25) == 1.25
        assert turns.rank(BALANCED, oldest_at=1.0, ttft_s=60.0) == 1.0 + PATIENCE_S[BALANCED]
        assert turns.rank(LATENCY, oldest_at=1.0, ttft_s=0.5) == 1.0


class TestQueue:
    def test_requests_of_one_tenant_go_in_order(self) -> None:
        line = Line()
        for _ in range(3):
            line.add()
            line.queue.check_invariants()
        assert [line.admit().sequence_id for _ in range(3)] == [1, 2, 3]
        assert len(line.queue) == 0

    def test_the_tenant_that_has_had_least_goes_first(self) -> None:
        line = Line()
        for tenant in "aaab":
            line.add(tenant)
        assert [line.admit().tenant for _ in range(4)] == ["a", "b", "a", "a"]

    def test_a_long_request_counts_for_several_short_ones(self) -> None:
        line = Line()
        line.add("big", max_tokens=100)
        line.add("big", max_tokens=100)
        for _ in range(5):
            line.add("small", max_tokens=16)
        assert [line.admit().tenant for _ in range(7)] == ["big", *["small"] * 5, "big"]

    def test_a_class_has_its_own_line(self) -> None:
        line = Line()
        line.add(qos=THROUGHPUT)
        line.add(qos=LATENCY)
        assert line.admit(LATENCY).sequence_id == 2
        assert line.queue.head(LATENCY) is None
        assert line.queue.head(BALANCED) is None

    def test_the_rank_of_a_class_is_that_of_who_waits_longest(self) -> None:
        line = Line()
        line.add("a", at=1.0)
        line.add("b", at=5.0)
        line.admit()
        assert line.queue.rank(BALANCED) == 5.0 + PATIENCE_S[BALANCED]

    def test_who_lost_a_slot_goes_before_all_that_never_had_one(self) -> None:
        line = Line()
        for _ in range(4):
            line.add()
        first, second = line.admit(), line.admit()
        line.preempt(second)
        line.preempt(first)
        assert [line.admit().sequence_id for _ in range(4)] == [2, 1, 3, 4]

    def test_who_is_withdrawn_is_out(self) -> None:
        line = Line()
        first, second = line.add("a"), line.add("b")
        line.queue.discard(first)
        assert line.queue.head(BALANCED) is second
        assert list(line.queue) == [second]

    def test_waiting_prompts_are_counted_by_class(self) -> None:
        line = Line()
        for qos in (LATENCY, BALANCED, BALANCED, THROUGHPUT):
            line.add(qos=qos)
        assert [line.queue.num_before(qos) for qos in CLASSES] == [1, 3, 4]
        assert [line.queue.num_tokens_before(qos) for qos in CLASSES] == [8, 24, 32]
        assert [line.queue.num_of(qos) for qos in CLASSES] == [1, 2, 1]

    def test_those_who_wait_too_long_are_found_by_rank_and_not_those_who_had_a_slot(self) -> None:
        line = Line()
        line.add(qos=THROUGHPUT, at=0.0)
        line.add(qos=LATENCY, at=3.0)
        line.add(qos=BALANCED, at=2.0)
        line.add(qos=BALANCED, at=7.0)
        line.preempt(line.admit(BALANCED))
        line.add(qos=BALANCED, at=4.0)
        found = line.queue.queued_before(4.0, at_most=16)
        assert [one.sequence_id for one in found] == [2, 1]
        assert [one.sequence_id for one in line.queue.queued_before(9.0, at_most=2)] == [2, 5]

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(CLASSES), st.booleans()), max_size=60))
    def test_whatever_comes_and_goes_each_tenant_is_served_in_order(
        self, events: list[tuple[str, QosClass, bool]]
    ) -> None:
        line = Line()
        served: dict[tuple[str, QosClass], list[int]] = {}
        for number, (tenant, qos, is_coming) in enumerate(events):
            if is_coming:
                line.add(tenant, qos, at=float(number), max_tokens=1 + number % 9)
            elif line.queue.head(qos) is not None:
                sequence = line.admit(qos)
                served.setdefault((sequence.tenant, qos), []).append(sequence.sequence_id)
                line.ledger.refund(sequence)
                line.ledger.leave(sequence.tenant)
            line.queue.check_invariants()
            line.ledger.check_invariants()
        assert all(numbers == sorted(numbers) for numbers in served.values())
        assert len(line.queue) == line.num_sequences - sum(len(one) for one in served.values())


def granted(sequence: Sequence) -> float:
    return len(sequence.prompt_token_ids) + 2 * sequence.max_tokens


@pytest.mark.parametrize("weight", [1.0, 3.0])
@given(lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=40, max_size=40))
def test_tenants_that_always_have_requests_get_the_same_within_twice_the_largest(
    weight: float, lengths: list[tuple[int, int]]
) -> None:
    line = Line()
    line.ledger = TenantLedger({"a": weight})
    line.queue = WaitingQueue(line.ledger, line.turns)
    for ours, theirs in lengths:
        line.add("a", max_tokens=ours)
        line.add("b", max_tokens=theirs)
    largest = max(granted(one) for one in line.queue)
    service = {"a": 0.0, "b": 0.0}
    while line.queue.num_of_tenant("a") and line.queue.num_of_tenant("b"):
        sequence = line.admit()
        service[sequence.tenant] += granted(sequence) / (weight if sequence.tenant == "a" else 1.0)
        assert abs(service["a"] - service["b"]) <= 2 * largest

"""How much each tenant has had, and what is made of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import tenants
from orchestrator.core.sequence import RunId, Sequence
from orchestrator.core.tenants import TenantHeap, TenantLedger, parse_weights
from shoal.errors import ConfigError
from shoal.types import SlotId
from tests.support.builders import make_sequence


def request(tenant: str, num_prompt: int = 10, max_tokens: int = 20) -> Sequence:
    return make_sequence(num_prompt=num_prompt, max_tokens=max_tokens, tenant=tenant)


def run(ledger: TenantLedger, sequence: Sequence) -> None:
    """Give a sequence its slot."""
    ledger.charge(sequence)
    ledger.charge_prompt(sequence)
    sequence.begin_run(RunId(1), SlotId(0), 0.0)


class TestWeights:
    def test_names_and_numbers_are_read(self) -> None:
        assert parse_weights(" gold=4, free = 0.5 ") == {"gold": 4.0, "free": 0.5}

    @pytest.mark.parametrize("text", ["", "  "])
    def test_nothing_gives_no_weights(self, text: str) -> None:
        assert parse_weights(text) == {}

    @pytest.mark.parametrize(
        "text", ["gold", "gold=", "=4", "gold=x", "gold=0", "gold=-1", "gold=inf", "gold=1,,", "a=1,a=2"]
    )
    def test_anything_else_is_refused_with_what_is_allowed(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"tenant_weights = .* numbers above 0") as refused:
            parse_weights(text)
        assert refused.value.field == "tenant_weights"


class TestCounters:
    def test_a_slot_is_charged_for_the_prompt_and_twice_for_the_answer(self) -> None:
        ledger = TenantLedger()
        ledger.enter("a")
        run(ledger, request("a", num_prompt=10, max_tokens=20))
        assert ledger.counter("a") == 50

    def test_a_weight_makes_tokens_cheaper(self) -> None:
        ledger = TenantLedger({"gold": 4.0})
        ledger.enter("gold")
        run(ledger, request("gold", num_prompt=10, max_tokens=15))
        assert ledger.counter("gold") == 10

    def test_what_was_not_delivered_is_given_back(self) -> None:
        ledger, sequence = TenantLedger(), request("a", num_prompt=10, max_tokens=20)
        ledger.enter("a")
        run(ledger, sequence)
        sequence.output_token_ids += [7] * 5
        ledger.refund(sequence)
        assert ledger.counter("a") == 10 + 2 * 5

    def test_a_second_slot_is_charged_for_the_rest_of_the_answer_and_not_for_the_prompt(self) -> None:
        ledger, sequence = TenantLedger(), request("a", num_prompt=10, max_tokens=20)
        ledger.enter("a")
        run(ledger, sequence)
        sequence.output_token_ids += [7] * 5
        ledger.refund(sequence)
        sequence.stop_run(1.0)
        run(ledger, sequence)
        assert ledger.counter("a") == 50

    def test_an_unknown_tenant_has_had_nothing(self) -> None:
        assert TenantLedger().counter("nobody") == 0


class TestLift:
    def test_who_comes_back_starts_at_the_least_of_the_active(self) -> None:
        ledger = TenantLedger()
        ledger.enter("a")
        ledger.enter("b")
        run(ledger, request("a", max_tokens=100))
        run(ledger, request("b", max_tokens=50))
        ledger.enter("late")
        assert ledger.counter("late") == ledger.counter("b") == 110

    def test_who_comes_back_with_more_keeps_it(self) -> None:
        ledger = TenantLedger()
        ledger.enter("a")
        run(ledger, request("a", max_tokens=100))
        ledger.leave("a")
        ledger.enter("b")
        ledger.enter("a")
        assert ledger.counter("a") == 210

    def test_while_nobody_is_active_everybody_starts_where_the_last_stopped(self) -> None:
        ledger = TenantLedger()
        ledger.enter("a")
        run(ledger, request("a", max_tokens=100))
        ledger.leave("a")
        ledger.enter("b")
        assert ledger.counter("b") == 210

    def test_more_requests_of_an_active_tenant_change_nothing(self) -> None:
        ledger = TenantLedger()
        ledger.enter("a")
        ledger.enter("b")
        run(ledger, request("a", max_tokens=100))
        ledger.enter("b")
        assert ledger.counter("b") == 0

    def test_tenants_that_have_long_been_idle_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenants, "MAX_IDLE_TENANTS", 3)
        ledger = TenantLedger()
        for tenant in "abcde":
            ledger.enter(tenant)
            run(ledger, request(tenant))
            ledger.leave(tenant)
            ledger.check_invariants()
        assert [ledger.counter(tenant) for tenant in "ab"] == [0, 0]
        assert ledger.counter("e") > ledger.counter("c") > 0


class TestHeap:
    def test_the_smallest_counter_comes_first_as_counters_rise_and_fall(self) -> None:
        ledger = TenantLedger()
        heap = TenantHeap(ledger)
        sequences = {tenant: request(tenant) for tenant in "ab"}
        for tenant in "ab":
            ledger.enter(tenant)
            heap.add(tenant)
        assert heap.first() == "a"
        run(ledger, sequences["a"])
        assert heap.first() == "b"
        run(ledger, sequences["b"])
        ledger.charge(sequences["b"])
        assert heap.first() == "a"
        ledger.refund(sequences["b"])
        ledger.refund(sequences["b"])
        assert heap.first() == "b"
        heap.check_invariants()

    def test_who_is_taken_out_is_not_found(self) -> None:
        ledger = TenantLedger()
        heap = TenantHeap(ledger)
        ledger.enter("a")
        heap.add("a")
        heap.discard("a")
        assert heap.first() is None
        assert len(heap) == 0

    def test_coming_and_going_leaves_nothing_behind(self) -> None:
        ledger = TenantLedger()
        heap = TenantHeap(ledger)
        ledger.enter("idle")
        heap.add("idle")
        ledger.enter("busy")
        run(ledger, request("busy"))
        for _ in range(1000):
            heap.add("busy")
            heap.discard("busy")
        heap.check_invariants()

    def test_when_many_tenants_leave_at_once_their_dead_entries_do_too(self) -> None:
        ledger = TenantLedger()
        heap = TenantHeap(ledger)
        names = [f"t{number}" for number in range(tenants.HEAP_SLACK)]
        for name in names:
            ledger.enter(name)
            heap.add(name)
            heap.on_lowered(name)
        for name in names:
            heap.discard(name)
        heap.check_invariants()

    @given(
        st.lists(
            st.tuples(st.sampled_from("abcde"), st.sampled_from(["enter", "leave", "charge", "refund"])), max_size=80
        )
    )
    def test_whatever_happens_the_first_is_the_one_with_the_smallest_counter(
        self, events: list[tuple[str, str]]
    ) -> None:
        ledger = TenantLedger()
        heap = TenantHeap(ledger)
        active: dict[str, int] = {}
        for number, (tenant, event) in enumerate(events):
            sequence = request(tenant, num_prompt=1 + number % 7, max_tokens=1 + number % 11)
            if event == "enter" and tenant not in active:
                ledger.enter(tenant)
                heap.add(tenant)
                active[tenant] = 1
            elif tenant in active and event == "leave":
                heap.discard(tenant)
                ledger.leave(tenant)
                del active[tenant]
            elif tenant in active and event == "charge":
                ledger.charge(sequence)
            elif tenant in active and event == "refund":
                ledger.refund(sequence)
            ledger.check_invariants()
            heap.check_invariants()
            first = heap.first()
            assert (first is None) == (not active)
            if first is not None:
                assert ledger.counter(first) == min(ledger.counter(one) for one in active)

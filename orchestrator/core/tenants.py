"""Who of the tenants has had how much: a counter of weighted tokens each, which decides who is served next.

One ledger counts for all pipelines. It does not know who waits: queues ask it, through heaps that follow its counters.

Source: virtual token counters, "Fairness in Serving Large Language Models" (OSDI'24, arXiv 2401.00588).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.sequence import Sequence
from shoal.errors import ConfigError

# An answer token takes a pass of its own, prompt tokens share one: the paper's weights.
PROMPT_TOKEN_WEIGHT = 1.0
ANSWER_TOKEN_WEIGHT = 2.0
# Names come from clients: counters of tenants that have nothing to do are kept for so many of them only.
MAX_IDLE_TENANTS = 10_000
# Entries that a heap may keep beyond twice its members before it is made anew.
HEAP_SLACK = 64


def parse_weights(text: str) -> dict[str, float]:
    """Read `gold=4,free=1`; raises ConfigError that says what is allowed."""
    weights = {}
    for part in text.split(",") if text.strip() else []:
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not 0 < weight < math.inf:
            raise ConfigError(
                f"tenant_weights = {text!r}: {part.strip()!r} is not a tenant and its weight; it must be a list like "
                "gold=4,free=0.5, each tenant once, with numbers above 0",
                field="tenant_weights",
            )
        weights[name] = weight
    return weights


@dataclass(slots=True, eq=False)
class _Account:
    """counter: weighted tokens granted, by weight. num_active: sequences that wait or run. heaps: who follows it."""

    weight: float
    counter: float = 0.0
    num_active: int = 0
    heaps: list[TenantHeap] = field(default_factory=list)


class TenantLedger:
    """Counters of all tenants.

    A grant is charged in full when a sequence gets its slot, so that many requests at once do not all look free; what was
    not delivered is given back. Who comes back from having nothing to do does not bring savings along.

    Invariants: a tenant is idle exactly if none of its sequences waits or runs; at most MAX_IDLE_TENANTS idle ones are
    known.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._accounts: dict[str, _Account] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._active = TenantHeap(self)
        # The counter of whoever became idle last: where tenants start while nobody is active.
        self._last_counter = 0.0

    def counter(self, tenant: str) -> float:
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.counter

    def enter(self, tenant: str) -> None:
        """Note that one more sequence of a tenant waits or runs; the first lifts its counter to the least active one."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._weights.get(tenant, 1.0))
        account.num_active += 1
        if account.num_active == 1:
            least = self._active.first()
            floor = self._last_counter if least is None else self.counter(least)
            account.counter = max(account.counter, floor)
            self._idle.pop(tenant, None)
            self._active.add(tenant)

    def leave(self, tenant: str) -> None:
        """Note that a sequence of a tenant has ended or went elsewhere."""
        account = self._accounts[tenant]
        account.num_active -= 1
        if account.num_active == 0:
            self._last_counter = account.counter
            self._active.discard(tenant)
            self._idle[tenant] = None
            if len(self._idle) > MAX_IDLE_TENANTS:
                del self._accounts[self._idle.popitem(last=False)[0]]

    def charge(self, sequence: Sequence) -> None:
        """Count what a slot grants: all of the answer that is to come."""
        self._add(sequence, sequence.num_output_left * ANSWER_TOKEN_WEIGHT)

    def charge_prompt(self, sequence: Sequence) -> None:
        """Count what is to be computed of a prompt, once, however often it is computed again.

        What was restored is free: copying a block takes a device about a hundredth of the time of computing it.
        """
        if not sequence.is_prompt_charged:
            sequence.is_prompt_charged = True
            self._add(sequence, sequence.num_prompt_left * PROMPT_TOKEN_WEIGHT)

    def refund(self, sequence: Sequence) -> None:
        """Give back what a slot granted and the sequence did not get of its answer."""
        self._add(sequence, -sequence.num_output_left * ANSWER_TOKEN_WEIGHT)

    def _add(self, sequence: Sequence, tokens: float) -> None:
        account = self._accounts[sequence.tenant]
        account.counter += tokens / account.weight
        if tokens < 0:
            for heap in account.heaps:
                heap.on_lowered(sequence.tenant)

    def follow(self, tenant: str, heap: TenantHeap) -> None:
        """Tell a heap from now on when the counter of an active tenant falls."""
        self._accounts[tenant].heaps.append(heap)

    def unfollow(self, tenant: str, heap: TenantHeap) -> None:
        self._accounts[tenant].heaps.remove(heap)

    def check_invariants(self) -> None:
        assert len(self._idle) <= MAX_IDLE_TENANTS
        for tenant, account in self._accounts.items():
            assert account.num_active >= 0, f"{tenant} has {account.num_active} sequences"
            assert (tenant in self._idle) == (account.num_active == 0), f"{tenant} is idle or not?"
            assert (tenant in self._active) == (account.num_active > 0), f"{tenant} is active or not?"
        self._active.check_invariants()


class TenantHeap:
    """Some active tenants, the one with the smallest counter first.

    Counters change while tenants are in here. An entry that is too low is put right when it comes to the top; one that is
    too high would hide its tenant, so the ledger tells when a counter falls.

    Invariants: every member has exactly one live entry, not above its counter.
    """

    def __init__(self, ledger: TenantLedger) -> None:
        self._ledger = ledger
        self._entries: list[tuple[float, int, str]] = []
        # The number of a member's live entry; all its others are dead.
        self._live: dict[str, int] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._live

    def add(self, tenant: str) -> None:
        self._push(tenant)
        self._ledger.follow(tenant, self)

    def discard(self, tenant: str) -> None:
        if self._live.pop(tenant, None) is not None:
            self._ledger.unfollow(tenant, self)
            self._forget_dead()

    def on_lowered(self, tenant: str) -> None:
        self._push(tenant)

    def first(self) -> str | None:
        """The member with the smallest counter; of equal ones the one whose entry is older."""
        while self._entries:
            counter, number, tenant = self._entries[0]
            if self._live.get(tenant) != number:
                heapq.heappop(self._entries)
            elif counter < self._ledger.counter(tenant):
                heapq.heappop(self._entries)
                self._push(tenant)
            else:
                return tenant
        return None

    def _push(self, tenant: str) -> None:
        self._num_entries += 1
        self._live[tenant] = self._num_entries
        heapq.heappush(self._entries, (self._ledger.counter(tenant), self._num_entries, tenant))
        self._forget_dead()

    def _forget_dead(self) -> None:
        """Keep the dead entries from becoming more than the others by much."""
        if len(self._entries) > 2 * len(self._live) + HEAP_SLACK:
            self._entries = [entry for entry in self._entries if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)

    def check_invariants(self) -> None:
        live = {tenant: counter for counter, number, tenant in self._entries if self._live.get(tenant) == number}
        assert live.keys() == self._live.keys()
        assert all(counter <= self._ledger.counter(tenant) for tenant, counter in live.items())
        assert len(self._entries) <= 2 * len(self._live) + HEAP_SLACK

"""Parts of trails on their way into slots: until when they are asked for."""

from __future__ import annotations

import pytest

from tests.support.clock import FakeClock
from tests.support.kv_cache import FORM, make_arena
from tests.support.lower_tier import MemoryLowerTier
from worker import trail_fetches
from worker.kv.trail import FoundTrail, Segment, pack_segment, token_bytes
from worker.trail_fetches import TrailFetches

TRAIL = b"t" * 16
# Two parts of one segment each.
PART_TOKENS, NUM_TOKENS = 8, 16


@pytest.mark.parametrize(("now", "asked_again"), [(0.9, True), (1.0, False)], ids=["in time", "too late"])
def test_no_part_is_asked_for_when_time_is_up(now: float, asked_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_fetches, "MAX_PART_BYTES", PART_TOKENS * token_bytes(FORM))
    clock, arena, lower = FakeClock(), make_arena(), MemoryLowerTier()
    for start in range(0, NUM_TOKENS, PART_TOKENS):
        segment = Segment(FORM.layers, start, start + PART_TOKENS)
        packed = pack_segment(TRAIL, FORM, segment, arena.tokens(1, segment.start, segment.stop), is_exact=True)
        lower.write_segment(TRAIL, segment, packed, lambda: None)
    found: list[FoundTrail] = []
    fetches = TrailFetches(FORM, arena, lower, lambda slot, sequence_id, one: found.append(one), clock=clock.now)
    assert fetches.begin(0, 7, TRAIL, 0, NUM_TOKENS, timeout_s=1.0)
    assert fetches.arrived(0, 7, found.pop())

    clock.move_to(now)
    held = fetches.copy(0, 0, NUM_TOKENS, is_exact_only=True)

    assert (held, fetches.is_on_its_way(0), len(found)) == (PART_TOKENS, asked_again, asked_again)
    fetches.check_invariants()

"""How long what ends is left alone before it is started again."""

from __future__ import annotations

from launch.backoff import FIRST_S, LONGEST_S, STEADY_S, Backoff


def test_what_ends_soon_is_started_again_ever_later_up_to_a_bound() -> None:
    backoff, now, waits = Backoff(), 100.0, []
    for _ in range(10):
        backoff.began(now)
        start_at = backoff.ended(now + 1.0)
        waits.append(start_at - (now + 1.0))
        now = start_at
        backoff.check_invariants()

    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert waits[-2:] == [LONGEST_S, LONGEST_S]


def test_what_was_well_for_long_is_started_again_at_once() -> None:
    backoff = Backoff()
    for now in (0.0, 1.0, 2.0):
        backoff.began(now)
        backoff.ended(now)
    backoff.began(10.0)

    assert backoff.ended(10.0 + STEADY_S + 1.0) == 10.0 + STEADY_S + 1.0 + FIRST_S

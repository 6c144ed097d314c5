"""How a device's figures follow what its passes take: not for a hiccup, and surely for a device that stays slower."""

from __future__ import annotations

import math

import pytest

from orchestrator.core.figures import LayerTimes
from orchestrator.core.refinement import HALF_LIFE_S, MIN_PASSES, STEP, Correction, StageLoad
from orchestrator.core.step_time import StepTiming

TIMES = LayerTimes(
    layer_s=((1, 0.001), (2, 0.0015), (4, 0.002)),
    head_s=((1, 0.004), (2, 0.005)),
    prefill_token_s=0.0005,
    pass_s=0.0001,
)
# So much work a row means, here, that its slot holds as many tokens as when times were measured.
CONTEXT_WORK = 1.5


def expected_s(num_rows: int, *, has_head: bool = False, is_solo: bool = False, work: float | None = None) -> float:
    load = StageLoad(num_layers=10, has_head=has_head, context_work=CONTEXT_WORK)
    timing = StepTiming(num_rows * CONTEXT_WORK if work is None else work, (0.1,), is_solo, num_rows)
    return load.expected_s(TIMES, timing)


def seen(correction: Correction, factor: float, count: int, now: float = 0.0) -> Correction:
    for _ in range(count):
        correction.observe(factor * 0.01, 0.01, now)
    correction.update(now)
    correction.check_invariants()
    return correction


def test_a_solo_row_is_expected_to_take_what_one_row_took() -> None:
    assert expected_s(1, is_solo=True) == pytest.approx(0.0001 + 10 * 0.001)


def test_a_shared_row_that_is_alone_is_computed_as_two() -> None:
    assert expected_s(1) == pytest.approx(0.0001 + 10 * 0.0015)


def test_the_stage_with_the_head_is_expected_to_take_longer() -> None:
    assert expected_s(2, has_head=True) - expected_s(2) == pytest.approx(0.005)


def test_longer_contexts_are_expected_to_take_longer() -> None:
    assert expected_s(2, work=2 * CONTEXT_WORK + 1.0) - expected_s(2) == pytest.approx(10 * 0.0005)


def test_empty_slots_are_expected_to_take_less_but_not_nothing() -> None:
    assert expected_s(2, work=2.0) == pytest.approx(expected_s(2) - 10 * 0.0005)
    assert expected_s(2, work=-100.0) == pytest.approx(expected_s(2) / 2)


def test_a_few_passes_say_nothing() -> None:
    assert seen(Correction(), 2.0, MIN_PASSES - 1).factor == 1.0


def test_a_device_that_is_twice_as_slow_is_found_out() -> None:
    assert seen(Correction(), 2.0, 100).factor == pytest.approx(2.0, rel=STEP)


def test_a_device_that_is_faster_than_it_was_measured_is_found_out() -> None:
    assert seen(Correction(), 0.5, 100).factor == pytest.approx(0.5, rel=STEP)


def test_a_lone_hiccup_moves_nothing() -> None:
    correction = seen(Correction(), 1.0, 50)
    correction.observe(100.0, 0.01, 0.0)
    assert not correction.update(0.0)
    assert correction.factor == 1.0


def test_a_small_difference_makes_no_new_plan() -> None:
    assert seen(Correction(), 1.0 + 0.8 * STEP, 100).factor == 1.0


def test_a_throttled_device_looks_slow_and_recovers_when_it_does() -> None:
    correction = seen(Correction(), 2.5, 200)
    assert correction.factor > 2.0
    assert seen(correction, 1.0, 200).factor == pytest.approx(1.0, rel=STEP)


def test_what_was_seen_is_forgotten_while_nothing_is_seen() -> None:
    correction = seen(Correction(), 4.0, 400)
    before = correction.factor
    assert correction.update(HALF_LIFE_S)
    assert correction.factor == pytest.approx(math.sqrt(before), rel=0.02)


@pytest.mark.parametrize(("took_s", "wanted_s"), [(0.0, 0.01), (-1.0, 0.01), (0.01, 0.0), (0.01, math.inf)])
def test_times_that_make_no_sense_are_not_counted(took_s: float, wanted_s: float) -> None:
    correction = Correction()
    for _ in range(100):
        correction.observe(took_s, wanted_s, 0.0)
    correction.update(0.0)
    assert correction.factor == 1.0

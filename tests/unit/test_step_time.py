"""What is learned of step times, and what is predicted from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.step_time import MIN_OBSERVATIONS, PRIOR_BASE_TOKENS, Prediction, StepTimes


def observe(times: StepTimes, tokens: list[int], *, base_s: float, token_s: float) -> None:
    """One stage that takes so long for passes of these sizes."""
    for num_tokens in tokens:
        times.observe((base_s + token_s * num_tokens,), num_tokens, is_solo=False)
        times.check_invariants()


def test_before_any_pass_one_row_is_expected_to_take_about_23_ms_on_any_number_of_stages() -> None:
    for num_stages in (1, 2, 5):
        times = StepTimes(num_stages)
        assert not times.is_known
        assert times.latency_s(1) == pytest.approx(0.0235)
        assert times.bottleneck_s(1) == pytest.approx(0.0235 / num_stages)


def test_stages_are_expected_to_take_their_share_at_their_speed() -> None:
    times = StepTimes(2, (0.25, 1.5))
    assert times.latency_s(1) == pytest.approx(0.0235 * 1.75)
    assert times.bottleneck_s(1) == pytest.approx(0.0235 * 1.5)


def test_what_is_not_known_is_expected_to_be_as_slow_as_what_is() -> None:
    known, unknown = StepTimes(1), StepTimes(1, (2.0,))
    observe(known, [1, 4, 16, 64] * 5, base_s=0.188, token_s=0.047)
    assert known.slowness == pytest.approx(10.0, rel=0.02)
    assert unknown.slowness is None

    unknown.expect(10.0)
    unknown.expect(10.0)

    assert unknown.latency_s(1) == pytest.approx(0.47)
    unknown.check_invariants()


def test_what_is_observed_is_not_changed_by_expectations() -> None:
    times = StepTimes(1)
    observe(times, [4], base_s=0.1, token_s=0.01)
    before = times.latency_s(4)
    times.expect(10.0)
    assert times.latency_s(4) == before


def test_an_answer_takes_as_long_as_steps_or_its_client_want() -> None:
    prediction = Prediction(queue_s=1.0, prefill_s=2.0, inter_token_s=0.1)
    assert prediction.answer_s(1, 0.5) == 3.0
    assert prediction.answer_s(11, 0.0) == 4.0
    assert prediction.answer_s(11, 0.5) == 8.0


def test_a_few_passes_make_times_known() -> None:
    times = StepTimes(1)
    for _ in range(MIN_OBSERVATIONS):
        assert not times.is_known
        times.observe((0.05,), 4, is_solo=False)
    assert times.is_known


def test_passes_of_one_size_scale_the_prior_line() -> None:
    """With rows alone nothing tells base from slope; their usual ratio does."""
    times = StepTimes(1)
    observe(times, [4] * 10, base_s=0.08, token_s=0.02)
    assert times.latency_s(4) == pytest.approx(0.16)
    assert times.latency_s(20) == pytest.approx(0.16 * (PRIOR_BASE_TOKENS + 20) / (PRIOR_BASE_TOKENS + 4))


def test_passes_of_several_sizes_show_the_line() -> None:
    times = StepTimes(1)
    observe(times, [1, 4, 64, 8, 16, 40, 2, 64, 32, 8] * 3, base_s=0.1, token_s=0.002)
    assert times.latency_s(1) == pytest.approx(0.102, rel=0.02)
    assert times.latency_s(64) == pytest.approx(0.228, rel=0.02)


def test_latency_is_of_all_stages_and_the_bottleneck_of_the_slowest() -> None:
    times = StepTimes(2)
    for _ in range(10):
        times.observe((0.03, 0.05), 4, is_solo=False)
    assert times.latency_s(4) == pytest.approx(0.08)
    assert times.bottleneck_s(4) == pytest.approx(0.05)


@pytest.mark.parametrize("factor", [1.5, 3.0, 0.5])
def test_a_device_that_changes_its_speed_is_followed_within_some_tens_of_steps(factor: float) -> None:
    times = StepTimes(1)
    observe(times, [4, 12] * 100, base_s=0.02, token_s=0.005)
    observe(times, [4, 12] * 30, base_s=0.02 * factor, token_s=0.005 * factor)
    assert times.latency_s(8) == pytest.approx(0.06 * factor, rel=0.25)
    observe(times, [4, 12] * 30, base_s=0.02 * factor, token_s=0.005 * factor)
    assert times.latency_s(8) == pytest.approx(0.06 * factor, rel=0.05)


def test_a_lone_outlier_counts_little() -> None:
    times = StepTimes(1)
    observe(times, [4, 12] * 50, base_s=0.02, token_s=0.005)
    times.observe((4.0,), 4, is_solo=False)
    assert times.latency_s(4) == pytest.approx(0.04, rel=0.1)
    assert times.latency_s(12) == pytest.approx(0.08, rel=0.1)


def test_solo_rows_have_a_mean_of_their_own() -> None:
    times = StepTimes(2)
    assert times.solo_s() == times.latency_s(1)
    observe_line = times.latency_s(1)
    for _ in range(5):
        times.observe((0.01, 0.02), 1, is_solo=True)
    assert times.solo_s() == pytest.approx(0.03)
    assert times.latency_s(1) == observe_line
    assert not times.is_known


def test_what_a_time_allows_is_bounded_by_the_whole_way_and_by_the_slowest_stage() -> None:
    times = StepTimes(2)
    for num_tokens in (2, 10, 30, 60) * 5:
        times.observe((0.01 + 0.001 * num_tokens, 0.01 + 0.003 * num_tokens), num_tokens, is_solo=False)
    assert times.work_within(0.101, 1.0) == pytest.approx(20, rel=0.02)
    assert times.work_within(1.0, 0.0401) == pytest.approx(10, rel=0.02)
    assert times.work_within(0.001, 1.0) == 0


@pytest.mark.parametrize(("stage_s", "num_tokens"), [((0.1,), 4), ((0.1, 0.0), 4), ((0.1, 0.1), 0)])
def test_a_pass_without_full_timing_says_nothing(stage_s: tuple[float, ...], num_tokens: int) -> None:
    times = StepTimes(2)
    before = times.latency_s(8)
    for _ in range(5):
        times.observe(stage_s, num_tokens, is_solo=False)
    assert times.latency_s(8) == before
    assert not times.is_known


@given(st.lists(st.tuples(st.integers(1, 128), st.floats(1e-4, 10.0), st.booleans()), max_size=60))
def test_whatever_is_observed_more_tokens_take_longer_and_none_takes_less_than_nothing(
    passes: list[tuple[int, float, bool]],
) -> None:
    times = StepTimes(1)
    for num_tokens, seconds, is_solo in passes:
        times.observe((seconds,), num_tokens, is_solo)
        times.check_invariants()
    assert 0 < times.latency_s(1) < times.latency_s(64)
    work = times.work_within(0.5, 0.5)
    assert work == 0 or times.latency_s(work) == pytest.approx(0.5)
    assert times.latency_s(work) >= 0.5 - 1e-9


def test_the_first_token_comes_after_queue_and_prompt() -> None:
    assert Prediction(queue_s=0.5, prefill_s=0.25, inter_token_s=0.1).first_token_s == 0.75

"""Half an hour at full load: a phone warms, is limited, and goes on serving below the temperature at which it throttles."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest

from orchestrator.core.thermal import HOLD_S, LEVELS
from tests.simulation.thirty_minutes import LOAD_S, NUM_STREAMS, Moment, Simulation, phone

THROTTLE_C = 75.0
LEVEL_OF_STATE = {state.value: level for level, state in enumerate(LEVELS)}


@pytest.fixture(scope="module")
def trace() -> list[Moment]:
    return Simulation(phone()).run()


def hottest_c(trace: list[Moment]) -> float:
    return max(moment.temperature_c for moment in trace)


def under_load(trace: list[Moment]) -> list[Moment]:
    return [moment for moment in trace if moment.at_s <= LOAD_S]


def level_changes(trace: list[Moment]) -> list[tuple[float, int]]:
    """When the state changed, and by how many levels."""
    levels = [(moment.at_s, LEVEL_OF_STATE[moment.state]) for moment in trace]
    return [(at_s, after - before) for (_, before), (at_s, after) in pairwise(levels) if after != before]


def test_the_phone_stays_below_its_throttle_temperature_throughout(trace: list[Moment]) -> None:
    assert len(under_load(trace)) == LOAD_S
    assert hottest_c(trace) < THROTTLE_C


def test_without_limits_it_would_not(trace: list[Moment]) -> None:
    unlimited = Simulation(phone(), load_s=900.0, recovery_s=0.0, is_limited=False).run()

    assert hottest_c(unlimited) > THROTTLE_C
    assert min(moment.clock for moment in unlimited) < min(moment.clock for moment in trace)


def test_it_warms_up_at_full_speed_before_it_is_limited(trace: list[Moment]) -> None:
    limited_at_s = next(moment.at_s for moment in trace if moment.state != "nominal")
    before = [moment for moment in trace if moment.at_s < limited_at_s]

    assert limited_at_s > 60.0
    assert fmean(moment.busy for moment in before) > 0.9
    assert {moment.max_batch for moment in before} == {8}


def test_it_is_always_at_full_load_until_the_load_ends(trace: list[Moment]) -> None:
    assert min(moment.num_running + moment.num_waiting for moment in under_load(trace)) == NUM_STREAMS
    assert fmean(moment.num_running for moment in under_load(trace)) > 7.0
    assert trace[-1].num_running == trace[-1].num_waiting == 0


def test_it_serves_in_every_minute(trace: list[Moment]) -> None:
    minutes = [sum(moment.tokens for moment in trace[start : start + 60]) for start in range(0, int(LOAD_S), 60)]

    assert len(minutes) == 30
    assert min(minutes) > 500


def test_steps_keep_to_the_limit_of_the_state(trace: list[Moment]) -> None:
    """A second may hold the end of a step that was due in the one before."""
    for before, moment in pairwise(under_load(trace)):
        if moment.steps_per_s and moment.state == before.state:
            assert moment.steps <= moment.steps_per_s + 1, moment


def test_batches_keep_to_the_limit_of_the_state(trace: list[Moment]) -> None:
    for before, moment in pairwise(under_load(trace)):
        if moment.state == before.state:
            assert moment.tokens <= moment.steps * moment.max_batch + moment.max_batch, moment


def test_limits_relax_one_level_at_a_time_and_only_after_a_calm_while(trace: list[Moment]) -> None:
    changes = level_changes(trace)
    falls = [(before_s, at_s, by) for (before_s, _), (at_s, by) in pairwise(changes) if by < 0]

    assert falls
    assert {by for _, _, by in falls} == {-1}
    assert min(at_s - before_s for before_s, at_s, _ in falls) >= HOLD_S


def test_the_phone_is_itself_again_after_the_load(trace: list[Moment]) -> None:
    assert trace[-1].state == "nominal"
    assert trace[-1].cause == ""
    assert trace[-1].temperature_c < 40.0


def test_the_battery_lasts(trace: list[Moment]) -> None:
    assert trace[0].battery_percent > trace[-1].battery_percent > 60.0


@pytest.mark.parametrize("fields", [{"speed": 0.35}, {"speed": 0.2}], ids=["half as fast", "less than a third as fast"])
def test_slower_phones_are_limited_harder_and_stay_below_it_too(fields: dict[str, object]) -> None:
    trace = Simulation(phone(**fields), load_s=900.0, recovery_s=0.0).run()

    assert hottest_c(trace) < THROTTLE_C
    assert "critical" in {moment.state for moment in trace}
    assert sum(moment.tokens for moment in trace[-60:]) > 100

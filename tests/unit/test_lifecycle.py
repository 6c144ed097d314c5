"""Which state of a worker may follow which."""

from __future__ import annotations

import itertools

import pytest

from shoal.errors import InternalError
from worker.lifecycle import TRANSITIONS, Lifecycle, WorkerState

S = WorkerState
WAY_TO = {
    S.DIALING: (),
    S.ATTACHED: (S.ATTACHED,),
    S.LOADING: (S.ATTACHED, S.LOADING),
    S.LOADED: (S.ATTACHED, S.LOADING, S.LOADED),
    S.SERVING: (S.ATTACHED, S.LOADING, S.LOADED, S.SERVING),
    S.STOPPED: (S.STOPPED,),
}
ALLOWED = [(before, after) for before, states in TRANSITIONS.items() for after in states]
FORBIDDEN = [pair for pair in itertools.product(S, S) if pair not in ALLOWED]


def at(state: WorkerState) -> Lifecycle:
    lifecycle = Lifecycle()
    for step in WAY_TO[state]:
        lifecycle.move_to(step)
    return lifecycle


def pair_name(value: object) -> str:
    return value.value if isinstance(value, WorkerState) else str(value)


def test_the_table_has_every_state() -> None:
    assert set(TRANSITIONS) == set(S)


def test_a_worker_begins_with_dialling() -> None:
    assert Lifecycle().state is S.DIALING


@pytest.mark.parametrize(("before", "after"), ALLOWED, ids=pair_name)
def test_a_change_in_the_table_is_made(before: WorkerState, after: WorkerState) -> None:
    lifecycle = at(before)

    lifecycle.move_to(after)

    assert lifecycle.state is after


@pytest.mark.parametrize(("before", "after"), FORBIDDEN, ids=pair_name)
def test_any_other_change_is_refused_and_changes_nothing(before: WorkerState, after: WorkerState) -> None:
    lifecycle = at(before)

    with pytest.raises(InternalError):
        lifecycle.move_to(after)

    assert lifecycle.state is before


def test_a_refused_change_tells_how_the_worker_got_there() -> None:
    with pytest.raises(InternalError, match="dialing -> attached -> loading -> loaded -> serving -> loaded"):
        at(S.SERVING).move_to(S.LOADED)


def test_a_new_shard_may_come_before_the_one_under_way_is_loaded() -> None:
    assert S.LOADING in TRANSITIONS[S.LOADING]


@pytest.mark.parametrize(
    ("before", "after"), [(S.DIALING, S.LOADING), (S.ATTACHED, S.LOADED), (S.LOADING, S.SERVING)], ids=pair_name
)
def test_no_state_on_the_way_to_serving_is_left_out(before: WorkerState, after: WorkerState) -> None:
    assert after not in TRANSITIONS[before]


def test_only_a_stop_is_final() -> None:
    assert [state for state, following in TRANSITIONS.items() if not following] == [S.STOPPED]


@pytest.mark.parametrize("state", [state for state in S if state not in (S.STOPPED, S.DIALING)])
def test_a_worker_that_is_cut_off_may_dial_again_from_any_state(state: WorkerState) -> None:
    assert S.DIALING in TRANSITIONS[state]

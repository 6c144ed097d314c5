"""Who takes the place of a lost stage."""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures, LinkFigures, declared_fleet
from orchestrator.core.placement import Placement, place_split
from orchestrator.core.repair import repair, takers
from shoal.types import DeviceProfile, WorkerId
from tests.support.builders import MIB, make_model, make_profile, make_workers

MODEL = make_model()
W0, W1, W2, W3 = (WorkerId(f"w{index}") for index in range(4))


def make_fleet(*profiles: DeviceProfile) -> tuple[Placement, FleetFigures]:
    """A pipeline over the first two, and the figures of all."""
    workers = make_workers(*profiles)
    fleet = declared_fleet(MODEL, workers)
    return place_split(MODEL, fleet.devices[:2], Demand(num_streams=4), [18, 12]), fleet


def test_a_free_device_takes_the_same_layers_with_the_same_memory() -> None:
    placement, fleet = make_fleet(*[make_profile()] * 3)
    repaired = repair(MODEL, placement, W1, [W2], fleet)
    assert repaired is not None
    assert repaired.worker_ids == (W0, W2)
    assert repaired == replace(placement, stages=(placement.stages[0], replace(placement.stages[1], worker_id=W2)))


def test_the_fastest_of_those_with_memory_is_taken() -> None:
    fast_but_small = make_profile(speed=4.0, memory_bytes=200 * MIB)
    placement, fleet = make_fleet(
        make_profile(), make_profile(), fast_but_small, make_profile(speed=0.5), make_profile(speed=2.0)
    )
    repaired = repair(MODEL, placement, W0, [W2, W3, WorkerId("w4")], fleet)
    assert repaired is not None
    assert repaired.worker_ids == ("w4", "w1")


def test_of_equal_ones_the_nearest_is_taken_and_of_equally_near_ones_the_first_by_name() -> None:
    placement, fleet = make_fleet(*[make_profile()] * 4)
    repaired = repair(MODEL, placement, W1, [W3, W2], fleet)
    assert repaired is not None
    assert repaired.worker_ids == (W0, W2)
    far = replace(fleet, links={(W0, W2): LinkFigures(0.005, math.inf)})
    repaired = repair(MODEL, placement, W1, [W3, W2], far)
    assert repaired is not None
    assert repaired.worker_ids == (W0, W3)


def test_nobody_takes_it_who_is_not_free_or_has_no_room() -> None:
    placement, fleet = make_fleet(make_profile(), make_profile(), make_profile(memory_bytes=200 * MIB), make_profile())
    assert repair(MODEL, placement, W1, [], fleet) is None
    assert repair(MODEL, placement, W1, [W2], fleet) is None
    assert repair(MODEL, placement, W1, [W1], fleet) is None


def test_whoever_would_take_a_stage_is_named_with_it() -> None:
    fast_but_small = make_profile(speed=4.0, memory_bytes=200 * MIB)
    placement, fleet = make_fleet(make_profile(), make_profile(), fast_but_small, make_profile())
    small, large = replace(placement.stages[1], need_bytes=100 * MIB), placement.stages[0]
    placement = replace(placement, stages=(large, small))

    assert takers(MODEL, [placement], [W2, W3], fleet) == {W2: [small], W3: [large]}
    assert takers(MODEL, [placement], [W2], fleet) == {W2: [small]}
    assert takers(MODEL, [placement], [], fleet) == {}

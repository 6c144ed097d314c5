"""Who takes the place of a lost stage."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures, LinkEnds, LinkFigures, declared_fleet
from orchestrator.core.placement import Placement, place_split
from orchestrator.core.repair import absorb, repair, takers
from shoal.types import DeviceProfile, LayerRange, Objective, WorkerId
from tests.support.builders import MIB, make_model, make_profile, make_workers

MODEL = make_model()
# How slow a stage is does not count then.
ALONE = Demand(num_streams=4, objective=Objective.LATENCY)
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


def make_ring(*profiles: DeviceProfile, counts: list[int]) -> tuple[Placement, FleetFigures]:
    """A pipeline over all of them."""
    fleet = declared_fleet(MODEL, make_workers(*profiles))
    return place_split(MODEL, fleet.devices, Demand(num_streams=4), counts), fleet


def absorbed(
    placement: Placement,
    fleet: FleetFigures,
    lost: WorkerId,
    *,
    usable: tuple[WorkerId, ...] | None = None,
    demand: Demand = ALONE,
) -> list[tuple[str, str]] | None:
    """Who has which layers then."""
    found = absorb(MODEL, placement, lost, usable or placement.worker_ids, fleet, demand)
    return None if found is None else [(stage.worker_id, str(stage.layers)) for stage in found.stages]


def with_links(fleet: FleetFigures, **mbytes_per_s: float) -> FleetFigures:
    """From the orchestrator to each."""
    links: dict[LinkEnds, LinkFigures] = {
        (None, WorkerId(name)): LinkFigures(0.001, rate * 1e6) for name, rate in mbytes_per_s.items()
    }
    return replace(fleet, links=links)


class TestAbsorbed:
    def test_both_neighbours_take_what_makes_neither_of_them_slow(self) -> None:
        placement, fleet = make_ring(*[make_profile()] * 4, counts=[8, 8, 8, 6])
        assert absorbed(placement, fleet, W1) == [("w0", "[0, 12)"), ("w2", "[12, 24)"), ("w3", "[24, 30)")]

    def test_whose_link_is_slow_fetches_less(self) -> None:
        placement, fleet = make_ring(*[make_profile()] * 3, counts=[10, 10, 10])
        near = with_links(fleet, w0=9.0, w2=1.0)
        assert absorbed(placement, near, W1) == [("w0", "[0, 19)"), ("w2", "[19, 30)")]

    def test_the_first_stage_goes_to_the_second_with_its_embedding_and_the_last_to_the_one_before(self) -> None:
        placement, fleet = make_ring(*[make_profile()] * 3, counts=[10, 10, 10])
        assert absorbed(placement, fleet, W0) == [("w1", "[0, 20)"), ("w2", "[20, 30)")]
        assert absorbed(placement, fleet, W2) == [("w0", "[0, 10)"), ("w1", "[10, 30)")]
        first = absorb(MODEL, placement, W0, placement.worker_ids, fleet, ALONE)
        assert first is not None
        assert first.stages[0].weight_bytes == MODEL.weight_bytes(0, 20)
        assert first.stages[0].need_bytes == MODEL.need_bytes(0, 20, placement.kv_tokens)

    def test_who_has_no_room_leaves_all_to_the_other(self) -> None:
        room = MODEL.need_bytes(0, 10, 4 * 2048)
        placement, fleet = make_ring(make_profile(memory_bytes=room), *[make_profile()] * 2, counts=[10, 10, 10])
        assert absorbed(placement, fleet, W1) == [("w0", "[0, 10)"), ("w2", "[10, 30)")]
        assert absorbed(placement, fleet, W2) == [("w0", "[0, 10)"), ("w1", "[10, 30)")]

    def test_who_may_be_given_nothing_keeps_what_it_has(self) -> None:
        placement, fleet = make_ring(*[make_profile()] * 3, counts=[10, 10, 10])
        assert absorbed(placement, fleet, W1, usable=(W2,)) == [("w0", "[0, 10)"), ("w2", "[10, 30)")]
        assert absorbed(placement, fleet, W0, usable=(W2,)) is None

    def test_it_will_not_do_where_a_stage_would_be_too_slow(self) -> None:
        placement, fleet = make_ring(*[make_profile()] * 4, counts=[10, 10, 8, 2])
        assert absorbed(placement, fleet, W1, demand=Demand(num_streams=4)) is not None
        assert absorbed(placement, fleet, W0, demand=Demand(num_streams=4)) is None
        even, fleet = make_ring(*[make_profile()] * 2, counts=[18, 12])
        assert absorbed(even, fleet, W0, demand=Demand(num_streams=4)) is None

    def test_a_split_stays_as_it_is(self) -> None:
        placement, fleet = make_ring(*[make_profile()] * 3, counts=[10, 10, 10])
        assert absorbed(placement, fleet, W1, demand=replace(ALONE, split=(10, 10, 10))) is None

    def test_nobody_is_beside_a_lone_stage(self) -> None:
        placement, fleet = make_ring(make_profile(), counts=[30])
        assert absorbed(placement, fleet, W0) is None

    def test_nothing_is_decided_about_devices_of_which_nothing_is_known(self) -> None:
        placement, fleet = make_ring(*[make_profile()] * 3, counts=[10, 10, 10])
        assert absorbed(placement, replace(fleet, devices=fleet.devices[:2]), W1) is None

    @given(
        counts=st.lists(st.integers(1, 9), min_size=2, max_size=6),
        memory_mib=st.lists(st.integers(150, 700), min_size=6, max_size=6),
        lost=st.integers(0, 5),
    )
    def test_every_layer_is_somewhere_and_fits(self, counts: list[int], memory_mib: list[int], lost: int) -> None:
        model = make_model(num_layers=sum(counts))
        fleet = declared_fleet(model, make_workers(*[make_profile()] * len(counts)))
        placement = place_split(model, fleet.devices, Demand(num_streams=4), counts)
        sizes = zip(fleet.devices, memory_mib, strict=False)
        tight = replace(
            fleet, devices=tuple(replace(one, profile=make_profile(memory_bytes=mib * MIB)) for one, mib in sizes)
        )
        gone = placement.worker_ids[lost % len(counts)]
        found = absorb(model, placement, gone, placement.worker_ids, tight, ALONE)
        if found is None:
            return
        assert found.worker_ids == tuple(one for one in placement.worker_ids if one != gone)
        ends = [stage.layers.stop for stage in found.stages]
        assert [stage.layers for stage in found.stages] == [
            LayerRange(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)
        ]
        assert ends[-1] == sum(counts)
        memory = {one.worker_id: one.shard_bytes for one in tight.devices}
        changed = [stage for stage in found.stages if stage not in placement.stages]
        assert 1 <= len(changed) <= 2
        assert all(stage.need_bytes <= memory[stage.worker_id] for stage in changed)

"""Who gets which layers: by speed, capped by memory, or as the operator says."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.core.placement import MIN_CONTEXT_TOKENS, ModelFootprint, Placement, place
from shoal.errors import ConfigError, PlacementImpossible
from shoal.types import DeviceProfile
from tests.support.builders import MIB, make_model, make_profile, make_workers

GIB = 1024 * MIB


def counts(placement: Placement) -> list[int]:
    return [len(stage.layers) for stage in placement.stages]


def place_on(model: ModelFootprint, *profiles: DeviceProfile, num_slots: int = 4, context_tokens: int = 0) -> Placement:
    return place(model, make_workers(*profiles), num_slots=num_slots, context_tokens=context_tokens)


class TestBySpeed:
    def test_a_lone_worker_gets_all_layers(self) -> None:
        assert counts(place_on(make_model(), make_profile())) == [30]

    def test_the_stage_with_the_head_gets_fewer_layers(self) -> None:
        assert counts(place_on(make_model(), make_profile(), make_profile())) == [18, 12]

    def test_three_equal_devices_share_layers_and_head_evenly(self) -> None:
        assert counts(place_on(make_model(), *[make_profile()] * 3)) == [12, 12, 6]

    def test_a_faster_device_gets_more_layers(self) -> None:
        placement = place_on(make_model(head_cost_layers=0), make_profile(speed=2.0), make_profile(speed=1.0))
        assert counts(placement) == [20, 10]

    def test_what_cannot_be_shared_evenly_differs_by_one_layer(self) -> None:
        placement = place_on(make_model(num_layers=10, head_cost_layers=0), *[make_profile()] * 3)
        assert sorted(counts(placement)) == [3, 3, 4]

    def test_a_device_too_slow_for_one_layer_is_left_out(self) -> None:
        placement = place_on(make_model(), make_profile(), make_profile(speed=0.01), make_profile())
        assert [stage.worker_id for stage in placement.stages] == ["w0", "w2"]

    def test_more_devices_than_layers_leave_some_out(self) -> None:
        placement = place_on(make_model(num_layers=2, head_cost_layers=0), *[make_profile()] * 4)
        assert counts(placement) == [1, 1]

    def test_workers_keep_their_order(self) -> None:
        placement = place_on(make_model(), make_profile(speed=0.5), make_profile(speed=2.0), make_profile())
        assert [stage.worker_id for stage in placement.stages] == ["w0", "w1", "w2"]


class TestByMemory:
    def test_a_device_short_of_memory_gives_layers_to_the_others(self) -> None:
        small = make_profile(memory_bytes=260 * MIB)
        placement = place_on(make_model(), small, make_profile(memory_bytes=4 * GIB), num_slots=1)
        assert counts(placement) == [7, 23]
        assert placement.stages[0].need_bytes <= 260 * MIB

    def test_the_tied_embedding_is_held_by_both_ends_but_once_on_one_device(self) -> None:
        model = make_model(head_bytes=5)
        first, last = place_on(model, make_profile(), make_profile()).stages
        assert first.weight_bytes == 18 * 3 * MIB + 30 * MIB
        assert last.weight_bytes == 12 * 3 * MIB + 30 * MIB + 5
        (only,) = place_on(model, make_profile()).stages
        assert only.weight_bytes == 30 * 3 * MIB + 30 * MIB + 5

    def test_an_untied_head_does_not_bring_the_embedding_to_the_last_stage(self) -> None:
        model = make_model(head_bytes=7 * MIB, is_head_tied=False)
        _, last = place_on(model, make_profile(), make_profile()).stages
        assert last.weight_bytes == 12 * 3 * MIB + 7 * MIB

    def test_need_is_weights_runtime_and_kv(self) -> None:
        placement = place_on(make_model(), make_profile(memory_bytes=4 * GIB), num_slots=2)
        kv_bytes = 2 * 2048 * 30 * 1536
        assert placement.kv_tokens == 2 * 2048
        assert placement.stages[0].need_bytes == round(2.3 * (120 * MIB + 4096)) + 130 * MIB + kv_bytes

    def test_kv_takes_what_the_tightest_stage_has_left(self) -> None:
        placement = place_on(make_model(), make_profile(memory_bytes=512 * MIB), make_profile(memory_bytes=4 * GIB))
        tight = placement.stages[0]
        assert counts(placement) == [18, 12]
        page_bytes = 16 * 18 * 1536
        assert 512 * MIB - page_bytes < tight.need_bytes <= 512 * MIB

    def test_of_equally_fast_plans_the_one_with_more_kv_is_taken(self) -> None:
        model = make_model(num_layers=3, head_cost_layers=0, embedding_bytes=0, is_head_tied=False)
        tight, wide = make_profile(memory_bytes=146 * MIB), make_profile(memory_bytes=GIB)
        assert counts(place_on(model, tight, wide, num_slots=16)) == [1, 2]
        assert counts(place_on(model, wide, tight, num_slots=16)) == [2, 1]

    def test_a_long_context_is_cut_to_what_the_memory_holds(self) -> None:
        placement = place_on(make_model(context_tokens=8192), make_profile(memory_bytes=500 * MIB))
        assert placement.context_tokens == placement.kv_tokens < 8192

    def test_the_wanted_context_bounds_the_kv(self) -> None:
        placement = place_on(make_model(), make_profile(memory_bytes=8 * GIB), num_slots=3, context_tokens=640)
        assert (placement.context_tokens, placement.kv_tokens, placement.slots) == (640, 3 * 640, 3)

    def test_more_context_than_the_model_has_is_not_promised(self) -> None:
        placement = place_on(make_model(context_tokens=1024), make_profile(memory_bytes=8 * GIB), context_tokens=4096)
        assert placement.context_tokens == 1024

    def test_a_short_context_needs_no_more_kv_than_itself(self) -> None:
        placement = place_on(make_model(context_tokens=64), make_profile(memory_bytes=415 * MIB), num_slots=1)
        assert (placement.context_tokens, placement.kv_tokens) == (64, 64)


class TestImpossible:
    def test_without_workers_the_message_says_how_to_start_one(self) -> None:
        with pytest.raises(PlacementImpossible, match="shoal worker --join"):
            place_on(make_model())

    def test_each_device_is_told_with_what_it_has_and_lacks(self) -> None:
        small, slow = make_profile(memory_bytes=100 * MIB), make_profile(memory_bytes=200 * MIB, speed=0.001)
        with pytest.raises(PlacementImpossible) as impossible:
            place_on(make_model(), small, slow)
        need = round(2.3 * (120 * MIB + 4096)) + 130 * MIB + MIN_CONTEXT_TOKENS * 30 * 1536
        lack, message = need - 100 * MIB, impossible.value.message
        assert f"w0 (phone) has {100 * MIB} bytes, needs {need} for layers [0, 30): lacks {lack}" in message
        assert f"w1 (phone) has {200 * MIB} bytes, gets no layer" in message
        assert "What helps: another worker" in message

    def test_a_model_that_fits_without_kv_only_is_refused(self) -> None:
        model = make_model(num_layers=1, embedding_bytes=0, head_bytes=0)
        fits = model.need_bytes(0, 1, MIN_CONTEXT_TOKENS)
        assert place_on(model, make_profile(memory_bytes=fits)).kv_tokens == MIN_CONTEXT_TOKENS
        with pytest.raises(PlacementImpossible, match=r"lacks 1 \(1 MiB\)"):
            place_on(model, make_profile(memory_bytes=fits - 1))

    def test_a_device_without_speed_is_of_no_use_and_no_crash(self) -> None:
        with pytest.raises(PlacementImpossible, match="gets no layer"):
            place_on(make_model(), make_profile(speed=0.0))

    def test_no_slots_is_a_configuration_error(self) -> None:
        with pytest.raises(ConfigError, match="num_slots is 0"):
            place_on(make_model(), make_profile(), num_slots=0)


class TestSplit:
    def test_the_operators_split_is_followed(self) -> None:
        workers = make_workers(*[make_profile()] * 4)
        placement = place(make_model(), workers, num_slots=4, split=[5, 0, 25])
        assert [(stage.worker_id, str(stage.layers)) for stage in placement.stages] == [
            ("w0", "[0, 5)"),
            ("w2", "[5, 30)"),
        ]

    @pytest.mark.parametrize(
        ("split", "message"),
        [([10, 10], "10,10 shares 20 layers, the model has 30"), ([], "shares 0 layers"), ([31, -1], "negative")],
    )
    def test_a_split_that_can_never_work_is_a_configuration_error(self, split: list[int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            place(make_model(), make_workers(make_profile()), num_slots=4, split=split)

    def test_a_split_for_more_workers_than_there_are_waits_for_them(self) -> None:
        with pytest.raises(PlacementImpossible, match="3 workers, 2 can be used now"):
            place(make_model(), make_workers(*[make_profile()] * 2), num_slots=4, split=[10, 10, 10])

    def test_a_split_that_does_not_fit_names_the_device(self) -> None:
        workers = make_workers(make_profile(), make_profile("tablet", memory_bytes=64 * MIB))
        with pytest.raises(PlacementImpossible, match=r"w0 .*: enough; w1 \(tablet\) .* lacks"):
            place(make_model(), workers, num_slots=4, split=[20, 10])

    def test_kv_follows_the_tightest_stage_of_a_split(self) -> None:
        workers = make_workers(make_profile(memory_bytes=400 * MIB), make_profile(memory_bytes=4 * GIB))
        placement = place(make_model(), workers, num_slots=64, split=[15, 15])
        page_bytes = 16 * 15 * 1536
        assert 400 * MIB - page_bytes < placement.stages[0].need_bytes <= 400 * MIB


profiles_strategy = st.lists(
    st.builds(
        make_profile, memory_bytes=st.integers(100, 1500).map(lambda size: size * MIB), speed=st.floats(0.05, 4.0)
    ),
    min_size=1,
    max_size=4,
)


@given(
    profiles=profiles_strategy,
    layer_mib=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    is_head_tied=st.booleans(),
    num_slots=st.integers(1, 8),
    context_tokens=st.integers(0, 4096),
)
def test_every_layer_is_placed_once_in_order_and_no_device_is_overfull(
    profiles: list[DeviceProfile], layer_mib: list[int], is_head_tied: bool, num_slots: int, context_tokens: int
) -> None:
    model = ModelFootprint(
        layer_bytes=tuple(size * MIB for size in layer_mib),
        embedding_bytes=20 * MIB,
        head_bytes=MIB,
        is_head_tied=is_head_tied,
        kv_bytes_per_token_per_layer=4096,
        context_tokens=2048,
        shared_bytes=MIB,
    )
    workers = make_workers(*profiles)
    try:
        placement = place(model, workers, num_slots=num_slots, context_tokens=context_tokens)
    except PlacementImpossible:
        assume(False)
    ends = [stage.layers.stop for stage in placement.stages]
    assert [stage.layers.start for stage in placement.stages] == [0, *ends[:-1]]
    assert ends[-1] == model.num_layers
    memory = {worker_id: profile.memory_bytes for worker_id, profile in workers}
    assert len({stage.worker_id for stage in placement.stages}) == len(placement.stages)
    for stage in placement.stages:
        assert stage.need_bytes <= memory[stage.worker_id]
    assert 0 < placement.context_tokens <= placement.kv_tokens
    assert placement.kv_tokens >= min(MIN_CONTEXT_TOKENS, context_tokens or 2048)
    assert 1 <= placement.slots <= num_slots


def slowest(model: ModelFootprint, cuts: list[tuple[float, int, int]]) -> float:
    return max(model.cost(start, stop) / speed for speed, start, stop in cuts)


def brute_force(model: ModelFootprint, speeds: list[float]) -> float:
    """The least time of the slowest stage over all choices of workers, in order, and all cuts."""
    best = float("inf")
    for num_stages in range(1, min(len(speeds), model.num_layers) + 1):
        for chosen in combinations(speeds, num_stages):
            for inner in combinations(range(1, model.num_layers), num_stages - 1):
                bounds = [0, *inner, model.num_layers]
                best = min(best, slowest(model, list(zip(chosen, bounds, bounds[1:], strict=False))))
    return best


@given(
    speeds=st.lists(st.floats(0.1, 4.0), min_size=1, max_size=4),
    num_layers=st.integers(1, 9),
    head_cost_layers=st.floats(0.0, 8.0),
)
def test_with_memory_to_spare_no_cut_has_a_faster_slowest_stage(
    speeds: list[float], num_layers: int, head_cost_layers: float
) -> None:
    model = make_model(num_layers=num_layers, head_cost_layers=head_cost_layers)
    workers = make_workers(*(make_profile(memory_bytes=64 * GIB, speed=speed) for speed in speeds))
    placement = place(model, workers, num_slots=4)
    speed_of = {worker_id: profile.speed for worker_id, profile in workers}
    cuts = [(speed_of[stage.worker_id], stage.layers.start, stage.layers.stop) for stage in placement.stages]
    assert slowest(model, cuts) == brute_force(model, speeds)


def test_memory_for_kept_kv_is_left_free() -> None:
    model = make_model()
    keeping = replace(make_profile(memory_bytes=800 * MIB), host_kv_bytes=100 * MIB)
    smaller = make_profile(memory_bytes=700 * MIB)

    assert place(model, make_workers(keeping), num_slots=64) == place(model, make_workers(smaller), num_slots=64)


def test_a_device_whose_kept_kv_leaves_too_little_is_told_what_is_left() -> None:
    keeping = replace(make_profile(memory_bytes=500 * MIB), host_kv_bytes=400 * MIB)

    with pytest.raises(PlacementImpossible, match=f"has {100 * MIB} bytes"):
        place(make_model(), make_workers(keeping), num_slots=1)

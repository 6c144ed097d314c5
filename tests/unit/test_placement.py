"""Who gets which layers: as is best for the objective within memory, or as the operator says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.core.demand import MIN_CONTEXT_TOKENS, Demand
from orchestrator.core.figures import FleetFigures, LinkEnds, LinkFigures, declared_fleet
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.pipelines import place_one
from orchestrator.core.placement import Placement, place_split
from shoal.errors import ConfigError, PlacementImpossible
from shoal.types import DeviceProfile, Objective
from tests.support.builders import MIB, make_model, make_profile, make_workers

GIB = 1024 * MIB
NO_LINK = LinkFigures(0.0)
# The head of a model without any takes no time.
HEADLESS = make_model(num_layers=10, head_bytes=0, embedding_bytes=0)


def counts(placement: Placement) -> list[int]:
    return [len(stage.layers) for stage in placement.stages]


def place_on(
    model: ModelFootprint,
    *profiles: DeviceProfile,
    num_streams: int = 16,
    context_tokens: int = 0,
    objective: Objective = Objective.THROUGHPUT,
    link: LinkFigures = NO_LINK,
    is_promised: bool = False,
) -> Placement:
    fleet = replace(declared_fleet(model, make_workers(*profiles)), default_link=link)
    demand = Demand(
        num_streams=num_streams, context_tokens=context_tokens, objective=objective, is_promised=is_promised
    )
    return place_one(model, fleet, demand).placement


def figures_of(model: ModelFootprint, *profiles: DeviceProfile) -> FleetFigures:
    return declared_fleet(model, make_workers(*profiles))


class TestForManyStreams:
    def test_a_lone_worker_gets_all_layers(self) -> None:
        assert counts(place_on(make_model(), make_profile())) == [30]

    def test_the_stage_with_the_head_gets_fewer_layers(self) -> None:
        first, last = counts(place_on(make_model(), make_profile(), make_profile()))
        assert first > last

    def test_a_faster_device_gets_more_layers(self) -> None:
        placement = place_on(HEADLESS, make_profile(speed=1.0), make_profile(speed=0.5))
        assert dict(zip(placement.worker_ids, counts(placement), strict=True)) == {"w0": 7, "w1": 3}

    def test_nobody_of_equal_devices_gets_more_than_its_share(self) -> None:
        assert max(counts(place_on(HEADLESS, *[make_profile()] * 3, num_streams=48))) == 4

    def test_equal_devices_are_stages_in_the_order_of_their_names(self) -> None:
        assert place_on(make_model(), *[make_profile()] * 3).worker_ids == ("w0", "w1", "w2")

    def test_a_device_too_slow_for_one_layer_stands_by(self) -> None:
        placement = place_on(make_model(), make_profile(), make_profile(speed=0.01), make_profile())
        assert placement.worker_ids == ("w0", "w2")

    def test_more_devices_than_layers_leave_some_out(self) -> None:
        assert counts(place_on(replace(HEADLESS, layer_bytes=(MIB,) * 2), *[make_profile()] * 4)) == [1, 1]

    def test_devices_that_streams_are_too_few_for_stand_by(self) -> None:
        assert len(place_on(make_model(), *[make_profile()] * 4, num_streams=1).stages) == 1

    def test_devices_behind_slow_links_stand_by(self) -> None:
        devices = [make_profile()] * 3
        assert len(place_on(make_model(), *devices, link=LinkFigures(0.001, 1e7)).stages) == 3
        assert len(place_on(make_model(), *devices, link=LinkFigures(0.001, 1e5)).stages) == 1


class TestForOneStream:
    def test_it_is_the_fastest_device_alone_where_it_holds_the_model(self) -> None:
        placement = place_on(make_model(), make_profile(), make_profile(speed=1.2), objective=Objective.LATENCY)
        assert placement.worker_ids == ("w1",)

    def test_it_is_as_few_devices_as_hold_the_model(self) -> None:
        half = make_profile(memory_bytes=300 * MIB)
        placement = place_on(make_model(), half, half, half, objective=Objective.LATENCY)
        assert placement.worker_ids == ("w0", "w1")

    def test_the_nearer_of_two_is_taken(self) -> None:
        half = make_profile(memory_bytes=300 * MIB)
        workers = make_workers(half, half, half)
        ids = [worker_id for worker_id, _ in workers]
        near: dict[LinkEnds, LinkFigures] = {(ids[0], ids[2]): LinkFigures(0.001)}
        fleet = replace(declared_fleet(make_model(), workers), links=near, default_link=LinkFigures(0.01))
        demand = Demand(num_streams=1, objective=Objective.LATENCY)
        assert set(place_one(make_model(), fleet, demand).placement.worker_ids) == {"w0", "w2"}


class TestMemory:
    def test_the_tied_embedding_is_held_by_both_ends_but_once_on_one_device(self) -> None:
        model = make_model(head_bytes=5)
        first, last = place_on(model, make_profile(), make_profile()).stages
        assert first.weight_bytes == len(first.layers) * 3 * MIB + 30 * MIB
        assert last.weight_bytes == len(last.layers) * 3 * MIB + 30 * MIB + 5
        (only,) = place_on(model, make_profile()).stages
        assert only.weight_bytes == 30 * 3 * MIB + 30 * MIB + 5

    def test_an_untied_head_does_not_bring_the_embedding_to_the_last_stage(self) -> None:
        model = make_model(head_bytes=7 * MIB, is_head_tied=False)
        _, last = place_on(model, make_profile(), make_profile()).stages
        assert last.weight_bytes == len(last.layers) * 3 * MIB + 7 * MIB

    def test_need_is_weights_runtime_and_kv(self) -> None:
        placement = place_on(make_model(), make_profile(memory_bytes=4 * GIB), num_streams=2)
        kv_bytes = 2 * 2048 * 30 * 1536
        assert placement.kv_tokens == 2 * 2048
        assert placement.stages[0].need_bytes == round(1.3 * (120 * MIB + 4096)) + 130 * MIB + kv_bytes

    def test_kv_takes_what_the_tightest_stage_has_left(self) -> None:
        placement = place_on(make_model(), make_profile(memory_bytes=512 * MIB), make_profile(memory_bytes=4 * GIB))
        tight = next(stage for stage in placement.stages if stage.worker_id == "w0")
        page_bytes = 16 * len(tight.layers) * 1536
        assert 512 * MIB - page_bytes < tight.need_bytes <= 512 * MIB

    def test_of_equally_fast_cuts_the_one_with_more_kv_is_taken(self) -> None:
        model = replace(HEADLESS, layer_bytes=(3 * MIB,) * 3)
        tight, wide = make_profile(memory_bytes=146 * MIB), make_profile(memory_bytes=GIB)
        placement = place_on(model, tight, wide)
        assert dict(zip(placement.worker_ids, counts(placement), strict=True)) == {"w0": 1, "w1": 2}

    def test_fewer_streams_at_a_time_are_better_than_none(self) -> None:
        room = make_model().need_bytes(0, 30, 3 * MIN_CONTEXT_TOKENS)
        placement = place_on(make_model(), make_profile(memory_bytes=room), num_streams=64)
        assert placement.kv_tokens == 3 * MIN_CONTEXT_TOKENS

    def test_what_is_promised_has_room_or_there_is_no_plan(self) -> None:
        room = make_model().need_bytes(0, 30, 2 * 1024)
        fits, lacks = make_profile(memory_bytes=room), make_profile(memory_bytes=room - 1)
        placement = place_on(make_model(), fits, num_streams=2, context_tokens=1024, is_promised=True)
        assert (placement.kv_tokens, placement.context_tokens, placement.slots) == (2048, 1024, 2)
        with pytest.raises(PlacementImpossible):
            place_on(make_model(), lacks, num_streams=2, context_tokens=1024, is_promised=True)

    def test_a_long_context_is_cut_to_what_the_memory_holds(self) -> None:
        placement = place_on(make_model(context_tokens=8192), make_profile(memory_bytes=500 * MIB))
        assert placement.context_tokens == placement.kv_tokens < 8192

    def test_the_wanted_context_bounds_the_kv(self) -> None:
        placement = place_on(make_model(), make_profile(memory_bytes=8 * GIB), num_streams=3, context_tokens=640)
        assert (placement.context_tokens, placement.kv_tokens, placement.slots) == (640, 3 * 640, 3)

    def test_more_context_than_the_model_has_is_not_promised(self) -> None:
        placement = place_on(make_model(context_tokens=1024), make_profile(memory_bytes=8 * GIB), context_tokens=4096)
        assert placement.context_tokens == 1024

    def test_a_short_context_needs_no_more_kv_than_itself(self) -> None:
        placement = place_on(make_model(context_tokens=64), make_profile(memory_bytes=415 * MIB), num_streams=1)
        assert (placement.context_tokens, placement.kv_tokens) == (64, 64)

    def test_memory_for_kept_kv_is_left_free(self) -> None:
        keeping = replace(make_profile(memory_bytes=800 * MIB), host_kv_bytes=100 * MIB)
        smaller = make_profile(memory_bytes=700 * MIB)
        assert place_on(make_model(), keeping) == place_on(make_model(), smaller)

    def test_memory_that_was_found_free_counts_where_it_is_less_than_declared(self) -> None:
        model = make_model()
        fleet = figures_of(model, make_profile(memory_bytes=GIB))
        found = replace(fleet, devices=(replace(fleet.devices[0], free_bytes=700 * MIB),))
        demand = Demand(num_streams=64)
        assert place_one(model, found, demand) == place_one(
            model, figures_of(model, make_profile(memory_bytes=700 * MIB)), demand
        )


class TestImpossible:
    def test_without_workers_the_message_says_how_to_start_one(self) -> None:
        with pytest.raises(PlacementImpossible, match="shoal worker --join"):
            place_on(make_model())

    def test_each_device_is_told_with_what_it_has_and_lacks(self) -> None:
        small, slow = make_profile(memory_bytes=100 * MIB), make_profile(memory_bytes=200 * MIB, speed=0.001)
        with pytest.raises(PlacementImpossible) as impossible:
            place_on(make_model(), small, slow)
        need = round(1.3 * (120 * MIB + 4096)) + 130 * MIB + MIN_CONTEXT_TOKENS * 30 * 1536
        lack, message = need - 100 * MIB, impossible.value.message
        assert f"w0 (phone) has {100 * MIB} bytes, needs {need} for layers [0, 30): lacks {lack}" in message
        assert f"w1 (phone) has {200 * MIB} bytes, gets no layer" in message

    def test_the_device_that_would_help_has_the_least_memory_that_does(self) -> None:
        small = make_profile(memory_bytes=260 * MIB)
        with pytest.raises(PlacementImpossible, match=r"another worker with \d+ MiB") as impossible:
            place_on(make_model(), small)
        (size,) = (int(word) for word in impossible.value.message.split("another worker with ")[1].split()[:1])
        assert len(place_on(make_model(), small, make_profile(memory_bytes=size * MIB)).stages) == 2
        with pytest.raises(PlacementImpossible):
            place_on(make_model(), small, make_profile(memory_bytes=(size - 1) * MIB))

    def test_the_context_that_would_fit_is_named(self) -> None:
        room = make_model().need_bytes(0, 30, 2 * 800)
        with pytest.raises(PlacementImpossible, match=r"a context of 800 tokens for 2 stream\(s\); or 1 stream\(s\)"):
            place_on(
                make_model(), make_profile(memory_bytes=room), num_streams=2, context_tokens=1024, is_promised=True
            )

    def test_a_context_that_nobody_can_use_is_not_named(self) -> None:
        room = make_model().need_bytes(0, 30, 4 * 1024)
        with pytest.raises(PlacementImpossible, match=r"What helps: 4 stream\(s\) of 1024 tokens"):
            place_on(
                make_model(), make_profile(memory_bytes=room), num_streams=5000, context_tokens=1024, is_promised=True
            )

    @pytest.mark.parametrize("num_pages", [199, 200, 201])
    def test_what_is_named_is_possible(self, num_pages: int) -> None:
        model = make_model()
        profile = make_profile(memory_bytes=model.need_bytes(0, 30, num_pages * 16))
        with pytest.raises(PlacementImpossible) as impossible:
            place_on(model, profile, num_streams=3, context_tokens=1500, is_promised=True)
        context, _, num_streams = re.findall(
            r"context of (\d+) tokens for (\d+) stream\(s\); or (\d+) stream", impossible.value.message
        )[0]
        assert place_on(model, profile, num_streams=3, context_tokens=int(context), is_promised=True)
        assert place_on(model, profile, num_streams=int(num_streams), context_tokens=1500, is_promised=True)

    def test_the_share_of_bytes_that_would_fit_is_named(self) -> None:
        model = make_model()
        with pytest.raises(PlacementImpossible, match=r"weights of at most \d+ %") as impossible:
            place_on(model, make_profile(memory_bytes=300 * MIB))
        percent = int(impossible.value.message.split("at most ")[1].split()[0])
        smaller = make_model(layer_bytes=3 * MIB * percent // 100, embedding_bytes=30 * MIB * percent // 100)
        assert counts(place_on(smaller, make_profile(memory_bytes=300 * MIB))) == [30]

    def test_a_model_that_fits_without_kv_only_is_refused(self) -> None:
        model = make_model(num_layers=1, embedding_bytes=0, head_bytes=0)
        fits = model.need_bytes(0, 1, MIN_CONTEXT_TOKENS)
        assert place_on(model, make_profile(memory_bytes=fits)).kv_tokens == MIN_CONTEXT_TOKENS
        with pytest.raises(PlacementImpossible, match=r"lacks 1 \(1 MiB\)"):
            place_on(model, make_profile(memory_bytes=fits - 1))

    def test_a_device_without_speed_is_of_no_use_and_no_crash(self) -> None:
        with pytest.raises(PlacementImpossible, match="gets no layer"):
            place_on(make_model(), make_profile(speed=0.0))

    def test_no_streams_is_a_configuration_error(self) -> None:
        with pytest.raises(ConfigError, match="num_streams is 0"):
            Demand(num_streams=0)


class TestSplit:
    def place(self, split: Sequence[int], *profiles: DeviceProfile, num_streams: int = 4) -> Placement:
        model = make_model()
        return place_split(model, figures_of(model, *profiles).devices, Demand(num_streams=num_streams), split)

    def test_the_operators_split_is_followed(self) -> None:
        placement = self.place([5, 0, 25], *[make_profile()] * 4)
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
            self.place(split, make_profile())

    def test_a_split_for_more_workers_than_there_are_waits_for_them(self) -> None:
        with pytest.raises(PlacementImpossible, match="3 workers, 2 can be used now"):
            self.place([10, 10, 10], *[make_profile()] * 2)

    def test_a_split_that_does_not_fit_names_the_device(self) -> None:
        with pytest.raises(PlacementImpossible, match=r"w0 .*: enough; w1 \(tablet\) .* lacks"):
            self.place([20, 10], make_profile(), make_profile("tablet", memory_bytes=64 * MIB))

    def test_kv_follows_the_tightest_stage_of_a_split(self) -> None:
        placement = self.place(
            [15, 15], make_profile(memory_bytes=400 * MIB), make_profile(memory_bytes=4 * GIB), num_streams=64
        )
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
    num_streams=st.integers(1, 8),
    context_tokens=st.integers(0, 4096),
    objective=st.sampled_from((Objective.LATENCY, Objective.THROUGHPUT)),
)
def test_every_layer_is_placed_once_in_order_and_no_device_is_overfull(
    profiles: list[DeviceProfile],
    layer_mib: list[int],
    is_head_tied: bool,
    num_streams: int,
    context_tokens: int,
    objective: Objective,
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
    try:
        placement = place_on(
            model, *profiles, num_streams=num_streams, context_tokens=context_tokens, objective=objective
        )
    except PlacementImpossible:
        assume(False)
    ends = [stage.layers.stop for stage in placement.stages]
    assert [stage.layers.start for stage in placement.stages] == [0, *ends[:-1]]
    assert ends[-1] == model.num_layers
    memory = {worker_id: profile.memory_bytes for worker_id, profile in make_workers(*profiles)}
    assert len({stage.worker_id for stage in placement.stages}) == len(placement.stages)
    for stage in placement.stages:
        assert stage.need_bytes <= memory[stage.worker_id]
    assert 0 < placement.context_tokens <= placement.kv_tokens
    assert placement.kv_tokens >= min(MIN_CONTEXT_TOKENS, context_tokens or 2048)
    assert 1 <= placement.slots <= num_streams

"""The parts of simulated runs, each by itself: time, stages and links, what is fetched, fleets, requests, counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.core.batch import Batch
from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures, LinkFigures, declared_fleet
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.restores import Restore
from orchestrator.core.sequence import RunId
from orchestrator.core.tenants import TenantLedger
from shoal.errors import ConfigError
from shoal.types import KVReuse, QosClass, SlotId
from simulation.agenda import Agenda
from simulation.fetches import FETCH_S, Fetches
from simulation.lane import Calls, SimulatedLane
from simulation.requests import STOP_ID, Request, Traffic
from simulation.results import spread
from simulation.settings import Lengths, Load, Settings, targets_of
from simulation.stages import Stages
from simulation.synthetic import KIND_SHARES, in_sites, make_devices
from simulation.tally import End, Tally
from tests.support.builders import (
    make_decoding,
    make_limits,
    make_model,
    make_placement,
    make_profile,
    make_sequence,
    make_sequences,
    make_workers,
)

MODEL = make_model()
SLOW_LINK = LinkFigures(delay_s=0.01, bytes_per_s=1e6)


class TestAgenda:
    def test_things_happen_by_their_times_and_of_one_time_in_the_order_they_were_put_in(self) -> None:
        agenda, happened = Agenda(), list[str]()
        for at, name in ((2.0, "late"), (1.0, "first"), (1.0, "second"), (9.0, "never")):
            agenda.at(at, lambda name=name: happened.append(name))  # type: ignore[misc]
        agenda.run(5.0)
        assert (happened, agenda.now, agenda.next_at()) == (["first", "second", "late"], 5.0, 9.0)

    def test_what_is_past_happens_now(self) -> None:
        agenda, times = Agenda(), list[float]()
        agenda.run(3.0)
        agenda.at(1.0, lambda: times.append(agenda.now))
        agenda.run(3.0)
        assert times == [3.0]


def make_stages(*speeds: float, link: LinkFigures | None = None) -> Stages:
    workers = make_workers(*(make_profile(speed=speed) for speed in speeds))
    fleet = declared_fleet(MODEL, workers, FleetFigures((), default_link=link or LinkFigures(0.0)))
    return Stages(MODEL, fleet, make_placement(*(worker_id for worker_id, _ in workers), layers_each=30 // len(speeds)))


def decode_batch(num_rows: int, limits: SchedulerLimits | None = None) -> Batch:
    limits = limits or make_limits(num_stages=1, max_batch=num_rows)
    scheduler = make_decoding(limits, *make_sequences(*[QosClass.BALANCED] * num_rows))
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert batch.num_decode_rows == num_rows
    return batch


class TestStages:
    def test_a_pass_takes_what_the_figures_say(self) -> None:
        stages = make_stages(1.0)
        left_at, passes_s = stages.run(decode_batch(8), 8, 8, 1.0)
        expected_s = stages.devices[0].times.stage_s(30, True, 8)
        assert left_at == pytest.approx(1.0 + expected_s)
        assert passes_s == pytest.approx((expected_s,))

    def test_a_lone_row_costs_as_much_as_two_unless_it_goes_alone(self) -> None:
        batch = decode_batch(1)
        shared, _ = make_stages(1.0).run(batch, 1, 1, 0.0)
        solo, _ = make_stages(1.0).run(replace(batch, is_solo=True), 1, 1, 0.0)
        times = make_stages(1.0).devices[0].times
        assert (shared, solo) == pytest.approx((times.stage_s(30, True, 2), times.stage_s(30, True, 1)))

    def test_a_second_pass_waits_for_the_slowest_stage(self) -> None:
        stages = make_stages(1.0, 0.5)
        first, passes_s = stages.run(decode_batch(4), 4, 4, 0.0)
        second, _ = stages.run(decode_batch(4), 4, 4, 0.0)
        assert first == pytest.approx(sum(passes_s))
        assert second == pytest.approx(first + passes_s[1])
        assert stages.busy_s == pytest.approx([2 * one for one in passes_s])

    def test_a_link_carries_one_message_after_the_other(self) -> None:
        stages = make_stages(1e6, 1e6, link=SLOW_LINK)
        batch = decode_batch(8)
        sending_s = 8 * MODEL.activation_bytes / 1e6
        first, _ = stages.run(batch, 8, 8, 0.0)
        second, _ = stages.run(batch, 8, 8, 0.0)
        assert first == pytest.approx(sending_s + 0.01, rel=1e-3)
        assert second == pytest.approx(2 * sending_s + 0.01, rel=1e-3)

    def test_full_slots_cost_the_time_of_so_many_prompt_tokens(self) -> None:
        batch = decode_batch(4)
        empty, _ = make_stages(1.0).run(batch, 4, 4, 0.0)
        full, _ = make_stages(1.0).run(replace(batch, work=batch.work + 10), 4, 4, 0.0)
        assert full - empty == pytest.approx(10 * 30 * make_stages(1.0).devices[0].times.prefill_token_s)


def make_restore(num_tokens: int, timeout_s: float = 0.5) -> Restore:
    return Restore(
        RunId(1), SlotId(0), (), is_exact_only=True, timeout_s=timeout_s, trail_id=b"t", num_tokens=num_tokens
    )


class TestFetches:
    def test_whole_segments_are_found_after_the_time_their_bytes_take(self) -> None:
        assert Fetches([1000], [1e6]).fetch(make_restore(21), [0], 5.0) == pytest.approx((5.0 + FETCH_S + 0.016, 16))

    def test_a_link_brings_one_sequence_after_the_other(self) -> None:
        fetches = Fetches([1000], [1e6])
        first_at, _ = fetches.fetch(make_restore(160), [0], 0.0)
        second_at, _ = fetches.fetch(make_restore(160), [0], 0.0)
        assert (first_at, second_at) == pytest.approx((FETCH_S + 0.16, FETCH_S + 0.32))

    def test_what_is_not_there_in_time_does_not_count(self) -> None:
        # After 0.03 s, a hundred of them a second.
        there_at, num_tokens = Fetches([1000], [1e5]).fetch(make_restore(160), [0], 0.0)
        assert there_at == pytest.approx(0.5)
        assert num_tokens in (46, 47)

    def test_stages_that_kept_their_slots_fetch_nothing(self) -> None:
        assert Fetches([1000, 1000], [1e3, 1e9]).fetch(make_restore(160), [1], 0.0)[1] == 160


class TestLane:
    @pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "lost"])
    def test_stages_that_outlive_a_loss_have_what_was_in_their_slots(self, is_kept: bool) -> None:
        agenda, calls = Agenda(), Calls(lambda sequence, index: 7, lambda lane, tokens, is_turn: None)
        before, after = make_lane(), make_lane()
        sequence = make_sequence(num_prompt=40, max_tokens=64, stop_ids=frozenset())
        sequence.trail_id, sequence.kv_reuse = b"t", KVReuse.POLICY
        before.scheduler.submit(sequence, 0.0)
        before.send_all(agenda, calls)
        agenda.run(1.0)
        before.send_all(agenda, calls)
        agenda.run(2.0)
        assert before.take_all(2.0) == [sequence]
        if is_kept:
            after.keep(before, (1,))
        after.scheduler.submit(sequence, 2.0)
        after.send_all(agenda, calls)
        agenda.run(3.0)
        # The link of the first stage brings one token in the time that there is.
        assert (sequence.num_restored >= 40) == is_kept


def make_lane() -> SimulatedLane:
    limits = make_limits(num_stages=2, burst_steps=16)
    fetches = Fetches([1000, 1000], [2e3, 1e9])
    placement = make_placement("w0", "w1", layers_each=15)
    return SimulatedLane(placement, limits, make_stages(1.0, 1.0), fetches, TenantLedger(), 0.2)


class TestFleets:
    PROFILES = {kind: make_profile(kind, speed=0.5) for kind in KIND_SHARES}

    def test_kinds_have_their_shares_and_devices_differ(self) -> None:
        devices = make_devices(self.PROFILES, 200, seed=1)
        kinds = Counter(profile.name for _, profile in devices)
        assert kinds == {kind: round(200 * share) for kind, share in KIND_SHARES.items()}
        assert len({worker_id for worker_id, _ in devices}) == 200
        assert all(0.4 <= profile.speed <= 0.6 for _, profile in devices)
        assert len({profile.speed for _, profile in devices}) > 50

    def test_a_seed_makes_one_fleet(self) -> None:
        one, same, other = (make_devices(self.PROFILES, 30, seed) for seed in (7, 7, 8))
        assert one == same != other

    def test_no_site_is_larger_than_allowed_and_none_is_left_out(self) -> None:
        devices = make_devices(self.PROFILES, 60, seed=1)
        sites = in_sites(devices, most=25)
        assert [len(site) for site in sites] == [20, 20, 20]
        assert sorted(worker_id for site in sites for worker_id, _ in site) == sorted(one for one, _ in devices)

    @pytest.mark.parametrize("number", [0, 10_001])
    def test_a_number_out_of_range_is_refused(self, number: int) -> None:
        with pytest.raises(ConfigError, match="from 1 to 10000"):
            make_devices(self.PROFILES, number, seed=1)


def make_settings(**fields: object) -> Settings:
    given: dict[str, object] = {"load": Load(num_streams=4), "duration_s": 20.0, **fields}
    return Settings(model=MODEL, demand=Demand(4), **given)  # type: ignore[arg-type]


def test_more_requests_than_can_be_played_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1e\+09 requests a second for 20 s are 20,000,000,000; at most 1,000,000"):
        make_settings(load=Load(rate_per_s=1e9))


class TestTraffic:
    def test_a_seed_asks_for_the_same_things(self) -> None:
        def drawn(seed: int) -> list[tuple[int, int, QosClass]]:
            traffic = Traffic(make_settings(seed=seed), 0, 0.0)
            requests = [traffic.draw(0.0) for _ in range(20)]
            return [(len(one.sequence.prompt_token_ids), one.num_answer, one.sequence.qos) for one in requests]

        assert drawn(1) == drawn(1) != drawn(2)

    def test_lengths_stay_within_their_bounds(self) -> None:
        load = Load(num_streams=1, prompts=Lengths(50, 2.0, 20, 80), answers=Lengths(50, 2.0, 30, 60))
        traffic = Traffic(make_settings(load=load), 0, 0.0)
        requests = [traffic.draw(0.0) for _ in range(200)]
        assert {len(one.sequence.prompt_token_ids) for one in requests} >= {20, 80}
        assert (min(one.num_answer for one in requests), max(one.num_answer for one in requests)) == (30, 60)

    def test_an_answer_ends_with_its_last_token(self) -> None:
        request = Request(make_sequence(), num_answer=3, stream=None, last_at=0.0)
        assert [request.token_id(index) for index in range(3)] == [1, 2, STOP_ID]

    def test_a_load_is_of_streams_or_of_requests_a_second(self) -> None:
        with pytest.raises(ConfigError, match="one of the two"):
            Load(num_streams=4, rate_per_s=1.0)
        with pytest.raises(ConfigError, match="one of the two"):
            Load()


def make_request(qos: QosClass = QosClass.BALANCED, arrived_at: float = 10.0, num_answer: int = 2) -> Request:
    sequence = replace(make_sequence(qos=qos, arrived_at=arrived_at), targets=targets_of(qos))
    return Request(sequence, num_answer, None, arrived_at)


def answer(tally: Tally, request: Request, *times: float) -> None:
    """Have the tokens of an answer come at these times."""
    request.sequence.first_token_at = times[0]
    for index, now in enumerate(times):
        tally.token(request, index, now)
    tally.end(request, End.FINISHED, times[-1])


class TestTally:
    def test_an_answer_that_comes_in_time_is_good(self) -> None:
        tally = Tally(make_settings())
        answer(tally, make_request(), 10.5, 10.55)
        one = tally.by_class[QosClass.BALANCED]
        assert (one.num_good, one.num_judged, tally.num_tokens) == (1, 1, 2)
        assert [*one.ttft_s, *one.gap_s] == pytest.approx([0.5, 0.05])

    @pytest.mark.parametrize("times", [(12.5, 12.55), (10.5, 10.7)], ids=["late", "slow"])
    def test_one_that_is_late_or_slow_is_not(self, times: tuple[float, float]) -> None:
        tally = Tally(make_settings())
        answer(tally, make_request(), *times)
        assert (tally.by_class[QosClass.BALANCED].num_good, tally.by_class[QosClass.BALANCED].num_judged) == (0, 1)

    def test_what_comes_before_the_window_does_not_count(self) -> None:
        tally = Tally(make_settings())
        answer(tally, make_request(arrived_at=1.0), 1.5, 1.55)
        assert (tally.num_tokens, tally.by_class[QosClass.BALANCED].num_judged) == (0, 0)
        assert tally.ends[End.FINISHED] == 1

    @pytest.mark.parametrize("index", [0, 2], ids=["twice", "left out"])
    def test_a_token_twice_or_left_out_ends_the_run(self, index: int) -> None:
        tally, request = Tally(make_settings()), make_request(num_answer=9)
        tally.token(request, 0, 11.0)
        with pytest.raises(AssertionError, match=f"token {index} after 1"):
            tally.token(request, index, 11.1)

    def test_half_an_answer_is_not_one(self) -> None:
        tally, request = Tally(make_settings()), make_request(num_answer=9)
        tally.token(request, 0, 11.0)
        with pytest.raises(AssertionError, match="not the whole answer"):
            tally.end(request, End.FINISHED, 11.0)

    def test_a_stream_stood_still_from_the_last_token_before_a_loss_to_the_next(self) -> None:
        tally, request = Tally(make_settings()), make_request(num_answer=9)
        tally.token(request, 0, 11.0)
        request.num_losses = 1
        tally.token(request, 1, 13.5)
        tally.token(request, 2, 13.6)
        assert list(tally.losses.gap_s) == [2.5]

    def test_who_waited_no_longer_than_it_may_at_the_end_is_not_judged(self) -> None:
        tally = Tally(make_settings())
        tally.end(make_request(arrived_at=19.0), End.WAITING, 20.0)
        tally.end(make_request(arrived_at=15.0), End.WAITING, 20.0)
        one = tally.by_class[QosClass.BALANCED]
        assert (one.num_judged, one.num_good, tally.ends[End.WAITING]) == (1, 0, 2)


def test_samples_are_summed_up() -> None:
    found = spread([float(number) for number in range(101)])
    assert found is not None
    assert (found.count, found.p50_s, found.p95_s, found.p99_s, found.max_s) == (101, 50.0, 95.0, 99.0, 100.0)
    assert spread([]) is None

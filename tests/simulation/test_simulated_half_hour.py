"""Half an hour of mixed traffic on three warming devices, and the loss of one of them, in virtual time and from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from launch.profiles import load_profile
from orchestrator.core.sequence import QosTargets, Sequence
from orchestrator.core.tenants import TenantLedger
from shoal.errors import DeadlineExceeded, DeadlineUnmeetable, Overloaded, ShoalError, WorkerLost
from shoal.kv import chain
from shoal.types import DeviceMode, DeviceProfile, FinishReason, NumericClass, QosClass, SamplingParams
from tests.simulation.fleet import DevicePipeline, Request, SimulatedFleet
from tests.support.builders import SCOPE

HALF_HOUR_S = 1800.0
THROTTLE_C = 75.0
REFUSALS = (Overloaded, DeadlineUnmeetable)
SYSTEM_TOKENS = 64
# Of a tenant; so few that some of the rush are refused.
MAX_WAITING = 16
# A phone that two minutes of work bring to its limits, and a slower clock than in reality: fewer steps to simulate.
SLOWER = 0.4


NO_TARGETS = QosTargets()


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind. interval_s: mean time between two; rush: how many times more often in the rush hour."""

    qos: QosClass
    tenant: str
    interval_s: float
    num_prompt: int
    max_tokens: int
    rush: float = 1.0
    deadline_s: float | None = None
    targets: QosTargets = NO_TARGETS
    cancelled_share: float = 0.0
    has_system_prompt: bool = False


KINDS = (
    Kind(QosClass.LATENCY, "gold", 25.0, 20, 16, deadline_s=60.0, targets=QosTargets(0.5, 0.05)),
    Kind(QosClass.BALANCED, "gold", 20.0, 60, 40, targets=QosTargets(2.0, 0.1), cancelled_share=0.2),
    Kind(QosClass.BALANCED, "free", 20.0, 200, 40, rush=2.0, targets=QosTargets(2.0, 0.1), deadline_s=600.0),
    Kind(QosClass.THROUGHPUT, "free", 12.0, 40, 64, rush=5.0, has_system_prompt=True),
)
RUSH = range(600, 900)


class Traffic:
    """Requests as they come, by a seed; and what became of each."""

    def __init__(self, fleet: SimulatedFleet, seed: int, stop_s: float = HALF_HOUR_S) -> None:
        self.fleet = fleet
        self.requests: list[Request] = []
        self.refusals: list[ShoalError] = []
        self.num_sent = 0
        self._random = random.Random(seed)
        self._stop_s = stop_s
        for kind in KINDS:
            self._plan(kind)

    def _plan(self, kind: Kind) -> None:
        now = self.fleet.clock.now()
        rate = (kind.rush if int(now) in RUSH else 1.0) / kind.interval_s
        at = now + self._random.expovariate(rate)
        if at < self._stop_s:
            self.fleet.clock.call_at(at, lambda: self._arrive(kind))

    def _arrive(self, kind: Kind) -> None:
        self.send(kind)
        self._plan(kind)

    def send(self, kind: Kind) -> None:
        now = self.fleet.clock.now()
        sequence = self._sequence(kind, now)
        self.num_sent += 1
        try:
            request = Request(sequence, self.fleet.engine.submit(sequence), now)
        except REFUSALS as error:
            self.refusals.append(error)
        else:
            self.requests.append(request)
            if self._random.random() < kind.cancelled_share:
                self.fleet.clock.call_at(now + self._random.uniform(0.0, 5.0), lambda: self._cancel(request))

    def _sequence(self, kind: Kind, now: float) -> Sequence:
        num_prompt = max(1, round(kind.num_prompt * self._random.uniform(0.3, 1.7)))
        own = (self._random.randrange(100, 200) for _ in range(num_prompt))
        # What an application puts before everything it asks.
        shared = tuple(range(SYSTEM_TOKENS)) if kind.has_system_prompt else ()
        prompt = (*shared, *own)
        return Sequence(
            sequence_id=self.fleet.engine.new_sequence_id(),
            prompt_token_ids=prompt,
            block_hashes=chain(SCOPE, prompt),
            sampling=SamplingParams(),
            max_tokens=max(1, round(kind.max_tokens * self._random.uniform(0.3, 1.7))),
            stop_ids=frozenset(),
            numeric=NumericClass.SOLO if kind.qos is QosClass.LATENCY else NumericClass.SHARED,
            qos=kind.qos,
            arrived_at=now,
            tenant=kind.tenant,
            targets=kind.targets,
            deadline_at=None if kind.deadline_s is None else now + kind.deadline_s,
        )

    def _cancel(self, request: Request) -> None:
        request.read()
        if not request.is_over:
            request.is_cancelled = True
            self.fleet.engine.abort(request.sequence.sequence_id)

    def read_all(self) -> None:
        for request in self.requests:
            if not request.is_over:
                request.read()


def phone() -> DeviceProfile:
    profile = load_profile("phone")
    return replace(profile, speed=profile.speed * SLOWER)


def make_fleet() -> SimulatedFleet:
    """A phone for LATENCY alone, and a phone and a tablet that share the layers."""
    fleet = SimulatedFleet(TenantLedger({"gold": 2.0}))
    tablet = load_profile("tablet")
    shared = [
        fleet.add_device("phone-1", phone()),
        fleet.add_device("tablet-1", replace(tablet, speed=tablet.speed * SLOWER)),
    ]
    fleet.add_pipeline("p1", shared, num_slots=8, max_waiting=MAX_WAITING)
    fleet.add_pipeline(
        "p2", [fleet.add_device("phone-2", phone())], mode=DeviceMode.LATENCY, num_slots=4, max_waiting=MAX_WAITING
    )
    return fleet


def run(fleet: SimulatedFleet, traffic: Traffic, seconds: float) -> None:
    """Let time pass, with clients that read what they get."""
    stop = fleet.clock.now() + seconds
    while fleet.clock.now() < stop:
        fleet.clock.move_to(min(fleet.clock.now() + 10.0, stop))
        traffic.read_all()


def seconds_to_first_token(traffic: Traffic, qos: QosClass) -> Iterator[float]:
    """Of what was sent in the rush."""
    for request in traffic.requests:
        first_token_at = request.sequence.first_token_at
        if request.sequence.qos is qos and int(request.sent_at) in RUSH and first_token_at is not None:
            yield first_token_at - request.sent_at


@pytest.fixture(scope="module")
def half_hour() -> Traffic:
    fleet = make_fleet()
    traffic = Traffic(fleet, seed=2026)
    run(fleet, traffic, HALF_HOUR_S + 600.0)
    return traffic


def test_every_request_of_the_half_hour_comes_to_one_end(half_hour: Traffic) -> None:
    assert len(half_hour.requests) + len(half_hour.refusals) == half_hour.num_sent > 400
    assert all(request.is_over for request in half_hour.requests)
    assert half_hour.fleet.engine.is_idle


def test_every_answer_of_the_half_hour_has_the_text_that_it_has_alone(half_hour: Traffic) -> None:
    for request in half_hour.requests:
        request.check_text()
        if request.is_finished:
            assert request.sequence.finish_reason is FinishReason.LENGTH
            assert len(request.token_ids) == request.sequence.max_tokens
    assert sum(request.is_finished for request in half_hour.requests) > 0.8 * len(half_hour.requests)


def test_what_many_prompts_begin_with_is_computed_again_only_where_it_is_not_known(half_hour: Traffic) -> None:
    started = [
        one.sequence for one in half_hour.requests if one.sequence.prompt_token_ids[:2] == (0, 1) and one.token_ids
    ]

    assert sum(one.num_restored > 0 for one in started) > 0.9 * len(started) > 100


def test_nothing_but_a_deadline_ends_an_answer_early(half_hour: Traffic) -> None:
    for request in half_hour.requests:
        if request.error is not None:
            assert isinstance(request.error, DeadlineExceeded)
            assert request.sequence.deadline_at is not None


def test_a_refusal_says_when_to_come_again(half_hour: Traffic) -> None:
    assert half_hour.refusals, "nothing was refused: this shows nothing"
    assert all(error.retry_after_s > 0 for error in half_hour.refusals)


def test_no_class_starves_even_in_the_rush(half_hour: Traffic) -> None:
    waits = {qos: sorted(seconds_to_first_token(half_hour, qos)) for qos in QosClass}
    median = {qos: times[len(times) // 2] for qos, times in waits.items()}

    assert median[QosClass.LATENCY] < median[QosClass.BALANCED] < median[QosClass.THROUGHPUT]
    assert all(request.token_ids for request in half_hour.requests if request.is_finished)


def test_the_devices_stay_below_their_throttle_temperature_and_were_limited_for_it(half_hour: Traffic) -> None:
    devices = [device for pipeline in half_hour.fleet.pipelines for device in pipeline.devices]

    assert max(device.hottest_c for device in devices) < THROTTLE_C
    assert half_hour.fleet.paces, "nothing ever got warm: the half hour shows nothing"


def test_the_same_seed_gives_the_same_half_hour() -> None:
    def story() -> list[tuple[float, int, float | None]]:
        fleet = make_fleet()
        traffic = Traffic(fleet, seed=7, stop_s=300.0)
        run(fleet, traffic, 400.0)
        return [(one.sent_at, len(one.token_ids), one.sequence.first_token_at) for one in traffic.requests]

    assert story() == story()


def test_answers_outlive_the_pipeline_that_computed_them() -> None:
    fleet = make_fleet()
    fleet.add_pipeline("p3", [fleet.add_device("tablet-2", load_profile("tablet"))], num_slots=16)
    traffic = Traffic(fleet, seed=11, stop_s=120.0)
    run(fleet, traffic, 60.0)
    for _ in range(16):
        traffic.send(KINDS[-1])
    run(fleet, traffic, 10.0)

    def in_the_middle(pipeline: DevicePipeline) -> int:
        there = (one for one in traffic.requests if not one.is_over and one.answer.pipeline is pipeline.pipeline)
        return sum(bool(one.token_ids) for one in there)

    lost = max(fleet.pipelines, key=in_the_middle)
    assert in_the_middle(lost) > 0, "nothing was being answered: this shows nothing"

    fleet.lose(lost, WorkerLost("phone-1 was lost"))
    run(fleet, traffic, 600.0)

    assert all(one.is_over for one in traffic.requests)
    assert not any(isinstance(one.error, WorkerLost) for one in traffic.requests)
    for request in traffic.requests:
        request.check_text()

"""Classes, deadlines, pace and several pipelines, as clients of a whole fleet in one process meet them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shoal.errors import DeadlineExceeded, DeadlineUnmeetable
from shoal.generation import Generation
from shoal.status import FleetStatus
from shoal.types import DeviceMode
from tests.support.fleet import LocalFleet, make_device, start_fleet
from tests.support.shards import TinyModel, make_tokens
from tests.support.streams import ENDLESS, SLOW, SLOW_LATENCY, Reader, start_stream

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A model of random weights repeats itself if it is not drawn hot.
DRAWN: dict[str, Any] = {"temperature": 8.0, "seed": 11, "ignore_eos": True}

Store = Path


@pytest.fixture
def store(fleet_model: TinyModel) -> Store:
    return fleet_model.store.root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quick(fleet_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    """One device, whose answers are what all others are compared with."""
    async with start_fleet(fleet_model.store.root, tmp_path_factory.mktemp("quick"), [make_device()]) as fleet:
        yield fleet


def content(answer: Generation) -> tuple[object, ...]:
    """All that must depend neither on where an answer is computed nor on what happens to it."""
    return answer.token_ids, answer.logprobs, answer.text, answer.finish_reason


def worker_of(status: FleetStatus, pipeline_id: str) -> str:
    return next(one.worker_ids[0] for one in status.pipelines if one.pipeline_id == pipeline_id)


def busy_pipelines(status: FleetStatus) -> set[str]:
    return {one.pipeline_id for one in status.pipelines if one.num_running}


# Deadlines


async def test_an_answer_that_cannot_be_complete_in_time_is_refused_at_once_with_numbers(
    store: Store, tmp_path: Path
) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        # So that the orchestrator knows what a step takes here.
        await fleet.client.generate("hello", max_tokens=12, ignore_eos=True)

        with pytest.raises(DeadlineUnmeetable) as raised:
            await fleet.client.generate("hello", deadline_s=1.0, request_id="hasty", **ENDLESS)
        story = await fleet.client.explain("hasty")

    assert raised.value.retry_after_s == 0, "coming again would not help"
    assert " s" in raised.value.message
    assert (story.finish, story.completion_tokens) == ("DEADLINE_UNMEETABLE", 0)


async def test_an_answer_that_misses_its_deadline_ends_and_frees_what_it_held(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        with pytest.raises(DeadlineExceeded):
            await fleet.client.generate("hello", deadline_s=0.5, request_id="late", **ENDLESS)

        await fleet.until(lambda status: (status.num_running, status.pipelines[0].used_slots) == (0, 0), bound_s=1.0)
        story = await fleet.client.explain("late")

    assert story.state == "finished"
    assert story.completion_tokens < 240


# Pace


async def test_a_stream_comes_no_faster_than_it_asked_for(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [make_device()]) as fleet:
        free = await fleet.client.generate("hello", max_tokens=12, **DRAWN)
        paced = await fleet.client.generate("hello", max_tokens=12, max_tokens_per_s=20.0, **DRAWN)

    assert content(paced) == content(free)
    # Twice what was asked for: by the server's clock, which may see the first token late.
    assert 0 < paced.tokens_per_s <= 40.0


# Stories


async def test_a_request_can_be_explained_after_its_end(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [make_device()]) as fleet:
        await fleet.client.generate("hello", max_tokens=3, request_id="r-1", tenant="gold", qos_class="throughput")
        story = await fleet.client.explain("r-1")
        newest = await fleet.client.explain()

    (route,) = story.routes
    (candidate,) = route.candidates
    assert newest == story
    assert (story.tenant, story.qos_class.value, story.state, story.finish) == (
        "gold", "throughput", "finished", "length",
    )  # fmt: skip
    assert (route.reason, route.pipeline_id, candidate.pipeline_id) == ("arrived", "p1", "p1")
    assert (candidate.ruled_out, candidate.num_stages) == ("", 1)
    assert candidate.score_ms > 0
    assert [event.what for event in story.events] == ["queued", "admitted", "first_token", "ended"]
    assert sorted(event.at_ms for event in story.events) == [event.at_ms for event in story.events]


async def test_a_running_request_can_be_explained(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        reader = await start_stream(fleet, request_id="r-1")

        story = await fleet.client.explain("r-1")
        reader.stream.cancel()
        await asyncio.wait({reader.task})

    assert (story.state, story.finish) == ("decode", "")


async def test_an_answer_that_a_stop_string_ended_is_told_as_stopped(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [make_device()]) as fleet:
        whole = await fleet.client.generate("hello", max_tokens=40, **DRAWN)
        await fleet.client.generate("hello", max_tokens=40, stop=[whole.text[10:13]], request_id="r-1", **DRAWN)

        story = await fleet.client.explain("r-1")

    assert story.finish == "stop"


# Several pipelines


async def test_latency_requests_get_the_latency_device_and_others_do_not(store: Store, tmp_path: Path) -> None:
    devices = [make_device(), make_device(mode=DeviceMode.LATENCY)]
    async with start_fleet(store, tmp_path, devices) as fleet:
        status = await fleet.client.status()
        answers = {
            qos: await fleet.client.generate("hello", max_tokens=4, qos_class=qos)
            for qos in ("latency", "balanced", "throughput")
        }

    mode_of = {one.pipeline_id: one.mode for one in status.pipelines}
    assert {qos: mode_of[answer.pipeline_id] == "latency" for qos, answer in answers.items()} == {
        "latency": True,
        "balanced": False,
        "throughput": False,
    }
    assert answers["latency"].pipeline[0].worker_id == "w1"


@pytest.mark.parametrize("qos", ["balanced", "latency"])
@pytest.mark.parametrize("device", [SLOW, SLOW_LATENCY], ids=["replicas", "latency devices"])
async def test_an_answer_whose_device_vanishes_goes_on_elsewhere_with_the_same_text(
    store: Store, tmp_path: Path, quick: LocalFleet, device: Any, qos: Any
) -> None:
    question: dict[str, Any] = {
        "prompt": make_tokens(60, 280, seed=4), "max_tokens": 60, "qos_class": qos, "num_logprobs": 2,
        "repetition_penalty": 1.3, **DRAWN,
    }  # fmt: skip
    alone = content(await quick.client.generate(**question))
    async with start_fleet(store, tmp_path, [device] * 2, replicas=1 if device is SLOW_LATENCY else 2) as fleet:
        reader = Reader(fleet.client.stream(request_id="r-1", **question))
        await reader.has_started()
        status = await fleet.client.status()
        (used,) = busy_pipelines(status)

        await fleet.workers[worker_of(status, used)].vanish()
        answer = await reader.result()
        story = await fleet.client.explain("r-1")

    assert content(answer) == alone
    assert answer.pipeline_id != used
    assert [route.pipeline_id for route in story.routes] == [used, answer.pipeline_id]
    assert "moved" in [event.what for event in story.events]


async def test_all_answers_of_a_lost_pipeline_go_on_elsewhere(store: Store, tmp_path: Path, quick: LocalFleet) -> None:
    questions: list[dict[str, Any]] = [
        {"prompt": make_tokens(10 + 7 * seed, 280, seed=seed), "max_tokens": 30, **DRAWN, "seed": seed}
        for seed in range(6)
    ]
    alone = [content(await quick.client.generate(**question)) for question in questions]
    async with start_fleet(store, tmp_path, [SLOW] * 2, replicas=2, max_sequences=2) as fleet:
        readers = [Reader(fleet.client.stream(**question)) for question in questions]
        await readers[0].has_started()

        await fleet.workers["w0"].vanish()
        answers = [await reader.result() for reader in readers]

    assert [content(answer) for answer in answers] == alone
    assert {answer.pipeline[0].worker_id for answer in answers} == {"w1"}


async def test_a_request_that_waits_too_long_goes_where_it_can_start(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW, SLOW_LATENCY], max_sequences=1) as fleet:
        running = await start_stream(fleet)
        second = await start_stream(fleet, request_id="r-2")
        status = await fleet.client.status()
        story = await fleet.client.explain("r-2")
        for reader in (running, second):
            reader.stream.cancel()
            await asyncio.wait({reader.task})

    assert {one.num_running for one in status.pipelines} == {1}
    assert [route.reason for route in story.routes] == ["arrived", "not started within 200 ms"]


# Preemption


async def test_an_answer_whose_slot_was_taken_goes_on_later_with_the_same_text(
    store: Store, tmp_path: Path, quick: LocalFleet
) -> None:
    low = {"prompt": make_tokens(40, 280, seed=3), "max_tokens": 50, "qos_class": "throughput", **DRAWN}
    high = {"prompt": "hello world", "max_tokens": 8, "qos_class": "latency", **DRAWN}
    alone = [content(await quick.client.generate(**question)) for question in (low, high)]
    async with start_fleet(store, tmp_path, [SLOW], max_sequences=1) as fleet:
        reader = Reader(fleet.client.stream(**low))
        await reader.has_started()

        urgent = await fleet.client.generate(**high)
        preempted = await reader.result()

    assert [content(preempted), content(urgent)] == alone
    assert (preempted.num_preemptions, urgent.num_preemptions) == (1, 0)
    assert preempted.queue_ms > 0

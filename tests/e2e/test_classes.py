"""What requests of different classes do to each other on the real model: who waits, who loses a slot, what text stays."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from launch.local import LocalFleet
from shoal import Client
from shoal.generation import Generation
from tests.e2e.conftest import StartFleet
from tests.support.commands import WAIT_S, until

pytestmark = pytest.mark.e2e

PROMPT = "The history of the sea begins with"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.2, "seed": 11, "num_logprobs": 2}


def same_answer(one: Generation, other: Generation) -> bool:
    return (one.text, one.token_ids, one.logprobs) == (other.text, other.token_ids, other.logprobs)


def ask_later(pool: ThreadPoolExecutor, client: Client, **options: Any) -> Future[Generation]:
    return pool.submit(client.generate, PROMPT, ignore_eos=True, **options)


def test_a_preempted_answer_is_the_same_to_the_last_bit(start_fleet: StartFleet) -> None:
    fleet = start_fleet("tablet", max_sequences=1)
    with Client(fleet.address, timeout_s=WAIT_S) as client, ThreadPoolExecutor() as pool:
        low: dict[str, Any] = {"max_tokens": 48, "qos_class": "throughput", **SAMPLED}
        undisturbed = client.generate(PROMPT, ignore_eos=True, **low)
        answer = ask_later(pool, client, **low)
        until(client.status, lambda status: status.num_running == 1)
        time.sleep(0.5)  # so that there is something to lose
        urgent = client.generate("Quick:", max_tokens=4, qos_class="latency", ignore_eos=True)

        preempted = answer.result(WAIT_S)

    assert (undisturbed.num_preemptions, urgent.num_preemptions, preempted.num_preemptions) == (0, 0, 1)
    assert same_answer(preempted, undisturbed)
    assert preempted.queue_ms > 0


def test_a_latency_device_has_its_class_to_itself_and_says_why(start_fleet: StartFleet) -> None:
    fleet = start_fleet("tablet:latency", "phone", "phone")
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        urgent = client.generate("Hello!", max_tokens=4, qos_class="latency", request_id="urgent")
        many = client.generate("Hello!", max_tokens=4, qos_class="throughput", request_id="many")
        story = client.explain("many")

    assert [stage.device for stage in urgent.pipeline] == ["tablet"]
    assert [stage.device for stage in many.pipeline] == ["phone", "phone"]
    (route,) = story.routes
    assert route.pipeline_id == many.pipeline_id
    kept = next(one for one in route.candidates if one.pipeline_id == urgent.pipeline_id)
    assert "latency" in kept.ruled_out


def test_an_answer_goes_on_with_the_same_text_when_its_device_is_killed(start_fleet: StartFleet) -> None:
    fleet = start_fleet("phone", "phone", replicas=2)
    with Client(fleet.address, timeout_s=WAIT_S) as client, ThreadPoolExecutor() as pool:
        options: dict[str, Any] = {"max_tokens": 60, **SAMPLED}
        undisturbed = client.generate(PROMPT, ignore_eos=True, **options)
        answer = ask_later(pool, client, request_id="orphan", **options)
        pipeline_id = until(lambda: computing(client), bool)
        time.sleep(0.5)  # into the answer

        child_of(fleet, client, pipeline_id).process.kill()
        moved = answer.result(WAIT_S)
        story = client.explain("orphan")

    assert same_answer(moved, undisturbed)
    assert moved.pipeline_id != pipeline_id
    assert "moved" in [event.what for event in story.events]


def computing(client: Client) -> str:
    return next((one.pipeline_id for one in client.status().pipelines if one.num_running), "")


def child_of(fleet: LocalFleet, client: Client, pipeline_id: str) -> Any:
    (worker_id,) = [one.worker_id for one in client.status().devices if one.pipeline_id == pipeline_id]
    return next(child for child in fleet.children if child.name == worker_id)

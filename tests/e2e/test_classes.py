"""What requests of different classes do to each other on the real model: who waits, who loses a slot, what text stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from launch.local import Child, LocalFleet
from shoal import Client
from shoal.generation import Delta, Generation
from shoal.streams import Stream
from tests.e2e.conftest import StartFleet
from tests.support.commands import WAIT_S

pytestmark = pytest.mark.e2e

PROMPT = "The history of the sea begins with"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.2, "seed": 11, "num_logprobs": 2}


def same_answer(one: Generation, other: Generation) -> bool:
    return (one.text, one.token_ids, one.logprobs) == (other.text, other.token_ids, other.logprobs)


def begin(stream: Stream, num_tokens: int) -> Iterator[Delta]:
    """Read the start of an answer, so that there is something to lose; returns the rest of it."""
    deltas = iter(stream)
    for _ in range(num_tokens):
        next(deltas)
    return deltas


def read_rest(stream: Stream, deltas: Iterator[Delta]) -> Generation:
    for _ in deltas:
        pass
    return stream.result


def test_a_preempted_answer_is_the_same_to_the_last_bit(start_fleet: StartFleet) -> None:
    fleet = start_fleet("tablet", max_sequences=1)
    options: dict[str, Any] = {"max_tokens": 32, "qos_class": "throughput", "ignore_eos": True, **SAMPLED}
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        undisturbed = client.generate(PROMPT, **options)
        with client.stream(PROMPT, **options) as stream:
            deltas = begin(stream, 8)
            urgent = client.generate("Quick:", max_tokens=4, qos_class="latency", ignore_eos=True)
            preempted = read_rest(stream, deltas)

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
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, **SAMPLED}
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        undisturbed = client.generate(PROMPT, **options)
        with client.stream(PROMPT, request_id="orphan", **options) as stream:
            deltas = begin(stream, 8)
            pipeline_id = client.explain("orphan").routes[0].pipeline_id
            child_of(fleet, client, pipeline_id).process.kill()
            moved = read_rest(stream, deltas)
        story = client.explain("orphan")

    assert same_answer(moved, undisturbed)
    assert moved.pipeline_id != pipeline_id
    assert "moved" in [event.what for event in story.events]


def child_of(fleet: LocalFleet, client: Client, pipeline_id: str) -> Child:
    (worker_id,) = [one.worker_id for one in client.status().devices if one.pipeline_id == pipeline_id]
    return next(child for child in fleet.children if child.name == worker_id)

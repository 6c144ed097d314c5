"""A client that is not ours: `buf curl`, written in Go, which knows the services by reflection alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from launch.local import LocalFleet
from shoal import Client
from tests.support.commands import BIN, WAIT_S

pytestmark = pytest.mark.e2e

PROMPT = "The largest animals of the sea are"


def curl(fleet: LocalFleet, *args: str, method: str = "") -> subprocess.CompletedProcess[str]:
    url = f"http://{fleet.address}/{method}".rstrip("/")
    command = [str(BIN / "buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *args, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def call(fleet: LocalFleet, method: str, request: dict[str, object]) -> list[dict[str, Any]]:
    """The answers to a request, one for a unary method."""
    done = curl(fleet, "--data", json.dumps(request), method=method)
    assert done.returncode == 0, done.stderr
    return list(objects_of(done.stdout))


def objects_of(text: str) -> Iterator[dict[str, Any]]:
    text = text.strip()
    while text:
        value, stop = json.JSONDecoder().raw_decode(text)
        yield value
        text = text[stop:].strip()


def test_methods_are_listed_by_reflection(fleet: LocalFleet) -> None:
    methods = set(curl(fleet, "--list-methods").stdout.split())

    assert {
        "shoal.v1.InferenceService/Generate",
        "shoal.v1.InferenceService/ListModels",
        "shoal.v1.AdminService/GetStatus",
        "shoal.v1.FleetService/Attach",
        "grpc.health.v1.Health/Check",
    } <= methods


def test_the_status_is_readable_for_others(fleet: LocalFleet) -> None:
    (status,) = call(fleet, "shoal.v1.AdminService/GetStatus", {})

    assert (status["model"], status["ready"]) == ("smollm2-135m", True)
    assert sorted(device["workerId"] for device in status["devices"]) == fleet.worker_ids


def test_an_answer_streams_to_others_as_to_our_client(fleet: LocalFleet, client: Client) -> None:
    expected = client.generate(PROMPT, max_tokens=12)

    first, *deltas, last = call(fleet, "shoal.v1.InferenceService/Generate", {"prompt": PROMPT, "maxTokens": 12})

    assert first["accepted"]["promptTokens"] == expected.prompt_tokens
    assert "".join(event["delta"].get("text", "") for event in deltas) == expected.text
    assert [event["delta"].get("index", 0) for event in deltas] == list(range(12))
    assert last["finished"]["finishReason"] == "FINISH_REASON_LENGTH"
    assert len(last["finished"]["pipeline"]) == 3


@pytest.mark.parametrize("service", ["", "shoal.v1.InferenceService", "shoal.v1.AdminService"])
def test_a_fleet_that_serves_is_healthy(fleet: LocalFleet, service: str) -> None:
    assert call(fleet, "grpc.health.v1.Health/Check", {"service": service}) == [{"status": "SERVING"}]


def test_errors_are_statuses_with_the_field_at_fault(fleet: LocalFleet) -> None:
    request = {"prompt": "Hi", "sampling": {"temperature": 99}}

    done = curl(fleet, "--data", json.dumps(request), method="shoal.v1.InferenceService/Generate")

    error = json.loads(done.stderr)
    assert (done.returncode != 0, error["code"]) == (True, "invalid_argument")
    assert "sampling.temperature" in error["message"]

"""`shoal generate` and `shoal status` against a running fleet: what they print, and how they fail."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from launch.local import LocalFleet
from modelstore.manifest import Manifest
from orchestrator.tokenizer import Tokenizer
from shoal import Client
from tests.support.commands import Outcome, run_shoal, start_shoal, until

pytestmark = pytest.mark.e2e

STORY = "Tell me a long story about a whale who wanted to fly."
FIELDS = {
    "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "ttft_ms", "tokens_per_s", "pipeline",
    "request_id", "model", "seed", "pipeline_id", "queue_ms", "num_preemptions", "cache", "dropped_tokens",
    "num_recoveries", "has_changed_kernels", "num_resumes",
}  # fmt: skip


def ask(fleet: LocalFleet, home: Path, *args: str) -> Outcome:
    return run_shoal("generate", *args, "--server", fleet.address, home=home)


def ask_json(fleet: LocalFleet, home: Path, *args: str) -> dict[str, Any]:
    outcome = ask(fleet, home, *args, "--json")
    assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 1)
    answer = json.loads(outcome.out)
    assert isinstance(answer, dict)
    return answer


def test_json_is_one_object_with_what_was_asked_for(fleet: LocalFleet, home: Path, real_model: Manifest) -> None:
    answer = ask_json(fleet, home, STORY, "--max-tokens", "24", "--seed", "7")

    tokenizer = Tokenizer(real_model.tokenizer)
    assert answer.keys() == FIELDS
    assert (answer["model"], answer["seed"], answer["finish_reason"]) == (real_model.name, 7, "length")
    assert answer["prompt_tokens"] == len(tokenizer.encode_chat([{"role": "user", "content": STORY}]))
    assert answer["completion_tokens"] == len(answer["token_ids"]) == 24
    assert answer["text"] == tokenizer.decode(answer["token_ids"])
    assert answer["ttft_ms"] > 0
    assert answer["tokens_per_s"] > 0
    assert (answer["num_recoveries"], answer["has_changed_kernels"], answer["num_resumes"]) == (0, False, 0)


def test_the_pipeline_of_an_answer_covers_all_layers_once(fleet: LocalFleet, home: Path, real_model: Manifest) -> None:
    stages = ask_json(fleet, home, "Hello!", "--max-tokens", "1")["pipeline"]

    layers = [layer for stage in stages for layer in range(*stage["layers"])]
    assert layers == list(range(real_model.config.num_layers))
    assert sorted(stage["worker_id"] for stage in stages) == fleet.worker_ids
    assert sorted(stage["device"] for stage in stages) == ["phone", "phone", "tablet"]


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(fleet: LocalFleet, home: Path) -> None:
    sampled = (STORY, "--max-tokens", "24", "--temperature", "1.2", "--top-p", "0.95", "--min-p", "0.01")
    first, again, other = (ask_json(fleet, home, *sampled, "--seed", seed) for seed in ("5", "5", "6"))

    assert (first["text"], first["token_ids"]) == (again["text"], again["token_ids"])
    assert first["token_ids"] != other["token_ids"]


def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(fleet: LocalFleet, home: Path, client: Client) -> None:
    expected = client.chat([{"role": "user", "content": STORY}], max_tokens=16)

    outcome = ask(fleet, home, STORY, "--max-tokens", "16")

    assert (outcome.code, outcome.out) == (0, expected.text.rstrip("\n") + "\n")
    assert outcome.err.startswith("length, 16 tokens, first after ")
    assert outcome.err.count("\n") == 1


def test_the_answer_is_shown_while_it_is_computed_and_ctrl_c_ends_it(
    fleet: LocalFleet, home: Path, client: Client
) -> None:
    options = ("--raw", "--max-tokens", "2000", "--repetition-penalty", "1.1", "--server", fleet.address)
    with start_shoal("generate", "A very long story. Once upon a time", *options, home=home) as command:
        command.read_until(" ")
        assert client.status().num_running == 1
        command.process.send_signal(signal.SIGINT)

        assert command.wait() == 130
        assert "Traceback" not in command.err
    until(client.status, lambda status: status.num_running == 0)


def test_an_answer_ends_before_a_stop_text(fleet: LocalFleet, home: Path) -> None:
    whole = ask_json(fleet, home, STORY, "--max-tokens", "40")["text"]
    stop = whole.split()[9]

    answer = ask_json(fleet, home, STORY, "--max-tokens", "40", "--stop", stop)

    assert (answer["text"], answer["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert answer["completion_tokens"] < 40


BAD_REQUESTS = {
    "unknown model": (["Hi", "--model", "gpt-9"], "model 'gpt-9' is not served here; 'smollm2-135m' is"),
    "temperature": (["Hi", "--temperature", "99"], "sampling.temperature: 99.0 is out of range"),
    "empty chat": ([""], "empty; send some text"),
    "empty prompt": (["", "--raw"], "is empty"),
    "no tokens": (["Hi", "--max-tokens", "0"], "max_tokens: 0 is out of range"),
    "negative tokens": (["Hi", "--max-tokens", "-1"], "max_tokens: -1 is out of range"),
    "long prompt": (["word " * 9000], "the context is 8192"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_what_cannot_be_served_is_refused_in_one_line(fleet: LocalFleet, home: Path, name: str) -> None:
    args, told = BAD_REQUESTS[name]

    outcome = ask(fleet, home, *args)

    line, *hints = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (1, "")
    assert line.startswith("error: ")
    assert told in line
    assert all(hint.startswith("hint: ") for hint in hints)


def test_without_an_orchestrator_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    outcome = run_shoal("generate", "Hi", "--server", "127.0.0.1:1", home=tmp_path)

    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: nobody answers at 127.0.0.1:1: start a fleet with `shoal up`")


def test_status_shows_every_device_with_its_layers(fleet: LocalFleet, home: Path) -> None:
    outcome = run_shoal("status", "--server", fleet.address, home=home)

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"smollm2-135m at {fleet.address}: ready")
    rows = {line.split()[0]: line for line in outcome.out.splitlines() if line.split()}
    assert all("ready" in rows[worker_id] and "[" in rows[worker_id] for worker_id in fleet.worker_ids)
    assert "0 of 16 slots" in outcome.out


def test_status_as_json_has_devices_and_pipeline(fleet: LocalFleet, home: Path, real_model: Manifest) -> None:
    outcome = run_shoal("status", "--json", "--server", fleet.address, home=home)
    status = json.loads(outcome.out)

    devices = sorted(status["devices"], key=lambda device: device["layers"])
    weight_bytes = [device["telemetry"]["weight_bytes"] for device in devices]
    assert (status["ready"], status["model"], len(devices)) == (True, real_model.name, 3)
    assert [device["layers"][0] for device in devices[1:]] == [device["layers"][1] for device in devices[:-1]]
    assert all(0 < used < device["memory_bytes"] for used, device in zip(weight_bytes, devices, strict=True))
    assert sum(weight_bytes) >= real_model.weight_bytes
    (pipeline,) = status["pipelines"]
    assert (pipeline["used_slots"], pipeline["used_kv_tokens"]) == (0, 0)

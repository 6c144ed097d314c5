"""The command line against a scripted orchestrator: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.terminal import format_bytes, progress, waiting
from shoal.config import OrchestratorConfig, WorkerConfig, options
from shoal.errors import ContextExceeded, ModelNotFound, NotReady
from shoal.types import DeviceProfile
from shoal.v1 import admin_pb2, fleet_pb2, types_pb2
from tests.support.commands import Outcome
from tests.support.fake_server import HELLO, FakeServer, Script, accepted, chat_of, delta, finished
from tests.unit.conftest import Run


def test_generate_prints_the_answer_on_stdout_and_the_figures_on_stderr(run: Run, server: FakeServer) -> None:
    outcome = run("generate", "hi", "--server", server.address)

    assert outcome == Outcome(0, "Hello\n", "stop, 2 tokens, first after 12 ms, 40.0 tokens/s; request r-1\n")
    assert chat_of(server) == [("user", "hi")]


def test_generate_takes_all_its_options(run: Run, server: FakeServer) -> None:
    flags = "--max-tokens 5 --temperature 0.5 --top-p 0.75 --top-k 3 --min-p 0.25 --repetition-penalty 1.5 --seed 9"
    run("generate", "hi", *flags.split(), "--stop", "a", "--stop", "b", "--qos", "latency", "--server", server.address)

    request = server.orchestrator.requests[0]
    assert request.sampling == types_pb2.SamplingParams(
        temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, repetition_penalty=1.5, seed=9
    )
    assert (request.max_tokens, list(request.stop), request.qos_class) == (5, ["a", "b"], types_pb2.QOS_CLASS_LATENCY)


def test_json_is_exactly_one_object(run: Run, server: FakeServer) -> None:
    outcome = run("generate", "hi", "--json", "--server", server.address)

    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out) == {
        "text": "Hello",
        "token_ids": [10, 11],
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "ttft_ms": 12.5,
        "tokens_per_s": 40.0,
        "pipeline": [{"worker_id": "phone-1", "device": "phone", "layers": [0, 30]}],
        "request_id": "r-1",
        "model": "tiny",
        "seed": 7,
        "pipeline_id": "",
        "queue_ms": 0.0,
        "num_preemptions": 0,
        "cache": {"cached_tokens": 0, "from_redis_tokens": 0, "codec": "", "is_exact": True},
        "dropped_tokens": 0,
        "num_recoveries": 0,
        "has_changed_kernels": False,
        "num_resumes": 0,
    }


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ", resumed once after its stream broke off; "),
        (
            {"num_recoveries": 2, "has_changed_kernels": True},
            ", recovered 2 times from the loss of a device, on a processor of another kind (near-ties may have fallen "
            "differently), resumed once after its stream broke off; ",
        ),
    ],
)
def test_an_answer_says_what_it_outlived(run: Run, fields: dict[str, Any], told: str) -> None:
    with FakeServer([accepted(), delta(0, "Hel", [10]), NotReady("going down")]) as server:
        server.orchestrator.resume_scripts.append([accepted(), delta(1, "lo", [11]), finished(**fields)])
        outcome = run("generate", "hi", "--server", server.address)

    assert outcome.out == "Hello\n"
    assert f"tokens/s{told}request r-1" in outcome.err


def test_raw_continues_the_text_without_a_chat(run: Run, server: FakeServer) -> None:
    run("generate", "Once", "--raw", "--server", server.address)

    assert server.orchestrator.requests[0].prompt == "Once"


def test_a_system_message_comes_first(run: Run, server: FakeServer) -> None:
    run("generate", "hi", "--system", "Be brief.", "--server", server.address)

    assert chat_of(server) == [("system", "Be brief."), ("user", "hi")]


def test_raw_with_a_system_message_is_wrong_usage(run: Run, server: FakeServer) -> None:
    assert run("generate", "hi", "--raw", "--system", "x", "--server", server.address).code == 2


def test_a_dash_reads_the_prompt_from_stdin(run: Run, server: FakeServer) -> None:
    run("generate", "-", "--server", server.address, stdin="für\ndich".encode())

    assert chat_of(server) == [("user", "für\ndich")]


def test_stdin_that_is_no_text_is_one_clear_line(run: Run, server: FakeServer) -> None:
    outcome = run("generate", "-", "--server", server.address, stdin=b"\xff")

    assert outcome == Outcome(1, "", "error: prompt: standard input is not UTF-8 (byte 0)\n")


def test_text_of_a_model_is_never_read_as_markup(run: Run) -> None:
    text = "[bold]x[/nope] :smile: " + "long " * 60
    with FakeServer([accepted(), delta(0, text, [1]), finished()]) as server:
        assert run("generate", "hi", "--server", server.address).out == text + "\n"


def test_the_address_comes_from_the_environment_too(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SERVER", server.address)

    assert run("generate", "hi").out == "Hello\n"


def test_nobody_listening_is_one_line_and_exit_code_1(run: Run) -> None:
    outcome = run("generate", "hi", "--server", "127.0.0.1:1")

    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: nobody answers at 127.0.0.1:1: ")
    assert outcome.err.count("\n") == 1


def test_an_error_may_come_with_a_hint(run: Run) -> None:
    with FakeServer([ModelNotFound("there is no model x")]) as server:
        outcome = run("generate", "hi", "--json", "--server", server.address)

    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.splitlines()[0] == "error: there is no model x"
    assert outcome.err.splitlines()[1].startswith("hint: `shoal models list`")


def test_an_error_in_mid_answer_starts_on_a_line_of_its_own(run: Run) -> None:
    with FakeServer([accepted(), delta(0, "Hel", [10]), NotReady("going down")]) as server:
        outcome = run("generate", "hi", "--server", server.address)

    assert outcome == Outcome(1, "Hel\n", "error: going down\n")


@pytest.mark.parametrize("args", [["generate"], ["generate", "hi", "--top-k", "many"], ["fly"], ["status", "--bold"]])
def test_wrong_usage_is_exit_code_2(run: Run, args: list[str]) -> None:
    outcome = run(*args)

    assert (outcome.code, outcome.out) == (2, "")
    assert "Error" in outcome.err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("lost"), "error: a bug of Shoal: KeyError: 'lost'\nhint: SHOAL_DEBUG=1 shows where\n"),
        (PermissionError(13, "Permission denied", "/x"), "error: [Errno 13] Permission denied: '/x'\n"),
    ],
)
def test_what_nobody_expected_is_told_without_a_traceback(
    run: Run, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    run("--version")
    sys.excepthook(type(error), error, None)

    assert capsys.readouterr().err == told


def test_a_chat_from_a_pipe_answers_line_by_line_and_remembers(run: Run) -> None:
    again: Script = (accepted(), delta(0, "Sure.", [12]), finished())
    with FakeServer(HELLO, again) as server:
        outcome = run("chat", "--system", "Be kind.", "--server", server.address, stdin=b"one\n\ntwo\n")

        assert outcome == Outcome(0, "Hello\nSure.\n", "")
        assert chat_of(server, 1) == [("system", "Be kind."), ("user", "one"), ("assistant", "Hello"), ("user", "two")]


def test_a_chat_forgets_after_reset_and_ends_after_exit(run: Run, server: FakeServer) -> None:
    run("chat", "--server", server.address, stdin=b"one\n/reset\ntwo\n/exit\nthree\n")

    assert chat_of(server, 1) == [("user", "two")]
    assert len(server.orchestrator.requests) == 2


def test_an_unknown_chat_command_is_not_sent(run: Run, server: FakeServer) -> None:
    outcome = run("chat", "--server", server.address, stdin=b"/rest\n/etc/passwd is a file?\n")

    assert outcome.err.startswith("no command /rest")
    assert chat_of(server) == [("user", "/etc/passwd is a file?")]


def test_a_chat_from_a_pipe_fails_with_its_first_error(run: Run) -> None:
    with FakeServer([ContextExceeded("4000 tokens, but the context has 2048")]) as server:
        outcome = run("chat", "--server", server.address, stdin=b"one\ntwo\n")

    assert outcome == Outcome(1, "", "error: 4000 tokens, but the context has 2048\n")


STATUS = admin_pb2.GetStatusResponse(
    version="0.1.0",
    model="tiny",
    ready=True,
    devices=[
        admin_pb2.DeviceStatus(
            worker_id="phone-1",
            profile=fleet_pb2.DeviceProfile(name="phone", kind="phone", memory_bytes=700 * 2**20),
            state="ready",
            layers=types_pb2.LayerRange(start=0, stop=10),
            telemetry=fleet_pb2.Telemetry(rss_bytes=31 * 2**20, weight_bytes=20 * 2**20, kv_bytes=2**20),
            link_to_next="direct-socket",
            decode_ms=12.34,
        ),
        admin_pb2.DeviceStatus(worker_id="[red]tablet-1", state="standby"),
    ],
    pipelines=[
        admin_pb2.PipelineStatus(pipeline_id="p-1", epoch=3, num_slots=8, used_slots=2, decode_tokens_per_s=41.5)
    ],
)


def test_status_shows_devices_and_pipeline(run: Run) -> None:
    with FakeServer(status=STATUS) as server:
        outcome = run("status", "--server", server.address)

    rows = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert "phone-1 phone ready [0, 10) 31.0 MiB of 700 MiB 12.3 ms direct-socket" in rows
    assert any(row.startswith("[red]tablet-1 ") for row in rows)
    assert "2 of 8 slots" in outcome.out
    assert "decode 41.5" in outcome.out


def test_status_of_a_fleet_that_is_not_ready_says_what_it_waits_for(run: Run) -> None:
    with FakeServer(status=admin_pb2.GetStatusResponse(model="tiny", waiting_for="2 of 3 devices")) as server:
        outcome = run("status", "--server", server.address)

    assert "not ready: 2 of 3 devices" in outcome.out


def test_status_as_json_is_the_whole_status(run: Run) -> None:
    with FakeServer(status=STATUS) as server:
        status = json.loads(run("status", "--json", "--server", server.address).out)

    assert (status["ready"], status["pipelines"][0]["num_slots"]) == (True, 8)
    assert [device["layers"] for device in status["devices"]] == [[0, 10], None]
    assert status["devices"][0]["telemetry"]["weight_bytes"] == 20 * 2**20


def test_devices_are_listed_in_the_order_of_their_stages(run: Run) -> None:
    devices = [
        admin_pb2.DeviceStatus(worker_id="spare"),
        admin_pb2.DeviceStatus(worker_id="second", layers=types_pb2.LayerRange(start=10, stop=30)),
        admin_pb2.DeviceStatus(worker_id="first", layers=types_pb2.LayerRange(start=0, stop=10)),
    ]
    with FakeServer(status=admin_pb2.GetStatusResponse(model="tiny", ready=True, devices=devices)) as server:
        words = run("status", "--server", server.address).out.split()

    assert words.index("first") < words.index("second") < words.index("spare")


def test_a_process_gets_the_configuration_its_flags_say(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import orchestrator.app

    got: list[Any] = []

    def run_orchestrator(*args: Any, **options: Any) -> int:
        got.append((*args, options))
        return 7

    monkeypatch.setattr(orchestrator.app, "run", run_orchestrator)

    outcome = run("orchestrator", "--port", "7", "--no-use-sockets", "--home", "/there", "--stop-on-stdin-eof")

    assert outcome.code == 7
    (config, more) = got[0]
    assert (config.port, config.use_sockets, config.home, config.model) == (7, False, Path("/there"), "smollm2-135m")
    assert more == {"stop_on_stdin_eof": True}


def test_a_worker_gets_its_profile_and_its_id(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import worker.app

    got: list[Any] = []

    def run_worker(config: WorkerConfig, profile: DeviceProfile, **_: Any) -> int:
        got.append((config, profile))
        return 0

    monkeypatch.setattr(worker.app, "run", run_worker)

    run("worker", "--join", "10.0.0.7:50070", "--profile", "phone", "--id", "mine")

    (config, profile) = got[0]
    assert (config.join, config.worker_id, profile.name) == ("10.0.0.7:50070", "mine", "phone")


def test_a_bad_option_value_names_flag_and_variable(run: Run) -> None:
    outcome = run("worker", "--join", "nowhere")

    assert outcome.code == 1
    assert "--join or SHOAL_JOIN" in outcome.err


@pytest.mark.parametrize(("command", "config"), [("orchestrator", OrchestratorConfig), ("worker", WorkerConfig)])
def test_help_has_every_field_of_the_configuration(run: Run, command: str, config: Any) -> None:
    out = run(command, "--help").out

    missing = [option.name for option in options(config) if option.flag not in out or option.env not in out]
    assert missing == []


def test_up_with_an_unknown_device_says_which_there_are(run: Run) -> None:
    outcome = run("up", "--devices", "phone,toaster", "--port", "0")

    assert (outcome.code, outcome.out) == (1, "")
    assert "toaster" in outcome.err


def test_up_with_a_comma_too_many_says_that_a_device_has_no_name(run: Run) -> None:
    outcome = run("up", "--devices", "phone,,tablet", "--port", "0")

    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: there is no device profile ''; shipped are edge-box, flagship-phone, host")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tenant-weights", "gold"], "'gold' is not a tenant and its weight"),
        (["--devices", "phone,phone", "--replicas", "3"], "replicas = 3 with 2 devices"),
    ],
)
def test_up_says_what_cannot_work_before_it_starts_anything(
    run: Run, tmp_path: Path, flags: list[str], said: str
) -> None:
    outcome = run("up", "--port", "0", *flags)

    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert said in outcome.err
    assert not (tmp_path / "logs").exists()


def test_up_with_a_model_nobody_knows_starts_nothing(run: Run, tmp_path: Path) -> None:
    outcome = run("up", "--model", "nope", "--port", "0")

    assert outcome.code == 1
    assert outcome.err.startswith("error: there is no model nope")
    assert not (tmp_path / "logs").exists()


def test_help_does_not_import_what_is_heavy() -> None:
    program = "import sys, cli.main; print(sorted({'grpc', 'numpy', 'onnxruntime', 'rich.table'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (2048, "2 KiB"), (3 * 2**20, "3.0 MiB"), (700 * 2**20, "700 MiB"), (2**31, "2.0 GiB")],
)
def test_bytes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_progress_in_a_log_is_a_line_a_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("pull x") as update:
        for done in range(101):
            update(done * 2**20, 100 * 2**20, "layer")

    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"pull x: {share} % of 100 MiB (layer)" for share in (0, 25, 50, 75, 100)]


def test_waiting_in_a_log_is_a_line_for_each_new_text(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("starting") as update:
        for text in ("1 of 2", "1 of 2", "ready"):
            update(text)

    assert capsys.readouterr().err.splitlines() == ["starting", "1 of 2", "ready"]

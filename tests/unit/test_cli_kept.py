"""What the command line shows and sends of what a fleet keeps: tiers of KV, warmed prompts, sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest

import cli.kv
from cli.columns import short_time
from cli.kv import tier_table
from shoal.status import FleetStatus, status_from_proto
from shoal.v1 import admin_pb2, fleet_pb2, inference_pb2
from tests.support.commands import Outcome
from tests.support.fake_server import FakeServer, accepted, chat_of, delta, finished
from tests.unit.conftest import Run

MIB = 2**20


def make_tier(tier: str, **fields: Any) -> fleet_pb2.KVTierStatus:
    return fleet_pb2.KVTierStatus(tier=tier, **{"state": "ok", **fields})


def make_device(worker_id: str, *tiers: fleet_pb2.KVTierStatus, **profile: Any) -> admin_pb2.DeviceStatus:
    return admin_pb2.DeviceStatus(
        worker_id=worker_id,
        profile=fleet_pb2.DeviceProfile(**profile),
        telemetry=fleet_pb2.Telemetry(kv_tiers=tiers),
    )


HOST = make_tier(
    "host", budget_bytes=256 * MIB, used_bytes=12 * MIB, num_blocks=8, hits=1234, misses=12, evictions=3,
    mean_age_s=7300.0, read_mb_s=912.4, write_mb_s=804.0,
)  # fmt: skip
REDIS = make_tier(
    "redis", state="connecting", hits=12_345, puts=77, dropped_writes=4, mismatches={"checksum": 2, "codec": 1},
    queued_bytes=3 * MIB, max_queued_bytes=32 * MIB,
)  # fmt: skip
STATUS = admin_pb2.GetStatusResponse(
    model="tiny",
    devices=[
        make_device("phone-1", make_tier("device", used_bytes=MIB, num_blocks=2), HOST, REDIS, host_kv_bytes=256 * MIB),
        make_device("tablet-with-a-name", HOST, kv_policy="compact"),
        make_device("spare"),
        make_device("without", make_tier("redis", state="off")),
    ],
)


def rows_of(outcome: Outcome) -> list[str]:
    return [" ".join(line.split()) for line in outcome.out.splitlines()]


def fleet() -> FleetStatus:
    return status_from_proto(STATUS)


def test_kv_has_a_row_for_each_device_and_tier(run: Run) -> None:
    with FakeServer(status=STATUS) as server:
        rows = rows_of(run("kv", "--server", server.address))

    assert "device tier state MiB used blocks hits misses evicted age MB/s" in rows
    assert "phone-1 device ok 1.0 2 - - - - -" in rows
    assert "host ok 12 of 256 8 1234 12 3 2h 912/804" in rows
    assert "redis connecting - 77 12k 0 - - -" in rows
    assert "without redis off - - - - - - -" in rows
    assert not any("spare" in row for row in rows)


def test_kv_tells_of_what_was_given_up_what_was_not_right_and_of_policies(run: Run) -> None:
    with FakeServer(status=STATUS) as server:
        rows = rows_of(run("kv", "--server", server.address))

    assert "phone-1, redis: 4 writes given up" in rows
    assert "phone-1, redis: 3.0 of at most 32 MiB wait to be written" in rows
    assert sum("has stored there since it started" in row for row in rows) == 1
    assert "phone-1, redis: stored bytes that were not the block: 2 checksum, 1 codec" in rows
    assert any(row.startswith("tablet-with-a-name keeps KV by the policy compact") for row in rows)


def test_kv_as_json_has_all_figures(run: Run) -> None:
    with FakeServer(status=STATUS) as server:
        printed = json.loads(run("kv", "--json", "--server", server.address).out)

    phone, tablet, _ = printed["devices"]
    assert (phone["worker_id"], phone["host_kv_bytes"], tablet["kv_policy"]) == ("phone-1", 256 * MIB, "compact")
    assert [tier["tier"] for tier in phone["tiers"]] == ["device", "host", "redis"]
    assert phone["tiers"][2]["mismatches"] == {"checksum": 2, "codec": 1}


def test_before_any_device_told_of_kv_there_is_one_line(run: Run) -> None:
    with FakeServer() as server:
        assert run("kv", "--server", server.address).out.endswith(": no device has told of KV yet\n")


@pytest.mark.parametrize(
    ("width", "left_out"), [(94, []), (92, ["age"]), (80, ["age", "MB/s"]), (74, ["age", "MB/s", "evicted"])]
)
def test_the_table_of_tiers_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int, left_out: list[str]) -> None:
    from rich.console import Console

    console = Console(width=width, color_system=None)
    monkeypatch.setattr(cli.kv, "console", lambda: console)

    with console.capture() as captured:
        console.print(tier_table([device for device in fleet().devices if device.telemetry.kv_tiers]))

    text = captured.get()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert [title for title in ("age", "MB/s", "evicted") if title not in text] == left_out
    assert "…" not in text


def test_on_a_terminal_of_80_columns_nothing_is_left_out_where_names_are_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rich.console import Console

    console = Console(width=80, color_system=None)
    monkeypatch.setattr(cli.kv, "console", lambda: console)
    device = make_device("tablet-1", make_tier("device", used_bytes=MIB), HOST, make_tier("redis", hits=99_999))

    table = tier_table(list(status_from_proto(admin_pb2.GetStatusResponse(devices=[device])).devices))

    assert [column.header for column in table.columns][-3:] == ["evicted", "age", "MB/s"]


def test_the_summary_says_what_was_reused(run: Run) -> None:
    use = inference_pb2.CacheUse(cached_tokens=512, codec="f32", is_exact=True)
    with FakeServer([accepted(), delta(0, "x", [1]), finished(prompt_tokens=530, cache=use)]) as server:
        outcome = run("generate", "hi", "--server", server.address)

    assert "40.0 tokens/s, reused 512 of 530 prompt tokens (host, f32); request r-1\n" in outcome.err


@pytest.mark.parametrize(("from_redis", "tiers"), [(512, "redis, f32"), (64, "host and redis, f32")])
def test_the_summary_says_where_it_was(run: Run, from_redis: int, tiers: str) -> None:
    use = inference_pb2.CacheUse(cached_tokens=512, from_redis_tokens=from_redis, codec="f32", is_exact=True)
    with FakeServer([accepted(), finished(cache=use)]) as server:
        assert f"({tiers})" in run("generate", "hi", "--server", server.address).err


def test_the_summary_says_what_was_not_exact_and_what_was_left_out(run: Run) -> None:
    use = inference_pb2.CacheUse(cached_tokens=512, codec="int8", is_exact=False)
    with FakeServer([accepted(dropped_tokens=128), finished(cache=use)]) as server:
        outcome = run("generate", "hi", "--server", server.address)

    assert "(host, int8, not exact), 128 tokens of the session left out; request r-1\n" in outcome.err


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",)])
def test_a_request_takes_a_session_and_what_may_be_reused(
    run: Run, server: FakeServer, command: tuple[str, ...]
) -> None:
    options = ("--session", "talk", "--kv-reuse", "none", "--overflow", "window")
    run(*command, *options, "--server", server.address, stdin=b"hi\n")

    (request,) = server.orchestrator.requests
    assert (request.session_id, request.kv_reuse) == ("talk", inference_pb2.KV_REUSE_NONE)
    assert request.context_overflow == inference_pb2.CONTEXT_OVERFLOW_WINDOW


def test_a_chat_in_a_new_session_sends_each_turn_alone(run: Run, server: FakeServer) -> None:
    server.orchestrator.sessions.clear()
    run("chat", "--session", "new", "--system", "Be kind.", "--server", server.address, stdin=b"one\ntwo\n")

    assert chat_of(server, 0) == [("system", "Be kind."), ("user", "one")]
    assert chat_of(server, 1) == [("user", "two")]
    assert [request.session_id for request in server.orchestrator.requests] == ["new", "new"]


def test_a_chat_in_a_session_that_is_there_goes_on(run: Run, server: FakeServer) -> None:
    outcome = run("chat", "--session", "talk", "--system", "Be kind.", "--server", server.address, stdin=b"one\n")

    assert outcome.err == (
        "session talk goes on: 3 turns, 530 tokens\n"
        "the system message came with its first turn: the one given now is left out\n"
    )
    assert chat_of(server) == [("user", "one")]


def test_a_turn_of_a_session_that_had_no_token_did_not_happen(run: Run) -> None:
    with FakeServer([accepted(), finished()], [accepted(), delta(0, "x", [1]), finished()]) as server:
        run("chat", "--session", "talk", "--server", server.address, stdin=b"one\ntwo\n")

        assert chat_of(server, 1) == [("user", "two")]


def test_reset_deletes_the_session_of_a_chat(run: Run, server: FakeServer) -> None:
    run("chat", "--session", "talk", "--tenant", "gold", "--server", server.address, stdin=b"one\n/reset\ntwo\n")

    assert [(one.session_id, one.tenant) for one in server.orchestrator.deleted] == [("talk", "gold")]
    assert chat_of(server, 1) == [("user", "two")]


def test_reset_of_a_session_that_never_began_is_no_error(run: Run, server: FakeServer) -> None:
    server.orchestrator.sessions.clear()

    assert run("chat", "--session", "new", "--server", server.address, stdin=b"/reset\n").code == 0


def test_a_system_message_is_warmed(run: Run, server: FakeServer) -> None:
    outcome = run(
        "warm", "--system", "Be kind.", "--ttl", "60", "--tenant", "gold", "--public", "--server", server.address
    )

    (request,) = server.orchestrator.warmed
    assert outcome.out == "512 of 530 tokens are kept, 64 were there already\n"
    assert [(one.role, one.content) for one in request.chat.messages] == [("system", "Be kind.")]
    assert (request.ttl_s, request.is_public, request.tenant) == (60.0, True, "gold")


def test_a_text_is_warmed_as_it_is(run: Run, server: FakeServer) -> None:
    outcome = run("warm", "-", "--raw", "--json", "--server", server.address, stdin=b"Once")

    assert server.orchestrator.warmed[0].prompt == "Once"
    assert json.loads(outcome.out) == {"prompt_tokens": 530, "kept_tokens": 512, "cached_tokens": 64}


@pytest.mark.parametrize("args", [[], ["--raw"], ["x", "--raw", "--system", "y"]])
def test_nothing_to_warm_is_wrong_usage(run: Run, server: FakeServer, args: list[str]) -> None:
    assert run("warm", *args, "--server", server.address).code == 2


def test_sessions_are_listed(run: Run, server: FakeServer) -> None:
    rows = rows_of(run("sessions", "list", "--tenant", "gold", "--server", server.address))

    assert "talk 3 530 512 90s ago 7d" in rows
    assert server.orchestrator.listed[0].tenant == "gold"


def test_one_session_is_shown(run: Run, server: FakeServer) -> None:
    shown = run("sessions", "show", "talk", "--tenant", "gold", "--server", server.address)
    as_json = json.loads(run("sessions", "show", "talk", "--json", "--server", server.address).out)

    assert " ".join(shown.out.split()) == (
        "talk: 3 turns, 530 tokens, 512 of them with KV that is kept; last used 90s ago, ends in 7d if it is not used"
    )
    assert server.orchestrator.listed[0].tenant == "gold"
    assert (as_json["session_id"], as_json["num_tokens"]) == ("talk", 530)


def test_a_session_that_is_not_there_is_an_error(run: Run, server: FakeServer) -> None:
    outcome = run("sessions", "show", "nobody", "--server", server.address)

    assert outcome.code != 0
    assert "there is no session 'nobody'" in outcome.err


def test_sessions_as_json_are_one_object(run: Run, server: FakeServer) -> None:
    (session,) = json.loads(run("sessions", "list", "--json", "--server", server.address).out)["sessions"]

    assert (session["session_id"], session["num_turns"], session["kept_tokens"]) == ("talk", 3, 512)


def test_no_sessions_are_one_line_with_what_begins_one(run: Run, server: FakeServer) -> None:
    server.orchestrator.sessions.clear()

    assert "shoal chat --session NAME" in run("sessions", "list", "--server", server.address).out


def test_deleting_a_session_says_what_went_and_what_stays(run: Run, server: FakeServer) -> None:
    outcome = run("sessions", "delete", "talk", "--tenant", "gold", "--server", server.address)

    assert server.orchestrator.deleted[0].tenant == "gold"
    assert outcome.out == "session talk is deleted, with 7 blocks of KV; 1 are used by others and stay\n"


def test_deleting_what_is_not_there_is_one_clear_line(run: Run, server: FakeServer) -> None:
    server.orchestrator.sessions.clear()
    outcome = run("sessions", "delete", "talk", "--server", server.address)

    assert outcome == Outcome(1, "", "error: tenant 'default' has no session 'talk'\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0s"), (119.0, "119s"), (120.0, "2m"), (7200.0, "2h"), (600_000.0, "7d")]
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert short_time(seconds) == text

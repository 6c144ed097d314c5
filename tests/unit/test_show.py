"""The table and the lines of `shoal status`: one pipeline or several, as much as is known, as wide as the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from cli import show
from cli.show import departed_lines, device_table, pipeline_lines, standby_lines
from cli.terminal import say
from shoal.status import FleetStatus, status_from_proto
from shoal.v1 import admin_pb2, fleet_pb2, types_pb2
from tests.support.fake_server import FakeServer
from tests.unit.conftest import Run

MIB = 2**20


def make_device(
    worker_id: str, pipeline_id: str = "p1", layers: tuple[int, int] | None = (0, 30), **fields: Any
) -> admin_pb2.DeviceStatus:
    telemetry = fleet_pb2.Telemetry(rss_bytes=231 * MIB)
    for name in ("temperature_c", "battery_percent", "is_charging"):
        if name in fields:
            setattr(telemetry, name, fields.pop(name))
    return admin_pb2.DeviceStatus(
        worker_id=worker_id,
        profile=fleet_pb2.DeviceProfile(name="phone", kind="phone", memory_bytes=700 * MIB),
        state="ready",
        pipeline_id=pipeline_id,
        layers=types_pb2.LayerRange(start=layers[0], stop=layers[1]) if layers else None,
        telemetry=telemetry,
        link_to_next="socket",
        decode_ms=12.3,
        **{"thermal_state": "nominal", **fields},
    )


def make_status(devices: list[admin_pb2.DeviceStatus], *pipelines: admin_pb2.PipelineStatus) -> FleetStatus:
    return status_from_proto(admin_pb2.GetStatusResponse(ready=True, devices=devices, pipelines=pipelines))


def make_pipeline(pipeline_id: str, **fields: Any) -> admin_pb2.PipelineStatus:
    return admin_pb2.PipelineStatus(pipeline_id=pipeline_id, mode="mixed", epoch=3, num_slots=8, **fields)


def table_rows(status: FleetStatus, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the table that hold text, with single spaces."""
    say(device_table(status))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    return [line for line in lines if line.strip("─ ")]


def test_with_one_pipeline_no_column_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table_rows(make_status([make_device("phone-1")], make_pipeline("p1")), capsys)

    assert rows == [
        "device kind state layers memory decode heat link",
        "phone-1 phone ready [0, 30) 231 MiB of 700 MiB 12.3 ms nominal socket",
    ]


def test_a_device_that_is_cordoned_says_so_beside_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    (_, row) = table_rows(make_status([make_device("phone-1", is_cordoned=True)], make_pipeline("p1")), capsys)

    assert row.startswith("phone-1 phone ready, cordoned [0, 30)")


def test_with_several_devices_are_sorted_by_pipeline_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [
        make_device("spare", "", None),
        make_device("tablet", "p2"),
        make_device("loading", "p3"),
        make_device("second", "p1", (12, 30)),
        make_device("first", "p1", (0, 12)),
    ]

    rows = table_rows(make_status(devices, make_pipeline("p2"), make_pipeline("p1")), capsys)

    assert [row.split()[:2] for row in rows] == [
        ["pipeline", "device"],
        ["p2", "tablet"],
        ["p1", "first"],
        ["p1", "second"],
        ["p3", "loading"],
        ["-", "spare"],
    ]


def test_temperature_and_battery_are_shown_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [
        make_device("phone-1", layers=(0, 10), temperature_c=71.6, battery_percent=81.2, thermal_state="hot"),
        make_device("phone-2", layers=(10, 20), battery_percent=99.0, is_charging=True),
        make_device("box-1", layers=(20, 30)),
    ]

    rows = table_rows(make_status(devices, make_pipeline("p1")), capsys)

    assert [row.partition("12.3 ms ")[2] for row in rows[1:]] == [
        "hot 72 C 81 % socket",
        "nominal 99 % + socket",
        "nominal - socket",
    ]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (200, "device kind state layers memory decode heat battery link"),
        (90, "device state layers memory decode heat battery link"),
        (80, "device state layers memory decode heat battery"),
        (65, "device state layers memory heat"),
        (10, "device state layers memory heat"),
    ],
)
def test_what_matters_least_is_left_out_where_there_is_no_room(
    width: int, titles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Narrow:
        def __init__(self) -> None:
            self.width = width

    monkeypatch.setattr(show, "console", Narrow)
    device = make_device("phone-1", temperature_c=61.0, battery_percent=80.0, thermal_state="moderate")

    table = device_table(make_status([device], make_pipeline("p1")))

    assert " ".join(str(column.header) for column in table.columns) == titles


def test_each_pipeline_has_its_load_and_speed_in_a_line() -> None:
    busy = make_pipeline("p1", used_slots=2, num_running=2, num_waiting=5, decode_tokens_per_s=41.5)

    lines = pipeline_lines(make_status([], busy, make_pipeline("p2")))

    assert len(lines) == 4
    assert lines[0].startswith("pipeline p1 (mixed, epoch 3): 2 of 8 slots")
    assert "2 running, 5 waiting; decode 41.5" in lines[1]
    assert lines[2].startswith("pipeline p2 ")


def test_a_pipeline_that_is_spared_says_how_much_and_for_whom() -> None:
    devices = [
        make_device("phone-1", thermal_state="moderate", thermal_cause="61.2 C"),
        make_device("phone-2", thermal_state="critical", thermal_cause="battery at 9 %"),
        make_device("phone-3", "p2", thermal_state="moderate", thermal_cause="60.0 C"),
        make_device("tablet-1"),
    ]
    spared = make_pipeline("p1", max_batch=2, steps_per_s=3.0)

    *_, line = pipeline_lines(make_status(devices, spared))

    assert line == (
        "  kept to batches of 2 and 3 steps/s: phone-1 is moderate (61.2 C), phone-2 is critical (battery at 9 %)"
    )


def test_a_fleet_that_serves_nothing_has_no_lines() -> None:
    assert pipeline_lines(make_status([make_device("phone-1", "", None)])) == []


def test_devices_that_are_gone_are_told_with_when_and_why() -> None:
    status = status_from_proto(
        admin_pb2.GetStatusResponse(
            departed=[
                admin_pb2.DepartedDevice(worker_id="phone-2", why="no heartbeat for 5 s", ago_s=12.2),
                admin_pb2.DepartedDevice(worker_id="tablet-1", why="it left", ago_s=150.0, has_left=True),
            ]
        )
    )
    assert departed_lines(status) == ["phone-2 is lost, since 12s ago: no heartbeat for 5 s", "tablet-1 left 2m ago"]


def test_no_line_of_a_status_is_longer_than_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    devices = [
        make_device(
            "flagship-phone-1", thermal_state="critical", thermal_cause="temperature 81.5 C", temperature_c=81.5
        ),
        make_device("flagship-phone-2", layers=(12, 30), battery_percent=12.0),
    ]
    pipeline = make_pipeline(
        "p1", kv_tokens=130_000, used_kv_tokens=120_000, context_tokens=8192, max_batch=1, num_waiting=17
    )
    status = admin_pb2.GetStatusResponse(
        model="tiny",
        waiting_for="w " * 100,
        devices=devices,
        pipelines=[pipeline],
        departed=[admin_pb2.DepartedDevice(worker_id="phone-2", why="its data link ended: " + "x " * 60)],
    )
    with FakeServer(status=status) as server:
        lines = run("status", "--server", server.address).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:1] == ["flagship-phone-1"] for line in lines)


def test_who_stands_by_is_told_with_what_it_would_take_over_and_how_far_it_has_fetched_that() -> None:
    def standing_by(worker_id: str, *ranges: tuple[int, int], have_mib: int) -> admin_pb2.DeviceStatus:
        layers = [types_pb2.LayerRange(start=start, stop=stop) for start, stop in ranges]
        return make_device(
            worker_id, "", None, standby_layers=layers, prefetch_bytes=120 * MIB, prefetched_bytes=have_mib * MIB
        )

    devices = [
        make_device("phone-1"),
        standing_by("tablet-1", (0, 8), (20, 30), have_mib=83),
        standing_by("tablet-2", (0, 8), have_mib=120),
        make_device("tablet-3", "", None),
    ]

    assert standby_lines(make_status(devices)) == [
        "tablet-1 stands by for layers [0, 8), [20, 30), and has 83.0 MiB of 120 MiB of their weights",
        "tablet-2 stands by for layers [0, 8), and has all 120 MiB of their weights",
    ]

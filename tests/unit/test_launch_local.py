"""What a local fleet passes to its children, and how it tells that one of them, or their port, is not as it should be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launch.local import MAX_DEATHS, STEADY_S, Child, LocalFleet, failure_of, failure_of_all, to_flags
from launch.profiles import SHIPPED, load_profile, to_toml
from shoal.config import Config, OrchestratorConfig, WorkerConfig
from shoal.errors import ConfigError, LaunchFailed
from shoal.types import BatteryModel, DeviceLimits, DeviceMode, DeviceProfile, KVPolicy, LinkProfile, ThermalModel

SOME_PROFILE = DeviceProfile(
    name='old "phone"',
    kind="phone",
    memory_bytes=300 * 2**20,
    speed=0.5,
    num_threads=2,
    max_batch=4,
    poll_ms=2.5,
    allow_direct_links=False,
    link=LinkProfile(5.0, 20.0),
    is_emulated=True,
    mode=DeviceMode.LATENCY,
    fallback_timeout_ms=75.0,
    limits=DeviceLimits(
        moderate_c=50.0,
        hot_c=60.0,
        critical_c=70.5,
        low_battery_percent=20.0,
        critical_battery_percent=10.0,
        busy_load=0.5,
        max_batch=(4, 2, 2, 1),
        steps_per_s=(0.0, 8.0, 4.0, 0.5),
    ),
    thermal=ThermalModel(ambient_c=30.0, heat_c_per_s=0.5, cooling_per_s=0.02),
    host_kv_bytes=5 * 2**20,
    kv_policy=KVPolicy.COMPACT,
    battery=BatteryModel(capacity_wh=15.0, start_percent=80.0, active_w=4.0, idle_w=0.8),
)


def make_fleet(home: Path, devices: list[str | DeviceProfile], port: int = 0) -> LocalFleet:
    return LocalFleet(OrchestratorConfig(home=home, port=port), devices)


def make_child(name: str, program: str, folder: Path) -> Child:
    log_path = folder / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=log, stderr=log)
    return Child(name, process, log_path)


def test_devices_are_numbered_by_name(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, ["phone", "tablet", "phone", SOME_PROFILE])

    assert fleet.worker_ids == ["phone-1", "tablet-1", "phone-2", "old--phone--1"]
    assert fleet.config.expect_workers == 4


def test_port_0_takes_a_free_one_and_says_which(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, ["phone"])

    assert fleet.config.port != 0
    assert fleet.address == f"127.0.0.1:{fleet.config.port}"


def test_a_fleet_on_all_addresses_is_reached_on_this_machine(tmp_path: Path) -> None:
    fleet = LocalFleet(OrchestratorConfig(home=tmp_path, host="0.0.0.0", port=7), ["phone"])

    assert fleet.address == "127.0.0.1:7"


def worker_flags(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The command line of each worker that a fleet would start."""
    commands: dict[str, list[str]] = {}

    def keep(_: LocalFleet, name: str, args: list[str], profile: DeviceProfile | None = None) -> None:
        if profile is not None:
            commands[name] = args

    monkeypatch.setattr(LocalFleet, "_start_child", keep)
    fleet.start()
    return commands


def test_a_mode_behind_a_device_goes_before_that_of_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(replace(SOME_PROFILE, name="own")), encoding="utf-8")

    commands = worker_flags(make_fleet(tmp_path, ["phone", "tablet:latency", f"{path}:throughput"]), monkeypatch)

    assert list(commands) == ["phone-1", "tablet-1", "own-1"]
    assert {"--profile=phone", "--mode="} <= set(commands["phone-1"])
    assert {"--profile=tablet", "--mode=latency"} <= set(commands["tablet-1"])
    assert {f"--profile={path}", "--mode=throughput"} <= set(commands["own-1"])


def test_each_worker_has_a_trace_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = OrchestratorConfig(home=tmp_path, port=0), tmp_path / "new" / "traces"

    commands = worker_flags(LocalFleet(config, ["phone", "phone"], kv_trace=folder), monkeypatch)

    assert folder.is_dir()
    assert f"--kv-trace={folder}/phone-1.jsonl" in commands["phone-1"]
    assert f"--kv-trace={folder}/phone-2.jsonl" in commands["phone-2"]
    assert "--kv-trace=" in worker_flags(make_fleet(tmp_path, ["phone"]), monkeypatch)["phone-1"]


def test_a_folder_of_traces_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    fleet = LocalFleet(OrchestratorConfig(home=tmp_path, port=0), ["phone"], kv_trace=tmp_path / "file")

    with pytest.raises(ConfigError, match="cannot make the folder"):
        worker_flags(fleet, monkeypatch)


def test_a_colon_in_a_path_is_no_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a:b" / "c:d.toml"
    path.parent.mkdir()
    path.write_text(to_toml(replace(SOME_PROFILE, name="own")), encoding="utf-8")

    commands = worker_flags(make_fleet(tmp_path, [str(path), f"{path}:mixed"]), monkeypatch)

    assert {f"--profile={path}", "--mode="} <= set(commands["own-1"])
    assert {f"--profile={path}", "--mode=mixed"} <= set(commands["own-2"])


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fast' is not a mode; it must be one of mixed, latency, throughput"):
        make_fleet(tmp_path, ["phone:fast"])


def test_a_fleet_of_no_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one device"):
        make_fleet(tmp_path, [])


def test_a_port_that_is_taken_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fleet = make_fleet(tmp_path, ["phone"], port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another port"):
            fleet.__enter__()

    assert fleet.children == []


def start_without_processes(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a fleet of which nobody listens on its port yet."""
    monkeypatch.setattr(LocalFleet, "_start_child", lambda *_: None)
    fleet.start()


def test_a_port_on_which_another_fleet_of_the_home_starts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_fleet(tmp_path, ["phone"])
    start_without_processes(first, monkeypatch)

    with pytest.raises(ConfigError, match=f"another fleet of .* runs on port {first.config.port}; choose") as raised:
        start_without_processes(make_fleet(tmp_path, ["phone"], port=first.config.port), monkeypatch)

    assert raised.value.field == "port"
    first.stop()


def test_a_fleet_can_start_where_another_of_the_home_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_fleet(tmp_path, ["phone"])
    start_without_processes(first, monkeypatch)
    first.stop()

    second = make_fleet(tmp_path, ["phone"], port=first.config.port)
    start_without_processes(second, monkeypatch)
    second.stop()


@pytest.mark.parametrize(
    "config", [OrchestratorConfig(use_sockets=False, split="12,18"), WorkerConfig(worker_id="a b")]
)
def test_flags_say_all_of_a_configuration_but_its_secret(config: Config) -> None:
    flags = to_flags(replace(config, redis_url="redis://:password@host"))

    assert len(flags) == len(type(config).__dataclass_fields__) - 1
    assert not [flag for flag in flags if "redis" in flag]
    assert "--no-use-sockets" in flags or "--use-sockets" in flags
    assert "--split=12,18" in flags or "--worker-id=a b" in flags


@pytest.mark.parametrize(
    "profile", [SOME_PROFILE, DeviceProfile(name="plain", kind="box", memory_bytes=2**20)], ids=str
)
def test_a_profile_is_read_back_from_its_file_as_it_was(tmp_path: Path, profile: DeviceProfile) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(to_toml(profile), encoding="utf-8")

    assert load_profile(str(path)) == profile


@pytest.mark.parametrize("name", SHIPPED.names())
def test_a_shipped_profile_is_read_back_from_its_file_as_it_was(tmp_path: Path, name: str) -> None:
    profile, path = load_profile(name), tmp_path / "profile.toml"
    path.write_text(to_toml(profile), encoding="utf-8")
    whole_mib = profile.memory_bytes // 2**20 * 2**20

    assert load_profile(str(path)) == replace(profile, memory_bytes=whole_mib)


def test_the_example_profile_sets_everything_to_something_else_than_the_default() -> None:
    plain = DeviceProfile(name="", kind="", memory_bytes=0)
    tables = ("limits", "link", "thermal", "battery")
    set_to = {name: value for name, value in asdict(SOME_PROFILE).items() if name not in tables}
    default = {name: value for name, value in asdict(plain).items() if name not in tables}
    for table in tables:
        set_to |= {f"{table}.{name}": value for name, value in asdict(getattr(SOME_PROFILE, table)).items()}
        default |= {f"{table}.{name}": value for name, value in asdict(getattr(plain, table)).items()}
    same = [name for name, value in set_to.items() if value == default[name]]
    assert same == []


def test_a_child_that_ended_is_named_with_its_last_words(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, ["phone"])
    fleet.children.append(make_child("phone-1", "print('out of paper'); raise SystemExit(3)", tmp_path))
    fleet.children[0].process.wait()

    with pytest.raises(LaunchFailed, match=r"(?s)phone-1 ended with exit code 3; .*phone-1\.log:\n  out of paper"):
        fleet.check()
    fleet.stop()


def test_a_child_that_was_killed_is_told_from_one_that_failed(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, ["phone"])
    fleet.children.append(make_child("phone-1", "input()", tmp_path))
    fleet.children[0].process.kill()
    fleet.children[0].process.wait()

    with pytest.raises(LaunchFailed, match="phone-1 was ended by SIGKILL"):
        fleet.check()
    fleet.stop()


def test_children_stop_in_order_and_those_that_do_not_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.local.WORKER_STOP_S", 0.0)
    fleet = make_fleet(tmp_path, ["phone"])
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); input()"
    tidy = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); input()"
    orchestrator, worker = make_child("orchestrator", tidy, tmp_path), make_child("phone-1", deaf, tmp_path)
    fleet.children.extend([orchestrator, worker])
    for child in (orchestrator, worker):
        while "up" not in child.last_log_lines:
            os.sched_yield()

    fleet.stop()

    assert (orchestrator.process.returncode, worker.process.returncode) == (0, -signal.SIGKILL)
    assert fleet.children == []


class Dying:
    """A fleet whose orchestrator dies whenever it is told to, by a clock of its own. args: of those started again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.fleet = LocalFleet(OrchestratorConfig(home=folder, port=0), ["phone", "tablet"], clock=lambda: self.now)
        self.args: list[list[str]] = []
        self._folder = folder
        monkeypatch.setattr(self.fleet, "_spawn", self._spawn)
        self.fleet.children.append(self._spawn("orchestrator", []))
        self.args.clear()
        self.fleet.children.extend(make_child(name, "input()", folder) for name in ("phone-1", "tablet-1"))

    def _spawn(self, name: str, args: list[str], **_: object) -> Child:
        self.args.append(args)
        return make_child(name, "input()", self._folder)

    def kill(self, index: int = 0) -> None:
        self.fleet.children[index].process.kill()
        self.fleet.children[index].process.wait()


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dying]:
    dying = Dying(tmp_path, monkeypatch)
    yield dying
    dying.fleet.stop()


def test_an_orchestrator_that_runs_is_left_alone(dying: Dying) -> None:
    assert dying.fleet.revive() == ""


def test_an_orchestrator_that_was_killed_is_started_again_for_the_workers_that_are_left(dying: Dying) -> None:
    dying.now = 100.0
    dying.kill(2)
    dying.kill()

    assert "orchestrator was ended by SIGKILL; it is started again" in dying.fleet.revive()
    assert dying.fleet.revive() == ""
    (args,) = dying.args
    assert "--expect-workers=1" in args
    assert f"--port={dying.fleet.config.port}" in args
    assert [child.name for child in dying.fleet.children] == ["orchestrator", "phone-1", "tablet-1"]
    assert [child.name for child in dying.fleet.ended()] == ["tablet-1"]


def test_an_orchestrator_that_keeps_dying_is_started_again_ever_later_and_then_no_more(dying: Dying) -> None:
    started_at: list[float] = []
    dying.now = 100.0
    dying.kill()
    while len(started_at) < MAX_DEATHS:
        if dying.fleet.revive():
            started_at.append(dying.now)
            dying.kill()
        dying.now += 0.5
        assert dying.now < 200.0

    assert started_at == [100.0, 101.5, 104.0, 107.5]
    with pytest.raises(LaunchFailed, match="orchestrator was ended by SIGKILL"):
        dying.fleet.revive()


def test_an_orchestrator_that_was_well_for_long_is_started_again_at_once(dying: Dying) -> None:
    for _ in range(2 * MAX_DEATHS):
        dying.now += STEADY_S + 1
        dying.kill()
        assert dying.fleet.revive() != ""


def test_an_orchestrator_that_was_told_to_end_is_not_started_again(dying: Dying) -> None:
    pipe = dying.fleet.children[0].process.stdin
    assert pipe is not None
    pipe.write(b"\n")
    pipe.close()
    dying.fleet.children[0].process.wait()

    with pytest.raises(LaunchFailed, match="orchestrator ended with exit code 0"):
        dying.fleet.revive()


def test_a_fleet_whose_orchestrator_fails_says_why(tmp_path: Path) -> None:
    with (
        make_fleet(tmp_path, ["phone"]) as fleet,
        pytest.raises(LaunchFailed, match=r"(?s)orchestrator .*smollm2-135m"),
    ):
        fleet.wait_ready()


def test_when_all_devices_have_ended_each_is_named_with_how(tmp_path: Path) -> None:
    children = [
        make_child("phone-1", "print('out of memory'); raise SystemExit(3)", tmp_path),
        make_child("phone-2", "raise SystemExit(4)", tmp_path),
    ]
    for child in children:
        child.process.wait()
        assert child.process.stdin is not None
        child.process.stdin.close()
    message = failure_of_all(children).message
    assert "all 2 devices have ended, nothing can serve any more" in message
    assert "phone-1 ended with exit code 3, phone-2 ended with exit code 4" in message
    assert message.endswith(f"{children[0].log_path}:\n  out of memory")
    assert failure_of_all(children[:1]).message == failure_of(children[0]).message


def test_an_orchestrator_waits_for_the_devices_that_others_start(tmp_path: Path) -> None:
    fleet = LocalFleet(OrchestratorConfig(home=tmp_path, port=0), ["phone"], num_elsewhere=2)

    assert fleet.config.expect_workers == 3

"""A fleet whose workers Ray places on nodes that are not alike, and what becomes of an answer when parts of it are killed.

All tests share one cluster of this machine and one fleet, in the order of this file: each takes away more, and after the
last there is no head.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.changes import let_in_after_others
from launch.desk import Desk
from launch.local import LocalFleet
from launch.profiles import to_toml
from launch.ray_fleet import RayDevices
from launch.ray_nodes import load_map
from shoal import Client
from shoal.config import OrchestratorConfig
from shoal.errors import LaunchFailed
from shoal.generation import Generation
from shoal.status import FleetStatus
from tests.e2e.conftest import swift
from tests.support.commands import WAIT_S, RunningCommand, run_shoal, start_shoal, until

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Of a head that starts; Ray's 30 s were too short once.
os.environ.update(RAY_gcs_server_port_wait_time_s="120")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs shoal[ray]")

# Several of them wait for all workers to start, one after the other, on a busy machine too.
pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(600)]

# So that what ends is noticed in seconds: a node by health checks that nobody takes, the head by calls that fail. What is
# slow, as when it starts on a busy machine, has not ended.
QUICK = {
    "health_check_initial_delay_ms": 10_000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 5,
    "gcs_rpc_server_reconnect_timeout_s": 5,
}
NODE_CHARS = 8
KEPT = "goes on under a new keeper"
STORE_BYTES = 80 * 2**20
NUM_PROMPTS = 24
PROMPT, NUM_TOKENS = "Fish swim in shoals because", 48
MAP = """
[phone]
resources = { phone = 1 }
[tablet]
labels = { size = "large" }
"""
SHORT = """
name = "short"
[[stream]]
name = "short"
prompt_tokens = 8
output_tokens = 4
"""


@dataclass(frozen=True)
class Nodes:
    """A cluster, its node with places for two phones, and those that are labelled as large."""

    cluster: Any
    phones: Any
    large: list[Any]


@dataclass
class Running:
    """A fleet on a cluster. told: what an operator would have seen."""

    nodes: Nodes
    fleet: LocalFleet
    devices: RayDevices
    told: list[str]
    tablet: str
    undisturbed: str = ""

    @property
    def worker_ids(self) -> set[str]:
        """Of those that the orchestrator has."""
        with Client(self.fleet.address) as client:
            return {device.worker_id for device in client.status().devices}

    def hear(self) -> str:
        self.told += self.devices.hear()
        return "\n".join(self.told)

    def on_status(self, _: FleetStatus) -> None:
        self.hear()

    def pid_of(self, worker_id: str) -> int:
        self.hear()
        return self.devices.placed[worker_id].pid

    def ask(self, meanwhile: Callable[[], None] = lambda: None) -> Generation:
        """An answer, and something that happens after its first tokens."""
        with Client(self.fleet.address, timeout_s=WAIT_S) as client:
            with client.stream(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0) as stream:
                for index, _ in enumerate(stream):
                    if index == 3:
                        meanwhile()
            return stream.result

    def node_of(self, worker_id: str) -> str:
        """The start of the id of the node that has its supervisor."""
        self.hear()
        return self.devices.placed[worker_id].node.partition("/")[2]

    def actors(self, kind: str) -> list[psutil.Process]:
        """The oldest first."""
        children = [child for raylet in raylets_of(self.nodes.cluster) for child in raylet.children()]
        return sorted((child for child in children if kind in command_of(child)), key=psutil.Process.create_time)


class RunningChange:
    """A `shoal` command that changes the fleet; the launcher, this process, does its part while it is waited for."""

    def __init__(self, running: Running, *command: str) -> None:
        self._running = running
        self._command = command
        self._process: RunningCommand | None = None

    def start(self) -> None:
        home = self._running.fleet.config.home
        self._process = start_shoal(*self._command, f"--server={self._running.fleet.address}", home=home)

    def wait(self) -> None:
        assert self._process is not None

        command = self._process

        def look() -> int | None:
            self._running.hear()
            return command.process.poll()

        with command:
            # All workers start anew, one after the other.
            assert until(look, lambda code: code is not None, 2 * WAIT_S) == 0, command.err


def command_of(process: psutil.Process) -> str:
    """Empty where it has ended: Ray ends idle processes at any time."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def raylets_of(cluster: Any) -> list[psutil.Process]:
    return [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in cluster.list_all_nodes()]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head that computes nothing, a node with two phones' places, and two large ones."""
    small = {"object_store_memory": STORE_BYTES, "memory": 2 * 2**30}
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": QUICK}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    agents: list[psutil.Process] = []
    try:
        phones = cluster.add_node(num_cpus=1, resources={"phone": 2}, **small)
        large = [cluster.add_node(num_cpus=1, labels={"size": "large"}, **small) for _ in range(2)]
        agents = [child for raylet in raylets_of(cluster) for child in raylet.children()]
        yield Nodes(cluster, phones, large)
    finally:
        cluster.shutdown()
        # Those of nodes that were killed notice it only after minutes.
        for agent in agents:
            if agent.is_running():
                agent.kill()


@pytest.fixture(scope="module")
def running(nodes: Nodes, make_home: Callable[[], Path]) -> Iterator[Running]:
    home = make_home()
    (home / "map.toml").write_text(MAP)
    (home / "short.toml").write_text(SHORT)
    names = []
    for name in ("phone", "tablet"):
        path = home / f"{name}.toml"
        path.write_text(to_toml(swift(name)))
        names.append(str(path))
    phone, tablet = names
    fleet = LocalFleet(OrchestratorConfig(home=home, port=0), [], num_elsewhere=3)
    devices = RayDevices(
        fleet.config, [phone, phone, tablet], ray_address=nodes.cluster.address, node_map=load_map(home / "map.toml")
    )
    pids: set[int] = set()
    with devices, fleet:
        running = Running(nodes, fleet, devices, [], tablet)
        fleet.wait_ready(WAIT_S, on_status=running.on_status)
        yield running
        running.hear()
        pids = {placed.pid for placed in devices.placed.values()} - {0}
    # Those that nobody reached would end by themselves, but later.
    for pid in pids:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def test_devices_run_on_the_nodes_that_have_what_they_ask_for(running: Running) -> None:
    large = {node.node_id[:NODE_CHARS] for node in running.nodes.large}

    assert {running.node_of("phone-1"), running.node_of("phone-2")} == {running.nodes.phones.node_id[:NODE_CHARS]}
    assert running.node_of("tablet-1") in large


def test_an_answer_comes_from_them(running: Running) -> None:
    answer = running.ask()
    running.undisturbed = answer.text

    assert {stage.worker_id for stage in answer.pipeline} <= {"phone-1", "phone-2", "tablet-1"}
    assert answer.completion_tokens == NUM_TOKENS


def test_load_from_several_harnesses_is_one_report(running: Running) -> None:
    home = running.fleet.config.home
    done = run_shoal(
        "load", "server", f"--server={running.fleet.address}", "--ray=2", f"--ray-address={running.nodes.cluster.address}",
        f"--workload={home / 'short.toml'}", "--requests=4", "--rate=4", "--json=-", "--records", home=home,
    )  # fmt: skip

    report = json.loads(done.out)
    assert [record["number"] for record in report["records"]] == [0, 1, 2, 3]
    assert all(not record["error"] for record in report["records"])
    assert report["machine"].startswith("2 harnesses")


def test_load_that_is_interrupted_is_a_report_of_what_there_is(running: Running) -> None:
    home = running.fleet.config.home
    with start_shoal(
        "load", "server", f"--server={running.fleet.address}", "--ray=2", f"--ray-address={running.nodes.cluster.address}",
        f"--workload={home / 'short.toml'}", "--requests=240", "--rate=2", "--json=-", "--records", home=home,
    ) as load:  # fmt: skip
        until(lambda: re.search(r"[1-9]\d* of 240 ended", load.err))
        load.process.send_signal(signal.SIGINT)
        report = json.loads(load.read_rest())

    assert report["ending"] == "interrupted"
    assert 0 < len(report["records"]) < 240
    assert "stopping: the report has what there is" in load.err


def test_a_sweep_finds_on_the_cluster_what_it_finds_here(running: Running) -> None:
    home = running.fleet.config.home
    command = ("plan", "--sweep=streams=4,12", "--simulate", "--fleet=6", "--seconds=1", "--seeds=2", "--json")
    here = run_shoal(*command, home=home)
    there = run_shoal(*command, "--ray=4", f"--ray-address={running.nodes.cluster.address}", home=home)

    assert (here.code, there.code) == (0, 0), there.err
    assert len(json.loads(here.out)["cells"]) == 4
    assert json.loads(there.out) == json.loads(here.out)


def test_a_batch_from_several_helpers_has_every_answer_once_though_one_of_them_is_killed(running: Running) -> None:
    home = running.fleet.config.home
    prompts, out = home / "prompts.jsonl", home / "answers.jsonl"
    lines = [{"prompt": f"Fish number {number}", "ignore_eos": True, "max_tokens": 6} for number in range(NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "Hi", "top_p": 7.5}]))

    with start_shoal(
        "batch", str(prompts), f"--out={out}", f"--server={running.fleet.address}", "--concurrency=8", "--ray=2",
        f"--ray-address={running.nodes.cluster.address}", home=home,
    ) as driver:  # fmt: skip
        until(lambda: out.exists() and out.read_bytes().count(b"\n"), lambda count: count >= NUM_PROMPTS // 4)
        # The second one may come late; then it has lines that wait for it.
        *_, second = until(lambda: running.actors("_Helper"), lambda helpers: len(helpers) == 2)
        second.kill()
        code = until(driver.process.poll, lambda code: code is not None)

    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["line"] for answer in answers] == list(range(1, NUM_PROMPTS + 2))
    assert all(answer["completion_tokens"] == 6 for answer in answers[:-1])
    assert (answers[-1]["error"]["reason"], answers[-1]["error"]["field"]) == ("INVALID_REQUEST", "sampling.top_p")
    assert code == 1, driver.err


def test_killed_supervisors_leave_their_workers_to_the_next_ones(running: Running) -> None:
    before = {worker_id: running.pid_of(worker_id) for worker_id in running.devices.worker_ids}
    kept_before = running.hear().count(KEPT)
    killed = running.actors("Supervisor")

    def kill_supervisors() -> None:
        for supervisor in killed:
            supervisor.kill()

    answer = running.ask(kill_supervisors)
    until(running.hear, lambda told: told.count(KEPT) - kept_before >= 3)

    assert len(killed) == 3
    assert answer.text == running.undisturbed
    assert answer.num_recoveries == 0
    assert {worker_id: running.pid_of(worker_id) for worker_id in before} == before


def test_a_killed_worker_is_started_again_by_its_supervisor(running: Running) -> None:
    pid = running.pid_of("phone-2")

    answer = running.ask(psutil.Process(pid).kill)
    until(lambda: running.pid_of("phone-2"), lambda now: now not in (0, pid))

    assert answer.text == running.undisturbed
    assert "phone-2 has ended" in running.hear()


def test_a_fleet_grows_and_shrinks_while_it_answers(running: Running) -> None:
    changing = RunningChange(running, "scale", f"{running.tablet}=2")
    grown = running.ask(changing.start)
    changing.wait()
    joined = running.worker_ids
    changing = RunningChange(running, "scale", f"{running.tablet}=1")
    shrunk = running.ask(changing.start)
    changing.wait()

    assert (grown.text, shrunk.text) == (running.undisturbed, running.undisturbed)
    assert joined == {"phone-1", "phone-2", "tablet-1", "tablet-2"}
    assert running.worker_ids == {"phone-1", "phone-2", "tablet-1"}


def test_workers_are_started_anew_one_after_the_other_while_they_answer(running: Running) -> None:
    before = {worker_id: running.pid_of(worker_id) for worker_id in running.devices.worker_ids}

    changing = RunningChange(running, "roll")
    answer = running.ask(changing.start)
    changing.wait()

    assert answer.text == running.undisturbed
    until(lambda: all(running.pid_of(worker_id) not in (0, pid) for worker_id, pid in before.items()))


def test_a_change_that_is_killed_half_way_leaves_nobody_cordoned(running: Running) -> None:
    desk = Desk(running.fleet.config.home, running.fleet.config.port)
    with Client(running.fleet.address) as client:
        until(client.status, lambda status: len(status.devices) == 3 and status.is_complete)
        with start_shoal(
            "roll", f"--server={running.fleet.address}", home=running.fleet.config.home
        ) as rolling:  # fmt: skip
            until(client.status, lambda status: any(device.is_cordoned for device in status.devices))
            rolling.process.kill()
            rolling.wait()

        # What the launcher does all the time.
        until(lambda: let_in_after_others(running.fleet.address, desk), bool)
        status = client.status()

    assert not any(device.is_cordoned for device in status.devices)
    assert not desk.cordoned
    assert running.ask().text == running.undisturbed


def test_a_device_of_a_killed_node_is_placed_on_another_one(running: Running) -> None:
    with Client(running.fleet.address) as client:
        until(client.status, lambda status: len(status.devices) == 3 and status.is_complete)
    node_id, pid = running.node_of("tablet-1"), running.pid_of("tablet-1")
    (node,) = (node for node in running.nodes.large if node.node_id.startswith(node_id))

    def kill_machine() -> None:
        # A machine that dies takes the worker with it, too.
        running.nodes.cluster.remove_node(node, allow_graceful=False)
        psutil.Process(pid).kill()

    answer = running.ask(kill_machine)
    until(lambda: running.pid_of("tablet-1"), lambda now: now not in (0, pid))

    assert answer.text == running.undisturbed
    assert running.node_of("tablet-1") != node_id


def test_without_a_head_tokens_go_on_and_so_they_do_when_ray_has_given_up(running: Running) -> None:
    with Client(running.fleet.address) as client:
        until(client.status, lambda status: len(status.devices) == 3 and status.is_complete)
    before = {worker_id: running.pid_of(worker_id) for worker_id in running.devices.worker_ids}

    def kill_head() -> None:
        for processes in running.nodes.cluster.head_node.all_processes.values():
            for started in processes:
                started.process.kill()

    answer = running.ask(kill_head)
    until(running.hear, lambda told: "Ray is lost" in told)
    later = running.ask()

    assert (answer.text, answer.num_recoveries) == (running.undisturbed, 0)
    assert (later.text, later.num_recoveries) == (running.undisturbed, 0)
    assert {worker_id: running.devices.placed[worker_id].pid for worker_id in before} == before


def test_a_cluster_that_is_not_there_is_told_with_what_to_do(home: Path) -> None:
    config = OrchestratorConfig(home=home, port=50_001)

    with (
        pytest.raises(LaunchFailed, match="ray start --head"),
        RayDevices(config, ["phone"], ray_address="127.0.0.1:1") as devices,
    ):
        until(devices.hear, lambda told: bool(told), bound_s=WAIT_S)

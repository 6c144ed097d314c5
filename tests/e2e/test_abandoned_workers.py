"""A worker whose keeper is gone: it serves as long as it has an orchestrator, and is not left behind without one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from launch import detached
from launch.detached import Keeper, WorkerOrder
from launch.local import LocalFleet
from shoal import Client
from shoal.config import OrchestratorConfig
from tests.support.commands import WAIT_S, processes_of, until

pytestmark = pytest.mark.e2e


def test_an_abandoned_worker_goes_on_and_ends_after_its_orchestrator(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "LINGER_S", 0.5)
    with LocalFleet(OrchestratorConfig(home=home, port=0), [], num_elsewhere=1) as fleet:
        keeper = Keeper(WorkerOrder("phone-1", fleet.address, "phone", home=str(home)))
        worker = psutil.Process(keeper.tend().pid)
        fleet.wait_ready(WAIT_S)

        keeper.forsake()
        until(keeper.log_path.read_text, lambda log: "abandoned" in log)
        with Client(fleet.address, timeout_s=WAIT_S) as client:
            answer = client.generate("Hi", max_tokens=4)

        assert answer.completion_tokens == 4
        assert worker.is_running()
    until(lambda: processes_of(home), lambda left: not left)

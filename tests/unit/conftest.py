"""What unit tests share: examples without a time limit; one tiny model, imported once; for the command line and the client,
scripted servers and a run of the command in this process.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from cli import main as command_line
from tests.support.commands import Outcome
from tests.support.fake_server import FakeServer, Script
from tests.support.shards import TinyModel, make_tiny_model

Run = Callable[..., Outcome]
Serve = Callable[..., FakeServer]

# A busy machine is no fault of what is tested. All else as it was chosen, which differs in CI.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Four layers; nobody may change its store."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=4)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run `shoal` with these words, and this on its standard input."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("SHOAL_SERVER", raising=False)

    def run_command(*args: str, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["shoal", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            command_line.main()
        out, err = capsys.readouterr()
        return Outcome(int(left.value.code or 0), out, err)

    return run_command


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers with scripts of their own; they end with the test."""
    running: list[FakeServer] = []

    def start(*scripts: Script, **options: Any) -> FakeServer:
        running.append(FakeServer(*scripts, **options).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__(None, None, None)

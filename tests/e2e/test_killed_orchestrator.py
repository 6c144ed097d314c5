"""An orchestrator that is killed in mid-answer and started again: its clients' streams go on, with the same text."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.profiles import to_toml
from shoal import Client
from shoal.generation import Delta
from shoal.streams import Stream
from tests.e2e.conftest import swift
from tests.support.commands import WAIT_S, RunningCommand, processes_of, start_shoal, until

pytestmark = pytest.mark.e2e

PROMPTS = ("A very long story. Once upon a time", "Tell me about the sea, in the words of a", "1, 2, 3, 4, 5,")
NUM_TOKENS = 60
# In the middle of all three.
NUM_BEFORE = 10
OPTIONS: tuple[dict[str, Any], ...] = (
    {"seed": 1},
    {"temperature": 1.0},
    {"temperature": 0.7, "seed": 3, "num_logprobs": 1},
)


class Reader:
    """Reads a stream in a thread of its own; has_begun: some tokens of it have come."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.deltas: list[Delta] = []
        self.has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for delta in self.stream:
            self.deltas.append(delta)
            if len(self.deltas) == NUM_BEFORE:
                self.has_begun.set()

    def end(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def fleet_address(up: RunningCommand) -> str:
    """Where a fleet is, once it says that it is ready."""
    up.read_until("smollm2-135m is ready at ")
    return up.read_until(";")


def orchestrator_of(home: Path) -> psutil.Process:
    (process,) = [one for one in processes_of(home) if "orchestrator" in one.info["cmdline"]]
    return process


def swift_devices(home: Path, *names: str) -> str:
    """What --devices takes for devices as fast as this machine."""
    paths = [home / f"{name}.toml" for name in names]
    for path, name in zip(paths, names, strict=True):
        path.write_text(to_toml(swift(name)))
    return ",".join(map(str, paths))


def test_streams_go_on_when_the_orchestrator_was_killed(home: Path) -> None:
    with (
        start_shoal("up", "--port", "0", "--devices", swift_devices(home, "phone", "tablet"), home=home) as up,
        Client(fleet_address(up), timeout_s=WAIT_S, resume_s=WAIT_S) as client,
    ):
        length: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        readers = [
            Reader(client.stream(prompt, session_id=f"s{at}", **length, **options))
            for at, (prompt, options) in enumerate(zip(PROMPTS, OPTIONS, strict=True))
        ]
        assert all(reader.has_begun.wait(WAIT_S) for reader in readers)
        killed = orchestrator_of(home)
        killed.kill()
        for reader in readers:
            reader.end()

        until(lambda: up.err, lambda said: "orchestrator was ended by SIGKILL; it is started again" in said)
        assert orchestrator_of(home).pid != killed.pid
        for prompt, options, reader in zip(PROMPTS, OPTIONS, readers, strict=True):
            answer = reader.stream.result
            expected = client.generate(prompt, **length, **{**options, "seed": answer.seed})
            assert [delta.index for delta in reader.deltas] == list(range(NUM_TOKENS))
            assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
            assert answer.logprobs == expected.logprobs
            assert answer.num_resumes == 1
        assert [session.num_turns for session in client.sessions()] == [1, 1, 1]
        up.process.send_signal(signal.SIGINT)
        assert up.wait() == 0

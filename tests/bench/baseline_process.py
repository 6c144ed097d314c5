"""The benchmark's end of the baseline process: starts it, asks it, measures the machine's load meanwhile, ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.errors import LaunchFailed
from tests.bench.machine import LoadMeter
from tests.bench.pairs import Run

STOP_S = 3.0


class BaselineProcess:
    """A process that ends when this one does: it reads what only this one can write."""

    def __init__(self, home: Path, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.baseline", str(home), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, mode: str, **arguments: object) -> dict[str, Any]:
        """Have something measured. Raises LaunchFailed if the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"mode": mode, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LaunchFailed(f"the baseline process ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, meter: LoadMeter, value: str, mode: str, **arguments: object) -> Run:
        """Measure one value of an answer, with the load of the machine meanwhile."""
        meter.start()
        answer = self.ask(mode, **arguments)
        return Run(answer[value], meter.stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

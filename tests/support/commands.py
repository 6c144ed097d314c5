"""The `shoal` command as a user has it: run to its end, or running, on pipes or at a terminal of its own.

Every process gets a home folder, and is found again by it: so tests can tell that none is left. Bounds are what a busy
machine may need, not promises. Used by the end-to-end tests.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

BIN = Path(sys.executable).parent
WAIT_S = 120.0
# Between two looks at something that does not tell by itself.
LOOK_S = 0.02
# Makes the terminal on stdin the one whose Ctrl-C interrupts the command.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended and what it had printed."""

    code: int
    out: str
    err: str


def until(look: Callable[[], Seen], is_so: Callable[[Seen], bool] = bool, bound_s: float = WAIT_S) -> Seen:
    """Look again and again until what is seen is as wanted; fails with the last thing seen."""
    deadline = time.monotonic() + bound_s
    while not is_so(seen := look()):
        assert time.monotonic() < deadline, f"not so within {bound_s:g} s: {seen}"
        time.sleep(LOOK_S)
    return seen


def run_shoal(*args: str, home: Path, stdin: str = "") -> Outcome:
    """Run `shoal` to its end, without a terminal."""
    done = subprocess.run(
        [str(BIN / "shoal"), *args],
        env=_environment(home), input=stdin, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


class RunningCommand:
    """A command that runs until it ends or its `with` block does.

    columns: the width of its terminal, which then has its output and its errors; 0 for pipes, with the errors in `err`.
    """

    def __init__(self, argv: Sequence[str], home: Path, *, columns: int = 0) -> None:
        self._seen = ""
        self._err_path = home / "stderr.txt"
        if columns:
            self._source, terminal = pty.openpty()
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            streams = (terminal, terminal, terminal)
            argv = [sys.executable, "-c", _TAKE_TERMINAL, *argv]
        else:
            self._source, output = os.pipe()
            streams = (os.open(os.devnull, os.O_RDONLY), output, os.open(self._err_path, os.O_WRONLY | os.O_CREAT))
        stdin, stdout, stderr = streams
        environment = _environment(home, TERM="xterm", NO_COLOR="1")
        try:
            self.process = subprocess.Popen(
                argv, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )
        finally:
            for number in set(streams):
                os.close(number)

    @property
    def err(self) -> str:
        return self._err_path.read_text()

    def press(self, text: str) -> None:
        os.write(self._source, text.encode())

    def read_until(self, text: str) -> str:
        """Wait for a text; return what was printed since the last wait."""
        deadline = time.monotonic() + WAIT_S
        while text not in self._seen:
            chunk = self._read(deadline)
            assert chunk, f"ended without {text!r}: {self._seen!r}"
            self._seen += chunk
        before, _, self._seen = self._seen.partition(text)
        return before

    def read_rest(self) -> str:
        """All that is printed until the end."""
        deadline = time.monotonic() + WAIT_S
        while chunk := self._read(deadline):
            self._seen += chunk
        rest, self._seen = self._seen, ""
        return rest

    def _read(self, deadline: float) -> str:
        readable, _, _ = select.select([self._source], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"nothing more within {WAIT_S:g} s after {self._seen!r}"
        try:
            return os.read(self._source, 65536).decode(errors="replace")
        except OSError:
            return ""  # the other end of a terminal is closed

    def wait(self, bound_s: float = WAIT_S) -> int:
        return self.process.wait(bound_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._source)


def start_shoal(*args: str, home: Path, columns: int = 0) -> RunningCommand:
    """Start `shoal` and go on."""
    return RunningCommand([str(BIN / "shoal"), *args], home, columns=columns)


def start_program(program: str, *args: str, home: Path) -> RunningCommand:
    """Start a Python program and go on."""
    return RunningCommand([sys.executable, "-c", program, *args], home)


def processes_of(home: Path) -> list[psutil.Process]:
    """The processes that were started with this home folder, whoever's children they are."""
    return [process for process in psutil.process_iter(["cmdline", "environ"]) if _is_of(process, str(home))]


def _is_of(process: psutil.Process, home: str) -> bool:
    arguments, environment = process.info["cmdline"] or (), process.info["environ"] or {}
    return environment.get("SHOAL_HOME") == home or any(home in argument for argument in arguments)


def _environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    return {**kept, "SHOAL_HOME": str(home), **more}

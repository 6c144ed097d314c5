"""Runs chat templates in a process of their own, with bounds on time and memory that the system keeps.

A template is a program of whoever made the model, and can loop or grow without end within one expression; in here that would
take all requests with it. Decides the bounds, and that a process that reached them is replaced. Run as a program it is that
process: a line of JSON in, a line out, until its input ends. The orchestrator makes one for its tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from orchestrator.template_sandbox import FIELD, refused, run_template
from shoal.errors import InvalidRequest, NotReady

# Templates of real models take a millisecond and some megabytes.
MAX_CPU_S = 1.0
MAX_MEMORY_BYTES = 512 << 20
# By the clock, far above what a busy machine makes of the time above: for a process that was stopped, which uses none.
MAX_WAIT_S = 10.0


class TemplateProcess:
    """A process that is started when it is first needed. `run` may be called from any thread, one waits for another."""

    def __init__(self, *, max_cpu_s: float = MAX_CPU_S, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._bounds = (str(max_cpu_s), str(max_memory_bytes))
        self._running: _Running | None = None
        # Long requests are decoded in threads, and an answer must go to who asked.
        self._turn = threading.Lock()

    def run(self, source: str, names: Mapping[str, object]) -> str:
        """As `run_template`; InvalidRequest also for a template that takes more than the bounds.

        Raises NotReady if the process gives no sign, for no fault of the template's.
        """
        request = json.dumps([source, names]).encode() + b"\n"
        with self._turn:
            line = self._ask(request)
        answer = json.loads(line)
        if "refused" in answer:
            raise InvalidRequest(FIELD, answer["refused"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process; the next run would start another."""
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def _ask(self, request: bytes) -> bytes:
        if self._running is not None and self._running.process.poll() is not None:
            self.close()
        running = self._running = self._running or _Running(self._bounds)
        try:
            line = running.ask(request)
        except TimeoutError as error:
            self.close()
            raise NotReady(
                f"the process that runs the model's chat template gave no sign for {MAX_WAIT_S:g} s and is replaced: "
                "send the request again"
            ) from error
        if line.endswith(b"\n"):
            return line
        code = running.process.wait()
        self.close()
        took = (
            "more processor time than it may" if code == -signal.SIGPROF else f"its process with it (exit code {code})"
        )
        raise refused(f"it took {took}; use another template (shoal models import --chat-template)")


class _Running:
    """The process, and our end of what it reads and writes: a socket, for pipes have no bound on waiting."""

    def __init__(self, bounds: tuple[str, ...]) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(MAX_WAIT_S)
        self._answers = self._ours.makefile("rb")
        command = [sys.executable, "-m", "orchestrator.template_process", *bounds]
        with theirs:
            # Out of reach of the terminal's Ctrl-C: it ends when its input does.
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
            )

    def ask(self, request: bytes) -> bytes:
        """Return the line that answers; less if the process ends. Raises TimeoutError."""
        with contextlib.suppress(ConnectionError):
            self._ours.sendall(request)
            return self._answers.readline()
        return b""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._answers.close()
        self._ours.close()


def serve(max_cpu_s: float, max_memory_bytes: int) -> None:
    """Answer requests from standard input until it ends."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    for line in sys.stdin.buffer:
        source, names = json.loads(line)
        # Time of the processor, so that a busy machine is no fault of the template's. At its end the system ends us.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        answer = _answer(source, names)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(source: str, names: Mapping[str, object]) -> dict[str, str]:
    try:
        return {"text": run_template(source, names)}
    except InvalidRequest as error:
        return {"refused": error.message.removeprefix(f"{FIELD}: ")}


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))

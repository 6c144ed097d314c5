"""Runs chat templates in a process of their own, with bounds on time and memory that the system keeps.

A template is a program of whoever made the model, and can loop or grow without end within one expression; in here that would
take all requests with it. Decides the bounds, and that a process that reached them is replaced. Run as a program it is that
process: a line of JSON in, a line out, until its input ends. The orchestrator makes one for its tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from orchestrator.template_sandbox import FIELD, refused, run_template
from shoal.errors import InvalidRequest

# Templates of real models take a millisecond and some megabytes.
MAX_CPU_S = 1.0
MAX_MEMORY_BYTES = 512 << 20


class TemplateProcess:
    """A process that is started when it is first needed. `run` may be called from any thread, one waits for another."""

    def __init__(self, *, max_cpu_s: float = MAX_CPU_S, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        self._bounds = (str(max_cpu_s), str(max_memory_bytes))
        self._process: subprocess.Popen[bytes] | None = None
        # Long requests are decoded in threads, and an answer must go to who asked.
        self._turn = threading.Lock()

    def run(self, source: str, names: Mapping[str, object]) -> str:
        """As `run_template`; InvalidRequest also for a template that takes more than the bounds."""
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
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _ask(self, request: bytes) -> bytes:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        process = self._process = self._process or self._start()
        assert process.stdin is not None, "started with pipes"
        assert process.stdout is not None, "started with pipes"
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return line
        code = process.wait()
        self.close()
        took = (
            "more processor time than it may" if code == -signal.SIGPROF else f"its process with it (exit code {code})"
        )
        raise refused(f"it took {took}; use another template (shoal models import --chat-template)")

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "orchestrator.template_process", *self._bounds]
        # Out of reach of the terminal's Ctrl-C: it ends when its input does.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        # What was not written any more is of no use.
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
    process.wait()


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

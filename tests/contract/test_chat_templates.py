"""Chat templates run the same here and in a process of their own, which alone bounds what a hostile one may take."""

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from modelstore.chat_templates import CHAT_TEMPLATES
from orchestrator.template_process import MAX_WAIT_S, TemplateProcess, serve
from orchestrator.template_sandbox import MAX_REASON_CHARS, run_template
from shoal.errors import InvalidRequest, NotReady
from tests.support.tiny_gguf import CHAT_TEMPLATE

Run = Callable[[str, Mapping[str, object]], str]

# Some of the bounds that are used, so that a hostile template costs a test little.
MAX_CPU_S = 0.5
MAX_MEMORY_BYTES = 256 << 20


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(max_cpu_s=MAX_CPU_S, max_memory_bytes=MAX_MEMORY_BYTES)
    yield process
    process.close()


@pytest.fixture(params=["here", "process"])
def run(request: pytest.FixtureRequest, process: TemplateProcess) -> Run:
    return run_template if request.param == "here" else process.run


def names(*contents: str) -> dict[str, object]:
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
    return {"messages": messages, "tools": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, *CHAT_TEMPLATES.values()])
def test_a_template_writes_the_same_text_in_a_process(process: TemplateProcess, source: str) -> None:
    conversation = names("a\nb\u2028\x00", "ação 😀 \ue000", '"quoted" {{ no code }}')
    assert process.run(source, conversation) == run_template(source, conversation)


def test_what_a_template_says_is_shown_in_one_short_line_without_controls(run: Run) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run("{{ raise_exception('\\x1b[2J\\nroles must alternate' + 'x' * 5000) }}", names("a"))
    prefix, _, reason = caught.value.message.partition("refused these messages: ")
    assert prefix.startswith("chat.messages: ")
    assert reason.startswith(" [2J roles must alternate")
    assert reason.isprintable()
    assert len(reason) == MAX_REASON_CHARS


def test_half_a_character_of_the_templates_own_is_no_text(run: Run) -> None:
    with pytest.raises(InvalidRequest, match="half a character"):
        run("{{ '\\ud800' }}", names("\ud801"))


def test_half_a_character_that_stands_for_another_is_kept(run: Run) -> None:
    assert run("{{ messages[0].content }}", names("\ud801")) == "\ud801"


def test_a_text_that_no_prompt_could_be_is_refused(run: Run) -> None:
    with pytest.raises(InvalidRequest, match="it writes 16777217 characters"):
        run("{{ 'x' * (16 * 1024 * 1024 + 1) }}", names("a"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ '%200000000d' % 1 }}{{ '%200000000d' % 1 }}{{ '%200000000d' % 1 }}",
        "{{ 7 ** (7 ** 11) }}",
    ],
)
def test_a_template_without_an_end_is_ended(process: TemplateProcess, source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"processor time|MemoryError"):
        process.run(source, names("a"))
    assert process.run("{{ bos_token }}", names("a")) == "<s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('x' * 10 ** 10) | length }}",
        "{{ 'x'.ljust(10 ** 12) | length }}",
        "{% set ns = namespace(x='x' * 1024) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
    ],
)
def test_a_template_without_bounds_on_memory_is_refused(process: TemplateProcess, source: str) -> None:
    with pytest.raises(InvalidRequest, match="MemoryError"):
        process.run(source, names("a"))
    assert process.run("{{ bos_token }}", names("a")) == "<s>"


def test_a_process_that_was_killed_is_replaced() -> None:
    process = TemplateProcess()
    assert process.run("{{ 1 + 1 }}", names("a")) == "2"
    assert process._running is not None
    process._running.process.kill()
    process._running.process.wait()
    assert process.run("{{ 1 + 1 }}", names("a")) == "2"
    process.close()


def test_a_signal_of_the_terminal_does_not_reach_the_process(process: TemplateProcess) -> None:
    process.run("", names("a"))
    assert process._running is not None
    assert os.getpgid(process._running.process.pid) != os.getpgid(0)


def test_threads_get_their_own_answers(process: TemplateProcess) -> None:
    with ThreadPoolExecutor(4) as threads:
        texts = threads.map(lambda index: process.run("{{ messages[0].content }}", names(str(index))), range(100))
        assert list(texts) == [str(index) for index in range(100)]


@pytest.mark.parametrize("content", ["short", "longer than what a channel holds" * 100_000])
def test_a_process_that_was_stopped_is_replaced(content: str) -> None:
    process = TemplateProcess()
    assert process.run("{{ 1 + 1 }}", names("a")) == "2"
    assert process._running is not None
    os.kill(process._running.process.pid, signal.SIGSTOP)
    assert process._running._ours.gettimeout() == MAX_WAIT_S
    process._running._ours.settimeout(0.05)
    with pytest.raises(NotReady, match="gave no sign for 10 s and is replaced"):
        process.run("{{ 1 + 1 }}", names(content))
    assert process.run("{{ 1 + 1 }}", names("a")) == "2"
    process.close()


def test_the_time_between_requests_is_no_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []

    def requests() -> Iterator[bytes]:
        yield b'["", {}]'
        left.append(signal.getitimer(signal.ITIMER_PROF)[0])
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    monkeypatch.setattr("resource.setrlimit", lambda *bounds: None)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=requests()))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=io.BytesIO()))
    serve(60.0, MAX_MEMORY_BYTES)
    assert left == [0.0]


def test_the_process_ends_with_who_started_it() -> None:
    program = (
        "from orchestrator.template_process import TemplateProcess\n"
        "process = TemplateProcess(); process.run('', {})\n"
        "print(process._running.process.pid, flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen((sys.executable, "-c", program), stdin=pipe, stdout=pipe) as orchestrator:
        assert orchestrator.stdout is not None
        pid = int(orchestrator.stdout.readline())
        template_process = os.pidfd_open(pid)
        orchestrator.kill()
    ended, _, _ = select.select([template_process], [], [], 30.0)
    os.close(template_process)
    assert ended

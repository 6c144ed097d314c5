"""The command line at a terminal of its own, against a scripted orchestrator: how it is interrupted, and what it shows."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.terminal import MAX_ERROR_CHARS, note, report, say
from shoal.errors import ContextExceeded, UnsupportedModel
from tests.support.commands import RunningCommand, start_shoal
from tests.support.fake_server import ENDLESS, HELLO, FakeServer, accepted, chat_of, delta, finished
from tests.support.server_thread import WAIT_S


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[..., RunningCommand]]:
    with contextlib.ExitStack() as running:
        yield lambda *args: running.enter_context(start_shoal(*args, home=tmp_path, columns=100))


def test_an_interrupt_stops_the_answer_and_not_the_chat(open_terminal: Callable[..., RunningCommand]) -> None:
    with FakeServer(ENDLESS, HELLO) as server:
        terminal = open_terminal("chat", "--server", server.address)
        terminal.read_until("> ")
        terminal.press("one\n")
        terminal.read_until("Hel")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("stopped")
        assert server.orchestrator.is_released.wait(WAIT_S)
        terminal.read_until("> ")
        terminal.press("two\n")
        terminal.read_until("Hello")
        terminal.read_until("> ")
        terminal.press("\x04")

        assert terminal.wait() == 0
        assert chat_of(server, 1) == [("user", "one"), ("assistant", "Hel"), ("user", "two")]


def test_an_error_does_not_end_a_chat_at_a_terminal(open_terminal: Callable[..., RunningCommand]) -> None:
    with FakeServer([ContextExceeded("too long")], HELLO) as server:
        terminal = open_terminal("chat", "--server", server.address)
        terminal.read_until("> ")
        terminal.press("one\n")
        terminal.read_until("error: too long")
        terminal.press("two\n")
        terminal.read_until("Hello")

        assert chat_of(server, 1) == [("user", "two")]


def test_an_interrupted_generate_ends_its_call_with_exit_code_130(open_terminal: Callable[..., RunningCommand]) -> None:
    with FakeServer(ENDLESS) as server:
        terminal = open_terminal("generate", "hi", "--server", server.address)
        terminal.read_until("Hel")
        terminal.process.send_signal(signal.SIGINT)

        assert terminal.wait() == 130
        assert server.orchestrator.is_released.wait(WAIT_S)


def test_control_characters_of_a_model_do_not_reach_a_terminal(open_terminal: Callable[..., RunningCommand]) -> None:
    with FakeServer([accepted(), delta(0, "a\x1b]0;owned\x07b", [1]), finished()]) as server:
        terminal = open_terminal("generate", "hi", "--server", server.address)

        terminal.read_until("a]0;ownedb")


def test_what_files_and_models_say_comes_without_controls_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b]0;owned\x07\x9b2Jb"
    say(hostile)
    note(hostile)
    report(UnsupportedModel(hostile))

    printed = capsys.readouterr()
    assert printed.out == "a]0;owned2Jb\n"
    assert printed.err == "a]0;owned2Jb\nerror: a]0;owned2Jb\n"


def test_an_error_is_one_line_of_bounded_length_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    report(UnsupportedModel("architecture a\r\nb\u2028c is not supported" + "x" * 100_000))

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: architecture a b c is not supported")
    assert len(line) <= len("error: ") + MAX_ERROR_CHARS

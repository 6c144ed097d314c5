"""`shoal chat` with the real model, from a pipe and at a terminal with its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.local import LocalFleet
from shoal import Client
from tests.support.commands import run_shoal, start_shoal, until

pytestmark = pytest.mark.e2e

NAME = "My name is Ada. Please remember it."
QUESTION = "What is my name?"
LONG = "Tell me a very long story about the sea."
CTRL_C, CTRL_D = "\x03", "\x04"


def test_a_chat_from_a_pipe_answers_as_the_client_does_with_the_same_history(
    fleet: LocalFleet, home: Path, client: Client
) -> None:
    history = [{"role": "user", "content": NAME}]
    history.append({"role": "assistant", "content": client.chat(history, max_tokens=24).text})
    history.append({"role": "user", "content": QUESTION})
    answer = client.chat(history, max_tokens=24).text

    outcome = run_shoal(
        "chat", "--max-tokens", "24", "--server", fleet.address, home=home, stdin=f"{NAME}\n{QUESTION}\n"
    )

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"{history[1]['content']}\n{answer}\n"
    assert "Ada" in answer


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_the_chat(
    fleet: LocalFleet, home: Path, client: Client
) -> None:
    with start_shoal("chat", "--max-tokens", "1000", "--server", fleet.address, home=home, columns=100) as chat:
        assert "Ctrl-C stops an answer" in chat.read_until("> ")
        chat.press(f"{LONG}\n")
        chat.read_until(f"{LONG}\r\n")
        chat.read_until(" ")
        assert client.status().num_running == 1

        chat.press(CTRL_C)
        chat.read_until("stopped")
        chat.read_until("> ")
        until(client.status, lambda status: status.num_running == 0)
        chat.press("Now say goodbye.\n")
        assert "tokens/s" in chat.read_until("> ")

        chat.press(CTRL_D)
        assert chat.wait() == 0
        assert "Traceback" not in chat.read_rest()


def test_at_a_terminal_the_second_turn_knows_the_first(fleet: LocalFleet, home: Path) -> None:
    with start_shoal("chat", "--max-tokens", "24", "--server", fleet.address, home=home, columns=100) as chat:
        chat.read_until("> ")
        chat.press(f"{NAME}\n")
        chat.read_until("> ")
        chat.press(f"{QUESTION}\n")
        chat.read_until(QUESTION)

        assert "Ada" in chat.read_until("> ")

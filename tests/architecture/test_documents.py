"""What ARCHITECTURE.md says of states is what the code has, and files and functions stay small enough to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from orchestrator.core import fleet, sequence
from shoal import breaker
from worker import lifecycle

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "shoal",
    "modelstore",
    "orchestrator",
    "worker",
    "simulation",
    "launch",
    "loadtest",
    "batch",
    "evaluation",
    "cli",
)
MAX_FUNCTION_LINES = 50
MAX_FILE_LINES = 450


def documented_table(path: str) -> dict[str, set[str]]:
    """The state table under the line of ARCHITECTURE.md that names a file."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.split(f"(`{path}`)", 1)[1].split("\n\n")[1]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines()[2:]]
    return {row[0]: {state for state in row[1].split(", ") if state} if len(row) > 1 else set() for row in rows}


def actual_table(transitions: dict[Enum, frozenset[Enum]]) -> dict[str, set[str]]:
    return {state.value: {following.value for following in follow} for state, follow in transitions.items()}


@pytest.mark.parametrize(
    ("path", "transitions"),
    [
        ("orchestrator/core/sequence.py", sequence.TRANSITIONS),
        ("orchestrator/core/fleet.py", fleet.TRANSITIONS),
        ("worker/lifecycle.py", lifecycle.TRANSITIONS),
        ("shoal/breaker.py", breaker.TRANSITIONS),
    ],
)
def test_a_state_table_is_documented_as_it_is(path: str, transitions: dict[Enum, frozenset[Enum]]) -> None:
    assert documented_table(path) == actual_table(transitions)


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)


def test_no_function_is_longer_than_can_be_read_at_once() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_file_has_more_than_one_job_s_worth_of_lines() -> None:
    long = [str(path.relative_to(ROOT)) for path in sources() if len(path.read_text().splitlines()) > MAX_FILE_LINES]
    assert long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path.relative_to(ROOT)) for path in sources() if path.name != "__init__.py" and not module_doc(path)]
    assert silent == []


def module_doc(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_any_exception_is_caught_in_two_places_only() -> None:
    catchers = {
        str(path.relative_to(ROOT))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception")
    }
    assert catchers == {"shoal/rpc.py", "worker/compute.py"}

"""What `shoal scale` refuses before it asks anybody."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cli.main import app
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (["laptop"], "write NAME=COUNT"),
        (["tablet=x"], "write NAME=COUNT"),
        (["tablet=1", "tablet=2"], "more than once"),
    ],
)
def test_counts_that_make_no_sense_are_refused(counts: list[str], said: str) -> None:
    outcome = CliRunner().invoke(app, ["scale", *counts])

    assert isinstance(outcome.exception, ConfigError)
    assert said in outcome.exception.message

"""Which Redis a fleet of the command line gets."""

from __future__ import annotations

import pytest

from cli.serve import redis_url
from tests.unit.conftest import Run


@pytest.mark.parametrize(
    ("choice", "environ", "url"),
    [
        ("auto", {}, ""),
        ("auto", {"REDIS_URL": "redis://a"}, "redis://a"),
        ("auto", {"REDIS_URL": "redis://a", "SHOAL_REDIS_URL": "redis://b"}, "redis://b"),
        ("auto", {"SHOAL_REDIS_URL": ""}, ""),
        ("none", {"SHOAL_REDIS_URL": "redis://b"}, ""),
        ("rediss://c", {"SHOAL_REDIS_URL": "redis://b"}, "rediss://c"),
    ],
)
def test_a_choice_of_redis_is_an_url_or_none(choice: str, environ: dict[str, str], url: str) -> None:
    assert redis_url(choice, environ) == url


def test_up_with_an_url_that_is_none_says_which_there_are_and_no_password(run: Run) -> None:
    outcome = run("up", "--port", "0", "--redis", "http://:hush@host")

    assert outcome.code == 1
    assert "redis://HOST:PORT/DB" in outcome.err
    assert "hush" not in outcome.err

"""Errors go from one process to another, as from a helper of a batch to its driver, and are what they were."""

from __future__ import annotations

import pickle

import pytest

from shoal.errors import ConnectionFailed, InvalidRequest, ShoalError


@pytest.mark.parametrize(
    "error", [InvalidRequest("id", "is: taken"), ConnectionFailed("nobody", field="server", retry_after_s=2.0)]
)
def test_an_error_that_is_sent_is_the_same(error: ShoalError) -> None:
    sent = pickle.loads(pickle.dumps(error))

    assert type(sent) is type(error)
    assert (sent.message, sent.field, sent.retry_after_s, str(sent)) == (
        error.message, error.field, error.retry_after_s, str(error),
    )  # fmt: skip

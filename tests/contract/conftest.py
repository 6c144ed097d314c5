"""What the contract suites of fleets share: one tiny model, imported once."""

from __future__ import annotations

import pytest

from tests.support.fleet import MODEL
from tests.support.shards import TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def fleet_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Four layers and a context of 256 tokens; nobody may change its store."""
    model = make_tiny_model(tmp_path_factory.mktemp("fleet"), num_layers=4)
    assert model.manifest.name == MODEL
    return model

"""The tiny chat model of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...whole.conftest import write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a ChatML template."""
    return write_model(tmp_path_factory.mktemp("model"))

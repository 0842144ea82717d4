"""What transformers' server answers once it is started by `forge serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ASKED = """
import json, sys
from fastapi.testclient import TestClient
from forge.talking._transformers_server import list_only
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

list_only("/runs/first/export")
manager = ModelManager(device="cpu")
manager.force_model = "/runs/first/export"  # as given at the start, which would load it
client = TestClient(build_server(manager, *[None] * 6))
json.dump(client.get("/v1/models").json(), sys.stdout)
"""


@pytest.mark.slow
def test_the_served_model_is_listed_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GET /v1/models` was answered with 500 where the Hub's cache is missing, and never named a directory."""
    pytest.importorskip("fastapi")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _ASKED], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["object"] == "list"
    assert [(model["id"], model["object"]) for model in answer["data"]] == [("/runs/first/export", "model")]

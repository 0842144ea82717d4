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
_BAD = """
import json, sys
from types import SimpleNamespace
from fastapi.testclient import TestClient
from forge.talking._transformers_server import names_of, refuse_bad_requests
from transformers.cli.serving import server
from transformers.cli.serving.chat_completion import ChatCompletionHandler

resolved = []

def apply_chat_template(*_, **__):
    raise ValueError("2 tokens of images, 1 image")

class Handler(ChatCompletionHandler):
    def __init__(self):
        self.model_manager = SimpleNamespace(get_model_modality=lambda *_, **__: SimpleNamespace(value="VLM"))
        self.generation_state = SimpleNamespace(use_continuous_batching=lambda *_: False, get_manager=lambda *_, **__: None)
        self.chat_template_kwargs = {}
    def _resolve_model(self, body):
        resolved.append(body.get("model"))
        return "m", None, SimpleNamespace(apply_chat_template=apply_chat_template)

refuse_bad_requests(names_of("/runs/first/export", "runs/first"))
client = TestClient(server.build_server(None, Handler(), *[None] * 5))
part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}
asked = [{}, {"messages": [{"role": "user", "content": [part]}]}, {"messages": [{"role": "user", "content": "hi"}]}]
asked += [asked[-1] | {"model": name} for name in ("first", "runs/first", "/runs/first/export", "gpt-4")]
found = [client.post("/v1/chat/completions", json=each) for each in asked]
json.dump([(each.status_code, each.json()["error"]["message"]) for each in found] + [resolved], sys.stdout)
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


@pytest.mark.slow
def test_bad_requests_are_answered_with_what_is_wrong() -> None:
    """Status 400 and OpenAI's error object, where transformers' server answers 500; a model is known by its short name."""
    pytest.importorskip("fastapi")
    pytest.importorskip("PIL")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _BAD], capture_output=True, text=True, check=True)
    (none, image, text, *named, other, resolved) = json.loads(done.stdout)
    assert none == [400, "messages: nothing came; give a list of messages"]
    assert image[0] == text[0] == 400
    assert image[1].startswith("messages[0].content[0].image_url: 'data:image/png;base64,@@@' is no image that can be read")
    assert text[1] == "messages: this model's template and processor cannot read it: 2 tokens of images, 1 image"
    assert named == [text] * 3
    assert other == [
        400,
        "model: 'gpt-4' is not served here; ask for 'first' or 'runs/first' or '/runs/first/export', or leave model out",
    ]
    assert resolved == [None, None, *["/runs/first/export"] * 3]

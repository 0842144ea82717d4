"""`forge push`: an export goes up to the Hub in one commit, private, with its card; here to a Hub on this machine."""

from __future__ import annotations

import base64
import http.server
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import forge
from forge.cli import _app as _cli


class Hub(http.server.ThreadingHTTPServer):
    """As much of the Hub as an upload asks for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuse: int | None = None


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers of the fake Hub."""

    server: Hub

    def do_GET(self) -> None:
        """Describe a repository, or answer at all."""
        name = self.path.partition("?")[0].removeprefix("/api/models/")
        if self.path.startswith("/api/models/") and name not in self.server.repos:
            return self.answer(404, {"error": "Repository not found"}, code="RepoNotFound")
        return self.answer(200, {"id": name, **self.server.repos.get(name, {})})

    def do_POST(self) -> None:
        """Make a repository, say how files are to be sent, take a commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuse:
            return self.answer(self.server.refuse, {"error": "no"})
        if self.path.endswith("/repos/create"):
            made = json.loads(body)
            self.server.repos[f"{made['organization']}/{made['name']}"] = {
                "private": made.get("visibility") == "private" or made.get("private", False)
            }
            return self.answer(200, {"url": f"{self.server.url}/org/name"})
        if "/preupload/" in self.path:
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer(200, {"files": [{"path": file["path"], **plain} for file in json.loads(body)["files"]]})
        if "/commit/" not in self.path:
            return self.answer(200, {"errors": [], "warnings": []})  # of the card's head
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer(200, {"commitUrl": f"{self.server.url}/org/name/commit/1", "commitOid": "1", "success": True})

    def answer(self, status: int, found: dict[str, Any], code: str = "") -> None:
        """Send JSON."""
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:  # ty: ignore
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Hub on this machine, which the client is allowed to use."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def run(model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    path = tmp_path_factory.mktemp("push") / "run"
    return forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=path, max_steps=1).output_dir


@pytest.mark.slow
def test_a_run_goes_up(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file of the last export as it is, and a card with the run's proof, in a private repository; again: the same one."""
    assert _cli.main(["push", str(run), "org/name"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/org/name\n"
    assert hub.repos == {"org/name": {"private": True}}
    assert hub.tokens == {"Bearer hf_test"}
    (export,) = (run / "hf_format").glob("*/")
    card = hub.files.pop("README.md").decode()
    assert hub.files == {file.name: file.read_bytes() for file in export.iterdir()}
    assert "trained by forge sft" in card
    assert "Loaded back after training: on 4 samples its loss is " in card
    assert str(run.parent) not in card
    assert forge.push(run, "org/name") == f"{hub.url}/org/name"


def test_a_public_repository_is_asked_for(hub: Hub, run: Path) -> None:
    """A public repository is not written to by mistake."""
    hub.repos["org/open"] = {"private": False}
    with pytest.raises(forge.SettingsError, match="org/open is public: set public=True"):
        forge.push(run, "org/open")
    assert hub.files == {}
    forge.push(run, "org/open", public=True)
    forge.push(run, "org/new", public=True)
    assert hub.repos["org/new"] == {"private": False}
    assert "config.json" in hub.files


def test_a_refusal(hub: Hub, run: Path) -> None:
    """A token that may not write is an error of ours, status 1."""
    hub.refuse = 403
    with pytest.raises(forge.PushError, match=r"the Hub refuses \(403\): the token may not write there") as caught:
        forge.push(run, "org/name")
    assert caught.value.exit_status == 1


@pytest.mark.slow
def test_without_a_network(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that refuses connections, or is silent, is reported within seconds; so are a missing token and a wrong name."""
    from forge.exporting import _push

    monkeypatch.setattr(_push, "SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port, why in ((silent.getsockname()[1], "does not answer"), (1, "does not answer")):
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            with pytest.raises(forge.PushError, match=why):
                forge.push(run, "org/name")
    with pytest.raises(forge.SettingsError, match="give org/name"):
        forge.push(run, "name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(forge.SettingsError, match="HF_HUB_OFFLINE is set"):
        forge.push(run, "org/name")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(forge.SettingsError, match="no token"):
        forge.push(run, "org/name")
    assert hub.files == {}

"""Progress in a TrainJob's status, against a server that takes only what Kubeflow's does: token, certificate, schema, size."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge._errors import SettingsError
from forge.settings._trackers import TrackerSettings
from forge.trackers import _kubeflow
from forge.trackers._kubeflow import VARIABLES, KubeflowTracker, kubeflow
from forge.trackers._table import check_trackers
from forge.trackers._tracker import TrackedRun
from forge.trackers._watchers import Watchers

CERTIFICATE = Path(__file__).with_name("loopback.pem")
URL = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/us/trainjobs/first/status"


@attrs.define
class Server:
    """What the status server of Kubeflow Trainer V2 checks, and what it was sent."""

    url: str
    token: Path
    secret: str = "first"
    got: list[dict[str, Any]] = attrs.field(factory=list)
    refused: list[int] = attrs.field(factory=list)
    answer: int = 200

    def taken(self, path: str, authorization: str | None, body: bytes) -> int:
        """Return the status of an update, as the handler of the controller decides it."""
        if self.answer != 200:
            return self.answer
        if authorization != f"Bearer {self.secret}":
            return 403
        if path != URL:
            return 404
        if len(body) > 1 << 16:
            return 413
        update = json.loads(body)
        if fault := schema_fault(update):
            print(fault)
            return 422
        self.got.append(update["trainerStatus"])
        return 200


def schema_fault(update: dict[str, Any]) -> str:
    """What the schema of the TrainJob says against an update; "" for nothing."""
    status = update.get("trainerStatus", {})
    if set(update) != {"trainerStatus"} or not set(status) <= {
        *("progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime")
    }:
        return f"fields: {update}"
    for name, most in (("progressPercentage", 100), ("estimatedRemainingSeconds", 2**31 - 1)):
        if name in status and not (type(status[name]) is int and 0 <= status[name] <= most):
            return f"{name}: {status[name]!r}"
    if datetime.fromisoformat(status["lastUpdatedTime"]).tzinfo is None:
        return "lastUpdatedTime"
    if len(status.get("metrics", [])) > 256:
        return "more than 256 metrics"
    for metric in status.get("metrics", []):
        if set(metric) != {"name", "value"} or not all(
            isinstance(text, str) and 1 <= len(text) <= 64 for text in metric.values()
        ):
            return f"metric {metric}"
    return ""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running server, and the variables by which a pod finds it."""
    token = tmp_path / "token"
    token.write_text("first\n")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = found.taken(self.path, self.headers["Authorization"], body)
            if status != 200:
                found.refused.append(status)
            self.send_response(status)
            if status in (302, 307):
                self.send_header("Location", "https://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    http_server.socket = context.wrap_socket(http_server.socket, server_side=True)
    found = Server(f"https://127.0.0.1:{http_server.server_port}{URL}", token)
    for name, value in zip(VARIABLES, (found.url, CERTIFICATE, token), strict=True):
        monkeypatch.setenv(name, str(value))
    threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True).start()
    yield found
    http_server.shutdown()
    http_server.server_close()


def run_in(folder: Path, num_steps: int | None = 10) -> TrackedRun:
    return TrackedRun(directory=folder, id="an-id", settings={}, num_steps=num_steps)


def metrics(status: dict[str, Any]) -> dict[str, str]:
    return {metric["name"]: metric["value"] for metric in status["metrics"]}


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"time": "now", "step": number, "loss": 2.0 / number, "lr": 0.5, "tokens_per_second": 7.5, **more}


def write(run: Path, *lines: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The tracker's clock, in seconds."""
    now = [100.0]
    monkeypatch.setattr(_kubeflow.time, "monotonic", lambda: now[0])
    return now


def test_updates_are_five_seconds_apart_and_say_the_newest(server: Server, tmp_path: Path, clock: list[float]) -> None:
    """Progress, time left and figures under their fixed names; what comes in between is in the next update."""
    tracker = KubeflowTracker(run_in(tmp_path))
    tracker.start()
    for number in range(1, 9):
        tracker.log({"loss": 2.0 / number, "lr": 0.5, "tokens_per_second": 7.5, "eval_loss": 3.0}, number)
        clock[0] += 2.0
    assert [status["progressPercentage"] for status in server.got] == [10, 40, 70]
    assert [status.get("estimatedRemainingSeconds") for status in server.got] == [None, 12, 6]
    assert metrics(server.got[1]) == {
        "loss": "0.5",
        "eval_loss": "3.0",
        "learning_rate": "0.5",
        "tokens_per_second": "7.5",
        "global_step": "4",
    }
    assert server.refused == []


def test_the_end_is_told(server: Server, tmp_path: Path, clock: list[float]) -> None:
    """100 % once the run wrote the result of its last step; one that was stopped, or has no known length, says what it has."""
    write(tmp_path, step(9), {"step": 9, "eval_loss": 1.5}, step(10))
    tracker = KubeflowTracker(run_in(tmp_path))
    tracker.start()
    (tmp_path / "result.json").write_text('{"steps": 4}')
    tracker.finish()
    (tmp_path / "result.json").write_text('{"steps": 10}')
    tracker.finish()
    endless = KubeflowTracker(run_in(tmp_path / "none", num_steps=None))
    endless.start()
    endless.log({"loss": 1.0}, 3)
    assert [status.get("progressPercentage") for status in server.got] == [99, 100, None]
    assert server.got[1]["estimatedRemainingSeconds"] == 0
    assert metrics(server.got[1])["eval_loss"] == "1.5"
    assert metrics(server.got[2]) == {"loss": "1.0", "global_step": "3"}


def test_the_token_is_read_each_time(
    server: Server, tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """It changes every hour; with the old one an update is refused, said in the tracker's log, and nothing is raised."""
    tracker = KubeflowTracker(run_in(tmp_path))
    tracker.log({"loss": 1.0}, 1)
    server.secret, clock[0] = "second", 200.0
    tracker.log({"loss": 1.0}, 2)
    server.token.write_text("second")
    clock[0] = 300.0
    tracker.log({"loss": 1.0}, 3)
    assert server.refused == [403]
    assert "kubeflow: HTTPError: HTTP Error 403" in capsys.readouterr().out
    assert [metrics(status)["global_step"] for status in server.got] == ["1", "3"]


@pytest.mark.parametrize("fault", ["certificate", "no certificate", "no token", "redirect", "error", "nobody"])
def test_no_fault_is_raised_while_the_run_goes_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """A server that another authority vouches for, files that are not there, a redirect, which is not followed: a line each."""
    if fault == "certificate":
        monkeypatch.setenv(VARIABLES[1], ssl.get_default_verify_paths().cafile or str(tmp_path / "none"))
    if fault.startswith("no "):
        monkeypatch.setenv(VARIABLES[1 if fault == "no certificate" else 2], str(tmp_path / "none"))
    if fault == "nobody":
        monkeypatch.setenv(VARIABLES[0], "https://127.0.0.1:1/")
    server.answer = {"redirect": 307, "error": 500}.get(fault, 200)
    tracker = kubeflow(run_in(tmp_path))
    tracker.log({"loss": 1.0}, 1)
    assert capsys.readouterr().out.startswith("kubeflow: ")
    assert server.got == []
    with pytest.raises((OSError, ssl.SSLError)):
        tracker.finish()


def test_many_figures_stay_below_the_limits(server: Server, tmp_path: Path) -> None:
    """256 metrics of 64 characters at most: those with fixed names are always there, names that are too long never."""
    tracker = KubeflowTracker(run_in(tmp_path))
    values = {f"expert_load/{'x' * (number % 60)}/{number}": 1e-300 / 3 for number in range(4000)}
    tracker.log({**values, "loss": 1.0, "lr": 0.1}, 1)
    (status,) = server.got
    assert len(status["metrics"]) == 256
    assert list(metrics(status))[:3] == ["loss", "learning_rate", "global_step"]


def test_it_is_on_where_the_controller_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three variables switch it on; a list of trackers without it switches it off; outside of a TrainJob it is refused."""
    assert TrackerSettings().chosen() == ("kubeflow",)
    assert TrackerSettings(wandb_project="p").chosen() == ("wandb", "kubeflow")
    assert TrackerSettings(trackers=()).chosen() == ()
    check_trackers(["kubeflow"])
    monkeypatch.setenv(VARIABLES[0], server.url.replace("https", "http"))
    assert TrackerSettings().chosen() == ()
    with pytest.raises(SettingsError, match="must begin with https"):
        check_trackers(["kubeflow"])
    monkeypatch.delenv(VARIABLES[2])
    with pytest.raises(SettingsError, match=f"{VARIABLES[2]} is not set"):
        check_trackers(["kubeflow"])


@pytest.mark.slow
def test_a_run_ends_at_100_percent(server: Server, tmp_path: Path) -> None:
    """Sent by the process beside the run, with the number of steps that the run told it."""
    said: list[str] = []
    with Watchers(note=said.append, seconds=240) as watchers:
        watchers.begin(tmp_path / "trackers", "an-id", TrackerSettings(), {}, None, num_steps=4)
        write(tmp_path, *(step(number) for number in range(1, 5)))
        end = time.monotonic() + 240
        while not server.got and time.monotonic() < end:
            time.sleep(0.05)
        (tmp_path / "result.json").write_text('{"steps": 4}')
    assert [line for line in said if line.startswith("WARNING")] == []
    assert server.got[-1]["progressPercentage"] == 100
    assert metrics(server.got[-1])["loss"] == "0.5"
    assert server.refused == []


@pytest.mark.slow
def test_a_server_that_takes_nothing_is_said_at_the_end(server: Server, tmp_path: Path) -> None:
    """The run ends as it would; its log has a warning."""
    server.answer = 500
    said: list[str] = []
    with Watchers(note=said.append, seconds=240) as watchers:
        watchers.begin(tmp_path / "trackers", "an-id", TrackerSettings(), {}, None, num_steps=1)
        write(tmp_path, step(1))
    (warning,) = [line for line in said if line.startswith("WARNING")]
    assert "kubeflow: " in warning
    assert "500" in warning

"""Somebody who reaches a run's store, and speaks in its name."""

import subprocess
import sys

import pytest

from forge_dist import LaunchSettings, MeetingError, WorkerError, launch, topology
from forge_dist.ranks._failure_report import failure_report, rebuild_exception

# Rank 0 starts the other program while rank 1 waits for it, and beats go on; then the run ends as it would have.
WORKER = """
import os, subprocess, sys, time
from pathlib import Path
from forge_dist import LaunchSettings, join, topology, worker_report

here, what = Path(sys.argv[1]), sys.argv[2]
with worker_report(), join(topology(LaunchSettings())) as ranks:
    def work():
        environ = {name: value for name, value in os.environ.items() if name != "FORGE_RUN_SECRET"}
        address = [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]]
        while not (here / "asking_1").exists():  # rank 1 reads what is forged before the true answer is there
            time.sleep(0.05)
        subprocess.run([sys.executable, str(here / "hostile.py"), *address, str(here), what], env=environ, check=True)
        time.sleep(1.5)
        return "true"

    (here / f"asking_{ranks.rank}").touch()
    answer = ranks.first(work)
    (here / f"answer_{ranks.rank}").write_text(answer)
"""
HOSTILE = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore

host, port, here, what = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
start = f"forge/{os.environ['FORGE_ROUND']}/"
if hasattr(store, "list_keys"):  # by which anybody finds it
    assert any(key.startswith(start) for key in store.list_keys())
report = {
    "module": "hostile_module", "class": "Boom", "text": "\\x1b[2J", "traceback": "", "exit_status": 0, "rank": 7,
    "host": "nowhere", "time": 1.0, "consequence": False,
}
forged = {"failed": report, "pulse": [9, "nowhere", "rank 7 is gone"], "first/1": {"value": "forged"}}
for key in ["failed", "pulse"] if what == "speak" else forged:
    store.set(start + key, json.dumps(forged[key]))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    (tmp_path / "hostile_module.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\nclass Boom(Exception):\n    exit_status = 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    for name, value in (("INTERVAL", "0.2"), ("LIMIT", "20"), ("GRACE", "0.5")):
        monkeypatch.setenv(f"FORGE_HEARTBEAT_{name}", value)

    def go(what):
        here = topology(LaunchSettings(nproc_per_node=2), environ={})
        return launch(here, [str(tmp_path / "worker.py"), str(tmp_path), what], log_dir=tmp_path / "logs")

    return go


@pytest.mark.slow
def test_a_forged_failure_ends_nothing(run, tmp_path):
    """Keys are listed, a failure with exit status 0 is set: it ended the run with status 0; no rank heeds it now."""
    assert run("speak") == 0
    assert [(tmp_path / f"answer_{rank}").read_text() for rank in range(2)] == ["true", "true"]
    assert not (tmp_path / "imported").exists()


@pytest.mark.slow
def test_a_forged_answer_ends_the_run_with_an_error(run, tmp_path):
    """What stands for rank 0's word is refused by name; nothing of it is used, no class is imported, the status is not 0."""
    with pytest.raises(MeetingError, match="first/1 was not written by this run") as caught:
        run("answer")
    assert caught.value.exit_status == 1
    assert not (tmp_path / "answer_1").exists()
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("status", [0, -1, 256, True, "0", None, 1.5])
@pytest.mark.parametrize("kind", [("builtins", "SystemExit"), ("builtins", "ValueError"), ("nowhere", "Boom")])
def test_no_report_makes_an_exit_status_of_success(status, kind):
    """Whatever a report says, the command that raises it does not end with 0."""
    entry = failure_report(ValueError("x"), rank=0, host="h") | {"exit_status": status}
    made = rebuild_exception(entry | {"module": kind[0], "class": kind[1]})
    assert isinstance(made, WorkerError if kind[1] != "ValueError" else ValueError)
    assert getattr(made, "exit_status", 1) == 1


def test_no_module_is_imported(tmp_path):
    """A report names a module: it is not looked for, whether this process has it or not."""
    code = (
        "import sys\nfrom forge_dist.ranks._failure_report import failure_report, rebuild_exception\n"
        "report = failure_report(ValueError('x'), rank=0, host='h') | {'module': 'antigravity', 'class': 'Error'}\n"
        "print(type(rebuild_exception(report)).__name__, 'antigravity' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "WorkerError False\n"

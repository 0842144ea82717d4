"""The process of a rank, from the error that it ends with to its exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# A rank whose run fails, and whose launcher ends it while Python does what it does at an exit.
FAILING = """
import atexit, os, signal, sys, time
from types import SimpleNamespace
import forge._errors
import forge.backends._train
from forge.cli import _worker

def train(*_):
    raise {error}

def interrupted():
    print("exits", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)

forge.backends._train.train = train
_worker.read_settings = _worker.tokenized_rows = lambda *_: None
sys.modules["a_verb"] = SimpleNamespace(sft=SimpleNamespace(task=None))
atexit.register(interrupted)
_worker.main("a_verb", "sft", "settings.json")
"""


@pytest.mark.parametrize(
    ("error", "said"), [("forge._errors.SettingsError('is refused')", ""), ("RuntimeError('is a fault')", "is a fault")]
)
def test_a_rank_that_failed_is_not_interrupted_in_its_exit(error: str, said: str) -> None:
    """SIGTERM then ends it at once: nothing is printed of an exit that was interrupted, only the error of a fault."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING.format(error=error)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stdout == "exits\n"
    assert ended.returncode == -signal.SIGTERM
    assert "KeyboardInterrupt" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert (said in ended.stderr) if said else not ended.stderr


# A rank whose peer is gone, and which the launcher ends while it says so.
PEER_GONE = """
import os, signal, sys, traceback
from types import SimpleNamespace
import forge.backends._train
from forge.cli import _worker

def terminated():
    os.kill(os.getpid(), signal.SIGTERM)

def train(*_):
    try:
        raise RuntimeError("Connection closed by peer")
    finally:
        if {where!r} == "on its way":
            terminated()

def formatted(*given, original=traceback.format_exception):
    terminated()
    return original(*given)

if {where!r} == "as it is written":
    traceback.format_exception = formatted
forge.backends._train.train = train
_worker.read_settings = _worker.tokenized_rows = lambda *_: None
sys.modules["a_verb"] = SimpleNamespace(sft=SimpleNamespace(task=None))
_worker.main("a_verb", "sft", "settings.json")
"""


@pytest.mark.parametrize("where", ["on its way", "as it is written"])
def test_a_rank_whose_peer_is_gone_says_so_in_its_log(where: str, tmp_path: Path) -> None:
    """Whenever the launcher's SIGTERM comes: the traceback is in the rank's log, once, and nothing on stderr."""
    ended = subprocess.run(
        [sys.executable, "-c", PEER_GONE.format(where=where)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"RANK": "0"},
    )
    assert ended.returncode == (-signal.SIGTERM if where == "on its way" else 1)
    assert not ended.stderr
    log = (tmp_path / "rank_0.log").read_text()
    assert log.count("RuntimeError: Connection closed by peer") == 1
    assert log.startswith("Traceback")

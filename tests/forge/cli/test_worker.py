"""The process of a rank, from the error that it ends with to its exit."""

from __future__ import annotations

import signal
import subprocess
import sys

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

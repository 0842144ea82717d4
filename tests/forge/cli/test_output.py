"""Standard streams that are of another encoding than UTF-8, closed, or on a full disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = r"""
import sys
from forge.cli import _app

_app._COMMANDS = {"say": ("", lambda: (lambda: print("3 → 2", "\udce9")), {})}
sys.argv = ["forge", "say"]
sys.exit(_app.main())
"""


def test_what_an_encoding_lacks_is_escaped() -> None:
    """No command ends with UnicodeEncodeError for an arrow between two numbers."""
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", CODE], check=False, capture_output=True, env=environ)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"3 \\u2192 2 \xe9\n", b"")


CLOSED = r"""
import os, sys
from forge.cli import _app

def say():
    with open(sys.argv[2], "w") as file:
        os.system("echo printed by a library; echo and this >&2")
        file.write("the file")
    print("done")

_app._COMMANDS = {"say": ("", lambda: (lambda file: say()), {})}
sys.argv = ["forge", "say", sys.argv[1]]
sys.exit(_app.main())
"""


def test_closed_streams_are_the_null_device(tmp_path: Path) -> None:
    """A command without stdin, stdout and stderr ends with 0, and no file that it opens gets what others print."""
    file = tmp_path / "file"
    ended = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED, str(file)], check=False)
    assert (ended.returncode, file.read_text()) == (0, "the file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_output_is_said() -> None:
    """A result that cannot be printed is status 1 and one line, which blames nobody else."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", CODE], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "forge: standard output cannot be written: No space left on device.\n")

"""Standard output of another encoding than UTF-8: what it lacks is escaped, and a path is the bytes that it is."""

import os
import subprocess
import sys

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

"""Standard error that nobody reads: what is printed is dropped, and nothing ends for it."""

import os
import subprocess
import sys

CODE = """
import sys
from forge._progress import Reporter
from forge.cli._app import main

lines = []
reporter = Reporter(lambda line, **event: lines.append(line))
with reporter.steps(2):
    reporter.note("first")
    reporter.note("second")
assert lines == ["first", "second"]
print("a later line", file=sys.stderr)
sys.exit(main(["sft", "--nothing-like-it"]))
"""


def test_a_run_outlives_the_reader_of_its_progress():
    """`forge ... 2>&1 | tee log` and Ctrl-C, which ends `tee` first: no line is an error, the status is the command's."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", CODE], check=False, stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert (ended.returncode, ended.stdout) == (2, b"")

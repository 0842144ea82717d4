"""What a report says: of tests that pass, fail, are skipped, break in set-up, or were never run."""

import os
import sys
from pathlib import Path

import suite

FILE = """
import pytest
@pytest.fixture
def broken(): raise ValueError
def test_passes(): pass
def test_fails(): assert False
def test_breaks(broken): pass
@pytest.mark.skip(reason="r")
def test_is_skipped(): pass
"""


def run(folder, text, *arguments):
    (folder / "test_it.py").write_text(text)
    output = folder / "out.txt"
    arguments = [sys.executable, "test_it.py", *arguments]
    report = suite.run(*arguments, report=folder / "deep" / "report.xml", environ=dict(os.environ), root=folder, output=output)
    return report, output.read_text()


def test_counts_failures_and_times(tmp_path):
    """Each test is counted once; a failure and an error name file and test; times are by file."""
    report, printed = run(tmp_path, FILE)
    assert str(report) == "1 passed, 2 failed, 1 skipped"
    assert report.failed == ["test_it.py::test_fails", "test_it.py::test_breaks"]
    assert set(report.seconds) == {"test_it.py"}
    assert report.tests["test_it.py"] == 4
    assert "test_fails" in printed


def test_no_test_is_a_failure(tmp_path):
    """A selection that finds nothing has not passed."""
    assert run(tmp_path, FILE, "-k", "nothing")[0].failed == ["no test ran"]


def test_a_file_that_does_not_import_is_a_failure(tmp_path):
    """An error of collection is counted."""
    report, _ = run(tmp_path, "import no_such_module")
    assert len(report.failed) == 1


def test_a_run_that_dies_is_a_failure(tmp_path):
    """No report is left from an earlier run, and none at all is no success."""
    run(tmp_path, FILE)
    assert run(tmp_path, "import os\ndef test_dies(): os._exit(0)\n")[0].failed == ["pytest ended without a report"]


def test_reports_add_up(tmp_path):
    """Counts, failures and the times of a file that ran in several steps."""
    one, _ = run(tmp_path, FILE)
    other, _ = run(tmp_path, FILE)
    seconds = one.seconds["test_it.py"] + other.seconds["test_it.py"]
    one.add(other)
    assert (one.passed, len(one.failed), one.skipped, one.tests["test_it.py"]) == (2, 4, 2, 8)
    assert one.seconds["test_it.py"] == seconds


def test_temporary_folders_lie_in_memory_where_there_is_room(tmp_path, monkeypatch):
    """A folder of the run's own takes them and is removed with what is left there; without room all stays as it was."""
    with suite.temporary_folder(tmp_path) as variables:
        folder = Path(variables["TMPDIR"])
        assert folder.parent == tmp_path
        (folder / "left").write_text("behind")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(suite, "LEAST_BYTES", 1 << 80)
    for place in (tmp_path, tmp_path / "absent"):
        with suite.temporary_folder(place) as variables:
            assert variables == {}

"""How far it has come: to whoever wants to know, and nobody else."""

import io

import pytest

from forge_data.preparing import _progress
from forge_data.preparing._progress import teller, wanted


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("progress", "terminal", "answer"), [(True, True, True), (True, False, False), (False, True, False), (print, False, True)])  # fmt: skip
def test_wanted(monkeypatch, progress, terminal, answer):
    """A callable always wants to know, a person only where there is a terminal."""
    monkeypatch.setattr("sys.stderr", Terminal() if terminal else io.StringIO())
    assert wanted(progress) is answer


def test_a_line_on_a_terminal(monkeypatch):
    """One line that says row, last row and rate, written over itself, at most every tenth of a second, and wiped at the end."""
    monkeypatch.setattr("sys.stderr", Terminal())
    clock = iter([0.0, 1.0, 1.05, 2.0])
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(clock))
    with teller(True, 1000) as tell:
        for row in (100, 101, 500):
            tell(row)
    lines = _progress.sys.stderr.getvalue().split("\r")
    assert lines[0] == ""
    assert lines[1].startswith("tokenising: row 100 of 1,000 [###")
    assert "9 s left, 100 rows/s" in lines[1]
    assert lines[2].startswith("tokenising: row 500 of 1,000 [###############")
    assert lines[3:] == ["\x1b[K"]


def test_nothing_elsewhere(monkeypatch):
    """Where nobody watches nothing is written; a callable is told the row itself where the last is not known."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    for progress in (True, False):
        with teller(progress, 10) as tell:
            tell(5)
    assert _progress.sys.stderr.getvalue() == ""
    seen = []
    with teller(lambda *told: seen.append(told), None) as tell:
        tell(5)
    assert seen == [(5, 5)]

"""Progress: to a callable, or on a terminal."""

import io

import pytest

from forge_data.preparing import _progress
from forge_data.preparing._progress import is_shown, reporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("progress", "terminal", "answer"), [(True, True, True), (True, False, False), (False, True, False), (print, False, True)]
)
def test_wanted(monkeypatch, progress, terminal, answer):
    """A callable always gets progress, a person only on a terminal."""
    monkeypatch.setattr("sys.stderr", Terminal() if terminal else io.StringIO())
    assert is_shown(progress) is answer


def test_a_line_on_a_terminal(monkeypatch):
    """One line has row, last row and rate, is overwritten at most every tenth of a second, and removed at the end."""
    monkeypatch.setattr("sys.stderr", Terminal())
    clock = iter([0.0, 1.0, 1.05, 2.0])
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(clock))
    with reporter(True, 1000) as tell:
        for row in (100, 101, 500):
            tell(row)
    lines = _progress.sys.stderr.getvalue().split("\r")
    assert lines[0] == ""
    assert lines[1].startswith("tokenising: row 100 of 1,000 [###")
    assert "9 s left, 100 rows/s" in lines[1]
    assert lines[2].startswith("tokenising: row 500 of 1,000 [###############")
    assert lines[3:] == ["\x1b[K"]


def test_nothing_elsewhere(monkeypatch):
    """Without a terminal nothing is written; a callable gets the row itself where the last is unknown."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    for progress in (True, False):
        with reporter(progress, 10) as tell:
            tell(5)
    assert _progress.sys.stderr.getvalue() == ""
    seen = []
    with reporter(lambda *message: seen.append(message), None) as tell:
        tell(5)
    assert seen == [(5, 5)]

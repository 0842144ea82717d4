"""The progress report: how far a preparation is and what takes time, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from rich.console import Console

from forge import _progress
from forge._progress import Reporter


def reporter(*, terminal: bool) -> tuple[Reporter, io.StringIO]:
    """A report, and what it prints."""
    made, printed = Reporter(lambda _: None), io.StringIO()
    made._console = Console(
        file=printed, force_terminal=terminal, highlight=False, soft_wrap=True, width=100, color_system=None
    )
    return made, printed


@attrs.frozen
class Step:
    """A finished step's output, as far as it is shown."""

    step: int
    loss: float = 2.0
    figures: Mapping[str, float] = {}
    learning_rate: float = 0.1
    grad_norm: float = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as the report reads it."""
    now = [100.0]
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: now[0])
    return now


def test_a_terminal_sees_how_long_it_takes(clock: list[float]) -> None:
    """Each call on the same line, with the time left."""
    made, printed = reporter(terminal=True)
    show = made.progress("tokenizing")
    clock[0] += 10
    show(200, 1000)
    assert printed.getvalue().rstrip(" \r") == "tokenizing: 200 of 1,000, 0:40 left"
    assert printed.getvalue().endswith("\r")


def test_others_hear_each_half_minute(clock: list[float]) -> None:
    """Nothing of what is soon over, then a line each half minute; without a total only how far."""
    made, printed = reporter(terminal=False)
    show = made.progress("tokenizing")
    for done in (1, 2, 3, 4):
        clock[0] += 20
        show(done * 100, 1000)
    show(500, 0)
    clock[0] += 31
    show(600, 0)
    assert printed.getvalue().splitlines() == [
        "tokenizing: 200 of 1,000, 2:40 left",
        "tokenizing: 400 of 1,000, 2:00 left",
        "tokenizing: 600",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_steps_without_end_have_no_time_left(terminal: bool) -> None:
    """A bar without an end, or lines without one; those of a run with an end have both."""
    for steps, shown in ((None, False), (8, True)):
        made, printed = reporter(terminal=terminal)
        with made.steps(steps, done=1):
            for step in (2, 3):
                made.step(Step(step), 10.0)
        assert ("3/8" in printed.getvalue()) == shown
        if not terminal:
            assert ("ETA" in printed.getvalue()) == shown


@pytest.mark.parametrize(("width", "shown"), [(60, 0), (80, 1), (100, 2)])
def test_a_narrow_bar_keeps_its_times(width: int, shown: int) -> None:
    """Where a terminal has no room for every figure the last are left out, and nothing is cut."""
    out = Step(3, figures={"accuracy": 0.522})
    made, printed = reporter(terminal=True)
    made._console.width = width
    with made.steps(1000, done=1):
        made.step(out, 12_345.0)
    assert "3/1000 " in printed.getvalue()
    assert "loss 2.0000" in printed.getvalue()
    assert ["accuracy 0.522" in printed.getvalue(), "12,345 tokens/s" in printed.getvalue()] == [shown > 0, shown > 1]
    assert "after 0:00:00 left -:--:--" in printed.getvalue().splitlines()[-2]
    assert "…" not in printed.getvalue()


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_bar_cuts_words_only(width: int) -> None:
    """What takes time is cut where the line has no room for it, not number and times; the last figures stay at the end."""
    made, printed = reporter(terminal=True)
    made._console.width = width
    with made.steps(3000, done=3) as shown:
        shown.step(Step(4), 12_345.0)
        shown.doing("exporting samples_123456 and loading it back")
        bar: Any = made._bar
        bar.refresh()
    lines = re.split("[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.getvalue()).strip())
    for line in (next(line for line in lines if "export" in line), lines[-1]):
        assert re.fullmatch(r"step +4/3000 .* after 0:00:00 left -:--:--", line), line
        assert len(line) <= width
    assert "loss 2.0000" in lines[-1]


def test_what_takes_time_is_said() -> None:
    """In a line, or on the bar of the steps; a quiet report says nothing."""
    made, printed = reporter(terminal=False)
    made.doing("exporting")
    made.doing("measuring", line=False)
    assert printed.getvalue() == "exporting ...\n"
    made, printed = reporter(terminal=True)
    with made.steps(3) as shown:
        shown.doing("exporting")
        bar: Any = made._bar
        assert bar.tasks[0].description == "exporting"
    quiet = Reporter(lambda _: None, quiet=True)
    quiet.doing("exporting")
    quiet.progress("tokenizing")(1, 2)


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """What a file is called is no markup and no emoji, in a line and on the bar."""
    name = "info.json:a:b [/x] [bold]"
    Reporter(lambda _: None).note(name)
    assert capsys.readouterr().err == f"{name}\n"
    made, printed = reporter(terminal=True)
    with made.steps(3) as shown:
        shown.doing(name)
    assert "[/x] [bold]" in printed.getvalue()


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_what_takes_long_says_so_while_it_does(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line once it takes a while, another at its end with the time, in the log too; nothing where it is quick."""
    monkeypatch.setattr(_progress, "_SHORT_SECONDS", 0.1)
    made, printed = reporter(terminal=False)
    logged: list[str] = []
    made._log = logged.append
    with made.taking("loading it", "loaded it"):
        threading.Event().wait(seconds)
        seen = printed.getvalue()
    assert seen == ("loading it ...\n" if seconds else "")
    assert len(logged) == bool(seconds)
    assert all(re.fullmatch(r"loaded it in \d+\.\d s", line) for line in logged)


@pytest.mark.parametrize(("terminal", "live", "seen"), [(False, False, True), (True, False, False), (True, True, True)])
def test_what_a_later_line_ends(terminal: bool, live: bool, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without words for its end nothing is said of it; a terminal that shows it otherwise has no line either."""
    monkeypatch.setattr(_progress, "_SHORT_SECONDS", 0.1)
    made, printed = reporter(terminal=terminal)
    made._log = lambda _: pytest.fail("a line in the log")
    with made.taking("reading a.jsonl", live=live):
        threading.Event().wait(0.3)
    assert printed.getvalue() == ("reading a.jsonl ...\n" if seen else "")


def test_what_fails_is_not_said_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is what there is to say."""
    monkeypatch.setattr(_progress, "_SHORT_SECONDS", 0.0)
    made, printed = reporter(terminal=False)
    with pytest.raises(ValueError, match="no"), made.taking("loading it", "loaded it"):
        raise ValueError("no")
    assert "loaded" not in printed.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_name_controls_no_terminal(terminal: bool) -> None:
    """A file's name or another rank's message may hold escapes of a terminal: they are shown, and not obeyed."""
    made, printed = reporter(terminal=terminal)
    made.note("loading a\x1b[2J\x9b2Kb.jsonl\nfine")
    made.doing("exporting \x1b]0;title\x07")
    shown = printed.getvalue()
    assert "loading a\\x1b[2J\\x9b2Kb.jsonl\nfine" in shown
    assert "exporting \\x1b]0;title\\x07" in shown
    assert not set(shown) & set("\x1b\x9b\x07")


def test_what_is_done_aside_is_no_part_of_the_time_left(clock: list[float]) -> None:
    """Between two steps, said before it begins where it has words; the steps to come have none of it."""
    made, printed = reporter(terminal=False)
    with made.steps(4):
        made.step(Step(1), 10)
        clock[0] += 10
        with made.aside("comparing"):
            assert printed.getvalue().endswith("comparing ...\n")
            clock[0] += 50
        with made.aside():
            clock[0] += 50
        made.step(Step(2), 10)
    assert printed.getvalue().endswith("ETA 0:20\n")


def test_the_time_left_is_that_of_steps_after_the_first(clock: list[float]) -> None:
    """In the first of a start blocks are compiled and buffers made: it has no estimate, and later ones are not of it."""
    made, printed = reporter(terminal=False)
    with made.steps(20, done=7):
        for step, seconds in ((8, 60), (9, 2), (10, 4)):
            clock[0] += seconds
            made.step(Step(step), 10)
    first, second, third = printed.getvalue().splitlines()
    assert "ETA" not in first
    assert second.endswith("ETA 0:22")
    assert third.endswith("ETA 0:30")


def test_a_loss_of_nothing_has_no_sign() -> None:
    """GRPO's loss lies around zero: `-0.0000` is no number."""
    made, printed = reporter(terminal=False)
    with made.steps(8):
        made.step(Step(1, loss=-1e-9), 10.0)
    assert "loss 0.0000" in printed.getvalue()

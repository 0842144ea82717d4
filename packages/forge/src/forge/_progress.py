"""Training steps → a progress bar on a terminal, plain lines elsewhere, and the run's log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any, Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

import forge_dist
from forge._counted import counted, figure
from forge._printable import printable
from forge._result import RunResult, result_values
from forge._stderr import StandardError

_PATIENCE_SECONDS = 30.0
"""Seconds after which somebody without a terminal hears how far a preparation is."""
_SHORT_SECONDS = 2.0
"""Seconds that may pass without a word."""
_WIDTH = 72
_BESIDE_FIGURES = 41
"""Columns of a bar's line beside figures and number of the step: a short bar, both times, words and blanks."""
_WARNINGS = ("WARNING", "lint: ")
"""How lines begin that warn."""
_OUTCOMES = ("finished", "resumed", "skipped", "stopped_early")
"""Events that somebody who wants no progress hears of all the same."""
_SHOWN = ("accuracy", "mrr", "margin", "reward", "kl")
"""Figures of a step that its line shows beside the loss."""


class Reporter:
    """Progress report on stderr and in the log; a context manager around the steps.

    Args:
        log: appends a line to the run's log file, and with `event=` to its events.
        every: steps between two plain lines.
        quiet: print nothing, on all ranks but the first.
        brief: print warnings and how the run ends, and no progress; the log is whole.

    """

    def __init__(self, log: Callable[..., None], *, every: int = 1, quiet: bool = False, brief: bool = False) -> None:
        self._log = log
        self._every = every
        self._quiet = quiet
        self._brief = brief
        self._console = Console(
            file=cast("IO[str]", StandardError()), highlight=False, soft_wrap=True, emoji=False, quiet=quiet
        )
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._figures = ""
        """Figures of the last step, as the bar shows them."""
        self._num_steps: int | None = None
        self._done = 0
        self._began = 0.0
        self._warm = False
        self.rollout_figures = ""
        """Figures of the completions that steps train on now, shown behind a step's own."""

    def note(self, line: str, *, short: str | None = None, **event: object) -> None:
        """Print and log a line; `event="resumed"` and what else is given make it an event.

        `short` is printed in its place where no progress is wanted.
        """
        self._log(line, **event)
        if not self._brief or line.startswith(_WARNINGS) or event.get("event") in _OUTCOMES:
            self._print(short if self._brief and short is not None else line)

    def finished(self, result: RunResult, items: str) -> None:
        """Note the end of a run: steps, samples or other items, time, and where its model is."""
        skipped = f" ({result.skipped:,} skipped: not finite)" if result.skipped else ""
        self.note(
            f"finished: {counted(result.steps, 'steps')}{skipped}, {counted(result.samples, items)}, "
            f"{result.seconds:.0f} s; the model is in {result.model_dir}",
            event="finished",
            result=result_values(result),
        )

    def progress(self, what: str) -> Callable[[int, int], None]:
        """Return a function `(done, total)` that shows how far a preparation is, with time left.

        A terminal shows each call on one line, anything else a line every half minute.
        """
        began = said = time.perf_counter()

        def show(done: int, total: int) -> None:
            nonlocal said
            forge_dist.beat()
            now = time.perf_counter()
            live = self._console.is_terminal
            if self._quiet or self._brief or (not live and now - said < _PATIENCE_SECONDS):
                return
            said = now
            left = f", {_clock((now - began) / done * (total - done))} left" if total and done else ""
            line = f"{what}: {done:,}" + (f" of {total:,}{left}" if total else "")
            # The rest of a longer line before it is written over.
            self._print(line.ljust(_WIDTH) if live else line, end="\r" if live else "\n")

        return show

    def doing(self, what: str, *, line: bool = True) -> None:
        """Say what takes time now: on the bar, or where there is none in a line; never in the log.

        Who watches this process hears of it on every rank: it may take longer than a step.
        """
        forge_dist.doing(what)
        self._show(what, line=line)

    def _show(self, what: str, *, line: bool = True) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=self._cut(printable(what)))
        elif line and not self._brief:
            self._print(f"{printable(what)} ...")

    @contextmanager
    def taking(self, what: str, done: str = "", *, live: bool = True) -> Iterator[None]:
        """Say what is being done once it takes two seconds, and at its end how long it took.

        Args:
            what: such as `loading org/model`.
            done: such as `loaded org/model`, for the log; nothing where the line that follows says it.
            live: whether to say it on a terminal too, where nothing else shows it.

        """
        began = time.perf_counter()
        forge_dist.doing(what)
        waiting = threading.Timer(_SHORT_SECONDS, self._show, (what,))
        waiting.daemon = True
        if not self._quiet and (live or not self._console.is_terminal):
            waiting.start()
        try:
            yield
        finally:
            waiting.cancel()
        if done and (seconds := time.perf_counter() - began) > _SHORT_SECONDS:
            self.note(f"{done} in {_clock(seconds) if seconds >= 60 else f'{seconds:.1f} s'}")

    @contextmanager
    def aside(self, what: str = "") -> Iterator[None]:
        """Leave the block's time out of the estimate for the steps to come.

        Args:
            what: said to be done in it, if anything.
        """
        began = time.perf_counter()
        if what:
            self.doing(what)
        try:
            yield
        finally:
            self._began += time.perf_counter() - began

    def steps(self, num_steps: int | None, *, done: int = 0) -> Self:
        """Set the number of steps, `done` of them before this start: `with reporter.steps(n): ...`.

        None is a run without end.
        """
        self._num_steps, self._done, self._warm = num_steps, done, False
        return self

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        forge_dist.beat(self._done)
        if self._console.is_terminal and not self._quiet and not self._brief:
            self._bar = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                TextColumn("after"),
                TimeElapsedColumn(table_column=Column(no_wrap=True)),
                TextColumn("left"),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
                console=self._console,
            )
            self._task = self._bar.add_task("starting", total=self._num_steps, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None and self._task is not None:
            if kind is None and self._figures:
                self._bar.update(self._task, description=self._figures)  # what stays on the terminal
            self._bar.stop()
            self._bar = None

    def step(self, out: Any, tokens_per_second: float) -> None:
        """Show one finished step (a `forge_algos.StepOutput`)."""
        forge_dist.beat(out.step)
        named = [f"{name} {out.figures[name]:.3g}" for name in _SHOWN if name in out.figures]
        rollout = [self.rollout_figures] if self.rollout_figures else []
        figures = "  ".join([f"loss {figure(out.loss)}", *named, *rollout])
        speed = f"{tokens_per_second:,.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            self._figures = self._fitting(f"{figures}  {speed}")
            self._bar.update(self._task, completed=out.step, description=self._figures)
        of = "" if self._num_steps is None else f"/{self._num_steps}"
        eta = self._eta(out.step)
        if out.step % self._every and out.step != self._num_steps:
            return
        line = f"step {out.step}{of}  {figures}  lr {out.learning_rate:.3g}  grad_norm {out.grad_norm:.3g}  {speed}{eta}"
        self._log(line)
        if self._bar is None and not self._brief:
            self._print(line)

    def _eta(self, step: int) -> str:
        """Say how long the steps to come take, as those since the first of this start.

        The first one has no estimate: blocks are compiled and buffers made in it.
        """
        now = time.perf_counter()
        if not self._warm:
            self._warm, self._began, self._done = True, now, step
            return ""
        if self._num_steps is None:
            return ""
        return f"  ETA {_clock((now - self._began) / (step - self._done) * (self._num_steps - step))}"

    def _fitting(self, figures: str) -> str:
        """Leave out the last figures for which the bar's line has no room: the times would be cut."""
        while len(figures) > self._room() and "  " in figures:
            figures = figures.rpartition("  ")[0]
        return figures

    def _cut(self, words: str) -> str:
        """Cut words for which the bar's line has no room."""
        room = max(self._room(), 12)
        return words if len(words) <= room else f"{words[: room - 1]}…"

    def _room(self) -> int:
        """Return the columns of a bar's line that figures or words may take."""
        return self._console.width - _BESIDE_FIGURES - 2 * len(str(self._num_steps or ""))

    def _print(self, line: str, end: str = "\n") -> None:
        """Print what may quote the name of a file, which may hold what controls a terminal."""
        self._console.print(printable(line, keep="\n"), end=end, markup=False)


def _clock(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

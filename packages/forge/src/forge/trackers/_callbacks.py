"""Objects of a Python user → calls with copies of a run's record, which change nothing."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge._errors import SettingsError
from forge._stderr import StandardError
from forge.trackers._record import Record

METHODS = ("on_step", "on_evaluation", "on_end")
_POLL_SECONDS = 0.2
_LAST_SECONDS = 30.0


def _print(line: str) -> None:
    print(line, file=StandardError())


class Callbacks:
    """The callbacks of a run.

    `on_step(record)` gets each line of metrics.jsonl that is of a step, `on_evaluation(record)` each that is of a measurement,
    `on_end(result)` the result: copies, so that what one changes in them changes nothing. One that raises anything but
    KeyboardInterrupt, SystemExit too, is a warning and is not called again. In the process that trains they are called between
    steps, which wait for them; `following` calls them from a thread, which holds nothing up.

    Args:
        objects: those with at least one of these methods.

    Raises:
        SettingsError: an object has none of them.

    """

    def __init__(self, objects: Iterable[object] = ()) -> None:
        try:
            self._objects = list(objects)
        except TypeError:
            raise SettingsError(f"callbacks must be a list of objects, not {objects!r}.") from None
        for each in self._objects:
            if not any(callable(getattr(each, name, None)) for name in METHODS):
                raise SettingsError(
                    f"callbacks: {type(each).__name__} has none of the methods {', '.join(METHODS)}. Give an object that has "
                    "one."
                )

    def __bool__(self) -> bool:
        return bool(self._objects)

    def record(self, values: Mapping[str, Any], warn: Callable[[str], None] = _print) -> None:
        """Call `on_step` or `on_evaluation` of each with a copy of a line."""
        self._call("on_step" if "lr" in values else "on_evaluation", values, warn)

    def end(self, result: object, warn: Callable[[str], None] = _print) -> None:
        """Call `on_end` of each."""
        self._call("on_end", result, warn)

    @contextmanager
    def following(self, file: Path, warn: Callable[[str], None] = _print) -> Iterator[None]:
        """Call them, from a thread, with the lines that other processes write to a file meanwhile.

        Lines that are there already, and steps that are made again, are not reported.
        """
        if not self:
            yield
            return
        record, ended = Record(file), threading.Event()
        for _ in record.new():
            pass

        def follow() -> None:
            over = False
            while not over:
                over = ended.is_set()
                for values in record.new():
                    self.record(values, warn)
                ended.wait(_POLL_SECONDS)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_LAST_SECONDS)
            if thread.is_alive():
                warn(
                    f"WARNING: callbacks: they have not returned {_LAST_SECONDS:.0f} s after the run; it goes on without them."
                )

    def _call(self, method: str, given: object, warn: Callable[[str], None]) -> None:
        for each in self._objects:
            function = getattr(each, method, None)
            if not callable(function):
                continue
            try:
                function(copy.deepcopy(given))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a callback may raise anything, and the run goes on
                self._objects = [other for other in self._objects if other is not each]
                raised = f"{type(error).__name__}: {error}".removesuffix(": ")
                warn(f"WARNING: callback {type(each).__name__}.{method}: {raised}. It is not called again.")


@contextmanager
def random_state_kept(machine: Any) -> Iterator[None]:
    """Put the random states of Python, numpy and torch back after the block."""
    import numpy as np

    python, numpy_state, torch_state = random.getstate(), np.random.get_state(), machine.rng_state()  # noqa: NPY002 - it is put back
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002 - see above
        machine.set_rng_state(torch_state)

"""Composed settings of a verb → its run, by the backend that they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import forge
from forge._dry_run import DryRun
from forge._error_chain import exits_as_errors
from forge._errors import SettingsError
from forge.backends._names import get
from forge.backends._request import Request, params_of
from forge.run._rows import Rows, take_rows
from forge.settings._accelerate import with_accelerate
from forge.settings._backends import FORGE
from forge.settings._recipe import read_recipe
from forge.settings._settings import resolve
from forge.trackers._callbacks import Callbacks

if TYPE_CHECKING:
    from forge._result import RunResult
    from forge.tasks._task import Task


def train(task: Task, s: Any, rows: Rows | None = None, callbacks: Callbacks | None = None) -> RunResult:
    """Run a verb with composed settings, and rows in memory, by the backend that they name."""
    from forge.run._run import run

    request = Request(task, s, rows or {}, callbacks or Callbacks())
    if s.backend.backend == FORGE:
        with exits_as_errors():
            return run(*request)
    result = get(s.backend.backend).execute_training(params_of(request))
    directory = getattr(result, "model_dir", None)  # a backend of another package may return what it likes
    if directory is not None and os.environ.get("RANK", "0") == "0":
        from forge._turn_end import not_named

        # A backend of another package knows nothing of this; forge's own record the token in run.json.
        own = (Path(result.output_dir) / "run.json").is_file()
        if not own and (said := not_named(s, Path(directory))) is not None:
            from forge._progress import Reporter

            Reporter(lambda _line, **_event: None).note(said)
    return result


def rehearse(task: Task, s: Any, rows: Rows | None = None, *, target: str | None = None, cluster: bool = False) -> DryRun:
    """Say what the run would do, as the backend knows it; nothing is left behind."""

    def rehearsed() -> DryRun:
        with exits_as_errors():
            said = get(s.backend.backend).rehearse(params_of(Request(task, s, rows or {}, Callbacks())), target=target)
        return said if isinstance(said, DryRun) else DryRun(said)

    if not cluster:
        return rehearsed()
    from forge.run._preflight import preflight

    return preflight(task, s, rehearsed, for_others=target is not None)


def dry_run(
    verb: Any, recipe: str | Path | None = None, /, *, machine: str | None = None, cluster: bool = False, **settings: object
) -> DryRun:
    """Check all that can be of a run; return what it would do, and leave nothing.

    Args:
        verb: such as `forge.sft`, or its name.
        recipe: as the verb takes it.
        machine: devices that the memory plan is for, such as `8xH100-80GB` or `24GB`; this machine by default.
        cluster: first meet the other nodes of the run, on each of which this is called, and compare them.
        settings: as the verb takes them.

    Returns:
        Text for a person: steps, exports, what was chosen and why. The memory plan is printed with the other notes, and its
        figures are attributes of the text: `fits`, `peak_bytes`, `available_bytes`, `suggestions`. Of several ranks that were
        started with it the first answers, and the others return "".

    Raises:
        SettingsError: `verb` is no training verb.
        Exception: what the verb would raise before its first step.

    """
    task = _task_of(verb)
    layers = [(f"recipe {recipe}", read_recipe(recipe, task.name))] if recipe is not None else []
    accelerate_config = settings.pop("accelerate_config", None)
    Callbacks(cast("Any", settings.pop("callbacks", ())))  # which are checked, and called by nothing here
    settings, rows = take_rows(settings)
    s = resolve(task.settings, *with_accelerate(accelerate_config, *layers, ("argument", settings)))
    return rehearse(task, s, rows, target=machine, cluster=cluster)


def _task_of(verb: Any) -> Task:
    """Return the task of a training verb, a function or its name. Raises SettingsError."""
    found = getattr(forge, verb, None) if isinstance(verb, str) else verb
    task = getattr(found, "task", None)
    if task is None:
        names = " ".join(names for module, names in forge._PUBLIC.items() if module.startswith("verbs."))
        raise SettingsError(
            f"dry_run takes a training verb first, such as forge.sft or 'sft', not {verb!r}. Verbs: {', '.join(names.split())}."
        )
    return task

"""Composed settings → the parameters of a backend, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import attrs

import forge
from forge._errors import SettingsError
from forge.run._rows import Rows, take_rows
from forge.settings._recipe import as_values
from forge.settings._settings import resolve
from forge.trackers._callbacks import Callbacks

if TYPE_CHECKING:
    from forge.backends._backend import Backend
    from forge.tasks._task import Task


class Request(NamedTuple):
    """A training that a backend is asked for."""

    task: Task
    """The verb: its name, and how its rows are read."""
    settings: Any
    """All settings in their groups, such as `settings.plan.max_steps`; the backend's own are `settings.passed_on`."""
    rows: Rows
    """Setting → its rows in memory, `data_path` and `eval_data_path`."""
    callbacks: Callbacks
    """Objects that watch the run."""


def params_of(request: Request) -> dict[str, object]:
    """Return `verb`, every setting by name, and what else `Backend.execute_training` documents."""
    task, s, rows, callbacks = request
    in_memory = {name: each for name, each in rows.items() if not isinstance(each, Path)}
    stores = {name: each for name, each in rows.items() if isinstance(each, Path)}
    return {
        "verb": task.name,
        **as_values(s),
        **in_memory,
        "origins": s.origins,
        "callbacks": callbacks,
        **({"tokenized": stores} if stores else {}),
    }


def read_request(backend: Backend, params: Mapping[str, object]) -> Request:
    """Read and check a backend's parameters; settings that they leave out have defaults.

    Raises:
        SettingsError: a parameter is no setting of the verb or of the backend, or the backend does not have what it asks for.

    """
    given, rows = take_rows({name: value for name, value in params.items() if name not in _BESIDE})
    verb = params.get("verb")
    task = getattr(getattr(forge, verb, None), "task", None) if isinstance(verb, str) else None
    if task is None:
        raise SettingsError(f"verb must be the name of a training verb, such as 'sft', not {verb!r}.")
    if given.setdefault("backend", backend.name) != backend.name:
        raise SettingsError(f"backend={given['backend']} was given to the backend {backend.name}: leave it out.")
    origins = {**dict.fromkeys(given, "argument"), **cast("Mapping[str, str]", params.get("origins") or {})}
    layers = [(origins[name], {name: value}) for name, value in given.items() if origins[name] != "default"]
    s = resolve(task.settings, *layers)
    s = attrs.evolve(s, origins={**s.origins, **{name: origins[name] for name in given}})
    backend.check(task.name, s)
    callbacks = params.get("callbacks") or ()
    return Request(
        task,
        s,
        {**rows, **cast("Rows", params.get("tokenized") or {})},
        callbacks if isinstance(callbacks, Callbacks) else Callbacks(cast("Any", callbacks)),
    )


_BESIDE = ("verb", "origins", "callbacks", "tokenized")
"""Parameters that are no settings."""

"""The verbs of forge, `forge.sft(...)` and its kin: a table of their homes, and how a `Task` becomes a function."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from forge._result import RunResult
from forge.run._run import run
from forge.settings._recipe import read_recipe
from forge.settings._settings import resolve, signature_of
from forge.tasks._task import Task

VERBS: Mapping[str, str] = {
    name: f"verbs._{name}"
    for name in ("sft", "osft", "pretrain", "distill", "dpo", "orpo", "simpo", "kto", "reward", "ppo", "grpo", "rloo")
}
"""Verb → the file that it lives in, which offers `TASK` and the verb itself."""


class Verb(Protocol):
    """What users call."""

    def __call__(self, recipe: str | Path | None = None, /, **settings: object) -> RunResult:
        """Take every setting of the verb by name, and optionally a YAML recipe that they override."""
        ...


def task_of(name: str) -> Task:
    """The task of a verb, which loads its file."""
    return import_module(f"forge.{VERBS[name]}").TASK


def verb(task: Task) -> Verb:
    """Make the function that users call."""

    def call(recipe: str | Path | None = None, /, **settings: object) -> RunResult:
        layers = [(f"recipe {recipe}", read_recipe(recipe))] if recipe is not None else []
        return run(task, resolve(task.settings, *layers, ("argument", settings)))

    function: Any = call
    function.__name__ = function.__qualname__ = task.name
    function.__module__ = f"forge.{VERBS[task.name]}"
    function.__signature__ = signature_of(task.settings)
    function.__doc__ = f"{task.about}\n\n{_PROMISE.format(settings=task.settings.__name__)}"
    return function


_PROMISE = """Takes every setting of `{settings}` by name (`help` lists them; `docs/settings.md` explains them), and
optionally a YAML recipe that they override. `model_path`, `data_path` and `ckpt_output_dir` are required.

The same call with the same `ckpt_output_dir` goes on where the run was left: killed, stopped, or failed. A run that is
finished gives its result again.

Returns:
    A `RunResult`, once the export was loaded back and found to be the model that was trained.

Raises:
    SettingsError, RecipeError, RunDirectoryError: the request is wrong; nothing was written.
    PreemptedError: a signal asked the run to stop, and its state is saved.
    forge_data.ForgeDataError, forge_packing.PackingError, forge_dist.ForgeDistError, forge_algos.ForgeAlgosError,
    forge_accel.ForgeAccelError: a room refuses what it was given, saying what, where and what to do.
"""

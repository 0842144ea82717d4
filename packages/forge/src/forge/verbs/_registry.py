"""Table of the training verbs, and how a `Task` becomes the function that users call."""

from __future__ import annotations

import inspect
import signal
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import forge
from forge._errors import PreemptedError, RunInterruptedError
from forge.settings._settings import resolve, signature_of

if TYPE_CHECKING:
    from forge._result import RunResult
    from forge.tasks._task import Task

VERBS: dict[str, str] = {
    name: f"forge.{module}" for module, names in forge._PUBLIC.items() if module.startswith("verbs.") for name in names.split()
}
"""Verb → module that defines it: the public names of the modules in `verbs/`.

The command line, its help and docs/settings.md follow from this table; a row may be added at run time.
"""


class Verb(Protocol):
    """A training verb as users call it, such as `forge.sft`."""

    task: Task

    def __call__(self, recipe: str | Path | None = None, /, **settings: object) -> RunResult:
        """Run with settings by name, which override those of a YAML recipe."""
        ...


def task_of(name: str) -> Task:
    """Return the task of a verb, importing its module."""
    return getattr(import_module(VERBS[name]), name).task


def verb(task: Task) -> Verb:
    """Make the function that users call: one keyword argument for each setting of the task."""

    def call(recipe: str | Path | None = None, /, *others: object, **settings: object) -> RunResult:
        if others:
            raise TypeError(
                f"forge.{task.name} takes one recipe, and settings by name: model_path=..., data_path=..., ckpt_output_dir=..."
            )
        # Deferred, as the command line's help needs none of them.
        from forge.backends._train import train
        from forge.run._rows import take_rows
        from forge.settings._accelerate import with_accelerate
        from forge.settings._recipe import read_recipe
        from forge.trackers._callbacks import Callbacks

        layers = [(f"recipe {recipe}", read_recipe(recipe, task.name))] if recipe is not None else []
        callbacks = Callbacks(cast("Any", settings.pop("callbacks", ())))
        accelerate_config = settings.pop("accelerate_config", None)
        settings, rows = take_rows(settings)
        s = resolve(task.settings, *with_accelerate(accelerate_config, *layers, ("argument", settings)))
        try:
            return train(task, s, rows, callbacks)
        except PreemptedError as stopped:
            if stopped.received != signal.SIGINT.name:
                raise
            interrupted = RunInterruptedError(str(stopped))
            interrupted.exit_status = stopped.exit_status
        except KeyboardInterrupt as early:
            again = "the same call goes on from the last saved state, or begins again where there is none."
            interrupted = RunInterruptedError(f"interrupted; {str(early) or again}")
            interrupted.exit_status = 130
        # Raised here, where the frames of the run are not part of its traceback.
        raise interrupted

    function: Any = call
    function.task = task
    function.__name__ = function.__qualname__ = task.name
    function.__module__ = type(task).__module__
    function.__signature__ = _with_callbacks(signature_of(task.settings))
    function.__doc__ = f"{task.about}\n\n{_DOCSTRING.format(settings=task.settings.__name__)}"
    return function


def _with_callbacks(signature: inspect.Signature) -> inspect.Signature:
    """Add the arguments that are no settings: a source of them, and who watches the run."""
    callbacks = inspect.Parameter("callbacks", inspect.Parameter.KEYWORD_ONLY, default=(), annotation="Sequence[object]")
    accelerate = inspect.Parameter(
        "accelerate_config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | Path | None"
    )
    return signature.replace(parameters=[*signature.parameters.values(), accelerate, callbacks])


_DOCSTRING = """Takes every setting of `{settings}` by name (`help` lists them; `docs/settings.md` explains them), and
optionally a YAML recipe that they override. `model_path`, `data_path` and `ckpt_output_dir` are required. `data_path` and
`eval_data_path` may also be rows in memory: a `datasets.Dataset`, a list of dicts, any iterable of them. `accelerate_config` is
a file that `accelerate config` wrote, read as settings that recipe and arguments override. `callbacks` is a list of objects
with `on_step(record)`, `on_evaluation(record)` or `on_end(result)`, which watch the run and cannot change it: they are given
copies, and one that raises is a warning and is not called again. In a single process steps wait for them.

The same call with the same `ckpt_output_dir` resumes the run where it was left: killed, stopped, or failed. A run that is
finished returns its result again.

Returns:
    A `RunResult`, once the export was loaded back and compared with the model that was trained.

Raises:
    SettingsError, RecipeError, RunDirectoryError: the request is wrong; nothing was written.
    PreemptedError: a signal asked the run to stop, and its state is saved.
    KeyboardInterrupt: Ctrl-C did; its message says what became of the run.
    forge_data.ForgeDataError, forge_packing.PackingError, forge_dist.ForgeDistError, forge_algos.ForgeAlgosError,
    forge_accel.ForgeAccelError: a package refuses what it was given; the message says what, where and what to do.
    `forge.ERRORS` is all of them, for `except`; `exit_status` is that of the command.
"""

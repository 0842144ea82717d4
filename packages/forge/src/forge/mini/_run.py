"""Arguments of mini-trainer → a finished run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge._errors import SettingsError
from forge.mini._translate import translate
from forge.mini._types import TorchrunArgs, TrainingArgs

if TYPE_CHECKING:
    from forge._result import RunResult


def run_training(torch_args: TorchrunArgs, train_args: TrainingArgs) -> RunResult:
    """Train with mini-trainer's arguments, by the training verb that they ask for.

    The ranks are started here. The same call with the same `output_dir` goes on with the run, and a finished one returns its
    result again.

    Args:
        torch_args: processes, and where they meet.
        train_args: the training.

    Returns:
        The result of the run, where mini-trainer returns None.

    Raises:
        SettingsError: an argument asks for what forge does not have; messages about the translated settings name those.
        PreemptedError: a signal asked the run to stop, and its state is saved.

    """
    if torch_args is None:
        raise SettingsError("torch_args must be a forge.mini.TorchrunArgs, not None.")
    return train(torch_args, train_args)


def train(torch_args: TorchrunArgs | None, train_args: TrainingArgs) -> RunResult:
    """Train on processes that are started here, or with None on those that there are."""
    from forge.verbs._registry import task_of, verb

    name, settings = translate(torch_args, train_args)
    return verb(task_of(name))(**settings, callbacks=train_args.callbacks or ())

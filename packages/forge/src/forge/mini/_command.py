"""Flags of `mini_trainer.train` → a finished run: the command `python -m forge.mini`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from typing import Annotated, Any

import attrs
import cyclopts

import forge
from forge._errors import SettingsError
from forge.cli._app import main as run_command
from forge.cli._options import converter_of, field_texts, with_signature
from forge.mini._run import train
from forge.mini._translate import NAMES
from forge.mini._types import PretrainingConfig, TrainingArgs

_DEFAULTS: dict[str, Any] = {"lr_scheduler": "constant_with_warmup", "seed": 67}
"""Defaults of its command where its Python interface has others."""
_OWN = {
    "lr_scheduler_kwargs": (str, "{}", "Arguments of the schedule, as JSON."),
    "osft_target_patterns": (str | None, None, "With --osft: modules to decompose, with commas between."),
    "training_mode": (str, "epoch", "What ends the training: epoch, step, token or infinite."),
}
"""Option that has another type than the argument: type, default, help."""
_BLOCK_SIZE = (int | None, None, "Train on documents, cut into blocks of so many tokens.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with its flags: the messages and exit statuses are those of `forge`."""
    return run_command(argv, make=lambda _asked, _words: _app())


def _app() -> cyclopts.App:
    """Make the command line, with an option for each argument of a training."""
    app = cyclopts.App(name="forge.mini", version=forge.__version__, help_format="plaintext")
    parameters = []
    fields = {field.name: field for field in attrs.fields(attrs.resolve_types(TrainingArgs))}
    for name, field in fields.items():
        if name in ("callbacks", "pretraining_config"):
            continue
        default = _DEFAULTS.get(name, inspect.Parameter.empty if field.default is attrs.NOTHING else field.default)
        parameters.append(_option(name, *_OWN.get(name, (field.type, default, field_texts(TrainingArgs)[name]))))
    parameters.append(_option("block_size", *_BLOCK_SIZE))
    command = with_signature(
        _train,
        parameters,
        "Train with the flags of mini_trainer.train; start several ranks with torchrun, or use forge.\n\n"
        "Prints the directory of the trained model. docs/migrating/mini-trainer.md has each flag and what it is here.",
    )
    command.flags |= {ours: f"--{theirs.replace('_', '-')}" for theirs, ours in NAMES.items()}
    app.default(command)
    return app


def _option(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    kinds = {kind, *getattr(kind, "__args__", ())}
    about = cyclopts.Parameter(help=text, converter=converter_of(kinds))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


def _train(
    *,
    lr_scheduler_kwargs: str = "{}",
    osft_target_patterns: str | None = None,
    block_size: int | None = None,
    **given: Any,
) -> None:
    """Train, and print the directory of the model."""
    try:
        kwargs = json.loads(lr_scheduler_kwargs)
    except ValueError as error:
        raise SettingsError(f"lr_scheduler_kwargs is no JSON: {error}.") from error
    patterns = osft_target_patterns
    result = train(
        None,
        TrainingArgs(
            **{**_DEFAULTS, **given},
            lr_scheduler_kwargs=kwargs,
            osft_target_patterns=None if patterns is None else [each.strip(" '\"") for each in patterns.split(",")],
            pretraining_config=None if block_size is None else PretrainingConfig(block_size),
        ),
    )
    if os.environ.get("RANK", "0") == "0":
        print(result.model_dir)

"""Words of the command line → one message about all that are no commands or options.

Cyclopts stops at the first unknown option, offers the nearest one however far it is, and knows no other library's names.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, cast, get_args, get_origin

import cyclopts

from forge._errors import SettingsError
from forge.cli._flags import as_flags
from forge.settings._elsewhere import COMMANDS, unknown
from forge.settings._settings import dashed, flat_fields
from forge.verbs._registry import VERBS, task_of

_NEAR = 0.6
"""Least similarity of a command that is offered for a misspelled one: `stf` has 0.67 of `sft`."""


def check_words(app: cyclopts.App, words: Sequence[str]) -> None:
    """Raise SettingsError for an unknown command, or for all unknown options of a command.

    >>> from forge.cli._app import make_app
    >>> check_words(make_app("sft"), ["sft", "--lr", "1e-4", "--load-in-4bit"])
    Traceback (most recent call last):
    ...
    forge._errors.SettingsError: 2 unknown options:
      --lr: here it is --learning-rate
      --load-in-4bit: here it is --adapter qlora

    """
    if not words:
        return
    if not words[0].startswith("-") and words[0] not in set(app):
        raise SettingsError(_unknown_command(words[0], [name for name in app if not name.startswith("-")]))
    _check_subcommand(app, words)
    _, apps, _ = app.parse_commands(list(words))
    flags: dict[str, str] = getattr(apps[-1].default_command, "flags", {})
    if not flags:
        return
    _check_switches(apps[-1].default_command, flags, words)
    if "-" in words[: words.index("--") if "--" in words else None]:
        raise SettingsError(
            "`-` is no file here: write what comes on standard input to a file, and give that (`forge generate RUN < "
            "prompt.txt` reads a prompt)."
        )
    known = set(_spellings(flags)) | {*apps[-1].help_flags, *apps[-1].version_flags}
    names = {word: "" for word in _options(words) if word not in known}
    if names:
        settings = {flag.removeprefix("--").replace("-", "_") for flag in flags.values() if flag.startswith("--")}
        told = unknown(names, settings, what="unknown option")
        if _of_a_run(names) and "RECIPE" in flags.values() and "--model-path" not in flags.values():
            told += "\nSettings of the run are lines of the recipe, which this command takes as it is: write them there."
        raise SettingsError(as_flags(told, {**flags, **{name: f"--{name.replace('_', '-')}" for name in settings}}))


def _check_switches(command: object, flags: Mapping[str, str], words: Sequence[str]) -> None:
    """Raise SettingsError for `--keep-best true`, whose word would pass for a recipe."""
    parameters = inspect.signature(cast("Callable[..., object]", command)).parameters
    switches = {flags[name]: parameter for name, parameter in parameters.items() if _is_switch(parameter)}
    for flag, word in pairwise(words):
        asked = switches.get(dashed(flag))
        if asked is None or word.lower() not in ("true", "false"):
            continue
        if word.lower() == "true":
            raise SettingsError(f"{flag} takes no value: `{flag}` alone is true.")
        off = f"`--no-{dashed(flag[2:])}` is false" if _has_negative(asked) else f"without `{flag}` it is false"
        raise SettingsError(f"{flag} takes no value: {off}.")


def _is_switch(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return bool in (kind, *get_args(kind))


def _has_negative(parameter: inspect.Parameter) -> bool:
    options = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
    return not any(getattr(option, "negative", None) == () for option in options)


def _of_a_run(names: Collection[str]) -> bool:
    """Return whether a training verb has one of these options."""
    return any(f"--{dashed(field.name)}" in names for verb in VERBS for _, field in flat_fields(task_of(verb).settings))


def _options(words: Sequence[str]) -> Iterator[str]:
    """Yield the options among words, with dashes and without their values."""
    for word in words:
        if word == "--":
            return
        if word.startswith("--"):
            yield word.partition("=")[0].replace("_", "-")


def _spellings(flags: dict[str, str]) -> Iterator[str]:
    """Yield every spelling of every flag."""
    for flag in flags.values():
        yield flag
        yield f"--no-{flag.removeprefix('--')}"


_MEANT = {
    "prepare": "data prepare",
    "lint": "data lint",
    "show": "data show",
    "stats": "data stats",
    "convert": "config convert",
    "validate": "config validate",
    "schema": "config schema",
    "inspect": "osft inspect",
    "evaluate": "eval",
    "watch": "report",
    "ls": "recipes ls",
    "list": "recipes ls",
    "recipe": "recipes",
    "upload": "push",
    "publish": "push",
    "plot": "report",
    "check": "config validate",
    "k8s": "kubeflow",
    "kubernetes": "kubeflow",
    "sbatch": "slurm render",
    "version": "--version",
    "help": "--help",
}
"""Command that somebody may try → command that does it."""


_MEANT_OF = {
    "recipes": {
        "ls": "list all names dir",
        "show": "info cat view print describe get inspect",
        "cp": "copy save init new create edit download export",
        "run": "start train launch exec",
    },
    "config": {"validate": "check lint verify test show info", "convert": "import translate migrate", "schema": "json-schema"},
    "slurm": {"render": "generate create write make submit sbatch show script"},
    "kubeflow": {"render": "generate create write make submit apply show trainjob", "runtimes": "list ls runtime"},
}
"""Command with commands of its own → each of them, with other words for it."""


def _check_subcommand(app: cyclopts.App, words: Sequence[str]) -> None:
    """Raise SettingsError for a word that is none of a command's own commands."""
    if len(words) < 2 or words[0] not in _MEANT_OF or words[1].startswith("-"):
        return
    group, word = words[:2]
    commands = [name for name in app[group] if not name.startswith("-")]
    if word not in commands:
        meant = {other: name for name, others in _MEANT_OF[group].items() for other in others.split()}
        raise SettingsError(_unknown_command(word, commands, group, meant))


def _unknown_command(word: str, commands: Sequence[str], group: str = "", meant: Mapping[str, str] | None = None) -> str:
    """Say what an unknown command is here, or the nearest one, and name all of them."""
    near = difflib.get_close_matches(word, commands, n=1, cutoff=_NEAR)
    here = ({**COMMANDS, **_MEANT} if meant is None else meant).get(word)
    before = f"{group} " if group else ""
    told = f" Here it is `forge {before}{here}`." if here else f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown command {before + word!r}.{told} Commands: {', '.join(commands)}."

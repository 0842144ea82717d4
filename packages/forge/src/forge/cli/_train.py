"""A training verb → the command `forge VERB`, with an option for each of its settings."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, get_args

import attrs
import cyclopts

from forge._errors import RecipeError, SettingsError
from forge.cli._flags import as_flags
from forge.cli._loading import telling_of_torch
from forge.cli._options import converter_of, field_texts, with_signature
from forge.settings._backends import FORGE
from forge.settings._settings import dashed, flat_fields, groups, resolve, signature_of, with_own_settings

if TYPE_CHECKING:
    from forge.tasks._task import Task


def verb_command(task: Task, words: Sequence[str] = ()) -> Any:
    """Build `forge VERB`: one option for each settings field, its docstring as help.

    Args:
        task: the verb.
        words: the command line, whose backend may have settings of its own.

    """
    settings_class = with_own_settings(task.settings, _backend_in(words))
    named: dict[str, str] = {}

    def command(
        recipe: str | None = None,
        /,
        accelerate_config: str | None = None,
        dry_run: bool = False,
        for_: str | None = None,
        cluster: bool = False,
        **settings: object,
    ) -> int:
        from forge.settings._accelerate import with_accelerate
        from forge.settings._recipe import read_recipe

        layers = [(f"recipe {recipe}", read_recipe(recipe, task.name))] if recipe is not None else []
        flags = {
            name: of_words[name](value) if name in of_words and isinstance(value, tuple) else value
            for name, value in settings.items()
        }
        if os.getcwd() not in sys.path:
            # A console script does not look here, and `--reward rewards:correct` means the file in this directory.
            sys.path.append(os.getcwd())
        s = resolve(task.settings, *with_accelerate(accelerate_config, *layers, ("flag", flags)))
        if for_ is not None and not dry_run:
            raise SettingsError("--for names the devices of a memory plan: give --dry-run with it, or leave it out.")
        if cluster and not dry_run:
            raise SettingsError("--cluster checks the nodes of a run without running it: give --dry-run with it.")
        loading = telling_of_torch(task.name, quiet=s.report.quiet)
        if dry_run:
            from forge.backends._train import rehearse

            with loading:
                said = rehearse(task, s, target=for_, cluster=cluster)
            if said:
                # What other backends answer with are values of their own trainers' settings, which have no flags here. A line
                # that begins with `cluster:` is of the nodes, not of the flag.
                flags = {name: flag for name, flag in named.items() if name != "cluster"}
                print(as_flags(said, flags) if s.backend.backend == FORGE else said)
            # Whoever asks in a script whether a run fits reads the status.
            return 2 if said.fits is False and not cluster else 0
        from forge.backends._train import train

        with loading:
            result = train(task, s)
        if os.environ.get("RANK", "0") == "0":
            print(result.model_dir)
        return 0

    # What may be a mapping in Python and in recipes is a list of words in a shell, which its owner reads.
    of_words = {field.name: field.metadata["words"] for _, field in flat_fields(settings_class) if "words" in field.metadata}
    owners = groups(settings_class)
    order = list(owners)
    helps = {
        field.name: (group, field_texts(owners[group])[field.name] + _required(field))
        for group, field in flat_fields(settings_class)
    }
    parameters = []
    for parameter in signature_of(settings_class).parameters.values():
        if parameter.name == "recipe":
            about = cyclopts.Parameter(help="A YAML file of settings; options given beside it win.")
        else:
            group, text = helps[parameter.name]
            about = cyclopts.Parameter(
                help=text,
                group=cyclopts.Group(group.capitalize().replace("_", " "), sort_key=order.index(group)),
                consume_multiple=True,
                negative_iterable=(),
                show_default=False if parameter.default == () else None,
                converter=converter_of({parameter.annotation, *get_args(parameter.annotation)}),
            )
        words_too = parameter.name in of_words or tuple[str, ...] in get_args(parameter.annotation)
        annotation = tuple[str, ...] if words_too else parameter.annotation
        if parameter.default is None and parameter.name != "recipe":
            annotation = annotation | None
        parameters.append(parameter.replace(annotation=Annotated[annotation, about]))
    command = with_signature(
        command,
        [*parameters, *_BESIDE],
        f"{task.about}\n\n"
        f"Prints the directory of the trained model. Example: forge {task.name} --model-path org/model --data-path train.jsonl "
        "--ckpt-output-dir runs/first\n\n"
        f"Most runs give no more than {', '.join(_usual_flags(helps))}. Below are all, with their defaults.",
    )
    # The argument of forge.dry_run, in messages.
    command.flags["machine"] = "--for"
    # The name of the setting in forge_data's messages.
    command.flags["format"] = "--data-format"
    named.update(command.flags)
    return command


_USUAL = (
    *("model_path", "data_path", "ckpt_output_dir", "adapter", "learning_rate", "num_epochs", "effective_batch_size"),
    *("max_seq_len", "max_new_tokens", "reward", "teacher_path", "validation_split", "nproc_per_node"),
)
"""Settings that the help names first, of some hundred."""


def _usual_flags(known: Collection[str]) -> list[str]:
    """Return the flags of the usual settings that a verb has."""
    return [f"--{dashed(name)}" for name in _USUAL if name in known]


def _option(place: str, text: str, **more: Any) -> inspect.Parameter:
    """Make an option of a verb that is no setting: a text that may be left out."""
    described = Annotated[str | None, cyclopts.Parameter(help=text, **more)]
    return inspect.Parameter(place, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=described)


def _switch(place: str, text: str) -> inspect.Parameter:
    """Make a switch of a verb that is no setting, off by default."""
    described = Annotated[bool, cyclopts.Parameter(help=text, negative=())]
    return inspect.Parameter(place, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=described)


_BESIDE = (
    _option("accelerate_config", "A file that `accelerate config` wrote, read as settings; recipe and options win over it."),
    _switch(
        "dry_run",
        "Check all that can be checked, tokenize, plan steps and memory, and say what would happen; train nothing and leave "
        "nothing behind.",
    ),
    _option("for_", "With --dry-run: devices that the memory plan is for, such as 8xH100-80GB or 24GB.", name="--for"),
    _switch("cluster", "With --dry-run, on each node of a run: check first that they meet, are alike and share files."),
)
"""Options of a verb that are no settings: where settings come from, and whether to train at all."""


def _backend_in(words: Sequence[str]) -> object:
    """Return the backend that a command line names, itself or in its recipe; None for none."""
    for place, word in enumerate(words):
        flag, given, value = word.partition("=")
        if flag == "--backend":
            return value if given else next(iter(words[place + 1 :]), None)
    if len(words) > 1 and not words[1].startswith("-"):
        from forge.settings._recipe import read_recipe

        with suppress(RecipeError):  # the command reports it
            return read_recipe(words[1]).get("backend")
    return None


def _required(field: attrs.Attribute[Any]) -> str:
    return " Required, here or in the recipe." if field.default is attrs.NOTHING else ""

"""A training verb → the command `forge VERB`, with an option for each of its settings."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, get_args

import attrs
import cyclopts

from forge.cli._options import converter_of, field_texts, with_signature
from forge.settings._settings import flat_fields, groups, resolve, signature_of

if TYPE_CHECKING:
    from forge.tasks._task import Task


def verb_command(task: Task) -> Any:
    """Build `forge VERB`: one option for each settings field, its docstring as help."""

    def command(recipe: str | None = None, /, **settings: object) -> None:
        from forge.run._run import run
        from forge.settings._recipe import read_recipe

        layers = [(f"recipe {recipe}", read_recipe(recipe, task.name))] if recipe is not None else []
        flags = {
            name: of_words[name](value) if name in of_words and isinstance(value, tuple) else value
            for name, value in settings.items()
        }
        if os.getcwd() not in sys.path:
            # A console script does not look here, and `--reward rewards:correct` means the file in this directory.
            sys.path.append(os.getcwd())
        result = run(task, resolve(task.settings, *layers, ("flag", flags)))
        if os.environ.get("RANK", "0") == "0":
            print(result.model_dir)

    # What may be a mapping in Python and in recipes is a list of words in a shell, which its owner reads.
    of_words = {field.name: field.metadata["words"] for _, field in flat_fields(task.settings) if "words" in field.metadata}
    owners = groups(task.settings)
    order = list(owners)
    helps = {
        field.name: (group, field_texts(owners[group])[field.name] + _required(field))
        for group, field in flat_fields(task.settings)
    }
    parameters = []
    for parameter in signature_of(task.settings).parameters.values():
        if parameter.name == "recipe":
            about = cyclopts.Parameter(help="A YAML file of settings; options given beside it win.")
        else:
            group, text = helps[parameter.name]
            about = cyclopts.Parameter(
                help=text,
                group=cyclopts.Group(group.capitalize(), sort_key=order.index(group)),
                consume_multiple=True,
                negative_iterable=(),
                converter=converter_of({parameter.annotation, *get_args(parameter.annotation)}),
            )
        annotation = tuple[str, ...] if parameter.name in of_words else parameter.annotation
        if parameter.default is None and parameter.name != "recipe":
            annotation = annotation | None
        parameters.append(parameter.replace(annotation=Annotated[annotation, about]))
    command = with_signature(
        command,
        parameters,
        f"{task.about}\n\n"
        f"Prints the directory of the trained model. Example: forge {task.name} --model-path org/model --data-path train.jsonl "
        "--ckpt-output-dir runs/first",
    )
    # The name of the setting in forge_data's messages.
    command.flags["format"] = "--data-format"
    return command


def _required(field: attrs.Attribute[Any]) -> str:
    return " Required, here or in the recipe." if field.default is attrs.NOTHING else ""

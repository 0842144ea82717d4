"""`forge recipes`: shipped recipes listed, shown, copied and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import cyclopts
import yaml

from forge._errors import SettingsError
from forge._new_file import write_new_file
from forge.cli._options import command_of
from forge.clusters._words import as_words
from forge.settings._converted import converted
from forge.settings._recipe import verb_of
from forge.settings._settings import dashed, flat_fields
from forge.settings._shipped import about, shipped, shipped_recipe
from forge.verbs._registry import task_of


def ls() -> str:
    """List the shipped recipes."""
    known = shipped()
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {about(file)}" for name, file in known.items())


def show(name: str) -> str:
    """Print a recipe: what it is for, what it needs, and its settings.

    Args:
        name: The recipe.

    """
    return shipped_recipe(name).read_text(encoding="utf-8").rstrip("\n")


def cp(name: str, file: str | Path | None = None) -> str:
    """Copy a recipe into a file of your own, to change it.

    Args:
        name: The recipe.
        file: The file to write, which must not exist; by default NAME.yaml in this directory.

    """
    text = shipped_recipe(name).read_text(encoding="utf-8")
    return str(write_new_file(file or f"{name}.yaml", text))


def run(name: str, settings: Sequence[str] = ()) -> str:
    """Run a recipe with your model and data; what you give wins over the recipe.

    Args:
        name: The recipe.
        settings: Settings as name=value, then flags of the verb (--name value) if you like.

    """
    raise AssertionError(f"{name} {settings}: `as_verb` rewrites these words before they are parsed")


def as_verb(words: Sequence[str]) -> list[str]:
    """Rewrite `recipes run NAME key=value ...` as the words of its verb.

    Other words stay as they are, and so do all from the first flag on.

    >>> verb, file, *words = as_verb(["recipes", "run", "sft-lora", "model_path=m", "keep_best=true"])
    >>> verb, words
    ('sft', ['--model-path', 'm', '--keep-best'])

    """
    if list(words[:2]) != ["recipes", "run"] or len(words) < 3 or words[2].startswith("-"):
        return list(words)
    file = shipped_recipe(words[2])
    found = [verb_of(file) or "sft", str(file)]
    fields = {field.name: field for _, field in flat_fields(task_of(found[0]).settings)}
    rest = iter(words[3:])
    for word in rest:
        if word.startswith("-"):
            return [*found, word, *rest]  # from the first flag on they are the verb's own words
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise SettingsError(f"{word!r} is no setting: write name=value, such as model_path=org/model.")
        found += _flag(name, value, fields)
    return found


def _flag(name: str, text: str, fields: Mapping[str, attrs.Attribute[Any]]) -> list[str]:
    """Return the words of a flag whose value is YAML: a switch, a list, a mapping, or one word."""
    flag = f"--{dashed(name)}"
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        value = text  # a sentence with a colon
    if isinstance(value, (list, dict)) and name in fields and "words" not in fields[name].metadata:
        converted(fields[name], value, f"{name}={text}")  # refused here where it takes one value alone
    if isinstance(value, bool) and text in ("true", "false"):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    return as_words({name: value}) if isinstance(value, (list, dict)) else [flag, text]


def recipes_app() -> cyclopts.App:
    """Build `forge recipes`."""
    app = cyclopts.App(name="recipes", help="List, show, copy and run the shipped recipes.", help_format="plaintext")
    app.command(command_of(ls, "forge recipes ls"), name="ls")
    app.command(command_of(show, "forge recipes show sft-lora"), name="show")
    app.command(command_of(cp, "forge recipes cp sft-lora mine.yaml", positional=2), name="cp")
    example = "forge recipes run sft-lora model_path=org/model data_path=train.jsonl ckpt_output_dir=runs/first"
    app.command(command_of(run, example, positional=2), name="run")
    return app

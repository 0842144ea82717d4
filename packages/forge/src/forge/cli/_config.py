"""`forge config`: files of settings checked, converted, or described to an editor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cyclopts
import yaml

from forge._counted import counted
from forge._errors import RecipeError, SettingsError
from forge._new_file import write_new_file
from forge.cli._options import command_of, field_texts
from forge.settings._elsewhere import unknown
from forge.settings._recipe import read_recipe, verb_of
from forge.settings._schema import recipe_schema
from forge.settings._settings import flat_fields, required, resolve
from forge.settings._yaml_fault import read_text
from forge.settings.convert._convert import Converted, convert as convert_values, library_of, read_foreign
from forge.verbs._registry import VERBS, task_of


def convert(file: str | Path, *, output: str | Path | None = None, verb: str | None = None) -> str:
    """Write a recipe from a file of another library, and list what is lost.

    Of Axolotl, LLaMA-Factory, torchtune, TRL or ms-swift, recognised from the keys, or a shell script that trains with
    ms-swift, verl or OpenRLHF, which is read and not run. What the file leaves to the library and forge has otherwise is
    written out, so that the same is trained. Without --output the recipe is printed; what was not carried over stands in it as
    comments either way.

    Args:
        file: The other library's YAML or JSON file, or a script (.sh).
        output: The recipe to write, which must not exist.
        verb: Training verb of the recipe; by default the one that the configuration asks for.

    """
    file = Path(file).expanduser()
    try:
        text = read_text(file)
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise RecipeError(f"{error}.") from error
    values = _with_files(read_foreign(text, str(file)), file.parent)
    library = library_of(values, str(file))
    found = convert_values(values, library, _fields, _checked(verb))
    task = task_of(found.verb)
    open_names = [name for name in required(task.settings, found.settings) if name not in found.settings]
    try:
        resolve(task.settings, ("recipe", {**dict.fromkeys(open_names, "?"), **found.settings}))
    except SettingsError as error:
        found.lost.append(f"to be mended: {error}")
    text = _as_text(found, open_names, f"{found.library}'s {file.name}")
    if output is None:
        return text.rstrip("\n")
    target = write_new_file(output, text, argument="output=")
    defaults = sum("default" in comment for comment in found.comments.values())
    lines = [
        f"{target}: a recipe for forge {found.verb}, {counted(len(found.settings), 'settings')} from "
        f"{found.library}'s {file.name}" + (f", {defaults} by its defaults" if defaults else "")
    ]
    lines += [f"to be given: {', '.join(open_names)}"] if open_names else []
    for group, lost in found.groups.items():
        lines += [f"{group}: {len(lost)}", *(f"  {line}" for line in lost)]
    return "\n".join([*lines, f"check it: forge config validate {target}"])


def validate(file: str | Path, verb: str | None = None) -> str:
    """Check a recipe without running it, and report all faults at once.

    Names, types, ranges, and settings that have no effect beside the others.

    Args:
        file: The recipe, or the config.yaml of a run.
        verb: Training verb that will read it; by default the one in its line `verb:`, or that of its run.

    """
    verb = _checked(verb) or _checked(verb_of(file))
    if verb is None:
        known = {name for each in VERBS for name in _fields(each)}
        found = read_recipe(file)
        names = {name: "" for name in found if name not in known}
        nested = [name for name in names if isinstance(found[name], dict)]
        also = f" Of no verb: {unknown(names, known, nested=nested)}" if names else ""
        raise SettingsError(f"{file} does not say which verb it is for: add a line `verb: sft`, or give the verb.{also}")
    task, values = task_of(verb), read_recipe(file, verb)
    given = {name for name, value in values.items() if value is not None}
    open_names = [name for name in required(task.settings, given) if name not in given]
    # What a recipe leaves to the command line is no fault of it.
    resolve(task.settings, (f"recipe {file}", {**values, **dict.fromkeys(open_names, "?")}))
    more = f"; to be given: {', '.join(open_names)}" if open_names else ""
    return f"{file}: a recipe for forge {verb}, {counted(len(given), 'settings')}{more}"


def schema(verb: str) -> str:
    """Print a JSON schema of a verb's recipes, with which an editor completes and checks them.

    In an editor with the YAML language server, the first line of a recipe says where the schema lies:
    `# yaml-language-server: $schema=sft.schema.json`.

    Args:
        verb: The training verb.

    """
    task = task_of(_checked(verb) or "sft")
    return json.dumps(recipe_schema(task.name, task.settings, field_texts), indent=2)


def config_app() -> cyclopts.App:
    """Build `forge config`."""
    app = cyclopts.App(name="config", help="Check, convert and describe files of settings.", help_format="plaintext")
    app.command(command_of(convert, "forge config convert axolotl.yaml --output recipe.yaml"), name="convert")
    app.command(command_of(validate, "forge config validate recipe.yaml", positional=2), name="validate")
    app.command(command_of(schema, "forge config schema sft > sft.schema.json"), name="schema")
    return app


def _with_files(values: dict[str, Any], beside: Path) -> dict[str, Any]:
    """Put what a named file of DeepSpeed or FSDP holds in its place, if it is there."""
    found = dict(values)
    for key in ("deepspeed", "fsdp_config"):
        for place in (beside, Path()) if isinstance(values.get(key), str) else ():
            if (named := place / values[key]).is_file():
                try:
                    found[key] = read_foreign(read_text(named), str(named))  # JSON is YAML
                except (OSError, ValueError) as error:
                    raise RecipeError(f"{key}: {error}") from error
                break
    return found


def _fields(verb: str) -> dict[str, Any]:
    """Return the fields of a verb's settings by name."""
    return {field.name: field for _, field in flat_fields(task_of(verb).settings)}


def _checked(verb: str | None) -> str | None:
    """Return the verb. Raises SettingsError where there is none of this name."""
    if verb is not None and verb not in VERBS:
        raise SettingsError(f"there is no verb {verb!r}. Verbs: {', '.join(VERBS)}.")
    return verb


def _as_text(found: Converted, open_names: list[str], origin: str) -> str:
    """Write a recipe with comments on what is missing, and on what the file does not give."""
    lines = [f"# From {origin}, by `forge config convert`."]
    for group, lost in found.groups.items():
        lines += [f"# {group.capitalize()}:", *(f"#   {line}".replace("\n", " ") for line in lost)]
    lines += [f"verb: {found.verb}", *(f"# {name}: to be given, here or as a flag" for name in open_names)]
    for name, value in found.settings.items():
        plain = {name: list(value) if isinstance(value, tuple) else value}
        first, *rest = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=2**30).splitlines()
        lines += [f"{first}  # {found.comments[name]}" if name in found.comments else first, *rest]
    return "\n".join([*lines, ""])

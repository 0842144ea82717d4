"""A YAML recipe → flat names and values, and a run's settings → a recipe that repeats it."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from forge._errors import RecipeError
from forge.settings._settings import flat_fields
from forge.settings._yaml_fault import fault_of, read_text

_NOT_READ = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")


class _Loader(yaml.SafeLoader):
    """Safe YAML loader without some surprises of YAML 1.1.

    A key given twice is refused; 010 is not read as octal, 1:30 not as a number of base 60, and 2026-11-27 not as a date.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the parent has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_READ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is no setting's name", key_node.start_mark)
            if key in seen:
                twice = f"{key!r} is given twice, first in line {seen[key]}"
                raise yaml.constructor.ConstructorError(None, None, twice, key_node.start_mark)
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))


def read_recipe(path: str | Path, verb: str | None = None) -> dict[str, object]:
    """Read a flat mapping of setting names to values from a YAML file.

    A recipe may also say which verb it is for, `verb: sft`; only that one takes it.

    Args:
        path: the file.
        verb: the training verb that reads it; None for any.

    Raises:
        RecipeError: the file is missing, is not YAML, holds a name twice, is no mapping, or is for another verb.

    """
    found = _read(_file(path))
    meant = found.pop("verb", None)
    if verb is not None and meant not in (None, verb):
        raise RecipeError(f"{path}: is a recipe for forge {meant}, by its line `verb: {meant}`, and this is forge {verb}.")
    return found


def verb_of(path: str | Path) -> str | None:
    """Return the verb that a recipe or the run whose config.yaml it is names; None for none."""
    path = _file(path)
    meant = _read(path).get("verb")
    if meant is None and path.name == "config.yaml":
        with suppress(OSError, ValueError, AttributeError):
            meant = json.loads((path.parent / "run.json").read_text(encoding="utf-8")).get("verb")
    return None if meant is None else str(meant)


def _file(path: str | Path) -> Path:
    """Return the path of a recipe. Raises RecipeError for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        found = repr(path) if isinstance(path, (int, float, bytes)) else f"a {type(path).__name__}"
        raise RecipeError(
            f"a recipe is given by the path of its YAML file, not by {found}. Settings themselves are given by name, "
            "as in forge.sft(model_path=..., data_path=..., ckpt_output_dir=...), or those of a dict by forge.sft(**settings)."
        )
    if not str(path).strip():
        raise RecipeError("the recipe has an empty name. Give a YAML file of settings, or settings alone.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RecipeError(f"{path}: there is no such user. Give a YAML file of settings.") from error


def _read(path: Path) -> dict[str, object]:
    """Read the mapping that a recipe is."""
    hint = f" Is it the data? Then give --data-path {path}." if path.suffix in {".jsonl", ".json", ".parquet"} else ""
    if path.suffix.lower() == ".toml":
        hint = " Recipes are YAML (or JSON), not TOML."
    text = ""
    try:
        text = read_text(path)
        found = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: there is no such recipe. Give a YAML file of settings, or settings alone.") from error
    except IsADirectoryError as error:
        raise RecipeError(f"{path} is a directory. Give a YAML file; a run's own is {path / 'config.yaml'}.") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}. Give a YAML file of settings.") from error
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # PyYAML's own, of !!timestamp
        raise RecipeError(f"{fault_of(error, text, path) if text else error}.{hint}") from error
    if not text.strip():
        raise RecipeError(f"{path}: is empty. Write a line name: value for each setting, or leave the recipe out.")
    if found is None:
        return {}
    if not isinstance(found, dict):
        what = {list: "a list", str: "text without a colon"}.get(type(found), f"only {found!r}")
        raise RecipeError(f"{path}: a recipe has a line `name: value` for each setting, and this file holds {what}.{hint}")
    return {name: value for name, value in found.items() if name not in left_open(text)}


def values_in(text: str) -> Any:
    """Return what a run's config.yaml holds, read by libyaml where PyYAML has it.

    A run's report reads it at every renewal; PyYAML's own parser takes ten times as long.

    Raises:
        yaml.YAMLError, RecursionError: it is not YAML, or nested without end.

    """
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a SafeLoader


def origins_in(text: str) -> dict[str, str]:
    """Return where each setting of a run's config.yaml came from: the last comment of its line."""
    return dict(re.findall(r"^(\w+): .*  # ((?:(?!  # ).)*)$", text, re.MULTILINE))


def left_open(text: str) -> set[str]:
    """Return the names that a run's config.yaml marks as default, chosen or environment.

    They are resolved anew: otherwise `forge sft RUN/config.yaml --adapter none` would train all weights with the learning rate
    that was chosen for LoRA.
    """
    found = origins_in(text)
    return {name for name, origin in found.items() if origin == "default" or origin.startswith(("chosen: ", "environment: "))}


def as_recipe(settings: Any, verb: str) -> str:
    """Write composed settings as YAML, one line each, with its origin as a comment."""
    lines = [
        f"# Every setting of this run as resolved, and where it came from. `forge {verb} FILE` reads it as a recipe:",
        "# what is marked default, chosen or environment is then left open again, everything else is as written.",
    ]
    group = None
    for owner, field in flat_fields(type(settings)):
        if owner != group:
            lines.append(f"\n# {owner}")
            group = owner
        value = getattr(getattr(settings, owner), field.name)
        origin = " ".join(settings.origins[field.name].split())
        lines.append(f"{field.name}: {_one_line(list(value) if isinstance(value, tuple) else value)}  # {origin}")
    return "\n".join(lines) + "\n"


def _one_line(value: object) -> str:
    """Write a scalar or a list of strings as YAML on one line, so that a comment can follow."""
    text = yaml.safe_dump(value, default_flow_style=True, width=2**30, allow_unicode=True).removesuffix("...\n").rstrip("\n")
    if "\n" in text:
        text = yaml.safe_dump(value, default_flow_style=True, default_style='"', width=2**30).rstrip("\n")
    return text


def as_values(settings: Any) -> dict[str, object]:
    """Flatten composed settings to names and plain values."""
    return {field.name: getattr(getattr(settings, owner), field.name) for owner, field in flat_fields(type(settings))}

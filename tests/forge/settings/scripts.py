"""Scripts that call another library → recipes that forge's verbs take, for the tests of each library."""

from __future__ import annotations

from typing import Any

from forge.settings._settings import resolve
from forge.settings.convert._convert import convert, library_of, read_foreign
from forge.verbs._registry import task_of

from .test_convert import fields

NEEDED = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "reward": ("a:b",)}


def recipe_of(text: str, library: str, verb: str | None = None) -> Any:
    """What a script of a library becomes; its verb takes it."""
    values = read_foreign(text, "run.sh")
    assert library_of(values, "run.sh") == library
    found = convert(values, library, fields, verb)
    known = fields(found.verb)
    needed = {name: value for name, value in NEEDED.items() if name in known}
    resolve(task_of(found.verb).settings, ("recipe", needed | found.settings))
    return found


def looked_at(found: Any) -> set[str]:
    """Keys that are listed as to be looked at."""
    return {line.partition(":")[0] for line in found.groups.get("not carried over, to be looked at", [])}

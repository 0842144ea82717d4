"""Recipes that the package ships → their names, files and first lines."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from forge._errors import RecipeError


def shipped() -> dict[str, Path]:
    """Return the file of each shipped recipe by its name, sorted."""
    return {file.stem: file for file in sorted(Path(str(files("forge") / "recipes")).glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """Return the file of a shipped recipe. Raises RecipeError where there is none of this name."""
    known = shipped()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        told = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"there is no recipe {name!r}.{told} Recipes: {', '.join(known)}.")
    return known[name]


def about(file: Path) -> str:
    """Return what a recipe is for, in a line: its first comment."""
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

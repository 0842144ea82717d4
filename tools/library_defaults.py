"""Compare a committed table of other libraries' defaults with their wheels: `python tools/library_defaults.py WHEEL ...`.

`forge config convert` writes out what LLaMA-Factory, Axolotl and ms-swift do by default. None can be installed beside forge, so
the defaults that it relies on were read from their sources into tests/forge/settings/library_defaults.json (release → file →
class → field → default), which a test holds the recipes to. For a newer release: `pip download --no-deps NAME`, this
script with its wheels, and the table and `forge.settings.convert` mended by what it prints.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "tests" / "forge" / "settings" / "library_defaults.json"


def default(value: ast.expr | None) -> Any:
    """Return the default of a field of a dataclass or of pydantic's; its source where it is no literal."""
    if isinstance(value, ast.Call):
        given = {word.arg: word.value for word in value.keywords}
        made = given.get("default_factory")
        inner = made.body if isinstance(made, ast.Lambda) else given.get("default")
        return default(inner if inner is not None else value.args[0] if value.args else None)
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return ast.unparse(value) if value is not None else None


def fields(source: str) -> dict[str, dict[str, Any]]:
    """Class → its annotated fields and their defaults, without running the source."""
    return {
        each.name: {
            line.target.id: default(line.value)
            for line in each.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef)
    }


def differences(wheel: Path, table: dict[str, Any]) -> list[str]:
    """Compare a wheel with the rows of its library; each difference is a line."""
    name, version = wheel.name.split("-")[:2]
    known = next((key for key in table if key.partition(" ")[0] == name and key.endswith(f" {version}")), None)
    known = known or next(key for key in table if key.partition(" ")[0] == name)
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for file, classes in table[known].items():
            read = fields(archive.read(file).decode())
            for cls, rows in classes.items():
                for field, wanted in rows.items():
                    there = read.get(cls, {})
                    if field not in there or there[field] != wanted:
                        now = repr(there[field]) if field in there else "not there"
                        found.append(f"{wheel.name}: {file}: {cls}.{field}: {now}, in the table {wanted!r}")
    return found


if __name__ == "__main__":
    lines = [line for wheel in sys.argv[1:] for line in differences(Path(wheel), json.loads(TABLE.read_text()))]
    print("\n".join(lines) or "the table holds")
    sys.exit(bool(lines))

"""Path that is no run or model → what lies there or beside it, for the error."""

from __future__ import annotations

from pathlib import Path

_NAMED = 5
_MARKS = ("config.yaml", "config.json", "adapter_config.json")
"""Files by one of which a folder is a run, a model or an adapter."""


def near(path: Path) -> str:
    """Name the runs, models and adapters in a folder, or beside what is missing; "" for none."""
    folder = path if path.is_dir() else path.parent
    try:
        found = sorted(entry.name for entry in folder.iterdir() if any((entry / name).is_file() for name in _MARKS))
    except OSError:
        return ""
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    return f" {folder}/ holds {', '.join(found[:_NAMED])}{more}." if found else ""

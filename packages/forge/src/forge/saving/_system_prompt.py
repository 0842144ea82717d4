"""Export of a run, or a copy of it → the `system_prompt` that it was trained with.

An export holds it in a file of its own, for its run's config.yaml is not beside a copy.
"""

from __future__ import annotations

import json
from pathlib import Path

from forge._errors import SettingsError
from forge.saving._directories import run_values
from forge.tasks._system_message import PROMPT_FILE, write_system_prompt


def run_system_prompt(directory: str | Path) -> str | None:
    """Return the `system_prompt` of the run that exported a directory; None without one.

    The run's config.yaml says it, or else the export's own file.

    Raises:
        SettingsError: that file is not what an export writes.

    """
    folder = Path(directory).expanduser().absolute()
    if not folder.is_dir():
        return None
    run = folder.parent.parent
    found = None
    if (run / "config.yaml").is_file():
        try:
            found = run_values(run).get("system_prompt")
        except SettingsError:
            found = None  # another program's config.yaml, above a model of no run
    return found if isinstance(found, str) else _read(folder / PROMPT_FILE)


def copy_system_prompt(source: Path, folder: Path) -> None:
    """Write it beside another export of the same model; nothing where there is none."""
    if (text := run_system_prompt(source)) is not None:
        write_system_prompt(folder, text)


def _read(file: Path) -> str | None:
    try:
        text = json.loads(file.read_text(encoding="utf-8"))["system_prompt"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise SettingsError(
            f'{file}: is not what an export writes, {{"system_prompt": "..."}}. Put it back, or remove it to ask without one.'
        )
    return text

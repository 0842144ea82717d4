"""Rows in memory for `data_path` → their description in the settings, their token stores.

Settings hold the description of the rows. The rows themselves are tokenized where they are: by the first rank in its own
process, or by the launcher, which leaves the token stores to the ranks that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forge_data
from forge._progress import Reporter
from forge.run._stores import copy_linked
from forge.tasks._task import Task

SETTINGS = ("data_path", "eval_data_path")
"""Settings that may be rows."""

Rows = Mapping[str, forge_data.InMemoryRows | Path]
"""Setting → its rows, or a store that was made of them."""


def take_rows(settings: Mapping[str, object]) -> tuple[dict[str, object], Rows]:
    """Split settings into values, with the kind of rows in the place of rows, and the rows."""
    found = {name: forge_data.InMemoryRows.of(settings.get(name), name) for name in SETTINGS}
    rows = {name: each for name, each in found.items() if each is not None}
    return {**settings, **{name: each.kind for name, each in rows.items()}}, rows


def describe_rows(s: Any, rows: Rows) -> Any:
    """Return settings with the description of all rows; a stream's once it was read."""
    return with_descriptions(
        s, {name: each.description for name, each in rows.items() if isinstance(each, forge_data.InMemoryRows)}
    )


def with_descriptions(s: Any, descriptions: Mapping[str, str]) -> Any:
    """Return settings with the descriptions of rows that another rank read."""
    for name, text in descriptions.items():
        s = s.with_value("data", name, text)
    return s


def tokenize_rows(task: Task, s: Any, rows: Rows, folder: Path) -> Any:
    """Tokenize rows into stores for a launcher's ranks; return settings that describe the rows.

    Raises:
        forge_data.ForgeDataError: the tokenizer or the rows are refused.

    """
    tokenizer = forge_data.load_tokenizer(s.model.model_path)
    forge_data.add_tokens(tokenizer, s.model.add_tokens, special=s.model.add_special_tokens)
    for name, each in rows.items():
        if isinstance(each, Path):
            copy_linked(each, folder / name)
            continue
        task.prepare(s, each, tokenizer, folder / name, Reporter(lambda _: None, every=1, brief=s.report.quiet))
    return describe_rows(s, rows)


def tokenized_rows(folder: Path) -> Rows:
    """Find the stores that `tokenize_rows` left in `folder`."""
    return {name: folder / name for name in SETTINGS if (folder / name).is_dir()}

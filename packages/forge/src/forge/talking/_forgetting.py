"""A run and general data → what its model lost of its base, by source, and a page of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_data
import forge_packing
from forge._errors import RunDirectoryError, SettingsError
from forge._near import near
from forge._progress import Reporter
from forge.reports._forgetting import WORST, Row, Source, forgetting_page, row_of, summary, total_of
from forge.reports._page import write_page
from forge.saving._directories import last_export, run_values
from forge.talking._model import find_model
from forge.talking._rounded import load_rounded, rounding_of

_BASE = "base_model"
"""Folder of a run with new tokens: the model as it began."""


@attrs.frozen(kw_only=True)
class Forgetting:
    """What a run's model lost of its base on some data, in nats per learned token."""

    sources: Mapping[str, Source]
    """File of the data → its figures."""
    total: Source
    """Of all files together."""
    page: Path
    """The page that was written."""

    def __str__(self) -> str:
        return "\n".join([*summary(self.sources, self.total), f"page  {self.page}"])


def forgetting(
    run: str | Path,
    *,
    data: Sequence[str],
    max_seq_len: int | None = None,
    limit: int | None = None,
    rename_columns: Mapping[str, str] | Sequence[str] | None = None,
    output: str | Path | None = None,
) -> Forgetting:
    """Measure what a run's model lost of its base on general data, and write a page of it.

    Both models read the same tokens; each learned token has its loss before and after, and KL(base ‖ model). Rows are those of
    any supervised format, written by the run's own chat template; of texts every token counts.

    Args:
        run: A run directory with an export.
        data: Files, globs or directories of rows that the run was not trained on, or one. Each file is a source.
        max_seq_len: Cut longer rows after so many tokens; by default no longer than the run's own.
        limit: Take so many rows of each file only, from its beginning.
        rename_columns: Columns of the data that a format reads under another name, such as question=prompt answer=completion;
            those of the training data count for themselves alone.
        output: Where to write the page; by default forgetting.html of the run.

    Returns:
        The figures of each source; as text a summary whose last line is the path of the page.

    Raises:
        RunDirectoryError: there is no such run.
        SettingsError: it has no export, is a reward model, a number is out of range, or the page cannot be written.
        forge_data.DataError: there are no such rows, or they cannot be read.
        forge_dist.ModelError: a model cannot be loaded.

    """
    root = Path(os.path.abspath(Path(run).expanduser()))
    if not (root / "config.yaml").is_file():
        raise RunDirectoryError(f"{run}: is no run directory (it holds no config.yaml).{near(root)}")
    for name, value, least in (("max_seq_len", max_seq_len, 2), ("limit", limit, 1)):
        if value is not None and value < least:
            raise SettingsError(f"{name} must be at least {least}, not {value}.")
    export = find_model(last_export(str(root)))
    values = run_values(root)
    base = str(root / _BASE) if (root / _BASE).is_dir() else find_model(str(values["model_path"]))
    longest = max_seq_len or values.get("max_seq_len")
    with TemporaryDirectory() as folder:
        store = forge_data.prepare(
            [data] if isinstance(data, str) else list(data),
            export,
            folder,
            chat_template_kwargs=values.get("chat_template_kwargs"),
            max_seq_len=longest,
            on_overflow="drop" if longest is None else "truncate",
            rename_columns=as_columns(rename_columns),
        )
        tokenizer = store.tokenizer()
        kept = _kept(store, limit)
        rows = [row_of(*_place(store, index), store[index], found) for index, found in _measured(export, base, store, kept)]
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row.source, []).append(row)
        if not groups:
            raise SettingsError("data: no row has a token that is learned, so that nothing can be measured. Give other rows.")
        sources = {name: total_of(found) for name, found in groups.items()}
        total = total_of(rows)
        worst = sorted(rows, key=lambda row: -row.change)[:WORST]
        text = forgetting_page(
            name=root.name,
            verb=_verb(root),
            base=str(values["model_path"]),
            sources=sources,
            total=total,
            worst=worst,
            decode=lambda ids: str(tokenizer.decode(list(ids))),
        )
    page = write_page(root / "forgetting.html" if output is None else Path(output).expanduser(), text, "output")
    return Forgetting(sources=sources, total=total, page=page)


def as_columns(given: Mapping[str, str] | Sequence[str] | None) -> Mapping[str, str] | None:
    """Return columns and their new names, which a shell gives as `question=prompt`."""
    if given is None or isinstance(given, Mapping):
        return given
    read = attrs.fields_dict(forge_data.DataSettings)["rename_columns"].metadata["words"]
    return read([given] if isinstance(given, str) else given)


def _kept(store: Any, limit: int | None) -> list[int]:
    """Return the samples of each file's first rows that learn anything."""
    seen: dict[str, set[str]] = {}
    found = []
    for index in range(len(store)):
        source, row = _place(store, index)
        rows = seen.setdefault(source, set())
        if limit is not None and row not in rows and len(rows) >= limit:
            continue
        rows.add(row)
        if store.loss_counts[index]:
            found.append(index)
    return found


def _place(store: Any, index: int) -> tuple[str, str]:
    """Return the file and the row of a sample."""
    source, _, row = str(store.source(index)).rpartition(":")
    return (Path(source).name, row) if source else (row, "")


def _measured(export: str, base: str, store: Any, indices: Sequence[int]) -> Any:
    """Yield each sample with its changes, read by itself: no packing has to be right for it."""
    machine = forge_accel.accelerator()
    device, dtype = machine.device.value, machine.dtype("auto").value
    report = Reporter(lambda _: None)
    models, rounding = [], rounding_of(export)
    if rounding.said:
        report.note(f"both models: {rounding.said}")
    for path in (export, base):
        with report.taking(f"loading {path}", f"loaded {path}"):
            model: Any = load_rounded(path, rounding, dtype=dtype, device=device)
        forge_algos.keep_documents_apart(model, device=device)
        models.append(model)
    after, before = models
    found = forge_algos.token_changes(
        after, (forge_packing.collate([store[index]]) for index in indices), base=before, device=device
    )
    for index, changes in zip(indices, found, strict=True):
        if not all(map(math.isfinite, changes.after)):
            raise SettingsError(f"{store.source(index)}: the model's loss there is not finite: it diverged in training.")
        yield index, changes


def _verb(root: Path) -> str:
    """Return the verb of a run, for the page's first line."""
    from forge.reports._record import read_record

    return read_record(root).verb

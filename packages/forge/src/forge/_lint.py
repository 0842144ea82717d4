"""What the data's lint found → the run's log, or a refusal before anything trains."""

from __future__ import annotations

import forge_data
from forge._errors import DataLintError, SettingsError
from forge._progress import Reporter
from forge._settings import SFTSettings

_NAMED = 3


def check_data(s: SFTSettings, report: Reporter, train: forge_data.TokenStore, held_out: forge_data.TokenStore | None) -> None:
    """Say what was found in the rows, and refuse those that would teach something false.

    Raises:
        DataLintError: the lint stops and `lint` is not off.
        SettingsError: the rows are no rows to imitate (preferences).

    """
    stores = [train] if held_out is None else [train, held_out]
    for store in stores:
        if store.kind != "supervised":
            raise SettingsError(
                f"data_path holds {store.kind.replace('_', ' ')} rows ({store.source(0)}), and supervised fine-tuning imitates every row: "
                "give messages, prompt and completion, documents, or tokens."
            )
    reports = [forge_data.lint(train, eval_data=held_out)]
    if held_out is not None and held_out.path != train.path:
        reports.append(held_out.lint)
    for found in reports:
        if found.counts:
            report.note(f"lint: {found}")
    stops = sum(found.stops for found in reports)
    if not stops:
        return
    if s.data.lint == "off":
        report.note(f"WARNING: lint=off: training goes on in spite of {stops:,} findings that would stop it.")
        return
    named = [str(finding) for found in reports for finding in found.findings if finding.severity == "stop"]
    more = f"\n  ... and {stops - _NAMED:,} more" if stops > _NAMED else ""
    raise DataLintError(
        f"the lint of the data found {stops:,} reasons not to train on it (lint=off overrules it; `forge data lint` lists all):\n  "
        + "\n  ".join(named[:_NAMED])
        + more
    )

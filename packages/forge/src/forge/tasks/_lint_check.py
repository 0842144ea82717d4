"""What the data's lint found → the run's log, or a refusal before anything trains."""

from __future__ import annotations

from typing import Any

import forge_data
from forge._errors import DataLintError, SettingsError
from forge._progress import Reporter

_NAMED = 3


def check_kind(task: str, store: forge_data.TokenStore, kind: str, wanted: str) -> None:
    """Raise SettingsError unless the rows of a store are of a kind."""
    if store.kind != kind:
        which = "eval_data_path" if store.path.name == "eval" else "data_path"
        raise SettingsError(
            f"{which} holds {store.kind.replace('_', ' ')} rows ({store.source(0)}), and forge {task} takes {wanted}."
        )


def check_data(s: Any, report: Reporter, train: forge_data.TokenStore, held_out: forge_data.TokenStore | None) -> None:
    """Say what was found in the rows, and refuse those that would teach something false.

    Raises:
        DataLintError: the lint stops and `lint` is not off.

    """
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

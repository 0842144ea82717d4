"""Findings of the data's lint → lines of the run's log, or a refusal before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import forge_data
from forge._errors import DataLintError, SettingsError

if TYPE_CHECKING:
    from forge._progress import Reporter

_LISTED = 3


def check_kind(verb: str, store: forge_data.TokenStore, kind: str, wanted: str) -> None:
    """Raise SettingsError unless the rows of a store are of a kind."""
    if store.kind != kind:
        which = "eval_data_path" if store.path.name == "eval" else "data_path"
        raise SettingsError(
            f"{which} holds {store.kind.replace('_', ' ')} rows ({store.source(0)}), and forge {verb} takes {wanted}."
        )


def check_lint(s: Any, report: Reporter, train: forge_data.TokenStore, held_out: forge_data.TokenStore | None) -> None:
    """Log what the lint found, and refuse rows that would teach something wrong.

    Raises:
        DataLintError: a finding stops the run, and `lint` is not off.

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
    listed = [str(finding) for found in reports for finding in found.findings if finding.severity == "stop"]
    more = f"\n  ... and {stops - _LISTED:,} more" if stops > _LISTED else ""
    raise DataLintError(
        f"the lint of the data found {stops:,} reasons not to train on it (lint=off overrules it; `forge data lint` lists "
        "all):\n  " + "\n  ".join(listed[:_LISTED]) + more
    )

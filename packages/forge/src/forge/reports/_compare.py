"""Runs → one page that lays their curves over each other, and a table of what differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge._errors import SettingsError
from forge._printable import printable
from forge._templates import figure
from forge.reports._charts import charts, table
from forge.reports._curves import Curve, Curves, lowest
from forge.reports._page import PLOTS, page, reading, write_page
from forge.reports._record import Record, active_seconds, read_record
from forge.reports._report import read_curves

_MOST = 24
_PLACES = frozenset({"ckpt_output_dir", "rdzv_id", "resume", "logging_steps", "quiet"})
"""Settings in which two runs differ without being different."""
_SHOWN = 48
"""Characters of a value on a terminal."""


class Difference(NamedTuple):
    """A setting with its value in each run; None where a run has no such setting."""

    name: str
    values: list[str]


def compare(runs: Sequence[str | Path], *, output: str | Path = "compare.html") -> str:
    """Lay the curves of runs over each other, and list the settings in which they differ.

    Args:
        runs: Two run directories or more.
        output: Where to write the page; one that is there is replaced.

    Returns:
        A table of the settings that differ and of the last figures, whether held-out figures are of other samples, and, in its
        last line, the path of the page.

    Raises:
        SettingsError: there are fewer than two runs or too many, one is no run directory, or the page cannot be written.

    """
    if not 2 <= len(runs) <= _MOST:
        raise SettingsError(f"forge compare takes 2 to {_MOST} run directories, and got {len(runs)}.")
    paths = [Path(run).expanduser() for run in runs]
    with reading(*paths):
        records = [read_record(path) for path in paths]
        curves = [read_curves(record) for record in records]
        names = _names(paths)
        differing, last, others = differences(records), _last(curves), _other_samples(names, records, curves)
        verbs = {record.verb for record in records}
        drawn = charts(dict(zip(names, (one.figures for one in curves), strict=True)), verbs.pop() if len(verbs) == 1 else "")
        seconds = [
            record.result.get("seconds") or active_seconds(record.events, one.times)
            for record, one in zip(records, curves, strict=True)
        ]
        text = page(
            "compare.html",
            styles=("vendor/uPlot.min.css", "plots.css"),
            scripts=PLOTS,
            data={"renew": 0, "runs": len(records), **drawn},
            names=names,
            records=records,
            curves=curves,
            seconds=seconds,
            differing=differing,
            last=last,
            others=others,
        )
    file = write_page(Path(output).expanduser(), text, "output")
    settings = _columns(["setting", *names], [[one.name, *one.values] for one in differing])
    figures = _columns(["last figure", *names], [[name, *values] for name, values in last])
    notes = [others, ""] if others else []
    return "\n".join([*(settings if differing else ["no setting differs"]), "", *figures, "", *notes, str(file)])


def differences(records: Sequence[Record]) -> list[Difference]:
    """Return the settings whose values differ between runs, in the order of config.yaml.

    One that only some methods have is listed where somebody chose it.
    """
    names = [
        name
        for name in dict.fromkeys(name for record in records for name in record.settings if name not in _PLACES)
        if all(name in record.settings for record in records)
        or any(record.settings[name].origin != "default" for record in records if name in record.settings)
    ]
    found = [
        Difference(name, [_word(record.settings[name].value) if name in record.settings else "–" for record in records])
        for name in names
    ]
    verbs = Difference("verb", [record.verb or "–" for record in records])
    return [one for one in (verbs, *found) if len(set(one.values)) > 1]


def _names(paths: Sequence[Path]) -> list[str]:
    """Name each run by the last part of its path, or by as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({place})" for place, path in enumerate(paths, 1)]


def _last(curves: Sequence[Curves]) -> list[tuple[str, list[str]]]:
    """Return each figure's last value in each run as text; a held-out one's first before it."""
    rows = list(dict.fromkeys(row["name"] for one in curves for row in table(one.figures)))
    return [(name, [_value(one.figures.get(name), name) for one in curves]) for name in rows]


def _value(curve: Curve | None, name: str) -> str:
    if curve is None:
        return figure(None, name)
    first, last = figure(curve.first, name), figure(curve.last, name)
    # A curve of so many points that some were joined does not say whether its first is that of step 0.
    before = name.startswith("eval_") and curve.steps()[:1] == (0,)
    least = f" (least {found})" if name == "eval_loss" and (found := lowest(curve)) else ""
    return f"{first} → {last}{least}" if before and first != last else f"{last}{least}"


def _other_samples(names: Sequence[str], records: Sequence[Record], curves: Sequence[Curves]) -> str:
    """Say which runs were measured on other held-out samples; empty where they are the same."""
    groups: dict[str, list[str]] = {}
    for name, record, one in zip(names, records, curves, strict=True):
        if record.held_out and any(figure.startswith("eval_") for figure in one.figures):
            groups.setdefault(record.held_out, []).append(printable(name))
    if len(groups) < 2:
        return ""
    listed = "; ".join(", ".join(group) for group in groups.values())
    return (
        f"Held-out samples are not the same ({listed}): compare the eval_ figures of a run with its own, not with the others'."
    )


def _word(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _columns(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a table as lines; a long value loses its middle."""
    cells = [[_shortened(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _shortened(text: str) -> str:
    line = printable(text)
    half = _SHOWN // 2
    return line if len(line) <= _SHOWN else f"{line[: half - 1]}…{line[-half:]}"

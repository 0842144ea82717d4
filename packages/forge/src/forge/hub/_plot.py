"""Losses of runs → a picture of their curves (SVG), as training_hub's `plot_loss` has it."""

from __future__ import annotations

import json
import math
import webbrowser
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import forge_dist
from forge._errors import RunDirectoryError, SettingsError
from forge.reports._svg import line, text

_KEYS = ("avg_loss", "loss", "avg_loss_backwards", "train_loss")
_FILES = ("training_log.jsonl", "training_metrics.jsonl", "metrics.jsonl")
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 1000.0, 600.0, 80.0, 50.0, 30.0, 60.0
_STYLE = (
    "<style>text{font:14px sans-serif;fill:#222}.title{font-size:17px}.grid{stroke:#ddd}.axis{stroke:#222}"
    "rect{fill:#fff}</style>"
)


def plot_loss(
    ckpt_output_dirs: str | Path | Sequence[str | Path],
    *,
    metrics_file: str | None = None,
    output_path: str | Path | None = None,
    labels: Sequence[str] | None = None,
    ema: bool = False,
    ema_span: int = 30,
    metric_keys: Sequence[str] | None = None,
    show: bool = False,
) -> str:
    """Draw the losses of runs over their steps.

    Args:
        ckpt_output_dirs: one run directory, or several to compare.
        metrics_file: file of metrics in each; by default metrics.jsonl, or what other trainers call it.
        output_path: the picture, an .svg; by default loss_plot.svg in the first directory.
        labels: a name for each run; by default those of the directories.
        ema: draw the exponential moving average too.
        ema_span: its span in steps.
        metric_keys: figures to look for, the first that a line has is drawn; by default the loss.
        show: open the picture in a browser.

    Returns:
        The path of the picture.

    Raises:
        SettingsError: an argument is wrong, or no line has such a figure.
        RunDirectoryError: a directory has no file of metrics, or the picture cannot be written.

    """
    single = isinstance(ckpt_output_dirs, (str, Path))
    if not single and not isinstance(ckpt_output_dirs, Sequence):
        raise SettingsError(f"ckpt_output_dirs must be a run directory or a list of them, not {ckpt_output_dirs!r}.")
    runs = [Path(each).expanduser() for each in ([ckpt_output_dirs] if single else ckpt_output_dirs)]  # type: ignore[list-item]
    if not runs:
        raise SettingsError("ckpt_output_dirs is empty: give a run directory, or several.")
    if labels is not None and len(labels) != len(runs):
        raise SettingsError(f"labels has {len(labels)} names for {len(runs)} runs: give one a run.")
    if not isinstance(ema_span, int) or isinstance(ema_span, bool) or ema_span < 1:
        raise SettingsError(f"ema_span must be a whole number of 1 or more, not {ema_span!r}.")
    target = Path(output_path).expanduser() if output_path is not None else runs[0] / "loss_plot.svg"
    if target.suffix != ".svg":
        raise SettingsError(f"output_path={str(target)!r}: the picture is an .svg, which browsers show. Name it so.")
    keys = tuple(metric_keys) if metric_keys is not None else _KEYS
    curves = []
    for number, (run, label) in enumerate(zip(runs, labels or [run.resolve().name for run in runs], strict=True)):
        file = _metrics(run, metrics_file)
        values = list(_values(file, keys))
        if not values:
            raise SettingsError(f"{file}: no line has {' or '.join(keys)}. Name a figure of it in metric_keys.")
        curves.append((label, values, number, False))
        if ema:
            curves.append((f"{label} (EMA)", _average(values, ema_span), number, True))
    try:
        forge_dist.write_text_atomically(target, _drawn(curves))
    except forge_dist.ExportError as error:
        raise RunDirectoryError(f"output_path: {error}") from error
    if show:
        webbrowser.open(target.resolve().as_uri())
    return str(target)


def _metrics(run: Path, name: str | None) -> Path:
    names = (name,) if name is not None else _FILES
    for each in names:
        if (run / each).is_file():
            return run / each
    raise RunDirectoryError(
        f"{run}: has no {' or '.join(names)}. Give the directory of a run, or name its file in metrics_file."
    )


def _values(file: Path, keys: Sequence[str]) -> Iterator[tuple[float, float]]:
    """Yield step and figure of each line that has one; torn lines are passed over."""
    number = 0
    for each in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found = json.loads(each)
        except ValueError:
            continue
        key = next((key for key in keys if key in found), None) if isinstance(found, dict) else None
        if key is None:
            continue
        number += 1
        value, step = found[key], found.get("step", number)
        if _is_number(value):
            yield (float(step) if _is_number(step) else float(number)), float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _average(values: Sequence[tuple[float, float]], span: int) -> list[tuple[float, float]]:
    """Return a curve's exponential moving average: a new value has weight 2 / (span + 1)."""
    weight, mean, found = 2 / (span + 1), values[0][1], []
    for step, value in values:
        mean += weight * (value - mean)
        found.append((step, mean))
    return found


def _drawn(curves: Sequence[tuple[str, Sequence[tuple[float, float]], int, bool]]) -> str:
    """Draw curves: name, points, number of the run, whether it is an average."""
    points = [point for _, values, _, _ in curves for point in values]
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}"/>', text(_WIDTH / 2, 28, "loss over steps", "title", "middle")]
    for tick in y_ticks:
        _, y = place(x_ticks[0], tick)
        parts += [line(_LEFT, y, _WIDTH - _RIGHT, y, "grid"), text(_LEFT - 8, y + 5, f"{tick:g}", anchor="end")]
    for tick in x_ticks:
        x, bottom = place(tick, y_ticks[0])
        parts += [line(x, bottom, x, bottom + 5, "axis"), text(x, bottom + 22, f"{tick:g}", anchor="middle")]
    parts += [
        line(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, "axis"),
        text(_WIDTH / 2, _HEIGHT - 14, "step", anchor="middle"),
        text(16, _TOP - 12, "loss"),
    ]
    for number, (label, values, of_run, dashed) in enumerate(curves):
        color = _COLORS[of_run % len(_COLORS)]
        dash = ' stroke-dasharray="7 4"' if dashed else ""
        joined = " ".join(f"{x:.2f},{y:.2f}" for x, y in (place(*point) for point in values))
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="1.8"{dash}><title>{escape(label)}</title>'
            "</polyline>"
        )
        if len(values) == 1:
            x, y = place(*values[0])
            parts.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="4" fill="{color}"/>')
        top = _TOP + 18 * number
        drawn = f'stroke="{color}" stroke-width="2.5"{dash}'
        parts.append(f'<line x1="{_WIDTH - 290:g}" y1="{top:g}" x2="{_WIDTH - 260:g}" y2="{top:g}" {drawn}/>')
        parts.append(text(_WIDTH - 252, top + 5, label))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="loss over steps">'
        f"{_STYLE}\n{body}\n</svg>\n"
    )


def _ticks(least: float, most: float) -> list[float]:
    """Return about six round numbers that enclose a range."""
    if most <= least:
        least, most = least - 0.5, most + 0.5
    raw = (most - least) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor * 1.0001)
    first, last = math.floor(least / step), math.ceil(most / step)
    return [round(number * step, 12) for number in range(first, last + 1)]

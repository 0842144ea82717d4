"""Lines of metrics.jsonl → figures over steps, bounded in size however long the run is."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge._templates import number

MOST = 600
"""Points of a curve, once there are twice as many, neighbours are joined."""
_MOST_FIGURES = 120
_LARGEST = 1e300
_ABOUT = frozenset({"time", "step", "epoch"})
"""Fields that say where a line belongs."""


class Curve:
    """One figure over steps; a point is the mean, least and largest of `stride` measurements."""

    def __init__(self) -> None:
        self.stride = 1
        self.count = self.not_finite = 0
        self.total = 0.0
        self.first = self.last = self.least = self.most = math.nan
        self.least_step = 0
        self._points: list[list[float]] = []
        """[last step, sum, count, least, most] of each point; a count of 0 is a measurement that was not finite."""

    def add(self, step: int, value: float | None) -> None:
        """Add a measurement; None is one that was not finite."""
        if not _is_number(value):
            self.not_finite += 1
            self._append([step, 0.0, 0, math.inf, -math.inf])
            return
        value = float(value or 0.0)
        self.first = self.first if self.count else value
        self.least_step = step if not self.count or value < self.least else self.least_step
        self.count, self.total, self.last = self.count + 1, self.total + value, value
        self.least, self.most = (min(self.least, value), max(self.most, value)) if self.count > 1 else (value, value)
        self._append([step, value, 1, value, value])

    def _append(self, point: list[float]) -> None:
        seen = self.count + self.not_finite
        if self._points and (seen - 1) % self.stride:
            self._points[-1] = _joined(self._points[-1], point)
        else:
            self._points.append(point)
        if len(self._points) > 2 * MOST:
            pairs = range(0, len(self._points) - 1, 2)
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [_joined(self._points[i], self._points[i + 1]) for i in pairs] + odd
            self.stride *= 2

    def steps(self) -> tuple[int, ...]:
        """Return the last step of each point."""
        return tuple(int(point[0]) for point in self._points)

    def points(self) -> dict[str, list[float | None]]:
        """Return `y`, and `low` and `high` where a point is several measurements; None is a gap."""
        found = {"y": [_short(total / count) if count else None for _, total, count, _, _ in self._points]}
        if self.stride > 1:
            found["low"] = [_short(point[3]) if point[2] else None for point in self._points]
            found["high"] = [_short(point[4]) if point[2] else None for point in self._points]
        return found


def lowest(curve: Curve) -> str:
    """Say where a held-out loss was least, if neither before training nor at the end."""
    if not curve.count or curve.least_step == 0 or curve.least == curve.last:
        return ""
    return f"{number(curve.least)} after step {curve.least_step:,}"


class Curves:
    """Every figure of a run by name; `read` takes what was appended since the last time."""

    def __init__(self) -> None:
        self.starts: list[str] = []
        """Times at which training was started or resumed, which whoever reads has to know."""
        self._clear()

    def _clear(self) -> None:
        self.figures: dict[str, Curve] = {}
        self.left_out: set[str] = set()
        """Figures beyond the first 120."""
        self.step = 0
        self.samples = 0
        self.times: list[tuple[str, str]] = []
        """Times of the first and the last line of each start."""
        self.settled: tuple[int, str] | None = None
        """First step of the latest start and its time: what is compiled and allocated in it is no part of those to come."""
        self.step_seconds = 0.0
        """Time inside of steps, which measuring and exporting are no part of."""
        self.expert_load: list[list[float]] = []
        """Share of the tokens that each expert of each layer got in the last step."""
        self._read = 0

    def read(self, file: Path) -> None:
        """Read further lines; a line that is half-written, or is no JSON object, is left out."""
        try:
            with file.open("rb") as lines:
                if lines.seek(0, 2) < self._read:
                    self._clear()
                lines.seek(self._read)
                text = lines.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                self._add(values)

    def _add(self, values: Mapping[str, Any]) -> None:
        self.step = max(self.step, values["step"])
        if isinstance(at := values.get("time"), str):
            self._see(at)
            if self.settled is None and _is_number(values.get("tokens")):
                self.settled = values["step"], at
        if _is_number(values.get("samples")):
            self.samples = max(self.samples, int(values["samples"]))
        rate: Any = values.get("tokens_per_second")
        if _is_number(values.get("tokens")) and _is_number(rate) and rate > 0:
            self.step_seconds += values["tokens"] / rate
        for name, value in [*values.items(), *self._of_experts(values.get("expert_load"))]:
            if name not in _ABOUT and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
                curve = self.figures.get(name)
                if curve is None and len(self.figures) >= _MOST_FIGURES:
                    self.left_out.add(name)
                    continue
                if curve is None:
                    curve = self.figures[name] = Curve()
                curve.add(values["step"], value)

    def _see(self, at: str) -> None:
        """Add a line's time to those of its start; times of one form are ordered as text."""
        began = self.starts[bisect_right(self.starts, at) - 1] if self.starts and at >= self.starts[0] else ""
        if self.times and self.times[-1][0] >= began:
            self.times[-1] = (self.times[-1][0], at)
        else:
            self.times.append((at, at))
            self.settled = None

    def _of_experts(self, load: Any) -> list[tuple[str, float]]:
        """Return how uneven the experts' loads are; 1 is an even share."""
        layers = [layer for layer in load or [] if isinstance(layer, list) and layer and all(map(_is_number, layer))]
        if not layers:
            return []
        self.expert_load = layers
        shares = [share * len(layer) / (sum(layer) or 1.0) for layer in layers for share in layer]
        return [("expert_load_most", max(shares)), ("expert_load_least", min(shares))]


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that can be drawn; JSON's whole numbers have no bound."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _joined(one: list[float], other: list[float]) -> list[float]:
    """Join two points of one curve that follow each other."""
    return [other[0], one[1] + other[1], one[2] + other[2], min(one[3], other[3]), max(one[4], other[4])]


def _short(value: float) -> float:
    """Round to six digits, which a screen shows no more of."""
    return float(f"{value:.6g}")

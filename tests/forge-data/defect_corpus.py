"""Corpus of seeded defects: clean rows, and for each defect twenty rows that are damaged in one place each.

A defect knows which rule has to find it, how gravely, and in which field; whoever uses it knows in which row.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import attrs

from .lint_rows import TOOLED, Row, clean


@attrs.frozen
class Defect:
    """One kind of damage."""

    name: str
    rule: str
    severity: str
    damage: Callable[[Random, Row], str | tuple[Any, str]]
    """Damages a row in place and returns the field that has to be named; or returns what to write instead of the row, and the
    field."""
    base: Callable[[Random], Row] = clean
    template: str = TOOLED
    settings: dict[str, Any] = attrs.field(factory=dict)

    def file(self, seed: int, rows: int = 60, planted: int = 20) -> tuple[list[str], dict[int, str]]:
        """Lines of a file, and for the rows that are damaged (from 1) the field."""
        rng = Random(f"{self.name} {seed}")
        damaged = sorted(rng.sample(range(rows), planted))
        lines, fields = [], {}
        for place in range(rows):
            row: Any = self.base(rng)
            if place in damaged:
                message = self.damage(rng, row)
                row, fields[place + 1] = message if isinstance(message, tuple) else (row, message)
            lines.append(row if isinstance(row, (str, bytes)) else json.dumps(row))
        return lines, fields


DEFECTS: list[Defect] = []


def defect(rule: str, severity: str, **more: Any) -> Callable[..., Any]:
    """Register a way of damaging a row under its own name."""

    def add(damage: Callable[[Random, Row], Any]) -> Callable[[Random, Row], Any]:
        DEFECTS.append(Defect(damage.__name__, rule, severity, damage, **more))
        return damage

    return add

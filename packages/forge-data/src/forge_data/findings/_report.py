"""Findings of many rows → one report, in bounded memory, as text and JSON."""

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from forge_data._errors import StoreError, printable
from forge_data._values import counted, parsed_json
from forge_data.findings._finding import STOP, WARN, Finding
from forge_data.findings._rules import RULES

KEPT_PER_RULE = 1000
"""Findings of one rule that a report holds; more are only counted, so that a million bad rows fit in memory."""

_SHOWN_PER_RULE = 5


def _read_only(counts: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(sorted(counts.items())))


@attrs.frozen
class LintReport:
    """All findings of a data set, stops first.
    Counts are exact also where `findings` holds only the first of a rule.
    """

    findings: tuple[Finding, ...] = attrs.field(converter=tuple, default=())
    """At most 1,000 of each rule and severity: stops before warnings, then by rule, then in the order of the rows."""

    counts: Mapping[str, int] = attrs.field(
        default=attrs.Factory(lambda self: Counter(f.rule for f in self.findings), takes_self=True), converter=_read_only
    )
    """Number of findings by rule, exact."""

    stop_counts: Mapping[str, int] = attrs.field(
        default=attrs.Factory(lambda self: Counter(f.rule for f in self.findings if f.severity == STOP), takes_self=True),
        converter=_read_only,
    )
    """Number of findings that stop a training by rule, exact; a rule may have findings of both severities."""

    rows: int = 0
    """Rows that were linted."""

    @property
    def stops(self) -> int:
        """Number of findings that stop a training, exact."""
        return sum(self.stop_counts.values())

    @property
    def warnings(self) -> int:
        """Number of findings that do not stop a training, exact."""
        return sum(self.counts.values()) - self.stops

    def __str__(self) -> str:
        lines = [self._head()]
        for (severity, rule), found in self._groups().items():
            shown, told = _told_once(found)
            lines += [self._line(severity, rule), *shown]
            if (count := self._count(severity, rule)) > told:
                lines.append(f"  ... and {count - told:,} more")
        return "\n".join(lines)

    def summary(self) -> str:
        """Write the counts alone: a line for all, and one for each rule."""
        return "\n".join([self._head(), *(self._line(*group) for group in self._groups())])

    def _groups(self) -> dict[tuple[str, str], list[Finding]]:
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.severity, finding.rule), []).append(finding)
        return groups

    def _head(self) -> str:
        return f"{counted(self.stops, 'stops')}, {counted(self.warnings, 'warnings')} in {counted(self.rows, 'rows')}"

    def _line(self, severity: str, rule: str) -> str:
        why = f": {RULES[rule].why}" if rule in RULES else ""
        return f"{severity} {rule} ({self._count(severity, rule):,}){why}"

    def _count(self, severity: str, rule: str) -> int:
        stopping = self.stop_counts.get(rule, 0)
        return stopping if severity == STOP else self.counts[rule] - stopping

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping does not pickle; the dict that it was made of does.
        return LintReport, (self.findings, dict(self.counts), dict(self.stop_counts), self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, for JSON."""
        return {
            "rows": self.rows,
            "stops": self.stops,
            "warnings": self.warnings,
            "counts": dict(self.counts),
            "stop_counts": dict(self.stop_counts),
            "findings": [attrs.asdict(finding) for finding in self.findings],
        }

    def dumps(self) -> str:
        """Return the text of `lint.json`."""
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=True) + "\n"

    @classmethod
    def loads(cls, text: str, where: str = "lint.json") -> "LintReport":
        """Read what `dumps` wrote.

        Raises:
            StoreError: it is something else; named as `where`.
        """
        try:
            fields = parsed_json(text)
            findings = [Finding(**finding) for finding in fields["findings"]]
            counts, stops = ({str(r): int(n) for r, n in fields[name].items()} for name in ("counts", "stop_counts"))
            return cls(findings, counts, stops, int(fields["rows"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{where} is damaged ({type(error).__name__}: {error}); prepare the store again") from error


def _told_once(findings: Iterable[Finding]) -> tuple[list[str], int]:
    """Write the first findings of a rule, each text once with the places that have it.

    Returns:
        The lines, and of how many findings they are.
    """
    places: dict[tuple[str, str, str], list[str]] = {}
    lines: dict[tuple[str, str, str], str] = {}
    for finding in findings:
        key = (finding.field, finding.what, finding.fix)
        if key not in lines and len(lines) == _SHOWN_PER_RULE:
            continue
        lines.setdefault(key, f"  {finding}")
        places.setdefault(key, []).append(finding.place)
    written = []
    for key, (_, *others) in places.items():
        written.append(lines[key])
        if others:
            more = len(others) - _SHOWN_PER_RULE
            also = ", ".join(map(printable, others[:_SHOWN_PER_RULE])) + (f" and {more:,} more" if more > 0 else "")
            written.append(f"    the same: {also}")
    return written, sum(map(len, places.values()))


class Findings:
    """Collector of findings, batch by batch in the order of rows; keeps the first of each rule."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], list[Finding]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, findings: Iterable[Finding]) -> None:
        """Count findings, and keep those that fit."""
        for finding in findings:
            key = (finding.severity, finding.rule)
            self._counts[key] += 1
            if self._counts[key] <= KEPT_PER_RULE:
                self._kept.setdefault(key, []).append(finding)

    def resume(self, report: LintReport, without: Container[str] = ()) -> None:
        """Take over a report, except for some rules; of several in the order of their rows."""
        for rule, count in report.counts.items():
            if rule not in without:
                stopping = report.stop_counts.get(rule, 0)
                self._counts[STOP, rule] += stopping
                self._counts[WARN, rule] += count - stopping
        for finding in report.findings:
            kept = self._kept.setdefault((finding.severity, finding.rule), []) if finding.rule not in without else None
            if kept is not None and len(kept) < KEPT_PER_RULE:
                kept.append(finding)

    def report(self, rows: int) -> LintReport:
        """Make the report; `rows` is how many rows were linted."""
        counts: Counter[str] = Counter()
        stops: Counter[str] = Counter()
        for (severity, rule), count in (+self._counts).items():
            counts[rule] += count
            if severity == STOP:
                stops[rule] += count
        # "stop" sorts before "warn".
        kept = [finding for key in sorted(self._kept) for finding in self._kept[key]]
        return LintReport(kept, counts, stops, rows)

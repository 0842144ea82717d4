"""Findings, and the report that holds some of them and counts all."""

import pickle

import attrs
import pytest

from forge_data import StoreError
from forge_data.findings._finding import Finding
from forge_data.findings._report import KEPT_PER_RULE, Findings, LintReport


def finding(rule="empty_turn", severity="stop", row=7, **more):
    return Finding(
        rule, severity, "train.jsonl", row, more.get("field", "messages[1].content"), "the answer is empty", "take it out"
    )


def test_a_finding_says_where_what_and_what_to_do():
    """A finding prints place, field, what was found and what to do.

    A finding about the whole set has the file alone, one in a JSON array its index.
    """
    assert str(finding()) == "train.jsonl:7 messages[1].content: the answer is empty; take it out"
    assert str(finding(row=None, field="")) == "train.jsonl: the answer is empty; take it out"
    indexed = Finding("empty_turn", "stop", "a.json", 0, "", "it is empty", "take it out", "a.json[0]")
    assert str(indexed) == "a.json[0]: it is empty; take it out"


def test_a_finding_cannot_control_a_terminal():
    """What does not print, in a file's name or in what was found, is written as an escape."""
    hostile = Finding("empty_turn", "stop", "a\x1b[2J.jsonl", 1, "b\r", "c\u202e", "d\n")
    assert str(hostile) == r"a\x1b[2J.jsonl:1 b\r: c\u202e; d\n"
    assert r"a\x1b[2J.jsonl" in str(LintReport([hostile], rows=1))
    assert "\x1b" not in str(LintReport([hostile], rows=1))


def test_counts_are_exact_where_findings_are_not_kept():
    """A million bad rows fit in memory: the first of each rule and severity are kept, and all are counted."""
    collected = Findings()
    for row in range(1, KEPT_PER_RULE + 501):
        collected.add([finding(row=row), finding("role_order", "warn", row), finding(severity="warn", row=row)])
    report = collected.report(rows=2000)
    assert report.counts == {"empty_turn": 2 * (KEPT_PER_RULE + 500), "role_order": KEPT_PER_RULE + 500}
    assert (report.stops, report.warnings, report.rows) == (KEPT_PER_RULE + 500, 2 * (KEPT_PER_RULE + 500), 2000)
    assert len(report.findings) == 3 * KEPT_PER_RULE
    assert [each.row for each in report.findings[:3]] == [1, 2, 3]
    assert [each.severity for each in report.findings] == sorted(each.severity for each in report.findings)
    assert "1,500 stops, 3,000 warnings in 2,000 rows" in str(report)
    assert "stop empty_turn (1,500): a row whose every answer is empty" in str(report)
    assert "    the same: train.jsonl:2, train.jsonl:3, train.jsonl:4, train.jsonl:5, train.jsonl:6 and 994 more" in str(report)
    assert "... and 500 more" in str(report)
    assert report.summary().splitlines() == [line for line in str(report).splitlines() if not line.startswith(" ")]


def test_a_text_is_written_once():
    """Rows with the same fault share its text, by their places; five texts of a rule are written."""
    other = [attrs.evolve(finding(row=10 + number), what=f"fault {number}") for number in range(5)]
    lines = str(LintReport([finding(row=1), *other, finding(row=2)], rows=20)).splitlines()
    assert lines[2] == f"  {finding(row=1)}"
    assert lines[3] == "    the same: train.jsonl:2"
    assert lines[-2:] == [f"  {other[3]}", "  ... and 1 more"]


def test_a_report_made_of_findings_counts_them():
    """Without counts of its own a report counts what it holds."""
    report = LintReport([finding(), finding("role_order", "warn")], rows=2)
    assert report.counts == {"empty_turn": 1, "role_order": 1}
    assert (report.stops, report.warnings) == (1, 1)
    assert str(LintReport()) == "0 stops, 0 warnings in 0 rows"


def test_there_and_back():
    """JSON and pickle give the same report; half a surrogate pair in a name does not break the file."""
    report = LintReport(
        [finding(field="messages[0].tool_calls[0].function.arguments.\ud800")], {"empty_turn": 9}, {"empty_turn": 9}, 12
    )
    assert report.dumps().isascii()
    assert LintReport.loads(report.dumps()) == report
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"findings": [{}], "counts": {}, "stop_counts": {}, "rows": 1}',
        "nonsense",
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_damaged_file_is_named(text):
    """A file that is no report is refused as a damaged store is."""
    with pytest.raises(StoreError, match=r"store/lint\.json is damaged"):
        LintReport.loads(text, "store/lint.json")


def test_going_on_from_a_report():
    """Counts and findings are taken over, except for rules that run anew."""
    old = LintReport([finding(), finding("duplicate_row", "warn")], {"empty_turn": 5, "duplicate_row": 3}, {"empty_turn": 4}, 9)
    collected = Findings()
    collected.resume(old, without=("duplicate_row",))
    collected.add([finding(row=8)])
    report = collected.report(9)
    assert report.counts == {"empty_turn": 6}
    assert report.stops == 5
    assert [each.row for each in report.findings] == [7, 8]


def test_going_on_from_several_reports_keeps_the_first():
    """Reports of parts are taken over in order: counts are added up, and no more of a rule is kept than of one report."""
    parts, whole = [], Findings()
    for first in (1, KEPT_PER_RULE):
        part = Findings()
        part.add(finding(row=row) for row in range(first, first + KEPT_PER_RULE - 1))
        parts.append(part.report(KEPT_PER_RULE - 1))
    for part in parts:
        whole.resume(part)
    at_once = Findings()
    at_once.add(finding(row=row) for row in range(1, 2 * KEPT_PER_RULE - 1))
    assert whole.report(2 * KEPT_PER_RULE - 2) == at_once.report(2 * KEPT_PER_RULE - 2)

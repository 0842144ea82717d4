"""A store to the page's head: figures, findings, rows left out, and the hashes, as HTML that holds however hostile the words."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from forge_data.findings._finding import STOP

if TYPE_CHECKING:
    from forge_data.findings._report import LintReport
    from forge_data.store._token_store import TokenStore

LISTED = 1000
"""Rows left out that a page lists before it only counts."""


def lede(store: "TokenStore", shown: Sequence[int]) -> str:
    """One sentence on what the page shows."""
    if len(shown) == len(store):
        return f"All {_count(len(store), 'sample')}, token by token, as they are trained on."
    if list(shown) == list(range(len(shown))):
        return f"The first {len(shown):,} of {_count(len(store), 'sample')}, token by token, as they are trained on."
    return f"{len(shown):,} chosen of {_count(len(store), 'sample')}, token by token, as they are trained on."


def figures(store: "TokenStore") -> str:
    """The four numbers that one asks for first."""
    tokens, learned = int(store.lengths.sum()), int(store.loss_counts.sum())
    share = f"{100 * learned / tokens:.1f} % of all" if tokens else ""
    told = store.accounting
    rows = [
        ("Samples", f"{len(store):,}", "" if store.kind == "supervised" else store.kind.replace("_", " ")),
        ("Tokens", f"{tokens:,}", ""),
        ("Tokens in the loss", f"{learned:,}", share),
        ("Rows kept", f"{told.kept:,}", f"of {told.read:,}"),
    ]
    return "".join(
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)} <small>{safe(note)}</small></dd></div>" for name, value, note in rows
    )


def books(store: "TokenStore", places: Collection[str]) -> str:
    """What was found, what was left out, and what vouches for the arrays; `places` are the rows that the page shows."""
    report, told = store.lint, store.accounting
    stops, warnings = _count(report.stops, "stop"), _count(report.warnings, "warning")
    found = f"{stops}, {warnings}" if report.counts else "nothing"
    dropped = sum(told.dropped.values())
    return "".join(
        [
            _fold("Findings", found, "".join(_findings(report, places)), unfolded=report.stops > 0),
            _fold("Rows left out", f"{dropped:,}" if dropped else "none", "".join(_dropped(store))),
            _fold("Proof", f"SHA-256 {store.fingerprint[:16]}…", _proof(store)),
        ]
    )


def _fold(name: str, summary: str, inside: str, *, unfolded: bool = False) -> str:
    return (
        f"<details{' open' if unfolded else ''}><summary><b>{safe(name)}</b> <span>{safe(summary)}</span></summary>"
        f'<div class="inside" tabindex="0" role="region" aria-label="{safe(name)}">{inside}</div></details>'
    )


def _findings(report: "LintReport", places: Collection[str]) -> Iterator[str]:
    if not report.findings:
        yield '<p class="note">The lint looked at every row and found nothing to say.</p>'
    for (severity, rule), group in itertools.groupby(report.findings, key=lambda finding: (finding.severity, finding.rule)):
        listed = list(group)
        stopping = report.stop_counts.get(rule, 0)
        count = stopping if severity == STOP else report.counts[rule] - stopping
        # One remedy for all is said once.
        fixes = {finding.fix for finding in listed}
        yield f'<h3><span class="severity {safe(severity)}">{safe(severity)}</span> <code>{safe(rule)}</code> {count:,}</h3>'
        if len(fixes) == 1:
            yield f'<p class="note">{safe(listed[0].fix[:1].upper() + listed[0].fix[1:])}.</p>'
        yield "<table>"
        for finding in listed:
            field = f" <code>{safe(finding.field)}</code>" if finding.field else ""
            fix = f"; {finding.fix}" if len(fixes) > 1 else ""
            yield (
                f'<tr><th scope="row" class="place">{_linked(finding.place, places)}</th>'
                f"<td>{safe(finding.what + fix)}{field}</td></tr>"
            )
        yield "</table>"
        if count > len(listed):
            yield f'<p class="note">And {count - len(listed):,} more.</p>'


def _linked(place: str, places: Collection[str]) -> str:
    """A row that the page shows is a way there."""
    if place not in places:
        return safe(place)
    return f'<a href="#{safe(urlencode({"find": place}, errors="backslashreplace"))}">{safe(place)}</a>'


def _dropped(store: "TokenStore") -> Iterator[str]:
    told = store.accounting
    yield f'<p class="note">{safe(str(told))}.</p>'
    dropped = sum(told.dropped.values())
    if not dropped:
        return
    yield '<table><tr><th scope="col">Row</th><th scope="col">Why</th><th scope="col" class="number">Tokens</th></tr>'
    for row in itertools.islice(store.dropped(), LISTED):
        tokens = f"{row['tokens']:,}" if row.get("tokens") is not None else ""
        yield (
            f'<tr><th scope="row" class="place">{safe(row["place"])}</th><td>{safe(str(row["reason"]))}</td>'
            f'<td class="number">{tokens}</td></tr>'
        )
    yield "</table>"
    if dropped > LISTED:
        yield f'<p class="note">And {dropped - LISTED:,} more, in the store\'s dropped.jsonl.</p>'


def _proof(store: "TokenStore") -> str:
    rows = "".join(
        f'<tr><th scope="row" class="place">{safe(name)}</th><td class="hash">{safe(digest)}</td></tr>'
        for name, digest in store.sha256.items()
    )
    return (
        '<p class="note">What this page shows was read from the arrays that are trained on, and nothing was tokenised again. '
        "When it was written every file was read and gave these SHA-256; sha256sum gives them again.</p>"
        f'<table><tr><th scope="row" class="place">fingerprint</th><td class="hash">{safe(store.fingerprint)}</td></tr>{rows}</table>'
    )


def safe(text: str) -> str:
    """Words from a file; half a surrogate pair, which no file can hold, is escaped."""
    return escape(text.encode("utf-8", "backslashreplace").decode())


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

"""Store → head of the page: figures, findings, dropped rows and hashes, as escaped HTML."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, cast
from urllib.parse import urlencode

from forge_data._media import several
from forge_data._values import counted
from forge_data.findings._finding import STOP
from forge_data.store._manifest import PROMPTS

if TYPE_CHECKING:
    from forge_data.findings._report import LintReport
    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

LISTED = 1000
"""Rows left out that a page lists; more are only counted."""


def lede(store: "TokenStore | PromptStore", shown: Sequence[int]) -> str:
    """Write one sentence on what the page shows."""
    prompts = store.kind == PROMPTS
    which = counted(len(store), "prompts" if prompts else "samples")
    how = "token by token, as the model is asked" if prompts else "token by token, as they are trained on"
    if len(shown) == len(store):
        return f"All {which}, {how}."
    if list(shown) == list(range(len(shown))):
        return f"The first {len(shown):,} of {which}, {how}; the range 0: shows all."
    return f"{len(shown):,} chosen of {which}, {how}."


def figures(store: "TokenStore | PromptStore") -> str:
    """Write the main numbers; of prompts nothing is in a loss."""
    tokens, accounting = int(store.lengths.sum()), store.accounting
    kind = "" if store.kind in ("supervised", PROMPTS) else store.kind.replace("_", " ")
    rows = [("Prompts" if store.kind == PROMPTS else "Samples", f"{len(store):,}", kind), ("Tokens", f"{tokens:,}", "")]
    if store.kind != PROMPTS:
        learned = int(cast("TokenStore", store).loss_counts.sum())
        rows.append(("Tokens in the loss", f"{learned:,}", f"{100 * learned / tokens:.1f} % of all" if tokens else ""))
        media, of_media = cast("TokenStore", store).media_counts.sum(axis=0).tolist()
        if media:
            kinds = several(store.media_kinds)
            rows.append((kinds.capitalize(), f"{media:,}", f"{of_media:,} tokens stand for them"))
    if store.held_out:
        rows.append(("Held out", f"{len(store.held_out):,}", "measured, and not trained on"))
    rows.append(("Rows kept", f"{accounting.kept:,}", f"of {accounting.read:,}"))
    return "".join(
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)} <small>{safe(note)}</small></dd></div>" for name, value, note in rows
    )


def details(store: "TokenStore | PromptStore", places: Collection[str]) -> str:
    """Write findings, dropped rows and hashes; `places` are the rows that the page shows.

    Prompts are not linted.
    """
    dropped = sum(store.accounting.dropped.values())
    return "".join(
        [
            _linted(cast("TokenStore", store).lint, places) if store.kind != PROMPTS else "",
            _fold("Rows left out", f"{dropped:,}" if dropped else "none", "".join(_dropped(store))),
            _fold("Proof", f"SHA-256 {store.fingerprint[:16]}…", _proof(store)),
        ]
    )


def _linted(report: "LintReport", places: Collection[str]) -> str:
    stops, warnings = counted(report.stops, "stops"), counted(report.warnings, "warnings")
    found = f"{stops}, {warnings}" if report.counts else "nothing"
    return _fold("Findings", found, "".join(_findings(report, places)), unfolded=report.stops > 0)


def _fold(name: str, summary: str, inside: str, *, unfolded: bool = False) -> str:
    return (
        f"<details{' open' if unfolded else ''}><summary><b>{safe(name)}</b> <span>{safe(summary)}</span></summary>"
        f'<div class="inside" tabindex="0" role="region" aria-label="{safe(name)}">{inside}</div></details>'
    )


def _findings(report: "LintReport", places: Collection[str]) -> Iterator[str]:
    if not report.findings:
        yield '<p class="note">The lint examined every row and found nothing.</p>'
    for (severity, rule), group in itertools.groupby(report.findings, key=lambda finding: (finding.severity, finding.rule)):
        listed = list(group)
        stopping = report.stop_counts.get(rule, 0)
        count = stopping if severity == STOP else report.counts[rule] - stopping
        # A remedy that all share is written once.
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
    """Link a row that the page shows."""
    if place not in places:
        return safe(place)
    return f'<a href="#{safe(urlencode({"find": place}, errors="backslashreplace"))}">{safe(place)}</a>'


def _dropped(store: "TokenStore | PromptStore") -> Iterator[str]:
    accounting = store.accounting
    yield f'<p class="note">{safe(str(accounting))}.</p>'
    dropped = sum(accounting.dropped.values())
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


def _proof(store: "TokenStore | PromptStore") -> str:
    rows = "".join(
        f'<tr><th scope="row" class="place">{safe(name)}</th><td class="hash">{safe(digest)}</td></tr>'
        for name, digest in store.sha256.items()
    )
    return (
        '<p class="note">This page was read from the arrays that are trained on; nothing was tokenised again. '
        "When it was written, every file had these SHA-256, which sha256sum prints.</p>"
        '<table><tr><th scope="row" class="place">fingerprint</th>'
        f'<td class="hash">{safe(store.fingerprint)}</td></tr>{rows}</table>'
    )


def safe(text: str) -> str:
    """Escape text for HTML; half a surrogate pair, which UTF-8 lacks, is written as an escape."""
    return escape(text.encode("utf-8", "backslashreplace").decode())

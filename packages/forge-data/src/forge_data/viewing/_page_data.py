"""Views → data of the page: the text of each token once, samples as numbers into that table."""

import json
import re
from collections.abc import Iterable
from typing import Any

from forge_data._example import ROLES
from forge_data.findings._finding import Finding
from forge_data.viewing._view import View

_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
"""Characters that could end the element that holds the data, or that UTF-8 cannot encode."""


def page_data(views: Iterable[View], findings: Iterable[Finding], noun: str = "sample") -> dict[str, Any]:
    """Make what page/data.js reads; `findings` are those on the rows that are shown."""
    numbers: dict[int, int] = {}
    vocabulary: list[tuple[int, str, int]] = []
    samples: list[dict[str, Any]] = []
    kept = list(findings)
    on_row: dict[str, list[int]] = {}
    for number, finding in enumerate(kept):
        on_row.setdefault(finding.place, []).append(number)
    for view in views:
        for token, piece in zip(view.ids, view.pieces, strict=True):
            if token not in numbers:
                numbers[token] = len(vocabulary)
                vocabulary.append((token, piece.text, int(piece.special)))
        samples.append(_sample(view, numbers, vocabulary) | {"findings": on_row.get(view.place, [])})
    return {
        "noun": noun,
        "roles": ROLES,
        "vocabulary": vocabulary,
        "samples": samples,
        "findings": [
            {"rule": f.rule, "severity": f.severity, "field": f.field, "what": f.what, "fix": f.fix, "texts": f.texts}
            for f in kept
        ],
    }


def as_script(data: dict[str, Any]) -> str:
    """Encode data as JSON that can be inside a script element, whatever its texts contain."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _sample(view: View, numbers: dict[int, int], vocabulary: list[tuple[int, str, int]]) -> dict[str, Any]:
    local = [numbers[token] for token in view.ids]
    return {
        "index": view.index,
        "place": view.place,
        "standing": view.standing,
        "heldOut": view.held_out,
        "partner": view.partner,
        "columns": view.columns,
        "tokens": local,
        "learned": [edge for run in view.runs() for edge in run],
        "segments": [value for s in view.segments for value in (s.start, ROLES.index(s.role))],
        # Where a character is spread over several tokens, these differ from the vocabulary's own texts.
        "shared": {place: text for place, text in enumerate(view.texts) if text != vocabulary[local[place]][1]},
        "images": [edge for image in view.images for edge in image],
        "inside": [place for place, within in enumerate(view.inside) if within],
    }

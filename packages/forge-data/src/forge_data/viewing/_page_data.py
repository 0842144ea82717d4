"""Views → data of the page: the text of each token once, samples as numbers into that table."""

import base64
import json
import re
from collections.abc import Iterable
from typing import Any

from forge_data._example import ROLES
from forge_data._media import Media
from forge_data.findings._finding import Finding
from forge_data.media._read import thumbnail
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
    pictures = _Pictures()
    for number, finding in enumerate(kept):
        on_row.setdefault(finding.place, []).append(number)
    for view in views:
        for token, piece in zip(view.ids, view.pieces, strict=True):
            if token not in numbers:
                numbers[token] = len(vocabulary)
                vocabulary.append((token, piece.text, int(piece.special)))
        sample = _sample(view, numbers, vocabulary) | {"findings": on_row.get(view.place, [])}
        samples.append(sample | {"pictures": [pictures.number(medium) for medium in view.pictures]})
    return {
        "noun": noun,
        "roles": ROLES,
        "vocabulary": vocabulary,
        "samples": samples,
        "pictures": pictures.uris,
        "findings": [
            {"rule": f.rule, "severity": f.severity, "field": f.field, "what": f.what, "fix": f.fix, "texts": f.texts}
            for f in kept
        ],
    }


_MOST_PICTURES = 2000
"""Pictures of a page, of a few KB each; images beyond them are named alone."""


class _Pictures:
    """Small pictures of a page's images, each once."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self._known: dict[str, int] = {}

    def number(self, medium: Media) -> int:
        """Return the number of an image's picture; -1 where it is not there as it was."""
        if medium.sha256 not in self._known:
            made = thumbnail(medium) if len(self.uris) < _MOST_PICTURES else None
            self._known[medium.sha256] = -1 if made is None else len(self.uris)
            if made is not None:
                self.uris.append("data:image/jpeg;base64," + base64.b64encode(made).decode())
        return self._known[medium.sha256]


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
        "images": [edge for medium in view.media for edge in medium],
        "inside": [place for place, within in enumerate(view.inside) if within],
    }

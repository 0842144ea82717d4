"""Stores with images → rows without, whose text has a token of one: refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

import forge_data

_CHUNK = 2**24
"""Tokens that are looked at at once."""
_NO_MESSAGE = {"prompt": "prompt", "completion": "completion", "document": "text", "tokens": "input_ids"}
"""Role of a text that is no message → its field."""


def check_texts_beside_media(token_ids: Collection[int], *stores: Any) -> None:
    """Refuse rows without images that have a token of one.

    They would be given an image of another row, or end in an error. Of rows with images each token is compared
    as they are tokenized.

    Args:
        token_ids: tokens that the model takes for parts of an image, a video or a sound.
        stores: of the run, or None.

    Raises:
        forge_data.DataError: the first such row, and where in it the token is.
    """
    for store in (store for store in stores if store is not None):
        row = _first(store, np.array(sorted(token_ids), np.int32))
        if row is None:
            continue
        sample = store[row]
        at = int(np.flatnonzero(np.isin(sample.input_ids, [*token_ids]))[0])
        token = store.tokenizer().convert_ids_to_tokens(int(sample.input_ids[at]))
        raise forge_data.DataError(
            f"{store.source(row)}: {_field(sample, at)} has {token!r} in its text, which stands for a part of an image of this "
            "model, and no image; images are parts of a content, or in the column images, so take it out of the text"
        )


def _first(store: Any, token_ids: Any) -> int | None:
    """Return the first row without images that has one of these tokens."""
    without = store.media_counts[:, 0] == 0
    if not without.any():
        return None
    if not hasattr(store, "flat"):
        return next((row for row in np.flatnonzero(without).tolist() if np.isin(store[row].input_ids, token_ids).any()), None)
    ids, starts = store.flat
    order = np.argsort(starts, kind="stable")
    begins, found = starts[order], []
    for start in range(0, len(ids), _CHUNK):
        hits = start + np.flatnonzero(np.isin(ids[start : start + _CHUNK], token_ids))
        at = np.searchsorted(begins, hits, side="right") - 1
        hits, rows = hits[at >= 0], order[at[at >= 0]]
        inside = (hits < starts[rows] + store.lengths[rows]) & without[rows]
        found += [int(rows[inside].min())] if inside.any() else []
    return min(found, default=None)


def _field(sample: Any, at: int) -> str:
    """Return the field of a token; of a conversation the message, counted from its first."""
    segments, roles = getattr(sample, "segments", ()), getattr(sample, "roles", ())
    inside = next((number for number, (start, stop) in enumerate(segments) if start <= at < stop), None)
    if inside is None or roles[inside] == "template":
        return "its prompt" if inside is None else "a text of its template"
    if (role := roles[inside]) in _NO_MESSAGE:
        return f"field {_NO_MESSAGE[role]}"
    return f"field messages[{sum(each != 'template' for each in roles[:inside])}] ({role})"

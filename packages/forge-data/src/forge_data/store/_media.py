"""Media of samples ↔ the bytes that a store keeps of them: what they are, and where.

What they are (SHA-256, tokens) is trained on and fingerprinted; where they are (field, path, or their bytes) is not.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._media import Kind, Media
from forge_data.store._manifest import MEDIA, MEDIA_FILE_OFFSETS, MEDIA_FILES, MEDIA_OFFSETS

if TYPE_CHECKING:
    from numpy.typing import NDArray


def arrays_of_media(samples: "Sequence[tuple[Media, ...]]") -> "dict[str, NDArray[Any]]":
    """Write the media of samples as arrays of a `Batch`, which has a count for each sample."""
    known = [known_of(media) for media in samples]
    places = [_places(media) for media in samples]
    return {
        MEDIA: np.frombuffer(b"".join(known), dtype=np.uint8),
        MEDIA_OFFSETS: np.array([*map(len, known)], dtype=np.int64),
        MEDIA_FILES: np.frombuffer(b"".join(places), dtype=np.uint8),
        MEDIA_FILE_OFFSETS: np.array([*map(len, places)], dtype=np.int64),
    }


def media_at(arrays: "dict[str, NDArray[Any]]", at: int) -> tuple[Media, ...]:
    """Read the media of sample `at` of a store's arrays."""
    known = known_at(arrays, at)
    if not known:
        return ()
    offsets = arrays[MEDIA_FILE_OFFSETS]
    head, _, rest = arrays[MEDIA_FILES][offsets[at] : offsets[at + 1]].tobytes().partition(b"\n")
    media, done = [], 0
    for (sha256, start, stop, *kind), (field, path) in zip(json.loads(known), json.loads(head), strict=True):
        if isinstance(path, str):
            media.append(Media(field, path, None, sha256, start, stop, *kind))
        else:
            media.append(Media(field, None, rest[done : done + path], sha256, start, stop, *kind))
            done += path
    return tuple(media)


_HEAD = 1 << 16
"""Bytes that hold the paths of most samples' media."""


def files_at(arrays: "dict[str, NDArray[Any]]", at: int) -> list[tuple[str, str]]:
    """Read path and SHA-256 of the media of sample `at` that are files."""
    known = known_at(arrays, at)
    if not known:
        return []
    start, stop = arrays[MEDIA_FILE_OFFSETS][at : at + 2].tolist()
    head, end, _ = arrays[MEDIA_FILES][start : min(stop, start + _HEAD)].tobytes().partition(b"\n")
    if not end:
        head = arrays[MEDIA_FILES][start:stop].tobytes().partition(b"\n")[0]
    named = zip(json.loads(known), json.loads(head), strict=True)
    return [(path, sha256) for (sha256, *_), (_, path) in named if isinstance(path, str)]


def known_at(arrays: "dict[str, NDArray[Any]]", at: int) -> bytes:
    """Return what `known_of` wrote of the images of sample `at`."""
    if MEDIA not in arrays:
        return b""
    offsets = arrays[MEDIA_OFFSETS]
    return arrays[MEDIA][offsets[at] : offsets[at + 1]].tobytes()


def counts_at(arrays: "dict[str, NDArray[Any]]", at: int) -> tuple[int, int]:
    """Count the media of sample `at`, and the tokens that stand for them; nothing else is read."""
    known = json.loads(known_at(arrays, at) or b"[]")
    return len(known), sum(stop - start for _, start, stop, *_ in known)


def kinds_at(arrays: "dict[str, NDArray[Any]]", at: int) -> set[Kind]:
    """Return the kinds of media of sample `at`; nothing else is read."""
    return {kind[0] if kind else "image" for _, _, _, *kind in json.loads(known_at(arrays, at) or b"[]")}


def known_of(media: tuple[Media, ...]) -> bytes:
    """Write what media are, as a store keeps it: equal for equal media alone.

    An image does not say its kind.
    """
    found = [(each.sha256, each.start, each.stop, *(() if each.kind == "image" else (each.kind,))) for each in media]
    return _json(found) if media else b""


def _places(media: tuple[Media, ...]) -> bytes:
    if not media:
        return b""
    held = [medium.data for medium in media if medium.data is not None]
    named = [(medium.field, medium.path if medium.data is None else len(medium.data)) for medium in media]
    return b"\n".join([_json(named), b"".join(held)])


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

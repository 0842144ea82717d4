"""Media of samples ↔ the bytes that a store keeps of them: what they are, and where.

What they are (SHA-256, tokens) is trained on and fingerprinted; where they are (field, path, or their bytes) is not.
"""

import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
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
    held = io.BytesIO(rest)

    def read(field: str, where: Any) -> Media:
        if isinstance(where, dict):
            frames = tuple(attrs.evolve(read(name, of), sha256=sha256) for name, of, sha256 in where["frames"])
            return Media(field, frames=frames, fps=where["fps"])
        return Media(field, where) if isinstance(where, str) else Media(field, data=held.read(where))

    named = zip(json.loads(known), json.loads(head), strict=True)
    return tuple(
        attrs.evolve(read(*where), sha256=sha256, start=start, stop=stop, **({"kind": kind[0]} if kind else {}))
        for (sha256, start, stop, *kind), where in named
    )


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
    named = [(where, sha256) for (sha256, *_), (_, where) in zip(json.loads(known), json.loads(head), strict=True)]
    named += [(of, sha256) for where, _ in named if isinstance(where, dict) for _, of, sha256 in where["frames"]]
    return [(where, sha256) for where, sha256 in named if isinstance(where, str)]


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
    each = [one for medium in media for one in medium.frames or (medium,)]
    held = [one.data for one in each if one.data is not None]
    return b"\n".join([_json([(medium.field, _where(medium)) for medium in media]), b"".join(held)])


def _where(medium: Media) -> Any:
    """Return a path, the number of bytes that are held, or those of frames."""
    if medium.frames:
        return {"frames": [(each.field, _where(each), each.sha256) for each in medium.frames], "fps": medium.fps}
    return medium.path if medium.data is None else len(medium.data)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

"""Value of a row that stands for a medium, as a file, bytes, frames or decoded → `Media`."""

import base64
import binascii
import io
import os
import re
import struct
import sys
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs
import numpy as np

from forge_data._errors import DataError
from forge_data._media import ONE, Kind, Media
from forge_data._values import checked_text, describe

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://|(?<=data:))", re.IGNORECASE)
_IN_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of PIL images that a PNG file keeps as they are."""
_ENCODED = re.compile("iVBORw0KGgo|/9j/|R0lGOD|UklGR|ZkxhQ|T2dnU|SUQz|AAAA..Z0eX|GkXfo")
"""How PNG, JPEG, GIF, WebP, WAV, AVI, FLAC, Ogg, MP3, MP4 and WebM begin in base64."""
_LONGEST_NAME = 255
"""Characters of a file's name; what is longer and begins so is no path."""
_STRUCT = {"bytes", "path"}
"""Fields of an image or audio of `datasets`, in tables too."""
_DECODED = {"array", "sampling_rate"}
"""Fields of decoded audio, beside its path."""
_MOST = 2**32
"""What a WAV file's numbers of 32 bits stay below."""
_EXAMPLES: dict[Kind, str] = {
    "image": "data:image/png;base64,",
    "video": "data:video/mp4;base64,",
    "audio": "data:audio/wav;base64,",
}


def media_of(place: str, field: str, value: Any, kind: Kind = "image") -> Media:
    """Read a medium: a path, a `file://` or `data:` URI, bytes, a struct, or decoded.

    A struct is `{"bytes": ..., "path": ...}`, whose bytes win. Decoded are a PIL image, and audio as
    `{"array": float[N], "sampling_rate": ...}`. A video may be a list of images, its frames. The path is as the row has it;
    `placed` makes it absolute. No file is opened.

    Raises:
        DataError: the address of a server, a URI that cannot be decoded, or nothing of this kind at all.
    """
    if isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
        return Media(field, path=checked_text(place, field, path), kind=kind)
    if isinstance(value, str):
        return _named(place, field, checked_text(place, field, value), kind)
    if isinstance(value, bytes | bytearray | memoryview) and len(value):
        return Media(field, data=bytes(value), kind=kind)
    if isinstance(value, dict) and value.keys() <= _STRUCT:
        given = value.get("bytes") or value.get("path")
        if isinstance(given, str) if not value.get("bytes") else isinstance(given, bytes | bytearray | memoryview):
            return media_of(place, field, given, kind)
    if kind == "image" and is_pil_image(value):
        return Media(field, data=_as_png(place, field, value))
    if kind == "video" and isinstance(value, list):
        return _of_frames(place, field, value)
    if kind == "audio" and isinstance(value, dict) and value.keys() >= _DECODED and value.keys() <= _DECODED | _STRUCT:
        return Media(field, data=as_wav(place, field, value["array"], value["sampling_rate"]), kind=kind)
    raise DataError(
        f"{place}: field {field} is {describe(value)}, and no {kind}; give the path of its file, its bytes, or a data: URI"
        f"{' (or a list of frames)' if kind == 'video' else ''}"
    )


def _of_frames(place: str, field: str, value: list[Any]) -> Media:
    if not value:
        raise DataError(f"{place}: field {field} is a video of no frames; give it, or take the row out")
    return Media(field, kind="video", frames=tuple(media_of(place, f"{field}[{at}]", each) for at, each in enumerate(value)))


def from_base64(place: str, field: str, value: Any, kind: Kind = "image") -> Media:
    """Read bytes in base64, with `data:image/png;base64,` before them or not.

    Raises:
        DataError: it is no base64.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be the bytes of {ONE[kind]} in base64")
    if value[:5].lower() == "data:":
        return media_of(place, field, value, kind)
    return Media(field, data=_decoded(place, field, value, kind), kind=kind)


def placed(place: str, medium: Media, directory: str | None) -> Media:
    """Make the path of a medium absolute: beside `~`, it begins in `directory`.

    Raises:
        DataError: it is relative, and the rows lie in no directory of this machine.
    """
    if medium.frames:
        return attrs.evolve(medium, frames=tuple(placed(place, each, directory) for each in medium.frames))
    if medium.path is None:
        return medium
    path = os.path.expanduser(medium.path)
    if not os.path.isabs(path):
        if directory is None:
            raise DataError(
                f"{place}: field {medium.field} is the relative path {medium.path!r}, and these rows lie in no directory of "
                "this machine; give an absolute path, or the bytes"
            )
        path = os.path.join(directory, path)
    # Behind a link to a directory `..` leads elsewhere than the path's text does.
    return attrs.evolve(medium, path=path if os.pardir in path.split(os.sep) else os.path.normpath(path))


def is_pil_image(value: object) -> bool:
    """Tell whether a value is an image of Pillow, which is not imported for it."""
    pil: Any = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _named(place: str, field: str, value: str, kind: Kind) -> Media:
    found = _SCHEME.match(value)
    scheme = found[1].lower() if found else ""
    if scheme == "data":
        head, comma, encoded = value.partition(",")
        if not comma or not head.lower().startswith(f"data:{kind}/") or not head.lower().endswith(";base64"):
            raise DataError(
                f"{place}: field {field} is {describe(value)}, a data: URI of another kind; give {_EXAMPLES[kind]}... "
                "or the path of a file"
            )
        return Media(field, data=_decoded(place, field, encoded, kind), kind=kind)
    if scheme == "file":
        parts = urlsplit(value)
        if parts.netloc not in ("", "localhost"):
            raise DataError(
                f"{place}: field {field} is {describe(value)}, a file of the host {parts.netloc!r}; of a file here it is "
                "file:///..., or its path alone"
            )
        value, scheme = unquote(value[len("file://") + len(parts.netloc) :]), ""
    if scheme:
        raise DataError(
            f"{place}: field {field} is {describe(value)}, and nothing is fetched while training; download it, and give the "
            "path of the file"
        )
    if len(value) > _LONGEST_NAME and _ENCODED.match(value):
        raise DataError(
            f"{place}: field {field} is {describe(value)}, bytes in base64 that do not say so; write {_EXAMPLES[kind]} "
            "(or another format) before them"
        )
    if not value.strip() or "\0" in value:
        raise DataError(
            f"{place}: field {field} is {describe(value)}, which is no path; give the path of the file of {ONE[kind]}"
        )
    return Media(field, path=value, kind=kind)


def _decoded(place: str, field: str, encoded: str, kind: Kind) -> bytes:
    try:
        data = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{place}: field {field} is no base64 of {ONE[kind]}: {error}; encode its bytes again") from error
    if not data:
        raise DataError(f"{place}: field {field} is {ONE[kind]} of no bytes; give it, or take the row out")
    return data


def _as_png(place: str, field: str, medium: Any) -> bytes:
    """Encode a decoded image, such as `datasets` makes, without a loss."""
    file = io.BytesIO()
    try:
        # What a PNG cannot keep is made RGB, as processors do it themselves.
        made = medium if medium.mode in _IN_PNG else medium.convert("RGB")
        # The orientation in its EXIF is applied by processors.
        made.save(file, "PNG", exif=medium.getexif())
    except Exception as error:
        # Pillow reads a file only now, and raises OSError, SyntaxError, ValueError and others where it is broken.
        raise DataError(
            f"{place}: field {field} is an image that cannot be read: {error}; mend it, or take the row out"
        ) from error
    return file.getvalue()


def as_wav(place: str, field: str, array: Any, sampling_rate: Any) -> bytes:
    """Encode decoded audio, [N] or [channels, N], as a WAV file of its numbers, without a loss.

    Raises:
        DataError: it is no array of finite numbers with a rate in Hz, it has more channels than samples, or whole numbers of 16
            or 32 bits, which would be as many times too loud.
    """
    what = f"{place}: field {field} is decoded audio"
    try:
        given = np.asarray(array)
        if np.iscomplexobj(given):
            raise TypeError("they are complex")
        samples = given.astype(np.float64 if given.dtype == np.float64 and isinstance(array, np.ndarray) else np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} that is no array of numbers: {error}; give finite numbers, [N] or [channels, N]") from error
    if samples.ndim not in (1, 2) or not samples.size or not np.isfinite(samples).all():
        raise DataError(f"{what} of the shape {list(samples.shape)}; give finite numbers, [N] or [channels, N]")
    if isinstance(sampling_rate, bool | str) or not (0 < (rate := _whole(sampling_rate)) < _MOST):
        raise DataError(f"{what} with a sampling_rate that is {describe(sampling_rate)}; give samples in a second, in Hz")
    if samples.ndim == 2 and samples.shape[0] > samples.shape[1]:
        raise DataError(f"{what} of {samples.shape[0]} channels of {samples.shape[1]} samples; give it as [channels, N]")
    if given.dtype.kind in "iu" and (loudest := int(np.abs(samples).max())) > 1:
        raise DataError(
            f"{what} of whole numbers up to {loudest}; divide them by the largest of their type (32768 for 16 bits), so that "
            "they lie between -1 and 1"
        )
    frames = samples.reshape(-1, samples.shape[-1]).T
    width = frames.itemsize
    head = struct.pack("<HHIIHH", 3, frames.shape[1], rate, rate * frames.shape[1] * width, frames.shape[1] * width, 8 * width)
    body = np.ascontiguousarray(frames, dtype=f"<f{width}").tobytes()
    chunks = b"".join(name + struct.pack("<I", len(data)) + data for name, data in ((b"fmt ", head), (b"data", body)))
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _whole(number: Any) -> int:
    """Return a number that is whole; 0 for anything else."""
    try:
        return int(number) if int(number) == number else 0
    except (TypeError, ValueError, OverflowError):
        return 0

"""File or bytes of a medium → its upright pixels or audio samples, and the bytes' SHA-256."""

import base64
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._errors import DataError
from forge_data._media import ONE, Media
from forge_data._media_values import as_wav

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image as Pixels


_THUMBNAIL = (192, 192)
"""Pixels of the largest one."""
_OPAQUE = 255
_OPENED = re.compile(r"Error opening <.*?>: ")
"""How errors of soundfile begin, by an object in memory."""
_UNKNOWN_SIZE = 0x7FFFF000
"""Bytes from which on a WAV file's size is not known."""
_SHOWN = 300
"""Characters of a path that an error shows."""


def read_image(medium: Media, place: str, lost: list[str] | None = None) -> "tuple[Pixels, str]":
    """Decode an image as transformers' `load_image` does, with the SHA-256 of its bytes.

    Args:
        medium: the image; where it has a `sha256`, its bytes must still have it.
        place: of its row, such as `train.jsonl:417`.
        lost: gets what of the image is not in its pixels.

    Raises:
        DataError: it is missing, unreadable, no image, too large, or another one than before.
    """
    data, sha256 = checked_bytes(medium, place)
    return _decoded(data, medium, place, lost), sha256


def read_audio(medium: Media, place: str, sampling_rate: int) -> "tuple[NDArray[np.float32], str]":
    """Decode audio as transformers' `load_audio` does with soundfile: float32[N].

    It comes with the SHA-256 of its bytes. Channels are averaged, and it is resampled by soxr.

    Args:
        medium: the clip; where it has a `sha256`, its bytes must still have it.
        place: of its row, such as `train.jsonl:417`.
        sampling_rate: in Hz.

    Raises:
        DataError: it is missing, unreadable, cut off, no audio, empty, or another clip than before.
    """
    data, sha256 = checked_bytes(medium, place)
    if missing := _missing_bytes(data):
        raise media_error(medium, place, f"is cut off: its header tells of {missing:,} bytes more", "give the whole file")
    from transformers.audio_utils import load_audio

    try:
        samples = load_audio(_uri("audio/*", data), sampling_rate=sampling_rate, backend="soundfile")
    except ImportError as error:
        raise DataError(
            f"{place}: field {medium.field}: audio is read by soundfile and soxr, which cannot be imported; install "
            "forge-data[audio]"
        ) from error
    except Exception as error:
        # libsndfile's errors are of its own class, and those of formats that are video's RuntimeError.
        line = _OPENED.sub("", str(error)).partition("\n")[0] or type(error).__name__
        raise media_error(medium, place, f"cannot be read as audio: {line}", "give a WAV, FLAC, Ogg or MP3 file") from error
    if not len(samples) or not np.isfinite(samples).all():
        raise media_error(medium, place, "is audio of no samples, or of infinite ones", "mend it, or take the row out")
    return samples, sha256


def _missing_bytes(data: bytes) -> int:
    """Count the bytes that a WAV file lacks of what its header says.

    libsndfile reads such a file as a shorter clip. Programs that write into a pipe do not know the size, and say 0 or more than
    2 GiB.
    """
    said = int.from_bytes(data[4:8], "little") if data[:4] == b"RIFF" else 0
    return max(0, said + 8 - len(data)) if 0 < said < _UNKNOWN_SIZE else 0


def close(decoded: "Iterable[Any]") -> None:
    """Free images that were read."""
    for each in decoded:
        if hasattr(each, "close"):
            each.close()


def checked_bytes(medium: Media, place: str) -> tuple[bytes, str]:
    """Read the bytes of a medium, which must be those that were prepared."""
    data = _bytes_of(medium, place)
    sha256 = hashlib.sha256(data).hexdigest()
    if medium.sha256 and sha256 != medium.sha256:
        raise media_error(
            medium,
            place,
            f"changed since the rows were prepared: its SHA-256 is {sha256}, and was {medium.sha256}",
            "put it back, or prepare again",
        )
    return data, sha256


def sha256_of(medium: Media) -> str | None:
    """Return the SHA-256 of the bytes that a medium has now; None where it cannot be read."""
    try:
        return hashlib.sha256(_bytes_of(medium, "")).hexdigest()
    except DataError:
        return None


def thumbnail(medium: Media) -> bytes | None:
    """Return a small JPEG of an image, or of a video's first frame, as the model sees it.

    None of audio, of a file that is a video, or of one that changed.
    """
    if medium.frames:
        return thumbnail(medium.frames[0])
    if medium.kind != "image":
        return None
    try:
        pixels, _ = read_image(medium, "")
    except DataError:
        return None
    pixels.thumbnail(_THUMBNAIL)
    pixels.save(file := io.BytesIO(), "JPEG", quality=80)
    return file.getvalue()


def uri_of(medium: Media, place: str, sampling_rate: int) -> str:
    """Return a medium as a `data:` URI, without a loss.

    What `read_image` reads is a PNG, what `read_audio` reads a WAV, and a video its file as it is. A list of frames is one of
    PNGs with commas between them, as vLLM reads `video/jpeg`.

    Raises:
        DataError: as those.
    """
    if medium.frames:
        frames = [uri_of(each, place, sampling_rate).partition(",")[2] for each in medium.frames]
        return f"data:video/jpeg;base64,{','.join(frames)}"
    if medium.kind == "video":
        return _uri("video/mp4", checked_bytes(medium, place)[0])
    if medium.kind == "audio":
        samples, _ = read_audio(medium, place, sampling_rate)
        return _uri("audio/wav", as_wav(place, medium.field, samples, sampling_rate))
    pixels, _ = read_image(medium, place)
    pixels.info.clear()  # what its file says beside them, such as a profile of colours
    pixels.save(file := io.BytesIO(), "PNG", compress_level=1)
    return _uri("image/png", file.getvalue())


def _uri(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def name_of(medium: Media) -> str:
    """Name a medium for a person: its file's name, or the field that holds its bytes."""
    if medium.frames:
        return f"{name_of(medium.frames[0])} …"
    return os.path.basename(medium.path) if medium.path is not None else medium.field


def _bytes_of(medium: Media, place: str) -> bytes:
    if medium.data is not None:
        return medium.data
    assert medium.path is not None
    remedy = f"give the file of {ONE[medium.kind]}, relative to the rows' file or absolute"
    try:
        kind = os.stat(medium.path).st_mode
        # A pipe would wait for a writer, and a device has no end.
        if stat.S_ISREG(kind):
            return Path(medium.path).read_bytes()
    except (OSError, ValueError) as error:
        raise media_error(medium, place, f"cannot be read: {getattr(error, 'strerror', error)}", remedy) from error
    raise media_error(
        medium, place, "is a directory" if stat.S_ISDIR(kind) else "is no regular file, but a pipe or a device", remedy
    )


def _decoded(data: bytes, medium: Media, place: str, lost: list[str] | None) -> "Pixels":
    try:
        from PIL import Image as Pillow, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError(
            f"{place}: field {medium.field}: images are read by Pillow, which cannot be imported ({error}); install "
            "forge-data[images]"
        ) from error
    limit = Pillow.MAX_IMAGE_PIXELS
    try:
        with Pillow.open(io.BytesIO(data)) as opened:
            if limit is None or opened.width * opened.height <= limit:
                turned = ImageOps.exif_transpose(opened)
                if turned.mode == "P" and isinstance(turned.info.get("transparency"), bytes):
                    turned = turned.convert("RGBA")  # the same colours, without Pillow's warning
                pixels = turned.convert("RGB")
                if lost is not None:
                    lost += _lost(opened)
                return pixels
        found = f"{opened.width} x {opened.height} pixels"
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        found = str(error)
    except UnidentifiedImageError as error:
        raise media_error(medium, place, "is no image that Pillow knows", "give a PNG, JPEG or WebP file") from error
    except Exception as error:
        # Pillow's readers raise OSError, SyntaxError, ValueError, struct.error and others for what is broken.
        raise media_error(medium, place, f"is a broken image: {error}", "mend it, or take the row out") from error
    raise media_error(medium, place, f"has too many pixels ({found}; Pillow's limit is {limit})", "make it smaller")


def _lost(opened: "Pixels") -> Iterator[str]:
    """Say what of an opened file its RGB pixels do not have."""
    if opened.mode.startswith(("I", "F")):
        yield f"it has more than 8 bits a pixel (Pillow's mode {opened.mode}), and all above 255 is white"
    alpha = opened.getchannel("A") if "A" in opened.mode else None
    if alpha is None and "transparency" in opened.info:
        alpha = opened.convert("RGBA").getchannel("A")
    if alpha is not None and (least := int(np.asarray(alpha).min())) < _OPAQUE:
        yield f"parts of it are transparent (alpha from {least}), and the colours below are shown"
    # A camera's JPEG may hold a preview or a map of depths as another frame.
    if opened.format != "MPO" and (frames := getattr(opened, "n_frames", 1)) > 1:
        yield f"it has {frames:,} frames, and the first is shown"


def media_error(medium: Media, place: str, found: str, remedy: str) -> DataError:
    path = medium.path
    what = f"the {medium.kind}" if path is None else path if len(path) <= _SHOWN else f"{path[:_SHOWN]}…"
    return DataError(f"{place}: field {medium.field}: {what} {found}; {remedy}")

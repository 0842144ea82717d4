"""File or bytes of an image → its pixels, upright and in colours, and the bytes' SHA-256."""

import hashlib
import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from forge_data._errors import DataError
from forge_data._image import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels


def read_image(image: Image, place: str) -> "tuple[Pixels, str]":
    """Decode an image as transformers' `load_image` does, with the SHA-256 of its bytes.

    Args:
        image: the image; where it has a `sha256`, its bytes must still have it.
        place: of its row, such as `train.jsonl:417`.

    Raises:
        DataError: it is missing, unreadable, no image, too large, or another one than before.
    """
    data = _bytes_of(image, place)
    sha256 = hashlib.sha256(data).hexdigest()
    if image.sha256 and sha256 != image.sha256:
        raise _error(
            image,
            place,
            f"changed since the rows were prepared: its SHA-256 is {sha256}, and was {image.sha256}",
            "put it back, or prepare again",
        )
    return _decoded(data, image, place), sha256


def sha256_of(image: Image) -> str | None:
    """Return the SHA-256 of the bytes that an image has now; None where it cannot be read."""
    try:
        return hashlib.sha256(_bytes_of(image, "")).hexdigest()
    except DataError:
        return None


def name_of(image: Image) -> str:
    """Name an image for a person: its file's name, or the field that holds its bytes."""
    return os.path.basename(image.path) if image.path is not None else image.field


def _bytes_of(image: Image, place: str) -> bytes:
    if image.data is not None:
        return image.data
    assert image.path is not None
    remedy = "give the file of an image, relative to the rows' file or absolute"
    try:
        kind = os.stat(image.path).st_mode
        # A pipe would wait for a writer, and a device has no end.
        if stat.S_ISREG(kind):
            return Path(image.path).read_bytes()
    except (OSError, ValueError) as error:
        raise _error(image, place, f"cannot be read: {getattr(error, 'strerror', error)}", remedy) from error
    raise _error(image, place, "is a directory" if stat.S_ISDIR(kind) else "is no regular file, but a pipe or a device", remedy)


def _decoded(data: bytes, image: Image, place: str) -> "Pixels":
    try:
        from PIL import Image as Pillow, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError(
            f"{place}: field {image.field}: images are read by Pillow, which cannot be imported ({error}); install "
            "forge-data[images]"
        ) from error
    limit = Pillow.MAX_IMAGE_PIXELS
    try:
        with Pillow.open(io.BytesIO(data)) as opened:
            if limit is None or opened.width * opened.height <= limit:
                return ImageOps.exif_transpose(opened).convert("RGB")
        found = f"{opened.width} x {opened.height} pixels"
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        found = str(error)
    except UnidentifiedImageError as error:
        raise _error(image, place, "is no image that Pillow knows", "give a PNG, JPEG or WebP file") from error
    except Exception as error:
        # Pillow's readers raise OSError, SyntaxError, ValueError, struct.error and others for what is broken.
        raise _error(image, place, f"is a broken image: {error}", "mend it, or take the row out") from error
    raise _error(image, place, f"has too many pixels ({found}; Pillow's limit is {limit})", "make it smaller")


def _error(image: Image, place: str, found: str, remedy: str) -> DataError:
    what = f"{image.path} " if image.path is not None else "the image "
    return DataError(f"{place}: field {image.field}: {what}{found}; {remedy}")

"""Files and bytes of images: what is read, and each fault in one line."""

import hashlib
import io
import os
import warnings

import numpy as np
import pytest

from forge_data import DataError, Media

pytest.importorskip("PIL")
pytest.importorskip("torch")

from PIL import Image as Pillow
from transformers.image_utils import load_image

from forge_data.media._read import name_of, read_image, sha256_of

from .. import pictured

pytestmark = pytest.mark.together


def save(path, mode="RGB", orientation=None, **options):
    """A file of noise in a mode, with an orientation of EXIF if given."""
    exif = Pillow.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    pictured.pixels(1).convert(mode).save(path, exif=exif, **options)
    return path


@pytest.mark.parametrize("orientation", [None, 1, 3, 6, 8])
@pytest.mark.parametrize(
    ("name", "mode"), [("a.png", "RGB"), ("a.png", "RGBA"), ("a.png", "P"), ("a.jpg", "L"), ("a.jpg", "CMYK")]
)
def test_pixels_are_those_of_transformers(tmp_path, name, mode, orientation):
    """Whatever its mode and orientation, an image is what `load_image` makes of the file."""
    path = save(tmp_path / name, mode, orientation)
    pixels, sha256 = read_image(Media("images[0]", str(path)), "rows.jsonl:1")
    assert np.array_equal(np.asarray(pixels), np.asarray(load_image(str(path))))
    assert pixels.mode == "RGB"
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == sha256_of(Media("images[0]", str(path)))
    same, other = read_image(Media("images[0]", data=path.read_bytes()), "rows.jsonl:1")
    assert np.array_equal(np.asarray(pixels), np.asarray(same))
    assert other == sha256


def saved(image, format, **options):
    image.save(file := io.BytesIO(), format, **options)
    return Media("images[0]", data=file.getvalue())


@pytest.mark.parametrize(
    ("image", "lost"),
    [
        (saved(Pillow.new("I;16", (2, 2), 700), "PNG"), ["more than 8 bits a pixel (Pillow's mode I;16)"]),
        (saved(Pillow.new("F", (2, 2), 0.5), "TIFF"), ["more than 8 bits a pixel (Pillow's mode F)"]),
        (saved(Pillow.new("RGBA", (2, 2), (9, 9, 9, 40)), "PNG"), ["transparent (alpha from 40)"]),
        (saved(pictured.pixels().convert("P"), "PNG", transparency=bytes(256)), ["transparent (alpha from 0)"]),
        (saved(pictured.pixels(), "GIF", save_all=True, append_images=[pictured.pixels(1)]), ["2 frames, and the first"]),
        (saved(pictured.pixels(), "MPO", save_all=True, append_images=[pictured.pixels(1)]), []),
        (saved(Pillow.new("RGBA", (2, 2), (9, 9, 9, 255)), "PNG"), []),
        (saved(pictured.pixels().convert("CMYK"), "JPEG"), []),
    ],
)
def test_what_is_lost(image, lost):
    """What a person would see of an image and the model does not is said."""
    found = []
    pixels, _ = read_image(image, "rows.jsonl:1", found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.array_equal(np.asarray(pixels), np.asarray(load_image(Pillow.open(io.BytesIO(image.data)))))
    assert len(found) == len(lost)
    assert all(what in said for what, said in zip(lost, found, strict=True))


def broken(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(pictured.png()[:200])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing.png", "missing.png cannot be read: No such file or directory; give the file of an image"),
        ("folder", "folder is a directory; give the file of an image"),
        ("pipe.png", "pipe.png is no regular file, but a pipe or a device; give the file of an image"),
        ("text.png", "text.png is no image that Pillow knows; give a PNG, JPEG or WebP file"),
        ("cut.png", "cut.png is a broken image: .*; mend it, or take the row out"),
        ("a" * 900, "aaa… cannot be read: File name too long; give the file"),
        ("a\0b.png", "cannot be read: embedded null"),
    ],
)
def test_faults(tmp_path, name, expected):
    """An image that cannot be used is one error: row, field, file, what was found, what to do."""
    image = Media("messages[0].content[1]", str(broken(tmp_path) / name))
    with pytest.raises(DataError, match=rf"^rows.jsonl:7: field messages\[0\].content\[1\]: .*{expected}"):
        read_image(image, "rows.jsonl:7")


def test_too_many_pixels(monkeypatch):
    """Pillow's limit on pixels is an error, from the first pixel above it."""
    image = Media("images[0]", data=pictured.png(height=20, width=30))
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 600)
    read_image(image, "rows.jsonl:7")
    for limit in (599, 200):
        monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(
            DataError, match=rf"^rows.jsonl:7: field images\[0\]: the image has too many pixels .*limit is {limit}\); make"
        ):
            read_image(image, "rows.jsonl:7")


def test_another_image_in_its_place(tmp_path):
    """A file that changed since the rows were prepared is one error with both hashes."""
    path = save(tmp_path / "a.png")
    _, sha256 = read_image(Media("images[0]", str(path)), "rows.jsonl:1")
    known = Media("images[0]", str(path), sha256=sha256)
    read_image(known, "rows.jsonl:1")
    path.write_bytes(pictured.png(5))
    with pytest.raises(
        DataError, match=rf"a.png changed since the rows were prepared: its SHA-256 is \w+, and was {sha256}; put it back"
    ):
        read_image(known, "rows.jsonl:1")
    path.unlink()
    assert sha256_of(known) is None


def test_names():
    """A person sees the file's name, or the field."""
    assert name_of(Media("images[0]", "/data/cat.png")) == "cat.png"
    assert name_of(Media("images[0]", data=b"")) == "images[0]"


def test_files_are_closed(tmp_path):
    """No file stays open behind an image."""
    path = save(tmp_path / "a.png")
    pixels, _ = read_image(Media("images[0]", str(path)), "rows.jsonl:1")
    assert not isinstance(getattr(pixels, "fp", None), io.IOBase)

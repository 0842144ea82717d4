"""Images in the viewer: each is one piece, with its name and its number of tokens."""

import base64
import hashlib
import io
import json

import attrs
import pytest
from hypothesis import given, strategies as st

from forge_data import Media
from forge_data.viewing._page_data import as_script, page_data
from forge_data.viewing._show import text_of
from forge_data.viewing._terminal import lines
from forge_data.viewing._view import views

from ..pictured import pixels, png
from ..viewed import Store, example

pytestmark = pytest.mark.together


def pictured(tokenizer, **image):
    """Make a sample whose tokens 4 to 9 stand for an image."""
    parts = [("user", "<|im_start|>user\n", False), ("user", "abcdefghijklmnop", False), ("assistant", "fine<|im_end|>", True)]
    made = example(tokenizer, *parts)
    return attrs.evolve(made, media=(Media("images[0]", start=4, stop=9, **image),))


def shown(store, *, colour=False):
    return "\n".join(lines(next(iter(views(store, [0]))), colour=colour, width=400))


def test_the_terminal(chatml_tokenizer):
    """A terminal has the image's file, or its field, and how many tokens stand for it, and none of these tokens."""
    made = pictured(chatml_tokenizer, path="/data/my cat.png")
    text = shown(Store([made], chatml_tokenizer))
    before, after = (chatml_tokenizer.decode(made.input_ids[part]) for part in (slice(1, 4), slice(9, 12)))
    assert before.replace("\n", "↵\n").replace(" ", "·") + "⟪<image my cat.png, 5 tokens>⟫" + after in text.replace(
        " " * 10, ""
    )
    assert f"{len(made):,} tokens" in text
    assert "\x1b[0;7m<image my cat.png, 5 tokens>\x1b[0m" in shown(Store([made], chatml_tokenizer), colour=True)
    held = pictured(chatml_tokenizer, data=b"...")
    assert "⟪<image images[0], 5 tokens>⟫" in shown(Store([held], chatml_tokenizer))
    assert "<image my cat.png, 5 tokens>" in "\n".join(
        text_of(Store([made], chatml_tokenizer), [0], colour=False, width=80)
    ).replace("\n" + " " * 10, " ")


@given(name=st.text(st.characters(exclude_characters="/\0")))
def test_a_hostile_name(chatml_tokenizer, name):
    """No name controls a terminal, or passes for a mark of the viewer."""
    text = shown(Store([pictured(chatml_tokenizer, path=f"/data/{name}")], chatml_tokenizer))
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("⟪<image ") == 1


def test_the_page(chatml_tokenizer):
    """The page's data has every token, the image's text at the first of its own, and no bytes of it."""
    made = pictured(chatml_tokenizer, data=b"secret")
    script = as_script(page_data(views(Store([made], chatml_tokenizer), [0]), []))
    assert "secret" not in script
    (sample,) = json.loads(script)["samples"]
    assert len(sample["tokens"]) == len(made)
    assert sample["images"] == [4, 9]
    assert sample["shared"]["4"] == "<image images[0], 5 tokens>"
    assert [sample["shared"][str(place)] for place in range(5, 9)] == [""] * 4
    assert (sample["pictures"], json.loads(script)["pictures"]) == ([-1], [])


def test_pictures_of_the_page(chatml_tokenizer, tmp_path):
    """The page has a small picture of each image, as the model sees it, once; of a file that changed since it has none."""
    pytest.importorskip("PIL")
    from PIL import Image as Pillow

    exif = Pillow.Exif()
    exif[0x0112] = 6
    pixels(0, 20, 600).save(file := io.BytesIO(), "JPEG", exif=exif)
    (tmp_path / "a.png").write_bytes(png(1))
    held = [{"data": data, "sha256": hashlib.sha256(data).hexdigest()} for data in (file.getvalue(), png(1))]
    gone = {"path": str(tmp_path / "a.png"), "sha256": "0" * 64}
    samples = [pictured(chatml_tokenizer, **image) for image in (held[0], gone, held[1], held[0])]
    data = page_data(views(Store(samples, chatml_tokenizer), range(4)), [])
    assert [sample["pictures"] for sample in data["samples"]] == [[0], [-1], [1], [0]]
    shown = [Pillow.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/jpeg;base64,")))) for uri in data["pictures"]]
    assert [each.size for each in shown] == [(6, 192), (30, 20)]

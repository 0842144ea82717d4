"""Every form of a conversation with images becomes the same `Chat`."""

import base64

import pytest

from forge_data.formats._registry import convert, detect

ANSWER = {"role": "assistant", "content": "A cat."}
READ = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, ANSWER]
"""Messages as every form below becomes them."""
FILE = "/rows/cat.png"
DATA = b"\x89PNG"
CODED = base64.b64encode(DATA).decode()


def read(row, images=True, directory="/rows"):
    return convert(detect("f:1", row), "f:1", row, None, images=images, directory=directory)


def asked(*parts, text="What is it?"):
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def of_parts(part):
    return {"messages": [asked({"type": "image"} | part), ANSWER]}


GAP = {"type": "image"}
TEXT = {"role": "user", "content": "What is it?"}
MARKED = {"role": "user", "content": "<image>What is it?"}
FORMS = {
    "image": of_parts({"image": "cat.png"}),
    "path": of_parts({"path": "/rows/cat.png"}),
    "url": of_parts({"url": "file:///rows/cat.png"}),
    "image_url": of_parts({"type": "image_url", "image_url": {"url": "./cat.png", "detail": "auto"}}),
    "image_url string": of_parts({"type": "image_url", "image_url": "file://localhost/rows/cat%2Epng"}),
    "struct": of_parts({"image": {"bytes": None, "path": "cat.png"}}),
    "arrow": {"messages": [{"role": "user", "content": [
        {"type": "image", "text": None, "image": {"bytes": b"", "path": "cat.png"}},
        {"type": "text", "text": "What is it?", "image": {"bytes": None, "path": None}},
    ]}, ANSWER]},
    "trl": {"messages": [asked(GAP), ANSWER], "images": ["cat.png"]},
    "trl one": {"messages": [asked(GAP), ANSWER], "image": {"bytes": None, "path": "cat.png"}},
    "trl without a place": {"messages": [TEXT, ANSWER], "images": ["cat.png"]},
    "trl prompt": {"prompt": [TEXT], "completion": [ANSWER], "image": "cat.png"},
    "csv": {"messages": '[{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]',
            "images": '["cat.png"]'},
    "openai of llama-factory": {"messages": [MARKED, ANSWER], "images": ["cat.png"]},
    "sharegpt": {"conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}],
                 "images": ["cat.png"]},
    "llava": {"conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}],
              "image": "cat.png"},
    "alpaca": {"instruction": "<image>What is it?", "output": "A cat.", "images": ["cat.png"]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """Parts, columns and marks in texts say the same; the file is named from the directory of the rows."""
    made = read(FORMS[form])
    assert made.messages == READ
    (image,) = made.images
    assert (image.path, image.data) == (FILE, None)
    assert image.field in ("messages[0].content[0]", "images[0]", "image")


@pytest.mark.parametrize(
    "value",
    [
        {"image": DATA},
        {"image": {"bytes": DATA, "path": "x"}},
        {"image": bytearray(DATA)},
        {"base64": CODED},
        {"base64": f"data:image/png;base64,{CODED}"},
        {"url": f"DATA:image/png;base64,{CODED[:3]}\n{CODED[3:]}"},
    ],
)
def test_bytes(value):
    """Bytes, in base64 or as they are, win over the name of a file beside them."""
    assert [(image.path, image.data) for image in read(of_parts(value)).images] == [(None, DATA)]

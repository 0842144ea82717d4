"""Every form of a conversation with images becomes the same `Chat`."""

import base64
import io
from pathlib import PurePosixPath

import pytest
from hypothesis import given, strategies as st

from forge_data import DataError, Format, messages_with_media
from forge_data.formats import _registry
from forge_data.formats._messages import text_of
from forge_data.formats._registry import convert, detect
from forge_data.formats.questions._prompts import question
from forge_data.formats.questions._text_pairs import text_pair
from forge_data.formats.questions._texts import labelled

pytestmark = pytest.mark.together

ANSWER = {"role": "assistant", "content": "A cat."}
READ = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, ANSWER]
"""Messages as every form below becomes them."""
FILE = "/rows/cat.png"
DATA = b"\x89PNG"
CODED = base64.b64encode(DATA).decode()


def read(row, media=True, directory="/rows"):
    return convert(detect("f:1", row), "f:1", row, None, media=media, directory=directory)


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
    "Path": of_parts({"image": PurePosixPath("cat.png")}),
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
    (image,) = made.media
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
    assert [(image.path, image.data) for image in read(of_parts(value)).media] == [(None, DATA)]


def gap(**more):
    return {"role": "user", "content": [GAP, {"type": "text", "text": "?"}]} | more


def shared(text):
    return [{"from": "human", "value": text}, {"from": "gpt", "value": "A cat."}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (of_parts({"url": "https://a.org/cat.png"}),
         r"f:1: field messages\[0\].content\[0\].url is the string 'https://.*; download it, and give the path of the file"),
        (of_parts({"image": "s3://b/cat.png"}), r"content\[0\].image is the string 's3://b/cat.png'.*; download it"),
        (of_parts({"url": "file://other/cat.png"}), r"content\[0\].url is .*, a file of the host 'other'; of a file here"),
        (of_parts({"url": "data:text/plain;base64,aaaa"}), r"content\[0\].url is .*, a data: URI of another kind; give data:i"),
        (of_parts({"url": "data:image/png,abc"}), r"content\[0\].url is .*, a data: URI of another kind; give data:image/png;"),
        (of_parts({"image": "iVBORw0KGgo" + "A" * 300}), r"is the string 'iVBORw.*…', bytes in base64 that do not say"),
        (of_parts({"base64": "a!"}), r"content\[0\].base64 is no base64 of an image: .*; encode its bytes again"),
        (of_parts({"base64": 3}), r"content\[0\].base64 is int 3; it must be the bytes of an image in base64"),
        (of_parts({"url": "data:image/png;base64, "}), r"content\[0\].url is an image of no bytes"),
        (of_parts({"image": " "}), r"content\[0\].image is the string ' ', which is no path"),
        (of_parts({"image": "\ud800.png"}), r"content\[0\].image holds the lone surrogate"),
        (of_parts({"image": 3}), r"content\[0\].image is int 3, and no image; give the path of its file, its bytes, or"),
        (of_parts({"image": {"bytes": "abc", "path": None}}), r"content\[0\].image is an object with 'bytes', 'path', and no"),
        (of_parts({"image": "a.png", "path": "b.png"}), r"messages\[0\].content\[0\] has both image and path; keep the one"),
        (of_parts({"image": "a.png", "max_pixels": 9}), r"content\[0\].max_pixels is int 9, which would be passed over; a par"),
        (of_parts({}), r"messages\[0\].content\[0\] is a part that is an image and does not say which; give it image"),
        ({"messages": [TEXT, {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]},
         r"messages\[1\].content\[0\] is a part of the type 'image' in a message of the assistant, and what a model writes is"),
        ({"messages": [gap(), ANSWER], "images": ["a", "b"]},
         r"f:1: field images holds 2 images, and parts that are images and do not say which stand in its messages 1 time; g"),
        ({"messages": [asked(GAP, GAP), ANSWER], "image": "a"}, r"field image holds 1 image, and parts .* 2 times"),
        ({**of_parts({"image": "a.png"}), "images": ["b.png"]}, r"field images holds 1 image, and parts .* 0 times"),
        ({"messages": [TEXT, ANSWER], "image": "a", "images": ["a"]}, r"f:1 has both images and image; keep the one"),
        ({"messages": [TEXT, ANSWER], "images": [None]}, r"field images\[0\] is null, and no image"),
        ({"messages": [{"role": "system", "content": "s"}, ANSWER], "image": "a"}, r"field image is an image, and no message"),
        ({"messages": [MARKED, ANSWER | {"content": "<image>"}], "images": ["a", "b"]},
         r"field messages\[1\].content holds <image>, and the row has images; what a model writes is text"),
        ({"conversations": shared("<image><image>"), "images": ["a"]},
         r"field images holds 1 image, and <image> stands in its texts 2 times; give each image its place"),
        ({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "<image>"}], "image": "a", "system": "s"},
         r"field conversations\[1\].value holds <image>"),
        ({"text": "a", "images": ["a"]}, r"field images is a list of 1, and rows of text are trained on text alone; take it"),
    ],
)  # fmt: skip
def test_refused(row, expected):
    """Each fault is named by its field, with what to do."""
    with pytest.raises(DataError, match=expected):
        read(row)


@pytest.mark.parametrize("form", [form for form, row in FORMS.items() if isinstance(row.get("messages"), list)])
def test_messages_alone(form):
    """A prompt's messages are read in the same forms, with the same images."""
    made = read(FORMS[form])
    messages, media = messages_with_media(FORMS[form], "messages", place="f:1", directory="/rows")
    assert messages == made.messages
    assert media == made.media
    with pytest.raises(DataError, match=r"row: field images holds 2 images, and <image> stands in its texts 1 time"):
        messages_with_media({"prompt": [MARKED], "images": ["a", "b"]}, "prompt")


@pytest.mark.parametrize("form", FORMS)
def test_not_asked_for(form):
    """A caller that does not train images is told of the first, and who does."""
    with pytest.raises(
        DataError, match=r"f:1: field (messages\[0\].content\[0\]|images?) is .*, and only text is trained here: f"
    ):
        read(FORMS[form], media=False)


@pytest.mark.parametrize("read_as", [question, labelled, text_pair])
def test_columns_of_other_rows(read_as):
    """Prompts, labelled texts and pairs refuse columns of images, which no reader of theirs looks at."""
    with pytest.raises(
        DataError, match=r"f:1: field image is the string 'a', and only text is trained here: forge sft, osft, d"
    ):
        read_as("f:1", {"prompt": "?", "image": "a"})


def test_marks_without_images():
    """Without a column of images `<image>` is text, as in a row of text."""
    row = {"conversations": shared("<image>?"), "images": []}
    assert read(row).messages[0]["content"] == "<image>?"
    assert read({"messages": [gap(content="<image>"), ANSWER], "image": None}, media=False).media == ()


def test_parts_win_over_marks():
    """Where parts are images, `<image>` in a text is text."""
    made = read({"messages": [asked(GAP, text="<image>?"), ANSWER], "image": "cat.png"})
    assert made.messages[0]["content"] == [GAP, {"type": "text", "text": "<image>?"}]


def test_the_user_whose_text_follows():
    """Images without a place stand before the first user's text, behind what the system says; weights stay as they were."""
    told = [{"role": "system", "content": "s"}, TEXT, ANSWER | {"weight": 0.5}, TEXT, ANSWER]
    made = read({"messages": told, "images": ["a", "b"]})
    assert [message["content"] for message in made.messages[:2]] == ["s", [GAP, GAP, {"type": "text", "text": "What is it?"}]]
    assert made.messages[3] == TEXT
    assert made.weights == (1, 1, 0.5, 1, 1)
    assert [image.path for image in made.media] == ["/rows/a", "/rows/b"]


def test_of_the_prompt_and_its_completion():
    """Images of both sides are in the order of the messages, those of columns where parts do not say which."""
    tool = {"role": "tool", "content": [{"type": "image", "path": "/b.png"}, {"type": "text", "text": ""}, GAP]}
    made = read({"prompt": [gap(), ANSWER], "completion": [tool, ANSWER], "images": ["a.png", "c.png"]})
    assert [image.path for image in made.media] == ["/rows/a.png", "/b.png", "/rows/c.png"]
    assert [image.field for image in made.media] == ["images[0]", "completion[0].content[0]", "images[1]"]
    assert made.messages[2]["content"] == [GAP, GAP]


@pytest.mark.parametrize(
    ("path", "directory", "expected"),
    [
        ("~/a.png", "/rows", "/home/me/a.png"),
        ("../a.png", "/rows/of", "/rows/of/../a.png"),
        ("./a//b.png", "/rows", "/rows/a/b.png"),
        ("/a.png", None, "/a.png"),
    ],
)
def test_paths(path, directory, expected, monkeypatch):
    """Paths begin at home, or at the directory of the rows."""
    monkeypatch.setenv("HOME", "/home/me")
    assert read(of_parts({"image": path}), directory=directory).media[0].path == expected


def test_a_relative_path_of_no_directory():
    """A relative path of rows from elsewhere is refused, and not looked for in any directory."""
    with pytest.raises(
        DataError, match=r"f:1: field messages\[0\].content\[0\] is the relative path 'a.png', and these rows lie"
    ):
        read(of_parts({"image": "a.png"}), directory=None)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_images_in_memory(mode):
    """A decoded image is encoded without a loss: in colours, as processors see it, it is the same."""
    pillow = pytest.importorskip("PIL.Image")
    image = pillow.effect_noise((5, 3), 90).convert(mode)
    made = read(of_parts({"image": image}))
    with pillow.open(io.BytesIO(made.media[0].data)) as opened:
        assert opened.convert("RGB").tobytes() == image.convert("RGB").tobytes()
    assert made == read(of_parts({"image": image.copy()}))


def test_a_broken_image_in_memory():
    """An image whose file breaks off, which Pillow finds only when its pixels are asked for, is named by its field."""
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.effect_noise((50, 30), 90).save(file, "PNG")
    broken = pillow.open(io.BytesIO(file.getvalue()[:-600]))
    with pytest.raises(DataError, match=r"f:1: field image is an image that cannot be read: .*; mend it, or take the row out"):
        read({"messages": [TEXT, ANSWER], "image": broken})


def test_the_orientation_of_an_image_in_memory():
    """The orientation of a photograph that was not turned yet is kept."""
    pillow = pytest.importorskip("PIL.Image")
    image = pillow.new("RGB", (5, 3))
    image.getexif()[0x0112] = 6
    with pillow.open(io.BytesIO(read(of_parts({"image": image})).media[0].data)) as opened:
        assert opened.getexif()[0x0112] == 6


def test_a_format_of_another_package(monkeypatch):
    """A format that returns fields of a built-in one passes its images on where it says that it reads them."""
    known = {"photos": Format(needs="photo", matches=lambda row: "photo" in row, reads=("images",),
                              convert=lambda _, row: {"messages": [TEXT, ANSWER], "images": row["photo"]})}  # fmt: skip
    monkeypatch.setattr(_registry, "format_named", lambda name: known.get(name) or _registry.built_in(name))
    made = convert("photos", "f:1", {"photo": ["cat.png"]}, None, media=True, directory="/rows")
    assert (made.messages, made.media[0].path) == (READ, FILE)
    with pytest.raises(DataError, match=r"field images is a list of 1, and only text is trained here"):
        convert("photos", "f:1", {"photo": ["cat.png"]}, None)


TURN = st.lists(st.one_of(st.none(), st.text("ab \n<", min_size=1)), min_size=1, max_size=4)
"""Parts of a content: a text, or None for an image."""


@given(st.lists(TURN, min_size=1, max_size=3))
def test_parts_columns_and_marks_are_read_alike(turns):
    """A conversation in parts with images, in parts with a column of images, and in texts with marks is one `Chat`."""
    number = iter(range(100))
    parts, gaps, marks = [], [], []
    for turn in turns:
        files = [None if text is not None else f"/{next(number)}.png" for text in turn]
        texts = [{"type": "text", "text": text} for text in turn]
        parts += [{"role": "user", "content": [{"type": "image", "image": file} if file else text
                                               for file, text in zip(files, texts, strict=True)]}, ANSWER]  # fmt: skip
        gaps += [{"role": "user", "content": [GAP if file else text for file, text in zip(files, texts, strict=True)]}, ANSWER]
        marks += [{"role": "user", "content": "".join("<image>" if text is None else text for text in turn)}, ANSWER]
    column = [f"/{at}.png" for at in range(next(number))]
    made = [read({"messages": parts}), read({"messages": gaps, "images": column}), read({"messages": marks, "images": column})]
    assert [each.messages for each in made[1:]] == [made[0].messages] * 2
    assert [[image.path for image in each.media] for each in made] == [column] * 3
    assert sum(part == GAP for message in made[0].messages for part in message["content"]) == len(column)
    texts = ["".join(text for text in turn if text is not None) for turn in turns]
    assert [text_of(message) for message in made[0].messages[::2]] == texts

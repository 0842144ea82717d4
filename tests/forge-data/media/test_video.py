"""Rows with videos: forms, frames, tokens and arrays beside the processor's own, and each fault in one line."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import pytest

from forge_data import (
    DataError,
    Media,
    MediaInputs,
    TokenizerError,
    TokenStore,
    lint,
    load_tokenizer,
    prepare,
    prepare_prompts,
    show,
    stats,
)

pytest.importorskip("PIL")
pytest.importorskip("torch")

from transformers import AutoProcessor
from transformers.image_utils import load_image
from transformers.video_utils import load_video

from forge_data.formats._registry import convert, detect
from forge_data.media._video import read_video

from ... import films
from .. import heard, pictured

pytestmark = pytest.mark.together

CODED = base64.b64encode(b"film").decode()
TEXT, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "a cat"}
PART = {"type": "text", "text": "What is it?"}
NAMES = ("start", "end", "image", "video")


def asked(*parts):
    return {"messages": [{"role": "user", "content": [*parts, PART]}, ANSWER]}


def read(row, media=True, directory="/rows"):
    return convert(detect("f:1", row), "f:1", row, None, media=media, directory=directory)


FORMS = {
    "video": asked({"type": "video", "video": "cat.mp4"}),
    "path": asked({"type": "video", "path": "/rows/cat.mp4"}),
    "url": asked({"type": "video", "url": "file:///rows/cat.mp4"}),
    "video_url": asked({"type": "video_url", "video_url": {"url": "cat.mp4"}}),
    "struct": asked({"type": "video", "video": {"path": "cat.mp4", "bytes": None}}),
    "a column": asked({"type": "video"}) | {"videos": ["cat.mp4"]},
    "a column without a place": {"messages": [TEXT, ANSWER], "video": "cat.mp4"},
    "llama-factory": {"messages": [TEXT | {"content": "<video>What is it?"}, ANSWER], "videos": ["cat.mp4"]},
    "sharegpt": {"conversations": [{"from": "human", "value": "<video>What is it?"}, {"from": "gpt", "value": "a cat"}],
                 "videos": ["cat.mp4"]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """Parts, columns and marks say the same."""
    made = read(FORMS[form])
    assert made.messages == [{"role": "user", "content": [{"type": "video"}, PART]}, ANSWER]
    assert [(video.kind, video.path, video.data) for video in made.media] == [("video", "/rows/cat.mp4", None)]


@pytest.mark.parametrize(
    "row",
    [
        asked({"type": "video", "video": ["1.png", "/rows/2.png"]}),
        asked({"type": "video"}) | {"videos": [["1.png", "file:///rows/2.png"]]},
        {"messages": [TEXT | {"content": "<video>What is it?"}, ANSWER], "videos": [["1.png", {"path": "2.png"}]]},
    ],
)
def test_frames(row):
    """A list of images is one video."""
    (video,) = read(row).media
    assert (video.kind, [frame.path for frame in video.frames], video.fps) == ("video", ["/rows/1.png", "/rows/2.png"], None)
    (video,) = read(asked({"type": "video", "video": ["1.png"], "sample_fps": 2})).media
    assert video.fps == 2


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": b"film"},
        {"type": "video", "base64": CODED},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{CODED}"}},
    ],
)
def test_bytes(part):
    """Bytes, in base64 or as they are, are the same video."""
    (video,) = read(asked(part)).media
    assert (video.kind, video.path, video.data) == ("video", None, b"film")


def test_images_and_audio_beside():
    """A row may have all; each column fills the places of its kind."""
    row = {"messages": [TEXT | {"content": "<audio><video>and<image>?"}, ANSWER], "audio": "a", "videos": ["v"], "image": "i"}
    assert [(each.kind, each.path) for each in read(row).media] == [
        ("audio", "/rows/a"), ("video", "/rows/v"), ("image", "/rows/i"),
    ]  # fmt: skip
    made = read({"messages": [TEXT, ANSWER], "image": "i", "audio": "a", "video": "v"})
    assert [part["type"] for part in made.messages[0]["content"]] == ["image", "video", "audio", "text"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (asked({"type": "video", "video": "https://a.org/cat.mp4"}), r"content\[0\].video is .*; download it, and give"),
        (asked({"type": "video", "video": "data:image/png;base64,aaaa"}), r"a data: URI of another kind; give data:video/mp4;"),
        (asked({"type": "video", "video": 3}), r"content\[0\].video is int 3, and no video; give .* \(or a list of frames\)"),
        (asked({"type": "video", "video": ["a.png", 3]}), r"content\[0\].video\[1\] is int 3, and no image; give the path"),
        (asked({"type": "video"}) | {"videos": [[]]}, r"field videos\[0\] is a video of no frames; give it, or take"),
        (asked({"type": "video", "video": "a", "fps": 2}), r"content\[0\].fps is .*a part that is a video has one of video, "),
        (asked({"type": "video", "video": ["a"], "fps": 2}), r"content\[0\].fps is int 2, .*: name it sample_fps, as the rate"),
        (asked({"type": "video", "video": "a", "sample_fps": 2}), r"sample_fps is int 2, and the part has no list of frames"),
        (asked({"type": "video", "video": ["a"], "sample_fps": 0}), r"content\[0\].sample_fps is int 0; it must be the frames"),
        (asked({"type": "video"}), r"content\[0\] is a part that is a video and does not say which; give it video"),
        ({"messages": [TEXT | {"content": "<video>"}, ANSWER], "videos": ["a", "b"]}, r"holds 2 videos, and <video> .* 1 time"),
        ({"messages": [TEXT, ANSWER | {"content": "<video>"}], "video": "a"}, r"holds <video>, and the row has videos"),
        ({"messages": [TEXT, {"role": "assistant", "content": [{"type": "video", "video": "a"}]}]}, r"what a model writes"),
    ],
)  # fmt: skip
def test_refused(row, expected):
    """What is no video, and what has no place, is one error."""
    with pytest.raises(DataError, match=expected):
        read(row)
    with pytest.raises(DataError, match=r"field messages\[0\].content\[0\] is a video, and only text is trained here"):
        read(FORMS["video"], media=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model's directory and rows with no video, one, and two beside an image."""
    folder = tmp_path_factory.mktemp("video")
    tokenizer = pictured.tiny_tokenizer("", [*films.MARKS])
    which = "{{% if c.type == 'video' %}}{video}{{% elif c.type == 'image' %}}{image}{{% else %}}".format(**films.PLACEHOLDERS)
    tokenizer.chat_template = pictured.TEMPLATE.replace("{% if c.type == 'image' %}PLACEHOLDER{% else %}", which)
    films.FilmProcessor.of(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    one, two = (films.frames(folder, name, number) for name, number in (("one", 4), ("two", 3)))
    (folder / "i.png").write_bytes(pictured.png(3, 60, 60))
    rows = [
        {"messages": [TEXT, ANSWER]},
        asked({"type": "video", "video": one}),
        asked({"type": "video", "video": two}, {"type": "image", "image": "i.png"}, {"type": "video", "video": one}),
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, rows


def plain(processor, row, folder):
    """What plain transformers makes of a conversation."""
    messages = json.loads(json.dumps(row["messages"]))
    for part in messages[0]["content"] if isinstance(messages[0]["content"], list) else []:
        if part["type"] == "image":
            part["image"] = load_image(str(folder / part["image"]))
        elif part["type"] == "video" and isinstance(part["video"], str):
            part["video"] = str(folder / part["video"])
        elif part["type"] == "video":
            part["video"] = [load_image(str(folder / frame)) for frame in part["video"]]
    made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="np")
    return {name: array for name, array in made.items() if name != "attention_mask"}


def compare(examples, rows, folder):
    """Compare ids, arrays and what is learned with those of plain transformers."""
    processor = AutoProcessor.from_pretrained(folder)
    inputs = MediaInputs(str(folder))
    for example, row in zip(examples, rows, strict=True):
        expected = plain(processor, row, folder)
        assert example.input_ids.tolist() == expected.pop("input_ids")[0].tolist()
        found = inputs(example)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert processor.decode(example.input_ids[example.labels != -100]) == "a cat<end>"
    return inputs


def test_ids_and_arrays_are_those_of_the_processor(directory, tmp_path, capsys):
    """Rows have its ids and its arrays, and are kept; a frame that changed is one error."""
    folder, rows = directory
    store = prepare(folder / "rows.jsonl", str(folder), tmp_path / "store", media=True, progress=False)
    inputs = compare(store, rows, folder)
    assert inputs.joins
    assert [[(each.kind, len(each.frames)) for each in example.media] for example in store] == [
        [], [("video", 4)], [("video", 3), ("image", 0), ("video", 4)],
    ]  # fmt: skip
    assert store.media_kinds == ("image", "video")
    assert len(store.media_files) == 8
    assert TokenStore.open(tmp_path / "store").media_files == store.media_files
    show(store)
    assert "<video one_0.png …, " in capsys.readouterr().out
    assert "\n4 images and videos in 2 samples, for which " in str(stats(store))
    frame = folder / "one_1.png"
    before = frame.read_bytes()
    frame.write_bytes(pictured.png(9, 32, 60))
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: field messages\[0\].content\[0\].video\[1\]: .*one_1.png changed since"
    ):
        inputs(store[1], store.source(1))
    frame.write_bytes(before)


def test_frames_of_known_times(directory, tmp_path):
    """`sample_fps` is the processor's `fps`, and part of what a store is; without it the lint says what is assumed."""
    folder, _ = directory
    frames = [str(folder / f"one_{at}.png") for at in range(4)]
    rows = [asked({"type": "video", "video": frames, **more}) for more in ({"sample_fps": 2}, {})]
    (folder / "times.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = prepare(folder / "times.jsonl", str(folder), tmp_path / "store", media=True, progress=False)
    known, unknown = (store[at].media[0] for at in range(2))
    assert (known.fps, unknown.fps, known.sha256 == unknown.sha256) == (2, None, False)
    words = [load_tokenizer(str(folder)).decode(example.input_ids) for example in store]
    assert "<0.2 seconds>" in words[0]
    assert "<1.2 seconds>" in words[0]
    assert "<0.1 seconds>" in words[1]
    (finding,) = [each for each in lint(folder / "times.jsonl", str(folder), media=True).findings if each.rule == "lossy_video"]
    assert finding.place.endswith(":2")
    assert "no sample_fps, and the processor assumes one" in finding.what
    marked = lint([{"messages": [TEXT | {"content": "<video> is?"}, ANSWER]}], str(folder), media=True)
    assert [each.rule for each in marked.findings] == ["video_mark_in_text"]


def test_times_that_a_processor_does_not_ask_for(directory, tmp_path, monkeypatch):
    """Muse Glimmer's writes times of frames, and returns none unless it is told to: rows are as of one that asks."""
    folder, rows = directory
    monkeypatch.setattr(films.FilmProcessor, "videos_kwargs", {})
    store = prepare(folder / "rows.jsonl", str(folder), tmp_path / "store", media=True, progress=False)
    made = MediaInputs(str(folder))(store[1])
    assert not made.keys() & {"video_metadata"}
    monkeypatch.undo()
    compare(store, rows, folder)


def test_bytes_of_frames_and_prompts(directory, tmp_path):
    """Rows may hold the bytes of frames, and prompts have each where it stands."""
    folder, rows = directory
    held = [(folder / f"one_{at}.png").read_bytes() for at in range(4)]
    row = [asked({"type": "video", "video": held})]
    store = prepare(row, str(folder), tmp_path / "store", media=True, progress=False)
    compare(TokenStore.open(store.path), [rows[1]], folder)
    asks = [{"prompt": [{"role": "user", "content": [{"type": "video", "video": held}, PART]}], "note": 1}]
    (prompt,) = prepare_prompts(asks, str(folder), tmp_path / "prompts", media=True)
    assert prompt.prompt == [{"role": "user", "content": [{"type": "video", "video": held}, PART]}]


def test_unlike_frames(directory):
    """Frames of unlike sizes, and one that is no image, are one error with row and field."""
    folder, _ = directory
    (folder / "other.png").write_bytes(pictured.png(1, 20, 20))
    (folder / "text.png").write_text("text")
    for other, expected in (
        ("other.png", r"is a frame of 20 x 20 pixels, and the first has 60 x 32; give"),
        ("text.png", "is no image"),
        ("none.png", "cannot be read: No such file"),
    ):
        frames = tuple(Media(f"videos[0][{at}]", str(folder / name)) for at, name in enumerate(("one_0.png", other)))
        with pytest.raises(DataError, match=rf"rows:1: field videos\[0\]\[1\]: .*{other} {expected}"):
            read_video(Media("videos[0]", frames=frames, kind="video"), "rows:1", None)


def test_a_model_without_videos(tmp_path):
    """A processor that takes none is one error."""
    folder = pictured.gemma3(tmp_path / "gemma3")
    frames = films.frames(tmp_path, "one", 2)
    row = [asked({"type": "video", "video": [str(tmp_path / each) for each in frames]})]
    with pytest.raises(TokenizerError, match=r"is a video, and the processor Gemma3Processor takes images; use a model"):
        prepare(row, str(folder), tmp_path / "store", media=True, progress=False)


@pytest.mark.parametrize(("lengthwise", "joins"), [(True, True), (False, False)])
def test_a_processor_of_videos_of_one_length(directory, monkeypatch, lengthwise, joins):
    """Texts with videos are joined where their arrays stand behind each other whatever the lengths (InternVL's)."""
    folder, _ = directory
    own = films.Films.preprocess

    def preprocess(self, videos, **options):
        """As InternVL's (arrays of frames), or as LLaVA-OneVision's (of videos)."""
        if len({len(each) for each in videos}) > 1:
            raise ValueError("stack expects each tensor to be equal size")
        made = own(self, videos, **options)
        frames = np.stack([np.resize(each, (len(each), 3, 4, 4)).astype(np.float32) for each in videos])
        made["pixel_values_videos"] = np.concatenate(frames) if lengthwise else frames
        return made

    monkeypatch.setattr(films.Films, "preprocess", preprocess)
    inputs = MediaInputs(str(folder))
    assert (inputs.joins_of(["image"]), inputs.joins_of(["image", "video"]), inputs.joins) == (True, joins, joins)


def test_without_pyav(directory, monkeypatch):
    """A file needs PyAV, and the error names the extra."""
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(
        DataError, match=r"rows:1: field video: videos are read by PyAV, .* install forge-data\[video\], or give"
    ):
        read_video(Media("video", data=b"film", kind="video"), "rows:1", None)


class TestFiles:
    """Files that PyAV reads."""

    @pytest.fixture(autouse=True)
    def _pyav(self):
        pytest.importorskip("av", reason="PyAV is not installed here: forge-data[video]")

    @pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm"])
    def test_frames_are_those_of_transformers(self, name, tmp_path):
        """All, or those that a processor chooses; WebM and Matroska do not say how many there are."""
        file = films.film(tmp_path / name, 12, codec="libvpx" if name.endswith("webm") else "mpeg4")
        every, about = load_video(str(file), backend="pyav", sample_indices_fn=lambda metadata: np.arange(12))
        for sample, chosen in (
            (None, np.arange(12)),
            (lambda metadata: [0, metadata.total_num_frames - 1, 5, 5], [0, 11, 5, 5]),
        ):
            video, found = read_video(Media("video", str(file), kind="video"), "rows:1", sample)
            assert np.array_equal(video.frames, every[chosen])
            assert (video.metadata().total_num_frames, video.metadata().fps) == (12, about.fps)
            assert [*video.metadata().frames_indices] == [*chosen]
            assert len(found.sha256) == 64

    def test_a_picture_that_lies_on_its_side(self, tmp_path):
        """A phone's video is read upright, as its header says: turned clockwise by a right angle."""
        data = films.film(tmp_path / "a.mp4", 4).read_bytes()
        at = data.index(b"tkhd") + 44
        turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
        assert data[at : at + 36] == struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
        lying, upright = (
            read_video(Media("video", data=each, kind="video"), "rows:1", None)[0]
            for each in (data, data[:at] + turned + data[at + 36 :])
        )
        assert np.array_equal(upright.frames, np.rot90(lying.frames, -1, axes=(1, 2)))
        assert (upright.metadata().height, upright.metadata().width) == (64, 48)

    def test_ids_and_arrays(self, directory, tmp_path):
        """Files are sampled as the processor samples them, as paths and as bytes; one that changed is one error."""
        folder, _ = directory
        file = films.film(folder / "cat.mp4", 14)
        rows = [asked({"type": "video", "video": "cat.mp4"}, {"type": "image", "image": "i.png"})]
        (folder / "files.jsonl").write_text(json.dumps(rows[0]) + "\n")
        store = prepare(folder / "files.jsonl", str(folder), tmp_path / "store", media=True, progress=False)
        inputs = compare(store, rows, folder)
        held = [asked({"type": "video", "video": file.read_bytes()}, {"type": "image", "image": str(folder / "i.png")})]
        compare(prepare(held, str(folder), tmp_path / "held", media=True, progress=False), rows, folder)
        films.film(file, 13)
        with pytest.raises(DataError, match=r"files.jsonl:1: .*cat.mp4 changed since the rows were prepared"):
            inputs(store[0], store.source(0))

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"text", r"cannot be read as a video: Invalid data"),
            (b"", r"cannot be read as a video: "),
            ("image", r"is an image, and no video; give the frames of one as a list in the list"),
            ("sound", r"has no pictures, but sound alone; give an MP4"),
            (
                "cut",
                r"(is cut off: its header tells of 40 frames, and there is none from number \d+ on|cannot be read as a video)",
            ),
            ("chosen", r"is a video of 40 frames of which the processor cannot choose some: too short; set another number"),
            ("large", r"has 40 frames of 64 x 48 pixels to be read, 0 GiB; make it shorter or smaller, or have the model"),
        ],
    )
    def test_broken(self, data, expected, tmp_path, monkeypatch):
        """What is no video, and what cannot be chosen from, is one error with row and field."""
        whole, sample = films.film(tmp_path / "whole.avi", 40).read_bytes(), None
        match data:
            case "image":
                data = pictured.png()
            case "sound":
                data = heard.wav()
            case "cut":
                data = whole[: len(whole) // 2]
            case "chosen":
                data = whole

                def sample(_metadata):
                    raise ValueError("too short")
            case "large":
                data = whole
                monkeypatch.setattr("forge_data.media._video._MOST_BYTES", 1000)
            case _:
                pass
        with pytest.raises(DataError, match=rf"rows:1: field videos\[0\]: the video {expected}"):
            read_video(Media("videos[0]", data=data, kind="video"), "rows:1", sample)

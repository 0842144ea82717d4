"""Rows with audio clips: forms, what is heard, tokens and arrays beside the processor's own, and each fault in one line."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from forge_data import (
    DataError,
    MediaInputs,
    TokenizerError,
    TokenStore,
    lint,
    load_tokenizer,
    prepare,
    prepare_prompts,
    show,
    stats,
    tokenize,
)

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from transformers import AutoProcessor
from transformers.audio_utils import load_audio

from forge_data._media import Media
from forge_data.formats._registry import convert, detect
from forge_data.media._read import read_audio

from .. import heard, pictured

pytestmark = pytest.mark.together

DATA = heard.wav()
CODED = base64.b64encode(DATA).decode()
TEXT, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "a cat"}
PART = {"type": "text", "text": "What is it?"}


def asked(*parts):
    return {"messages": [{"role": "user", "content": [*parts, PART]}, ANSWER]}


def read(row, media=True, directory="/rows"):
    return convert(detect("f:1", row), "f:1", row, None, media=media, directory=directory)


FORMS = {
    "audio": asked({"type": "audio", "audio": "cat.wav"}),
    "path": asked({"type": "audio", "path": "/rows/cat.wav"}),
    "url": asked({"type": "audio", "url": "file:///rows/cat.wav"}),
    "audio_url": asked({"type": "audio_url", "audio_url": {"url": "cat.wav"}}),
    "qwen": asked({"type": "audio", "audio_url": "cat.wav"}),
    "struct": asked({"type": "audio", "audio": {"path": "cat.wav", "bytes": None}}),
    "a column": asked({"type": "audio"}) | {"audios": ["cat.wav"]},
    "a column without a place": {"messages": [TEXT, ANSWER], "audio": "cat.wav"},
    "llama-factory": {"messages": [TEXT | {"content": "<audio>What is it?"}, ANSWER], "audios": ["cat.wav"]},
    "sharegpt": {"conversations": [{"from": "human", "value": "<audio>What is it?"}, {"from": "gpt", "value": "a cat"}],
                 "audios": ["cat.wav"]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """Parts, columns and marks say the same."""
    made = read(FORMS[form])
    assert made.messages == [{"role": "user", "content": [{"type": "audio"}, PART]}, ANSWER]
    assert [(clip.kind, clip.path, clip.data) for clip in made.media] == [("audio", "/rows/cat.wav", None)]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio", "audio": DATA},
        {"type": "audio", "base64": CODED},
        {"type": "audio", "url": f"data:audio/wav;base64,{CODED}"},
        {"type": "input_audio", "input_audio": {"data": CODED, "format": "wav"}},
        {"type": "audio", "audio": {"array": heard.samples(), "sampling_rate": 16_000}},
        {"type": "audio", "audio": {"array": heard.samples()[0].tolist(), "sampling_rate": 16_000, "path": None}},
    ],
)
def test_bytes(part):
    """Bytes, in base64, as they are or decoded, are the same clip."""
    (clip,) = read(asked(part)).media
    assert (clip.kind, clip.path, clip.data) == ("audio", None, DATA)


def test_images_beside():
    """A row may have both; each column fills the places of its kind, in the order of the messages."""
    row = {
        "messages": [TEXT | {"content": "<audio>and<image>or<audio>?"}, ANSWER],
        "audios": ["a.wav", "b.wav"],
        "image": "i.png",
    }
    made = read(row)
    assert [(each.kind, each.path) for each in made.media] == [
        ("audio", "/rows/a.wav"), ("image", "/rows/i.png"), ("audio", "/rows/b.wav"),
    ]  # fmt: skip
    parts = [{"type": "audio"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "or"},
             {"type": "audio"}, {"type": "text", "text": "?"}]  # fmt: skip
    assert made.messages[0]["content"] == parts
    mixed = asked({"type": "audio", "audio": "a.wav"}, {"type": "image"}, {"type": "audio"}) | {
        "images": ["i.png"],
        "audio": "b.wav",
    }
    assert [(each.kind, each.path) for each in read(mixed).media] == [(each.kind, each.path) for each in made.media]
    both = read({"messages": [TEXT, ANSWER], "image": "i.png", "audio": "a.wav"})
    assert [part["type"] for part in both.messages[0]["content"]] == ["image", "audio", "text"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (asked({"type": "audio", "audio": "https://a.org/cat.wav"}), r"content\[0\].audio is .*; download it, and give"),
        (asked({"type": "audio", "audio": "data:image/png;base64,aaaa"}), r"a data: URI of another kind; give data:audio/wav;"),
        (asked({"type": "audio", "base64": "a!"}), r"content\[0\].base64 is no base64 of an audio clip"),
        (asked({"type": "audio", "audio": 3}), r"content\[0\].audio is int 3, and no audio; give the path of its file"),
        (asked({"type": "audio", "audio": {"array": ["a"], "sampling_rate": 1}}), r"is decoded audio that is no array of"),
        (asked({"type": "audio", "audio": {"array": np.zeros(9, complex), "sampling_rate": 1}}), r"is decoded audio "),
        (asked({"type": "audio", "audio": {"array": np.zeros((9, 2)), "sampling_rate": 1}}), r"9 channels of 2 samples; give"),
        (asked({"type": "audio", "audio": {"array": [0, -32768], "sampling_rate": 1}}), r"numbers up to 32768; divide them by"),
        *((asked({"type": "audio", "audio": {"array": [0.0], "sampling_rate": rate}}), r"with a sampling_rate that is")
          for rate in (0, -1, True, "16000", 0.5, 2**40, float("inf"), float("nan"), None)),
        (asked({"type": "audio", "audio": {"array": [], "sampling_rate": 1}}), r"decoded audio of the shape \[0\]; give"),
        (asked({"type": "audio", "audio": "a", "path": "b"}), r"content\[0\] has both audio and path; keep the one that"),
        (asked({"type": "audio", "audio": "a", "image": "b"}), r"content\[0\].image is .*a part that is an audio clip has one"),
        (asked({"type": "audio"}), r"content\[0\] is a part that is an audio clip and does not say which; give it audio"),
        (asked({"type": "audio"}) | {"audios": ["a", "b"]}, r"field audios holds 2 audio clips, and parts .* stand .* 1 time"),
        ({"messages": [TEXT, ANSWER], "audios": ["a"], "audio": "a"}, r"f:1 has both audios and audio; keep the one with its"),
        ({"messages": [TEXT, ANSWER | {"content": "<audio>"}], "audio": "a"}, r"holds <audio>, and the row has audio clips"),
        ({"messages": [TEXT, {"role": "assistant", "content": [{"type": "audio", "audio": "a"}]}]}, r"what a model writes"),
    ],
)  # fmt: skip
def test_refused(row, expected):
    """What is no audio, and what has no place, is one error."""
    with pytest.raises(DataError, match=expected):
        read(row)


def test_refused_where_it_is_not_trained():
    """Who trains text alone refuses audio, and says who does not."""
    with pytest.raises(DataError, match=r"field messages\[0\].content\[0\] is an audio clip, and only text is trained here"):
        read(FORMS["audio"], media=False)


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (22_050, 2), (8_000, 1), (48_000, 2)])
def test_samples_are_those_of_transformers(tmp_path, rate, channels):
    """Whatever its rate and channels, a clip is what `load_audio` makes of the file."""
    (tmp_path / "a.wav").write_bytes(heard.wav(3, 0.3, rate, channels))
    expected = load_audio(str(tmp_path / "a.wav"), sampling_rate=16_000, backend="soundfile")
    for clip in (Media("audio", str(tmp_path / "a.wav"), kind="audio"), Media("audio", data=heard.wav(3, 0.3, rate, channels))):
        found, _ = read_audio(clip, "rows:1", 16_000)
        assert np.array_equal(found, expected)
        assert found.dtype == np.float32


@pytest.mark.parametrize("data", [b"not audio", b"", pictured.__doc__.encode(), heard.wav(seconds=0.0001)[:44]])
def test_broken_clips(tmp_path, data):
    """What cannot be decoded, and what has no samples, is one error with row and field."""
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(
        DataError, match=r"rows:1: field audio: .*a.wav (cannot be read as audio: .*|is audio of no samples|is cut off)"
    ):
        read_audio(Media("audio", str(tmp_path / "a.wav"), kind="audio"), "rows:1", 16_000)


def test_a_file_that_is_cut_off():
    """A WAV with less than its header says is one error; one of a pipe, whose header does not know, is read."""
    whole = heard.wav(seconds=0.5)
    with pytest.raises(DataError, match=r"rows:1: field audio: the audio is cut off: its header tells of 1,000 bytes more"):
        read_audio(Media("audio", data=whole[:-1000], kind="audio"), "rows:1", 16_000)
    for size in (b"\xff" * 4, bytes(4)):
        samples, _ = read_audio(Media("audio", data=whole[:4] + size + whole[8:], kind="audio"), "rows:1", 16_000)
        assert np.array_equal(samples, heard.samples(seconds=0.5)[0])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model's directory and rows with no, one and two clips of unlike rates, channels and lengths."""
    folder = heard.qwen2_audio(tmp_path_factory.mktemp("audio"))
    rows = []
    for at in range(6):
        parts = []
        for clip in range(at % 3):
            name = f"{at}-{clip}.wav"
            (folder / name).write_bytes(heard.wav(at, 0.2 + 0.3 * at, (16_000, 8_000, 22_050)[at % 3], 1 + clip))
            parts.append({"type": "audio", "audio": name if at < 3 else {"bytes": (folder / name).read_bytes()}})
        rows.append(asked(*parts) if parts else {"messages": [TEXT, ANSWER]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    return folder, rows


def plain(processor, row, folder):
    """What plain transformers makes of a conversation."""
    content = row["messages"][0]["content"]
    parts = content if isinstance(content, list) else [PART]
    clips = [part["audio"] for part in parts if part["type"] == "audio"]
    files = [folder / clip if isinstance(clip, str) else clip["bytes"] for clip in clips]
    named = [
        str(each) if not isinstance(each, bytes) else "data:audio/wav;base64," + base64.b64encode(each).decode()
        for each in files
    ]
    audio = [load_audio(each, sampling_rate=16_000, backend="soundfile") for each in named]
    written = [{"role": "user", "content": [{"type": part["type"], "text": part.get("text")} for part in parts]}, ANSWER]
    text = processor.tokenizer.apply_chat_template(written, tokenize=False)
    of_audio = {"audio": audio, "sampling_rate": 16_000} if audio else {}
    return dict(processor(text=[text], **of_audio, add_special_tokens=False, return_tensors="np"))


def test_ids_and_arrays_are_those_of_the_processor(directory, tmp_path, capsys):
    """Rows have its ids and its arrays, learn the answers alone, and are kept; a clip that changed is one error."""
    folder, rows = directory
    processor = AutoProcessor.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    store = prepare(folder / "rows.jsonl", tokenizer, tmp_path / "files", media=True, progress=False)
    held = prepare(rows[3:], tokenizer, tmp_path / "held", media=True, progress=False)
    inputs = MediaInputs(str(folder), tokenizer=tokenizer)
    examples = [*(store[at] for at in range(3)), *(held[at] for at in range(3))]
    for example, row in zip(examples, rows, strict=True):
        expected = plain(processor, row, folder)
        assert example.input_ids.tolist() == expected.pop("input_ids")[0].tolist()
        del expected["attention_mask"]
        found = inputs(example)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert tokenizer.decode(example.input_ids[example.labels != -100]) == "a cat<end>"
        spans = [(clip.start, clip.stop, clip.kind) for clip in example.media]
        assert all(kind == "audio" for *_, kind in spans)
        assert inputs.spans(example.input_ids) == [(start, stop) for start, stop, _ in spans]
    assert store.media_counts[:, 0].tolist() == [0, 1, 2]
    assert TokenStore.open(tmp_path / "files").media_files == store.media_files
    show(store)
    assert "<audio 1-0.wav, 12 tokens>" in capsys.readouterr().out
    assert "\n3 audio clips in 2 samples, for which " in str(stats(store))
    assert "Audio clips" in show(store, html=tmp_path / "page.html").read_text()
    # Clips of several texts are given as one array each.
    assert inputs.joins
    joined = inputs.join([inputs(example) for example in examples if example.media])
    assert len({each["input_features"].shape[1:] for each in joined}) == 1
    (folder / "1-0.wav").write_bytes(heard.wav(99))
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: field messages\[0\].content\[0\]: .*1-0.wav changed since the rows were"
    ):
        inputs(store[1], store.source(1))
    (folder / "1-0.wav").write_bytes(heard.wav(1, 0.5, 8_000, 1))


def test_prompts(directory, tmp_path):
    """Prompts have clips too, and the messages have each where it stands."""
    folder, _ = directory
    rows = [{"prompt": [{"role": "user", "content": [{"type": "audio", "audio": DATA}, PART]}], "note": 1}]
    (prompt,) = prepare_prompts(rows, str(folder), tmp_path / "prompts", media=True)
    assert prompt.prompt == [{"role": "user", "content": [{"type": "audio", "audio": DATA}, PART]}]
    assert [(clip.kind, clip.data) for clip in prompt.media] == [("audio", DATA)]


def test_a_clip_that_is_not_heard_to_its_end(directory, tmp_path):
    """The lint finds a clip that is longer than the processor hears; one up to it is not named."""
    folder, _ = directory
    rows = [asked({"type": "audio", "audio": heard.wav(seconds=seconds)}) for seconds in (3.9, 4.6)]
    report = lint(rows, str(folder), media=True)
    (finding,) = [each for each in report.findings if each.rule == "lossy_audio"]
    assert finding.row == 2 or "[1]" in finding.place
    assert "it has 4.6 s, and its end is not heard" in finding.what
    marked = lint([{"messages": [TEXT | {"content": "<audio> is?"}, ANSWER]}], str(folder), media=True)
    assert [each.rule for each in marked.findings] == ["audio_mark_in_text"]


def test_what_the_model_does_not_take(directory, tmp_path):
    """An image for a model that hears, and a clip for one that sees, are one error."""
    folder, _ = directory
    image = asked({"type": "image", "image": b"x"})
    with pytest.raises(
        TokenizerError, match=r"content\[0\] is an image, and the processor Qwen2AudioProcessor takes audio clips"
    ):
        prepare([image], str(folder), tmp_path / "store", media=True, progress=False)
    text = asked({"type": "audio", "audio": DATA})
    text["messages"][0]["content"].append({"type": "text", "text": "<AUDIO>"})
    with pytest.raises(
        DataError, match=r"field messages\[0\].content has '<AUDIO>' in its text, which stands for an audio clip"
    ):
        prepare([text], str(folder), tmp_path / "store", media=True, progress=False)


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (np.full(4_000, 3e38, np.float32), r"Qwen2AudioProcessor makes infinite numbers of the row's audio, which is too loud"),
        (
            np.zeros(1, np.float32),
            r"content\[0\]: the processor Qwen2AudioProcessor makes no token of this audio, which is too",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_clips_of_which_nothing_can_be_learned(directory, clip, expected):
    """A clip whose spectrum is infinite, and one that is too short for a token, are refused when they are prepared."""
    with pytest.raises(DataError, match=expected):
        tokenize(asked({"type": "audio", "audio": {"array": clip, "sampling_rate": 16_000}}), str(directory[0]), media=True)


def test_errors_of_broken_clips_name_no_object(tmp_path):
    """The error of a broken clip is the same in each run, and names the file alone."""
    with pytest.raises(DataError, match=r"the audio cannot be read as audio: Format not recognised.; give a WAV"):
        read_audio(Media("audio", data=b"not audio", kind="audio"), "rows:1", 16_000)


def test_processors_that_make_arrays_of_torch_alone(directory, monkeypatch):
    """A processor that refuses NumPy's arrays (GLM-ASR) is asked for torch's."""
    row, expected = asked({"type": "audio", "audio": DATA}), AutoProcessor.from_pretrained(directory[0])
    example = tokenize(row, str(directory[0]), media=True)
    made, call = MediaInputs(expected)(example), type(expected).__call__

    def of_torch(self, *args, return_tensors=None, **options):
        if return_tensors == "np":
            raise ValueError("GlmAsrProcessor only supports `return_tensors='pt'`.")
        return call(self, *args, return_tensors="np" if return_tensors else None, **options)

    monkeypatch.setattr(type(expected), "__call__", of_torch)
    assert tokenize(row, str(directory[0]), media=True).input_ids.tolist() == example.input_ids.tolist()
    assert np.array_equal(MediaInputs(expected)(example)["input_features"], made["input_features"])


def test_a_processor_of_conversations_alone(directory, tmp_path):
    """Voxtral's takes audio where mistral-common writes the text, and says so."""
    from transformers import VoxtralProcessor, WhisperFeatureExtractor

    VoxtralProcessor(WhisperFeatureExtractor(feature_size=8), load_tokenizer(directory[0])).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match=r"the processor VoxtralProcessor takes audio in conversations alone \(Voxtral\)"):
        MediaInputs(tmp_path)

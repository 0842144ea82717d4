"""Messages that a server is asked with: what cannot be read is said with its place."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest

from forge.talking._requests import BadRequest, as_row, check_messages


def asked(*content: Any) -> list[dict[str, Any]]:
    """One question, of these parts."""
    return [{"role": "user", "content": list(content)}]


def called(function: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A message that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": function}], **more}


def image(url: Any) -> list[dict[str, Any]]:
    """A question of an image."""
    return asked({"type": "image_url", "image_url": url})


@pytest.fixture
def png() -> str:
    """A PNG file as a data: URI."""
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("RGB", (4, 3)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_what_can_be_read_passes(png: str) -> None:
    """Texts, images of models that take them, audio of those that take it, calls of tools, and nothing."""
    part = {"type": "image_url", "image_url": {"url": png}}
    check_messages([{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}], "LLM")
    check_messages(asked(part, {"type": "input_image", "image_url": png}, {"type": "input_text", "text": "?"}), "VLM")
    check_messages(asked({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), "MULTIMODAL")
    check_messages(asked({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}), "VLM")
    check_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "LLM")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "messages: nothing came"),
        ([], "messages: nothing came"),
        ("hi", "messages: a str came"),
        ([{"content": "hi"}], "messages[0]: a dict came"),
        ([{"role": "user", "content": 5}], "messages[0].content: a int came"),
        (asked("hi"), "messages[0].content[0]: a str came"),
        (asked({"type": "text", "text": "a"}, {"type": "text"}), "messages[0].content[1]: a part of type 'text' has a text"),
        (asked({"type": "image", "image": "a.png"}), "messages[0].content[0]: parts of type 'image' are not known"),
        (image({"url": "data:image/png;base64,@@@"}), "'data:image/png;base64,@@@' is no image that can be read"),
        (image({"url": "data:text/plain;base64,aGk="}), "is no data: URI of an image"),
        (
            image({"url": "http://localhost:1/a.png"}),
            "messages[0].content[0].image_url: 'http://localhost:1/a.png' is no data: URI, and",
        ),
        (image({"url": "FILE:///a.png"}), "is no data: URI"),
        (image({"url": "DATA:image/png;base64,AAAA"}), "is no data: URI, and this server fetches nothing and opens no file"),
        (image({}), 'image_url must be {"url": '),
        (image(7), 'image_url must be {"url": '),
        (asked({"type": "input_audio", "input_audio": {"data": "AAAA"}}), "this model takes no audio"),
        (asked({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}), "'https://a/b.mp4' is no data: URI, and this"),
        (asked({"type": "video_url", "video_url": {"url": __file__}}), "is no data: URI, and this server fetches nothing and"),
        (asked({"type": "video_url", "video_url": {"url": "data:image/png;base64,AAAA"}}), "is no data: URI of a video"),
        (asked({"type": "video_url", "video_url": "data:video/mp4;base64,AAAA"}), 'video_url must be {"url": '),
        ([{"role": "user", "content": "\ud800 hi"}], "messages[0].content: is no UTF-8 at character 0: half of a pair"),
        (asked({"type": "text", "text": "hi \udfff"}), "messages[0].content[0]: is no UTF-8 at character 3"),
        (
            [{"role": "usr", "content": "hi"}],
            "messages[0].role: 'usr' is no role; is user meant? There are system, developer, ",
        ),
        (
            [{"role": "", "content": "hi"}],
            "messages[0].role: '' is no role; give one of system, developer, user, assistant, tool",
        ),
        ([{"role": "GPT", "content": "hi"}], "'GPT' is no role; is assistant meant? There are"),
        ([{"role": "user"}], "messages[0].content: nothing came, and a message of role user says something"),
        (asked(), "messages[0].content: nothing came, and a message of role user says something"),
        ([called({"name": "f", "arguments": "{"})], "messages[0].tool_calls[0]: function.arg"),
        ([called({"name": 5, "arguments": "{}"})], "messages[0].tool_calls[0]: a call is "),
        (
            [called({"name": "f", "arguments": "{}"}, role="user")],
            "messages[0].tool_calls: a message of role user calls no tool",
        ),
        ([called({"name": "f", "arguments": "{}"}, content=3)], "messages[0].content: a int came: '3'"),
    ],
)
def test_what_cannot_be_read(messages: Any, said: str) -> None:
    """OpenAI's error object, which says where it is and what to do."""
    with pytest.raises(BadRequest) as caught:
        check_messages(messages, "VLM")
    error = caught.value.as_json()["error"]
    assert said in error["message"]
    assert error["message"].startswith(error["param"])
    assert error["type"] == "invalid_request_error"


def test_a_model_of_text_takes_no_images(png: str) -> None:
    """They were left out without a word."""
    with pytest.raises(BadRequest, match="takes no images"):
        check_messages(image({"url": png}), "LLM")


@pytest.mark.parametrize("where", [__file__, f"{__file__}.none", "AAAA", "https://localhost:1/a.wav", "file:///a.wav"])
@pytest.mark.parametrize(
    "part",
    [
        lambda where: {"type": "input_audio", "input_audio": where},
        lambda where: {"type": "audio_url", "audio_url": {"url": where}},
    ],
)
def test_no_file_of_the_server_is_read_and_nothing_fetched(where: str, part: Any) -> None:
    """transformers would open the path, or ask the address, for whoever asks; nor is it told whether there is such a file."""
    with pytest.raises(BadRequest, match="is no data: URI, and this server fetches nothing and opens no file; send the bytes"):
        check_messages(asked(part(where)), "MULTIMODAL")


@pytest.mark.parametrize("clip", [{"data": __file__}, {"data": "AAAA"}, {"data": "AAAA", "format": "../a"}, {"format": "wav"}])
def test_audio_without_a_format(clip: dict[str, str]) -> None:
    """transformers would open the data as a path."""
    with pytest.raises(BadRequest, match="input_audio must be"):
        check_messages(asked({"type": "input_audio", "input_audio": clip}), "MULTIMODAL")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "input_audio", "input_audio": "data:audio/wav;base64,AAAA"},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    ],
)
def test_clips_are_heard(part: dict[str, Any]) -> None:
    """Their bytes, with their place; what is no base64 is said."""
    found: list[Any] = []
    check_messages(asked(part), "MULTIMODAL", lambda *given: found.append(given))
    assert found == [(b"\0\0\0", f"messages[0].content[0].{part['type']}")]
    torn = json.loads(json.dumps(part).replace("AAAA", "AAA"))
    with pytest.raises(BadRequest, match="'AAA' is no base64"):
        check_messages(asked(torn), "MULTIMODAL")


def test_parts_are_those_of_rows() -> None:
    """Of all interfaces; vLLM's list of frames is a list of images."""
    url = "data:video/jpeg;base64,AAAA,BBBB"
    made = as_row(
        asked(
            {"type": "input_text", "text": "hi"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
        )
    )
    assert made[0]["content"] == [
        {"type": "text", "text": "hi"},
        {"type": "image", "image": "data:image/png;base64,AAAA"},
        {"type": "video", "video": "data:video/mp4;base64,AAAA"},
        {"type": "video", "video": ["data:image/jpeg;base64,AAAA", "data:image/jpeg;base64,BBBB"]},
        {"type": "audio", "audio": "data:audio/wav;base64,AAAA"},
        {"type": "audio", "audio": "data:audio/wav;base64,AAAA"},
    ]
    assert as_row([{"role": "assistant", "content": None}]) == [{"role": "assistant", "content": ""}]

"""Messages of a request to the server → an error for the part that cannot be read.

transformers' server reads what it knows and passes over the rest: an image that cannot be read ends in status 500, and a part
that the model cannot take is left out without a word.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are texts → their field."""
_IMAGES = ("image_url", "input_image")
_KNOWN = "text, image_url, and of models that take them video_url, input_audio and audio_url"
_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Those of rows, which a model may have been trained with."""
_MEANT = {"function": "tool", "human": "user", "gpt": "assistant", "model": "assistant", "ai": "assistant", "bot": "assistant"}
"""Other words for a role → it."""
_FRAMES = "data:video/jpeg;base64,"
"""How a list of frames begins, as vLLM has it: each in base64, with commas between them."""


class BadRequest(Exception):  # noqa: N818 - the name of status 400
    """Request that cannot be answered as it is.

    Args:
        message: what is wrong, and what to do.
        param: place in the request.
        code: OpenAI's word for it, which some clients look at.
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        error = {"message": f"{self.param}: {self}", "type": "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": error}


def check_messages(messages: Any, modality: str, hear: Callable[[bytes, str], None] | None = None) -> None:
    """Refuse messages that a model cannot be asked. No file is opened, and no path looked at.

    Args:
        messages: of the request.
        modality: what the model takes: LLM (text), VLM (images too), or MULTIMODAL (audio too).
        hear: refuses the bytes of a clip, which are at a place, that the model makes nothing of.

    Raises:
        BadRequest: which part, and what to do.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRequest(f"{_said(messages)}; give a list of messages", "messages")
    for number, message in enumerate(messages):
        _check_message(message, modality, f"messages[{number}]", hear)


def _check_message(message: Any, modality: str, place: str, hear: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f'{_said(message)}; a message is {{"role": "user", "content": "..."}}', place)
    role, calls, content = message["role"], message.get("tool_calls"), message.get("content")
    if role not in _ROLES:
        near = _MEANT.get(role.lower()) or next(iter(get_close_matches(role.lower(), _ROLES, 1)), None)
        meant = f"; is {near} meant? There are" if near else "; give one of"
        raise BadRequest(f"{_short(role)} is no role{meant} {', '.join(_ROLES)}", f"{place}.role")
    if calls and role != "assistant":
        raise BadRequest(f"a message of role {role} calls no tool; they are the assistant's", f"{place}.tool_calls")
    if calls:
        _check_calls(calls, f"{place}.tool_calls")
    if content is None or content == []:
        if role != "assistant":
            raise BadRequest(f"nothing came, and a message of role {role} says something; give a text", f"{place}.content")
        return
    if isinstance(content, str):
        check_text(content, f"{place}.content")
        return
    if not isinstance(content, Sequence):
        raise BadRequest(f"{_said(content)}; give a text, or a list of parts", f"{place}.content")
    for number, part in enumerate(content):
        _check_part(part, modality, f"{place}.content[{number}]", hear)


def _check_calls(calls: Any, place: str) -> None:
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = (call.get("function") or call) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments")
        try:
            known = isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
        except ValueError:
            known = False
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest('a call is {"function": {"name": "...", "arguments": "{...}"}}', f"{place}[{number}]")
        if not known:
            raise BadRequest("function.arguments must be a JSON object, as a text or as it is", f"{place}[{number}]")


def _check_part(part: Any, modality: str, place: str, hear: Any) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise BadRequest(f'{_said(part)}; a part is {{"type": "text", "text": "..."}}, or has another type: {_KNOWN}', place)
    if kind in _TEXTS:
        if not isinstance(part.get(_TEXTS[kind]), str):
            raise BadRequest(f"a part of type {kind!r} has a text in {_TEXTS[kind]!r}", place)
        check_text(part[_TEXTS[kind]], place)
    elif kind in _IMAGES:
        if modality not in ("VLM", "MULTIMODAL"):
            raise BadRequest("this model takes no images; ask it in text, or serve a model of text and images", place)
        _check_media(_url(part, "image_url", place), f"{place}.image_url")
    elif kind in ("input_audio", "audio_url"):
        if modality != "MULTIMODAL":
            raise BadRequest("this model takes no audio; ask it in text, or serve a model of text and audio", place)
        _check_audio(part, kind, place, hear)
    elif kind == "video_url":
        if modality not in ("VLM", "MULTIMODAL"):
            raise BadRequest("this model takes no videos; ask it in text", place)
        _check_video(_url(part, kind, place), f"{place}.video_url")
    else:
        raise BadRequest(f"parts of type {kind[:40]!r} are not known; known are {_KNOWN}", place)


def _url(part: Mapping[str, Any], field: str, place: str) -> str:
    value = part.get(field)
    url = value.get("url") if isinstance(value, Mapping) else value if field == "image_url" else None
    if not isinstance(url, str) or not url:
        raise BadRequest(f'{field} must be {{"url": "data:...;base64,..."}}', f"{place}.{field}")
    return url


def _require_bytes(url: str, place: str, mime: str) -> None:
    # Another text transformers takes for an address or for the path of a file, which it opens, whoever asks. Whether there is
    # such a file is not to be told from the answer.
    if not url.startswith("data:"):
        raise BadRequest(
            f"{_short(url)} is no data: URI, and this server fetches nothing and opens no file; send the bytes: "
            f"data:{mime};base64,... (or another type)",
            place,
        )


def _check_media(url: str, place: str) -> None:
    from transformers.image_utils import load_image

    _require_bytes(url, place, "image/png")
    if not url.startswith("data:image/"):
        raise BadRequest(f"{_short(url)} is no data: URI of an image; it begins with data:image/png;base64,", place)
    try:
        load_image(url)  # as the server will do it
    except Exception as error:
        # Pillow raises OSError, SyntaxError, ValueError and others where a file is broken.
        why = " ".join(str(error).split())
        why = why if len(why) <= 200 and url not in why else type(error).__name__
        raise BadRequest(
            f"{_short(url)} is no image that can be read ({why}); send a PNG, JPEG or WebP file: data:image/png;base64,...",
            place,
        ) from error


def _check_audio(part: Mapping[str, Any], kind: str, place: str, hear: Callable[[bytes, str], None] | None) -> None:
    value, place = part.get(kind), f"{place}.{kind}"
    if kind == "input_audio" and isinstance(value, Mapping):
        data, form = value.get("data"), value.get("format")
        # Without a format transformers takes the data for a path, too.
        if not isinstance(data, str) or not data or not isinstance(form, str) or not form.isalnum():
            raise BadRequest('input_audio must be {"data": "(bytes in base64)", "format": "wav"}', place)
    else:
        url = value if kind == "input_audio" and isinstance(value, str) else _url(part, kind, place.rpartition(".")[0])
        _require_bytes(url, place, "audio/wav")
        data = url.partition(",")[2]
    try:
        clip = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise BadRequest(f"{_short(data)} is no base64 ({error}); send the bytes of a WAV, FLAC or MP3 file", place) from error
    if hear is not None:
        hear(clip, place)


def _check_video(url: str, place: str) -> None:
    _require_bytes(url, place, "video/mp4")
    if not url.startswith("data:video/"):
        raise BadRequest(f"{_short(url)} is no data: URI of a video; it begins with data:video/mp4;base64,", place)


def as_row(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return checked messages in the form of rows, where a video may be a list of its frames."""
    return [{**message, "content": _parts_of_row(message.get("content"))} for message in messages]


def _parts_of_row(content: Any) -> Any:
    return [_part_of_row(part) for part in content] if isinstance(content, list) else content or ""


def _part_of_row(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(part["type"])
    if kind in _TEXTS:
        return {"type": "text", "text": part[_TEXTS[kind]]}
    if kind in _IMAGES:
        return {"type": "image", "image": _url(part, "image_url", "")}
    if kind == "video_url":
        url = _url(part, kind, "")
        frames = url.removeprefix(_FRAMES).split(",") if url.startswith(_FRAMES) else []
        return {"type": "video", "video": [f"data:image/jpeg;base64,{each}" for each in frames] or url}
    value = part[kind]
    if isinstance(value, Mapping) and "data" in value:
        value = f"data:audio/{value['format']};base64,{value['data']}"
    return {"type": "audio", "audio": value["url"] if isinstance(value, Mapping) else value}


def check_text(text: str, place: str) -> None:
    """Refuse a text that is no UTF-8.

    Raises:
        BadRequest: it is none.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"is no UTF-8 at character {error.start}: half of a pair of surrogates; send the whole", place
        ) from error


def _short(url: str) -> str:
    return repr(url if len(url) <= 40 else f"{url[:40]}…")


def _said(value: Any) -> str:
    """Say what came instead."""
    return "nothing came" if value is None or value == [] else f"a {type(value).__name__} came: {_short(str(value))}"

"""Messages of a request to the server → an error for the part that cannot be read.

transformers' server reads what it knows and passes over the rest: an image that cannot be read ends in status 500, and a part
that the model cannot take is left out without a word.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are texts → their field."""
_IMAGES = ("image_url", "input_image")
_KNOWN = "text, image_url, and of models that take them input_audio and audio_url"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class BadRequest(Exception):  # noqa: N818 - the name of status 400
    """Request that cannot be answered as it is.

    Args:
        message: what is wrong, and what to do.
        param: place in the request.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        error = {"message": f"{self.param}: {self}", "type": "invalid_request_error", "param": self.param, "code": None}
        return {"error": error}


def check_messages(messages: Any, modality: str) -> None:
    """Refuse messages that a model cannot be asked.

    Args:
        messages: of the request.
        modality: what the model takes: LLM (text), VLM (images too), or MULTIMODAL (audio too).

    Raises:
        BadRequest: which part, and what to do.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRequest(f"{_said(messages)}; give a list of messages", "messages")
    for number, message in enumerate(messages):
        _check_message(message, modality, f"messages[{number}]")


def _check_message(message: Any, modality: str, place: str) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f'{_said(message)}; a message is {{"role": "user", "content": "..."}}', place)
    if message.get("tool_calls"):
        _check_calls(message["tool_calls"], f"{place}.tool_calls")
        return  # beside calls its content is not read
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence):
        raise BadRequest(f"{_said(content)}; give a text, or a list of parts", f"{place}.content")
    for number, part in enumerate(content):
        _check_part(part, modality, f"{place}.content[{number}]")


def _check_calls(calls: Any, place: str) -> None:
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = (call.get("function") or call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        try:
            known = isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
        except ValueError:
            known = False
        if not known:
            raise BadRequest("function.arguments must be a JSON object, as a text or as it is", f"{place}[{number}]")


def _check_part(part: Any, modality: str, place: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise BadRequest(f'{_said(part)}; a part is {{"type": "text", "text": "..."}}, or has another type: {_KNOWN}', place)
    if kind in _TEXTS:
        if not isinstance(part.get(_TEXTS[kind]), str):
            raise BadRequest(f"a part of type {kind!r} has a text in {_TEXTS[kind]!r}", place)
    elif kind in _IMAGES:
        if modality not in ("VLM", "MULTIMODAL"):
            raise BadRequest("this model takes no images; ask it in text, or serve a model of text and images", place)
        _check_media(_url(part, "image_url", place), f"{place}.image_url")
    elif kind in ("input_audio", "audio_url"):
        if modality != "MULTIMODAL":
            raise BadRequest("this model takes no audio; ask it in text, or serve a model of text and audio", place)
        _check_audio(part, kind, place)
    elif kind == "video_url":
        if modality not in ("VLM", "MULTIMODAL"):
            raise BadRequest("this model takes no videos; ask it in text", place)
        _refuse_address(_url(part, "video_url", place), f"{place}.video_url")
        raise BadRequest(
            "this server reads no video: transformers' takes one by its address or its path alone. Send frames as images "
            "(image_url), or ask with forge generate --video",
            f"{place}.video_url",
        )
    else:
        raise BadRequest(f"parts of type {kind[:40]!r} are not known; known are {_KNOWN}", place)


def _url(part: Mapping[str, Any], field: str, place: str) -> str:
    value = part.get(field)
    url = value.get("url") if isinstance(value, Mapping) else value if field == "image_url" else None
    if not isinstance(url, str) or not url:
        raise BadRequest(f'{field} must be {{"url": "data:...;base64,..."}}', f"{place}.{field}")
    return url


def _refuse_address(url: str, place: str) -> None:
    # transformers opens what is the path of a file here, whoever asks.
    if _ADDRESS.match(url) or (url[:5].lower() != "data:" and os.path.exists(url)):
        raise BadRequest(
            f"{_short(url)} is an address or a path, and this server fetches nothing; send the bytes: "
            "data:image/png;base64,... (or another type)",
            place,
        )


def _check_media(url: str, place: str) -> None:
    from transformers.image_utils import load_image

    _refuse_address(url, place)
    if url[:5].lower() == "data:" and not url.startswith("data:image/"):
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


def _check_audio(part: Mapping[str, Any], kind: str, place: str) -> None:
    if kind == "audio_url":
        _refuse_address(_url(part, kind, place), f"{place}.{kind}")
        return
    value = part.get(kind)
    data = value.get("data") if isinstance(value, Mapping) else value
    if not isinstance(data, str) or not data:
        raise BadRequest('input_audio must be {"data": "(bytes in base64)", "format": "wav"}', f"{place}.{kind}")
    _refuse_address(data, f"{place}.{kind}")


def _short(url: str) -> str:
    return repr(url if len(url) <= 40 else f"{url[:40]}…")


def _said(value: Any) -> str:
    """Say what came instead."""
    return "nothing came" if value is None else f"a {type(value).__name__} came: {_short(str(value))}"

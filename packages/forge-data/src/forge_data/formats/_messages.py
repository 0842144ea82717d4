"""List of messages as a file holds it → list whose roles, contents and fields are checked."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from forge_data._errors import DataError
from forge_data._media import ONE, Kind, Media
from forge_data._media_values import from_base64, media_of
from forge_data._values import MESSAGE_ROLES as ROLES, checked_text, describe, from_json, nearest, string
from forge_data.formats._samples import Message, Stretches
from forge_data.formats._tool_calls import checked_calls
from forge_data.formats._train_detail import DETAIL, LEARNED, detail_of, flags_of_parts, without_flags
from forge_data.formats._unread import is_empty, unread
from forge_data.formats._weights import weight_of

_PLAIN = {"role", "content"}
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Message fields in which templates look for reasoning."""
# Fields beside role and content, and the roles whose messages may have them.
_FIELDS: dict[str, tuple[str, ...]] = {
    "name": ROLES,
    **dict.fromkeys(LEARNED, ROLES),
    "tool_call_id": ("tool",),
    "tool_calls": ("assistant",),
    **dict.fromkeys(REASONING, ("assistant",)),
}
_KINDS: dict[str, Kind] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Types of parts that are media."""
_WHICH: dict[Kind, tuple[str, ...]] = {
    "image": ("image", "path", "url", "base64", "image_url"),
    "video": ("video", "path", "url", "base64", "video_url"),
    "audio": ("audio", "path", "url", "base64", "audio_url", "input_audio"),
}
"""Fields of a part that is of a kind, one of which says which."""
_RATE = "sample_fps"
"""Field of a part that is a list of frames: how many were taken in a second."""
MEDIA_ELSEWHERE = (
    "only text is trained here: forge sft, osft, distill, dpo, orpo, simpo, kto, reward, classify, embed, grpo, rloo, ppo and "
    "sdft train images, videos and audio (prepare with media=True, or --media)"
)
"""Why media are refused by those that do not train them."""
LIKENESS = 0.75
"""How much of two names must be equal so that one is taken for the other, misspelt."""
_SYNONYMS = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function": "tool",
}


class Turns(NamedTuple):
    """Messages as the chat template gets them, and which of them may be learned."""

    messages: list[Message]
    trains: tuple[bool, ...] | None
    """One per message, false where it has `train: false` or `weight: 0`; None where no message has either."""
    weights: tuple[float, ...] | None = None
    """One per message; None where all are 0 or 1."""
    media: tuple[Media, ...] = ()
    """One for each part that is a medium, in order; one without path and bytes stands for one that the row gives
    elsewhere."""
    asks: Mapping[int, Stretches | None] = MappingProxyType({})
    """As of a `Chat`."""


@attrs.frozen
class _Given:
    """What messages say of their own learning, by index."""

    weights: dict[int, float] = attrs.field(factory=dict)
    asks: dict[int, Stretches | None] = attrs.field(factory=dict)


def checked_messages(place: str, field: str, value: object, *, media: bool = False) -> Turns:
    """Check the messages of a row, whose contents may have `media`.

    A content with media stays a list of parts, in which texts that follow each other are one; any other becomes a string.

    Raises:
        DataError: not a list, an unknown role, a content that is neither text nor media, or a field that would be ignored.
    """
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a list of messages")
    if not value and field != "prompt":
        raise DataError(f"{place}: field {field} is an empty list; it must hold at least one message")
    given = _Given()
    found: list[Media] | None = [] if media else None
    messages = []
    for index, message in enumerate(value):
        messages.append(_checked_message(place, f"{field}[{index}]", message, index, given, found))
    turns = _turns(messages, given)
    return turns._replace(media=tuple(found)) if found else turns


def checked_message(place: str, field: str, value: object, *, media: bool = False) -> Turns:
    """Check one message that stands in a field of its own; errors as `checked_messages`."""
    given = _Given()
    found: list[Media] | None = [] if media else None
    return _turns([_checked_message(place, field, value, 0, given, found)], given)._replace(media=tuple(found or ()))


def _turns(messages: list[Message], given: _Given) -> Turns:
    if not given.weights:
        return Turns(messages, None, asks=given.asks)
    weights = tuple(given.weights.get(index, 1.0) for index in range(len(messages)))
    trains = tuple(weight > 0 for weight in weights)
    return Turns(messages, trains, weights if set(weights) - {0, 1} else None, asks=given.asks)


def _checked_message(
    place: str, field: str, message: object, index: int, given: _Given, media: list[Media] | None = None
) -> Message:
    if not isinstance(message, dict):
        raise DataError(f'{place}: field {field} is {describe(message)}; it must be {{"role": ..., "content": ...}}')
    role = message.get("role")
    if role not in ROLES if isinstance(role, str) else True:
        raise DataError(_unknown_role(place, field, message))
    if message.keys() == _PLAIN:
        content = message["content"]
        if isinstance(content, str):
            return {"role": role, "content": checked_text(place, f"{field}.content", content)}
    more = {
        name: item
        for name, item in message.items()
        if name in _FIELDS and item is not None and not (role not in _FIELDS[name] and is_empty(item))
    }
    # First the names: where the content is missing, it may be misspelt.
    for name in (*more, *unread(message, (*_PLAIN, *_FIELDS))):
        _check_field(place, field, name, message[name], str(role))
    kept: Message = {"role": role, "content": _content(place, field, role, message, media)}
    for name, item in more.items():
        if name == "tool_calls":
            kept[name] = checked_calls(place, f"{field}.{name}", item)
        elif name not in LEARNED:
            kept[name] = string(place, f"{field}.{name}", item)
    asks = more.get("train") is True
    stretches = flags_of_parts(place, f"{field}.content", message.get("content"), kept["content"], whole=asks)
    if DETAIL in more:
        if stretches is not None:
            raise DataError(f"{place}: field {field} has {DETAIL}, and parts of its content say train too; keep one of them")
        stretches = Stretches(detail_of(place, f"{field}.{DETAIL}", more[DETAIL], kept["content"]))
    weight = _weight(place, field, str(role), more)
    if DETAIL in more and not from_json(more[DETAIL]):
        # As in Axolotl: no stretch is learned, unless the message says that all of it is.
        stretches, weight = None, weight if asks else 0.0
    if weight is not None:
        given.weights[index] = weight
    if asks or stretches is not None:
        given.asks[index] = stretches
    return kept


def _unknown_role(place: str, field: str, message: dict[str, Any]) -> str:
    role = message.get("role")
    if role is None:
        return f"{place}: field {field} is {describe(message)} and lacks a role; allowed: {', '.join(ROLES)}"
    what = f"{place}: field {field}.role is {describe(role)}; allowed: {', '.join(ROLES)}"
    if not isinstance(role, str):
        return what
    meant = _SYNONYMS.get(role.strip().lower())
    return what + (f"; did you mean {meant!r}?" if meant else nearest(role.strip().lower(), ROLES))


def _check_field(place: str, field: str, name: str, item: object, role: str) -> None:
    what = f"{place}: field {field}.{name} is {describe(item)}"
    if name == "function_call":
        raise DataError(f"{what}; write it as tool_calls, as OpenAI's newer format has it")
    if name not in _FIELDS:
        raise DataError(
            f"{what}, which is not known, and would be ignored; known: role, content, {', '.join(_FIELDS)}. "
            f"Take it out, or write it into the content as the model is to see it{nearest(name, (*_PLAIN, *_FIELDS), LIKENESS)}"
        )
    if role not in _FIELDS[name]:
        raise DataError(
            f"{what}, but the message is of the role {role!r}; only {' and '.join(_FIELDS[name])} messages have {name}"
        )


def _content(
    place: str, field: str, role: object, message: dict[str, Any], media: list[Media] | None
) -> str | list[dict[str, str]] | None:
    content, field = message.get("content"), f"{field}.content"
    if isinstance(content, list) and content:
        parts = without_flags(place, field, content)
        return joined_parts([_part(place, f"{field}[{index}]", part, role, media) for index, part in enumerate(parts)])
    if content is None and role == "assistant":
        if message.get("tool_calls") or any(message.get(name) for name in REASONING):
            return None
        raise DataError(f"{place}: field {field} is null; it must be a string, or the message must have tool_calls")
    return string(place, field, content)


def joined_parts(parts: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Make a content of its parts, such as `{"type": "image"}`; a string where all are text."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    content: list[dict[str, str]] = []
    for part in parts:
        if part["type"] == "text" and content and content[-1]["type"] == "text":
            content[-1]["text"] += part["text"]
        elif part.get("text", part["type"]):
            content.append({**part})
    return content


def text_part(text: str) -> dict[str, str]:
    """Make a part of a content that is text."""
    return {"type": "text", "text": text}


def parts_of(message: Message) -> list[dict[str, str]]:
    """Return the parts of a message's content, one of text where it is a string."""
    content = message.get("content")
    return content if isinstance(content, list) else [text_part(content or "")]


def text_of(message: Message) -> str:
    """Return the text of a message's content, without its media; empty where it has none."""
    content = message.get("content")
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""


def has_media(message: Message) -> bool:
    """Tell whether a message has media, so that its content is a list of parts."""
    return isinstance(message.get("content"), list)


def _part(place: str, field: str, part: object, role: object, media: list[Media] | None) -> dict[str, str]:
    """Return a part of a content; a medium is added to `media`."""
    if isinstance(part, dict):
        if isinstance(part.get("text"), str) and part.get("type", "text") == "text":
            extra = unread(part, ("type", "text"))
            if not extra:
                return text_part(checked_text(place, f"{field}.text", part["text"]))
            raise DataError(f"{place}: field {field}.{extra[0]} is {describe(part[extra[0]])}; a part has type and text")
        given = part.get("type")
        if isinstance(given, str) and given != "text":
            what = f"{place}: field {field} is a part of the type {given!r}"
            if given not in _KINDS:
                raise DataError(f"{what}; a part is text ({_TEXT}), an image, a video or audio: take the row out")
            if media is None:
                raise DataError(f"{what}, and {MEDIA_ELSEWHERE}; take the row out")
            if role == "assistant":
                raise DataError(f"{what} in a message of the assistant, and what a model writes is text; take it out")
            media.append(_medium(place, field, part, _KINDS[given]))
            return {"type": _KINDS[given]}
    raise DataError(f"{place}: field {field} is {describe(part)}; a part must be {_TEXT}")


_TEXT = '{"type": "text", "text": ...}'


def _medium(place: str, field: str, part: dict[str, Any], kind: Kind) -> Media:
    """Read a part that is a medium; one that does not say which has no path, no bytes."""
    names = _WHICH[kind]
    if extra := unread(part, ("type", *names, *([_RATE] if kind == "video" else []))):
        of_frames = kind == "video" and extra[0] == "fps" and isinstance(part.get("video"), list)
        remedy = f"name it {_RATE}, as the rate of a list of frames is called" if of_frames else "take it out"
        raise DataError(
            f"{place}: field {field}.{extra[0]} is {describe(part[extra[0]])}, which would be passed over; a part that is "
            f"{ONE[kind]} has one of {', '.join(names)}: {remedy}"
        )
    given = [name for name in names if not is_empty(part.get(name))]
    if len(given) > 1:
        raise DataError(f"{place}: field {field} has both {given[0]} and {given[1]}; keep the one that is its {kind}")
    rate = _rate(place, field, part)
    if not given and rate is None:
        return Media(field, kind=kind)
    if rate is not None and not any(isinstance(part[name], list) for name in given):
        raise DataError(
            f"{place}: field {field}.{_RATE} is {describe(part[_RATE])}, and the part has no list of frames; take it out: a "
            "file says its own, and how many frames of it are taken is set in the file of the model's video processor"
        )
    name, value = given[0], part[given[0]]
    if name == f"{kind}_url" and isinstance(value, dict) and "url" in value:
        # OpenAI's; `detail` is for their models.
        name, value = f"{name}.url", value["url"]
    if name == "input_audio" and isinstance(value, dict) and "data" in value:
        # OpenAI's; the format is told from the bytes.
        return attrs.evolve(from_base64(place, f"{field}.{name}.data", value["data"], kind), field=field)
    read = from_base64 if name == "base64" else media_of
    return attrs.evolve(read(place, f"{field}.{name}", value, kind), field=field, fps=rate)


def _rate(place: str, field: str, part: dict[str, Any]) -> float | None:
    """Read the frames in a second of a list of frames, as qwen-vl-utils has them."""
    value = part.get(_RATE)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise DataError(f"{place}: field {field}.{_RATE} is {describe(value)}; it must be the frames in a second, such as 2")
    return float(value)


def _weight(place: str, field: str, role: str, more: dict[str, Any]) -> float | None:
    """Read how much a message is to be learned; None where it does not say.

    `loss` and `loss_scale` are ms-swift's names of `train` and `weight`.
    """
    asked, by = _one_of(place, field, more, ("train", "loss")), _one_of(place, field, more, ("weight", "loss_scale"))
    train, weight = more.get(asked), more.get(by)
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{place}: field {field}.{asked} is {describe(train)}; it must be true or false")
    if weight is not None:
        weight = weight_of(place, f"{field}.{by}", weight)
    if by == "loss_scale" and train is False:
        weight = None  # as there, where a message without loss has no scale
    if train is not None and weight is not None and train != bool(weight):
        raise DataError(f"{place}: field {field}.{asked} is {describe(train)}, but its {by} is {weight:g}; keep one of them")
    learned = weight if weight is not None else None if train is None else float(train)
    if learned and role != "assistant" and more.get("train") is not True:
        raise DataError(
            f"{place}: field {field} is of the role {role!r} and its {by if weight is not None else asked} asks for it to be "
            'learned, by itself only an answer is: write "train": true to have this message learned, or name the role in '
            "`train_on` (assistant,user) to have all of them; else take it out"
        )
    return learned


def _one_of(place: str, field: str, more: dict[str, Any], names: tuple[str, str]) -> str:
    """Return the one of two names of a field that a message has."""
    given = [name for name in names if more.get(name) is not None]
    if len(given) > 1 and more[given[0]] != more[given[1]]:
        raise DataError(f"{place}: field {field} has {names[0]} and {names[1]}, which say two things; keep one of them")
    return (given or names)[0]

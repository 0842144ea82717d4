"""Row of messages, and what else the row gives its chat template → conversation."""

from collections.abc import Mapping
from typing import Any

from forge_data._errors import DataError
from forge_data._media import COLUMNS, MANY, MARKS, ONE, Kind, Media
from forge_data._media_values import media_of, placed
from forge_data._values import NO_ARGUMENTS, checked_tree, counted, describe, from_json
from forge_data.formats._format import FieldOf, Fields, Format, message_field
from forge_data.formats._messages import Turns, checked_messages, joined_parts, parts_of, text_of, text_part
from forge_data.formats._rated import rated
from forge_data.formats._samples import Chat, Message
from forge_data.formats._tool_calls import with_call_turns
from forge_data.formats._train_detail import check_without_media
from forge_data.formats._unread import is_empty

TEMPLATE_FIELDS = ("tools", "documents", "chat_template_kwargs", "unmask")
"""Row fields that a conversation keeps: arguments of its chat template, and `unmask`."""

MEDIA_FIELDS = tuple(COLUMNS)
"""Columns of a row with the media of its messages."""


def chat(place: str, fields: Fields, turns: Turns, first_completion: int = 0, *, media: FieldOf | None = None) -> Chat:
    """Make a conversation of checked messages and the row's template fields.

    Where the format reads `media`, it is given how the format names fields, and those of the row's columns are read too.

    Raises:
        DataError: one of these that is not of its kind; media that are not as many as their places.
    """
    if media is not None and (turns.media or any(name in fields for name in MEDIA_FIELDS)):
        turns = _with_media(place, fields, turns, media)
    check_without_media(place, turns.asks, turns.media)
    if not any(fields.get(name) for name in TEMPLATE_FIELDS):
        return Chat(place, turns.messages, first_completion, turns.trains, turns.asks, weights=turns.weights, media=turns.media)
    return Chat(
        place,
        turns.messages,
        first_completion,
        turns.trains,
        turns.asks,
        weights=turns.weights,
        media=turns.media,
        unmask=_flag(place, "unmask", fields.get("unmask")),
        tools=_objects(place, "tools", fields.get("tools")),
        documents=_objects(place, "documents", fields.get("documents")),
        template_kwargs=_arguments(place, "chat_template_kwargs", fields.get("chat_template_kwargs")),
    )


def messages_with_media(
    row: Mapping[str, Any], field: str, *, place: str = "row", directory: str | None = None
) -> tuple[list[Message], tuple[Media, ...]]:
    """Read the messages in a field of a row, and their media, as `prepare` reads them.

    They are parts of contents, or in the columns `images`, `image`, `videos`, `video`, `audios` or `audio`. A content with
    some becomes a list of parts, such as `{"type": "image"}`, which a chat template takes; `MediaInputs.prompt` takes those.

    Args:
        row: with messages in `field`.
        field: such as `messages` or `prompt`.
        place: of the row, for errors.
        directory: where relative paths begin; without it they are refused.

    Raises:
        DataError: messages or media that `prepare` would refuse.
    """
    turns = checked_messages(place, field, row[field], media=True)
    made = chat(place, row, turns, media=lambda _fields, index, part, _answer: message_field(field, index, part))
    return made.messages, tuple(placed(place, medium, directory) for medium in made.media)


def _with_media(place: str, fields: Fields, turns: Turns, field_of: FieldOf) -> Turns:
    """Put the media of the row's columns into their places.

    These are the parts of their kind that do not say which. In a row without parts of that kind it is each `<image>` (or
    `<video>`, `<audio>`) in a text, as in LLaMA-Factory, and where there is none, all stand before the text of the first user,
    as in TRL.
    """
    for kind in MARKS:
        turns = _with_kind(place, fields, turns, field_of, kind)
    return turns


def _with_kind(place: str, fields: Fields, turns: Turns, field_of: FieldOf, kind: Kind) -> Turns:
    given = given_media(place, fields, kind)
    own = [medium for medium in turns.media if medium.kind == kind]
    open_places = [medium for medium in own if not medium.is_given]
    if not given and not open_places:
        return turns
    if not given:
        raise DataError(
            f"{place}: field {open_places[0].field} is a part that is {ONE[kind]} and does not say which; give it {kind} (a "
            f"path, a data: URI), or the row a list {kind}s"
        )
    messages = turns.messages
    if own:
        places, what = len(open_places), f"parts that are {MANY[kind]} and do not say which stand in its messages"
    else:
        messages, places = _at_marks(place, fields, turns.messages, field_of, kind)
        what = f"{MARKS[kind]} stands in its texts"
        if not places:
            messages, places = _before_user(place, turns.messages, given), len(given)
    if places != len(given):
        raise DataError(
            f"{place}: field {given[0].field.partition('[')[0]} holds {counted(len(given), MANY[kind])}, and {what} "
            f"{counted(places, 'times')}; give each {kind} its place"
        )
    following, before, filled = iter(given), iter(turns.media), list[Media]()
    for part in (part for message in messages for part in parts_of(message) if part["type"] != "text"):
        known = next(before) if own or part["type"] != kind else None
        is_open = known is None or (known.kind == kind and not known.is_given)
        filled.append(next(following) if known is None or is_open else known)
    return turns._replace(messages=messages, media=tuple(filled))


def given_media(place: str, fields: Fields, kind: Kind) -> list[Media]:
    """Read the media of a kind in the row's own columns.

    Raises:
        DataError: two columns of one kind, or a value that is no medium.
    """
    names = [name for name, of in COLUMNS.items() if of == kind and not is_empty(fields.get(name))]
    if len(names) > 1:
        raise DataError(f"{place} has both {names[0]} and {names[1]}; keep the one with its {MANY[kind]}")
    if not names:
        return []
    (name,) = names
    value = from_json(fields[name])
    listed = enumerate(value) if isinstance(value, list) else ()
    return [media_of(place, f"{name}[{at}]", each, kind) for at, each in listed] or [media_of(place, name, value, kind)]


def _at_marks(place: str, fields: Fields, messages: list[Message], field_of: FieldOf, kind: Kind) -> tuple[list[Message], int]:
    """Return messages with a medium in the place of each mark, and the number of these."""
    made, places = [*messages], 0
    for index, message in enumerate(messages):
        found = text_of(message).count(MARKS[kind])
        if found and message["role"] == "assistant":
            field = field_of(fields, index, "content", "completion")
            raise DataError(
                f"{place}: field {field} holds {MARKS[kind]}, and the row has {MANY[kind]}; what a model writes is text: take "
                f"it out, or give {MANY[kind]} as parts of the messages"
            )
        if found:
            places += found
            made[index] = message | {
                "content": joined_parts([each for part in parts_of(message) for each in _split(part, kind)])
            }
    return made, places


def _split(part: dict[str, str], kind: Kind) -> list[dict[str, str]]:
    """Return a part of a content as texts with a medium between them, one for each mark."""
    if part["type"] != "text":
        return [part]
    first, *others = part["text"].split(MARKS[kind])
    return [text_part(first), *(each for text in others for each in ({"type": str(kind)}, text_part(text)))]


def _before_user(place: str, messages: list[Message], given: list[Media]) -> list[Message]:
    """Return messages with all media of a kind before the first user's text, behind others."""
    first, kind = next((index for index, message in enumerate(messages) if message["role"] == "user"), None), given[0].kind
    if first is None:
        raise DataError(f"{place}: field {given[0].field} is {ONE[kind]}, and no message is of the user; say where it stands")
    parts = parts_of(messages[first])
    at = next((number for number, part in enumerate(parts) if part["type"] == "text"), len(parts))
    content = joined_parts([*parts[:at], *({"type": str(kind)} for _ in given), *parts[at:]])
    return [*messages[:first], messages[first] | {"content": content}, *messages[first + 1 :]]


def _flag(place: str, field: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise DataError(f"{place}: field {field} is {describe(value)}; it must be true or false")


def _objects(place: str, field: str, value: object) -> list[Any] | None:
    value = from_json(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a list of objects")
    objects = [from_json(item) for item in value]
    for index, item in enumerate(objects):
        if not isinstance(item, dict):
            raise DataError(f"{place}: field {field}[{index}] is {describe(item)}; it must be an object")
        checked_tree(place, f"{field}[{index}]", item)
    return objects


def _arguments(place: str, field: str, value: object) -> dict[str, Any]:
    value = from_json(value)
    if not value:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be an object of template arguments")
    reserved = sorted(value.keys() & NO_ARGUMENTS)
    if reserved:
        raise DataError(f"{place}: field {field}.{reserved[0]} is no argument of a template; take it out")
    return checked_tree(place, field, value)


def _messages(place: str, fields: Fields) -> Chat:
    value, _ = with_call_turns(place, "messages", from_json(fields["messages"]))
    turns = checked_messages(place, "messages", value, media=True)
    return chat(place, fields, turns, media=_field_of)


def _field_of(fields: Fields, index: int, part: str, _answer: str) -> str:
    return messages_field(fields, "messages", index, part)


def messages_field(fields: Fields, name: str, index: int, part: str) -> str:
    """Name a part of a message in a list in which ms-swift's calls are messages."""
    value = from_json(fields.get(name))
    starts = with_call_turns("", name, value)[1]
    if index >= len(starts):
        return message_field(name, index, part)
    at = starts[index]
    if part.startswith("tool_calls[") and isinstance(value, list):
        at += int(part[len("tool_calls[") :].partition("]")[0]) + (value[at].get("role") == "assistant")
        part = "content"
    return message_field(name, at, part)


MESSAGES = Format(
    needs="messages",
    matches=lambda row: "messages" in row and rated(row) is None,
    convert=_messages,
    field_of=_field_of,
    reads=(*TEMPLATE_FIELDS, *MEDIA_FIELDS),
    # Chosen by name, it ignores what rates the conversation.
    accepts=lambda row: "messages" in row,
)
"""OpenAI's `messages`, with the row's tools, documents, template arguments and `unmask`."""

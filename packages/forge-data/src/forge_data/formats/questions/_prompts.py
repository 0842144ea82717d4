"""Row → `Question`: the prompt that it holds, as text or messages, and its further fields."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._media_values import placed
from forge_data._values import describe, from_json, string
from forge_data.formats._chat import MEDIA_FIELDS, TEMPLATE_FIELDS, chat
from forge_data.formats._format import message_field
from forge_data.formats._messages import MEDIA_ELSEWHERE, Turns, checked_messages
from forge_data.formats._ms_swift import messages_of
from forge_data.formats._prompt_completion import text_with_media
from forge_data.formats._samples import Chat, Text
from forge_data.formats._system_prompt import with_system_prompt
from forge_data.formats._tool_calls import with_call_turns
from forge_data.formats._unread import is_empty, leaves_out_system

_BEFORE_ASSISTANT = ("user", "tool")
"""Roles after which the assistant's turn comes."""
_MAX_DEPTH = 200
"""Levels of nesting; Python's JSON encoder follows about a thousand, less the caller's own."""


@attrs.frozen
class Question:
    """A prompt that is not tokenised yet."""

    prompt: str | Chat | Text | tuple[str | Chat, ...]
    """Text or messages; text with media, without a completion; or several texts or messages, a query and its documents."""
    record: bytes
    """JSON of the prompt and of the row's further fields, as the store keeps it."""

    @property
    def empty(self) -> bool:
        """Whether the prompt has no text."""
        if isinstance(self.prompt, (tuple, Text)):
            return False
        if isinstance(self.prompt, str):
            return not self.prompt.strip()
        return not any(str(message.get("content") or "").strip() for message in self.prompt.messages)


def with_lengths(record: bytes, lengths: list[int]) -> bytes:
    """Return the record of a query with its documents, with one more column, `lengths`."""
    found = json.loads(record)
    made = {**found, "columns": {**found["columns"], "lengths": lengths}, "texts": len(lengths)}
    return json.dumps(made, separators=(",", ":")).encode("ascii")


def with_text(record: bytes, text: str) -> bytes:
    """Return a record with the text that the chat template wrote of a prompt with images."""
    return json.dumps({**json.loads(record), "text": text}, separators=(",", ":")).encode("ascii")


def question(
    place: str,
    fields: Mapping[str, Any],
    *,
    media: bool = False,
    directory: str | None = None,
    system_prompt: str | None = None,
) -> Question:
    """Read a row with `prompt`, as text or messages, or `messages` that end before an answer.

    ms-swift's `query` (with `system` and `history`) is messages; its `response` is a further field.

    Args:
        place: place of the row.
        fields: its fields.
        media: whether the prompt may have images; those in columns of the row are no further fields of it.
        directory: where relative paths of images begin; None where the rows lie in no directory of this machine.
        system_prompt: first message of messages that have no system message.

    Raises:
        DataError: neither or both of them, a conversation that ends with the assistant, a further field that is not JSON, or
            a field `system` that the prompt does not begin with.
    """
    if "query" in fields and not any(name in fields for name in ("prompt", "messages")):
        rest = {name: each for name, each in fields.items() if name not in ("query", "system", "history")}
        said = {name: fields[name] for name in ("query", "system", "history") if name in fields}
        fields = {"messages": messages_of(place, said), **rest}
    names = [name for name in ("prompt", "messages") if name in fields]
    if len(names) != 1:
        has = ", ".join(map(repr, fields)) or "(none)"
        what = "which are two; keep one of them" if names else "and none of them is a prompt; give prompt (text, or messages)"
        raise DataError(
            f"{place} has the fields {has}, {what}, or messages that end with the user's; a column of another name is read "
            "with `rename_columns`, such as question=prompt"
        )
    (name,) = names
    value = from_json(fields[name]) if name == "messages" else fields[name]
    if not media:
        refuse_media(place, fields)
    of_media = [each for each in MEDIA_FIELDS if media and not is_empty(fields.get(each))]
    columns = {field: given for field, given in fields.items() if field not in (name, *of_media)}
    if leaves_out_system({**fields, name: value}):
        raise DataError(
            f"{place}: field system is {describe(fields['system'])}, which the model would not be asked with; make it the "
            "first message (in text, the beginning of the prompt) with `preprocess`, or, if only rewards are to read it, "
            "give it another name with `rename_columns`, such as system=note"
        )
    if name == "prompt" and not isinstance(value, list):
        text = string(place, name, value)
        refuse_template_fields(place, fields)
        asked: str | Text = text
        if of_media:
            found = text_with_media(place, fields, Text(place, text, ""))
            asked = attrs.evolve(found, media=tuple(placed(place, medium, directory) for medium in found.media))
        return Question(asked, record_of(place, text, columns))
    value, _ = with_call_turns(place, name, value)
    turns = asked_messages(place, name, value, media=media)
    if turns.messages and turns.messages[-1]["role"] not in _BEFORE_ASSISTANT:
        raise DataError(
            f"{place}: field {name}[{len(turns.messages) - 1}] is of the role {turns.messages[-1]['role']!r}, and a prompt "
            "ends where the assistant is to answer; take out what follows the last turn of the user"
        )
    made = chat(place, fields, turns, media=partial(_field_of, name) if media else None)
    made = with_system_prompt(made, system_prompt)
    made = attrs.evolve(made, media=tuple(placed(place, medium, directory) for medium in made.media))
    return Question(made, record_of(place, made.messages, columns))


def asked_messages(place: str, field: str, value: object, *, media: bool) -> Turns:
    """Check messages of which nothing is learned.

    Raises:
        DataError: as `checked_messages`, or one that asks to be learned; an answer before the question may say so.
    """
    turns = checked_messages(place, field, value, media=media)
    for index, stretches in turns.asks.items():
        if stretches.learned if stretches is not None else turns.messages[index]["role"] != "assistant":
            raise DataError(
                f"{place}: field {field}[{index}] asks to be learned (train, or a stretch of it), and of this row no message "
                "is; take that out"
            )
    return turns


def _field_of(name: str, _fields: Mapping[str, Any], index: int, part: str, _answer: str) -> str:
    return message_field(name, index, part)


def refuse_media(place: str, fields: Mapping[str, Any]) -> None:
    """Refuse images in columns of rows of text."""
    for name in MEDIA_FIELDS:
        if not is_empty(fields.get(name)):
            raise DataError(
                f"{place}: field {name} is {describe(fields[name])}, and {MEDIA_ELSEWHERE}; take it out of the rows"
            )


def refuse_template_fields(place: str, fields: Mapping[str, Any]) -> None:
    """Refuse fields for chat templates in a row of text."""
    for name in TEMPLATE_FIELDS:
        if fields.get(name):
            raise DataError(
                f"{place}: field {name} is {describe(fields[name])}, but the prompt is text, which no chat template writes; "
                "make it a list of messages, or take the field out"
            )


def record_of(place: str, prompt: str | list[Any], columns: dict[str, Any]) -> bytes:
    """Return prompt and columns as JSON; DataError for a value that would come back changed."""
    for name, value in columns.items():
        _check_json(place, name, value)
    # ASCII, for a field of the row may hold half of a surrogate pair, which is JSON and no UTF-8.
    return json.dumps({"prompt": prompt, "columns": columns}, separators=(",", ":")).encode("ascii")


def _check_json(place: str, field: str, value: object, depth: int = 0) -> None:
    """Refuse values that would come back from the store changed, or not at all."""
    if value is None or type(value) in (str, int, float, bool):
        return
    if depth > _MAX_DEPTH:
        raise DataError(
            f"{place}: field {field[:40]}... holds lists and objects more than {_MAX_DEPTH} deep; make it text, or take it out"
        )
    if type(value) is list:
        for index, item in enumerate(value):
            _check_json(place, f"{field}[{index}]", item, depth + 1)
    elif type(value) is dict:
        for name, item in value.items():
            if not isinstance(name, str):
                raise DataError(f"{place}: field {field} has the key {describe(name)}; keys are strings")
            _check_json(place, f"{field}.{name}", item, depth + 1)
    else:
        raise DataError(
            f"{place}: field {field} is {describe(value)}, which is no JSON value, so that the store could not give it back as "
            "it was; make it text, a number, a list or an object with `preprocess`, or take it out"
        )

"""Row of messages, and what else the row gives its chat template → conversation."""

from typing import Any

from forge_data._errors import DataError
from forge_data._values import NO_ARGUMENTS, checked_tree, describe, from_json
from forge_data.formats._format import Fields, Format, message_field
from forge_data.formats._messages import Turns, checked_messages
from forge_data.formats._rated import rated
from forge_data.formats._samples import Chat

TEMPLATE_FIELDS = ("tools", "documents", "chat_template_kwargs", "unmask")
"""Row fields that a conversation keeps: arguments of its chat template, and `unmask`."""


def chat(place: str, fields: Fields, turns: Turns, first_completion: int = 0) -> Chat:
    """Make a conversation of checked messages and the row's template fields.

    Raises:
        DataError: one of these that is not of its kind.
    """
    if not any(fields.get(name) for name in TEMPLATE_FIELDS):
        return Chat(place, turns.messages, first_completion, turns.trains, weights=turns.weights)
    return Chat(
        place,
        turns.messages,
        first_completion,
        turns.trains,
        weights=turns.weights,
        unmask=_flag(place, "unmask", fields.get("unmask")),
        tools=_objects(place, "tools", fields.get("tools")),
        documents=_objects(place, "documents", fields.get("documents")),
        template_kwargs=_arguments(place, "chat_template_kwargs", fields.get("chat_template_kwargs")),
    )


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
    return chat(place, fields, checked_messages(place, "messages", from_json(fields["messages"])))


MESSAGES = Format(
    needs="messages",
    matches=lambda row: "messages" in row and rated(row) is None,
    convert=_messages,
    field_of=lambda _row, index, part, _answer: message_field("messages", index, part),
    reads=TEMPLATE_FIELDS,
    # Chosen by name, it ignores what rates the conversation.
    accepts=lambda row: "messages" in row,
)
"""OpenAI's `messages`, with the row's tools, documents, template arguments and `unmask`."""

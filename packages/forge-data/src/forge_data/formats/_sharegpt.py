"""ShareGPT row (`conversations` of `from` and `value`) → conversation."""

from typing import Any

from forge_data._errors import DataError
from forge_data._values import describe, from_json, nearest, string
from forge_data.formats._chat import MEDIA_FIELDS, TEMPLATE_FIELDS, chat, messages_field
from forge_data.formats._format import Fields, Format
from forge_data.formats._messages import LIKENESS, Turns, checked_messages
from forge_data.formats._rated import rated
from forge_data.formats._samples import Chat, Message
from forge_data.formats._tool_calls import function_call, with_call_turns
from forge_data.formats._train_detail import LEARNED
from forge_data.formats._unread import unread

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_FIELDS = ("from", "value", *LEARNED)


def sharegpt(place: str, fields: Fields) -> Chat:
    """Read a row with `conversations`, and `system` and `tools` where it has them.

    Turns of `role` and `content`, which some data sets keep under this name, are read as `messages` are.

    Raises:
        DataError: not a list, an unknown speaker, a value that is not text, a call that cannot be read.
    """
    return chat(place, fields, conversation(place, fields), media=turn_field)


def conversation(place: str, fields: Fields) -> Turns:
    """Read the turns of `conversations`, and `system` before them; errors as `sharegpt`."""
    value = from_json(fields["conversations"])
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else describe(value)
        raise DataError(f'{place}: field conversations is {found}; it must be a list of {{"from": ..., "value": ...}}')
    if all(isinstance(turn, dict) and "from" not in turn and "role" in turn for turn in value):
        value, _ = with_call_turns(place, "conversations", value)
        turns = checked_messages(place, "conversations", value, media=True)
    else:
        # `train` and `weight` mean here what they mean there, so the messages that come of it are checked by the same rules.
        turns = checked_messages(
            place, "conversations", [turn_message(place, f"conversations[{i}]", turn) for i, turn in enumerate(value)]
        )
    return with_system(place, fields, turns)


def with_system(place: str, fields: Fields, turns: Turns) -> Turns:
    """Put the system prompt that the row holds in a field of its own before the turns.

    Raises:
        DataError: the turns have one already, or it is not text.
    """
    system = fields.get("system")
    if not system:
        return turns
    if turns.messages[0]["role"] == "system":
        raise DataError(f"{place}: field system stands beside a system turn in the conversation; keep one of them")
    messages = [{"role": "system", "content": string(place, "system", system)}, *turns.messages]
    trains = None if turns.trains is None else (True, *turns.trains)
    asks = {index + 1: ranges for index, ranges in turns.asks.items()}
    return Turns(messages, trains, None if turns.weights is None else (1.0, *turns.weights), turns.media, asks)


def turn_message(place: str, field: str, turn: object) -> Message:
    """Read one turn as a message, whose `train` and `weight` are not checked yet.

    Raises:
        DataError: no turn, an unknown speaker, a value that is not text, a call that cannot be read.
    """
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise DataError(f'{place}: field {field} is {describe(turn)}; it must be {{"from": ..., "value": ...}}')
    speaker = turn["from"]
    if speaker not in _ROLES:
        raise DataError(f"{place}: field {field}.from is {describe(speaker)}; allowed: {', '.join(_ROLES)}")
    extra = unread(turn, _FIELDS)
    if extra:
        remedy = "take it out" if "value" in turn else "the turn has no value: if this is what is said, rename it to value"
        raise DataError(
            f"{place}: field {field}.{extra[0]} is {describe(turn[extra[0]])}, which would be passed over; "
            f"known: {', '.join(_FIELDS)}; {remedy}{nearest(extra[0], _FIELDS, LIKENESS)}"
        )
    message: Message = {"role": _ROLES[speaker]} | {name: turn[name] for name in LEARNED if name in turn}
    if speaker == "function_call":
        return message | {"content": None, "tool_calls": _calls(place, f"{field}.value", turn.get("value"))}
    return message | {"content": string(place, f"{field}.value", turn.get("value"))}


def _calls(place: str, field: str, value: object) -> list[dict[str, Any]]:
    """Read the calls of a `function_call` turn from its JSON: one object, or a list of them."""
    parsed = from_json(value)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise DataError(
            f'{place}: field {field} is {describe(value)}; a function_call is JSON: {{"name": ..., "arguments": {{...}}}}, '
            "or a list of these"
        )
    return [function_call(place, field, call) for call in calls]


def turn_field(fields: Fields, index: int, part: str, _answer: str) -> str:
    """Name the field of a part of a turn, or of the system prompt before them."""
    # A `system` field of its own becomes the message before the first.
    index -= bool(fields.get("system"))
    if index < 0:
        return "system"
    turns = from_json(fields["conversations"])
    if part and isinstance(turns, list) and isinstance(turns[index], dict) and "from" in turns[index]:
        part = "from" if part == "role" else "value"
    return messages_field(fields, "conversations", index, part)


SHAREGPT = Format(
    needs="conversations",
    matches=lambda row: "conversations" in row and rated(row) is None,
    convert=sharegpt,
    field_of=turn_field,
    reads=(*TEMPLATE_FIELDS, *MEDIA_FIELDS),
    # Chosen by name, it ignores what rates the conversation.
    accepts=lambda row: "conversations" in row,
)
"""ShareGPT's `conversations`."""

"""LLaMA-Factory's or ms-swift's row of a preference or of KTO → conversations."""

from forge_data._errors import DataError
from forge_data._values import checked_text, describe, from_json
from forge_data.formats import _alpaca, _ms_swift, _sharegpt
from forge_data.formats._chat import chat, messages_field
from forge_data.formats._format import Fields
from forge_data.formats._messages import Turns, checked_message, checked_messages
from forge_data.formats._samples import Chat
from forge_data.formats._tool_calls import with_call_turns

_BEFORE_ASSISTANT = ("user", "tool")
"""Roles after which the assistant's turn comes."""


def compared(place: str, fields: Fields, asked: str) -> tuple[Turns, list[Turns]]:
    """Read the prompt in the field `asked`, and the one turn of `chosen` and of `rejected`.

    Raises:
        DataError: a prompt that ends with the assistant's turn, a side that is no turn of the assistant's, or a field that is
            not what it should be.
    """
    prompt = _prompt(place, fields, asked)
    role = prompt.messages[-1]["role"]
    if role not in _BEFORE_ASSISTANT:
        last = field_of(fields, asked, len(prompt.messages) - 1, "")
        raise DataError(
            f"{place}: field {last} is of the role {role!r}, and what stands before chosen and rejected ends where the "
            "assistant is to answer; take out what follows the last turn of the user"
        )
    return prompt, [_side(place, name, fields[name]) for name in ("chosen", "rejected")]


def rated_answer(place: str, fields: Fields, asked: str) -> Chat:
    """Read a conversation whose last turn is rated (in Alpaca's rows, its `output`).

    Raises:
        DataError: the last turn is not the assistant's, or a field that is not what it should be.
    """
    turns = _prompt(place, fields, asked)
    if asked in ("instruction", "query"):
        output = "output" if asked == "instruction" else "response"
        turns = turns._replace(messages=[*turns.messages, *_side(place, output, fields[output]).messages])
    at = len(turns.messages) - 1
    role = turns.messages[-1]["role"]
    if role != "assistant":
        raise DataError(
            f"{place}: field {field_of(fields, asked, at, '')} is of the role {role!r}, and kto_tag rates the last turn, which "
            "is the assistant's; give its answer, or take the row out"
        )
    return chat(
        place, fields, turns, at, media=lambda fields, index, part, answer: field_of(fields, asked, index, part, answer)
    )


def field_of(fields: Fields, asked: str, index: int, part: str, answer: str = "") -> str:
    """Name the field of a part of a message: of the prompt, or of the side `answer` behind it."""
    before = _length(fields, asked)
    if before is not None and index >= before and answer in fields:
        side = fields[answer]
        if not isinstance(side, dict) or not part:
            return answer
        return f"{answer}.{part if 'role' in side else 'from' if part == 'role' else 'value'}"
    match asked:
        case "instruction":
            return _alpaca.field_of(fields, index, part, answer)
        case "query":
            return _ms_swift.field_of(fields, index, part, answer)
        case "conversations":
            return _sharegpt.turn_field(fields, index, part, answer)
        case _:
            index -= bool(fields.get("system"))
            return messages_field(fields, "messages", index, part) if index >= 0 else "system"


def _length(fields: Fields, asked: str) -> int | None:
    """Count the messages of the prompt; None where it cannot be read."""
    listed = from_json(fields.get("history" if asked in ("instruction", "query") else asked))
    count = len(listed) if isinstance(listed, list) else 0
    if asked in ("instruction", "query"):
        return 2 * count + 1 + bool(fields.get("system"))
    return count + bool(fields.get("system")) if isinstance(listed, list) else None


def _prompt(place: str, fields: Fields, asked: str) -> Turns:
    match asked:
        case "instruction":
            # A new line, as where these rows come from.
            return _alpaca.question(place, fields, between="\n")
        case "query":
            return _alpaca.question(place, {**fields, "instruction": fields["query"], "input": ""}, between="")
        case "conversations":
            return _sharegpt.conversation(place, fields)
        case _:
            value, _ = with_call_turns(place, "messages", from_json(fields["messages"]))
            turns = checked_messages(place, "messages", value, media=True)
            return _sharegpt.with_system(place, fields, turns)


def _side(place: str, name: str, value: object) -> Turns:
    """Read the answer in a field: text, or a turn in ShareGPT's or OpenAI's fields."""
    read = from_json(value)
    if isinstance(read, dict) and ("from" in read or "role" in read):
        value = read  # of a CSV file, whose cells are text
    if isinstance(value, str):
        return Turns([{"role": "assistant", "content": checked_text(place, name, value)}], None)
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: field {name} is {describe(value)}; it must be text, or one turn of the assistant's, such as "
            '{"from": "gpt", "value": ...}'
        )
    message = _sharegpt.turn_message(place, name, value) if "from" in value else value
    turns = checked_message(place, name, message, media=True)
    role = turns.messages[0]["role"]
    if role != "assistant":
        raise DataError(
            f"{place}: field {name} is a turn of the role {role!r}; an answer is the assistant's: mend it, or take the row out"
        )
    return turns

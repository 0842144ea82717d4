"""Tool calls, as OpenAI or ms-swift writes them → calls as chat templates read them."""

import json
from typing import Any

from forge_data._errors import DataError
from forge_data._values import checked_tree, describe, from_json, string
from forge_data.formats._train_detail import LEARNED
from forge_data.formats._unread import unread

_CALL = {"id", "type", "index", "function"}
_FUNCTION = {"name", "arguments"}


def checked_calls(place: str, field: str, value: object) -> list[dict[str, Any]]:
    """Check calls and decode their arguments.

    OpenAI keeps the arguments as a string of JSON, templates want the object. A string that is not a JSON object stays as it
    is, and
    missing arguments are null: what the template makes of them is trained, and the lint reports them.

    Raises:
        DataError: not a list of calls, a call without a function's name, a field that templates do not know.
    """
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a list of tool calls")
    return [_checked(place, f"{field}[{index}]", call) for index, call in enumerate(value)]


def function_call(place: str, field: str, value: object) -> dict[str, Any]:
    """Make a call of a function's name and arguments.

    Raises:
        DataError: not an object, no name, or another field.
    """
    return {"type": "function", "function": _function(place, field, value)}


TURNS = {"tool_call": "assistant", "tool_response": "tool"}
"""Roles of ms-swift's messages that are a call or what it gave → the roles that chat templates know."""


def with_call_turns(place: str, field: str, value: Any) -> tuple[Any, list[int]]:
    """Put ms-swift's calls into the assistant's messages, as OpenAI has them.

    A `tool_call` holds one call as JSON; those that follow each other, and the text of the assistant before them, are one turn.
    Beside the messages is the index that each had; empty where nothing is changed.

    Raises:
        DataError: a call that cannot be read; a turn of which the text is to be learned and the calls are not.
    """
    if not isinstance(value, list) or not any(_role(each) in TURNS for each in value):
        return value, []
    made, starts, before = list[Any](), list[int](), ""
    for index, message in enumerate(value):
        role = _role(message)
        if role == "tool_call":
            call = _turn_call(place, f"{field}[{index}].content", message.get("content"))
            if before not in ("assistant", "tool_call") or (before == "assistant" and made[-1].get("tool_calls")):
                made.append({"role": "assistant", "content": None, **_learned(message)})
                starts.append(index)
            elif before == "assistant" and _learned(made[-1]) != _learned(message):
                raise DataError(
                    f"{place}: field {field}[{index}] is not to be learned as the text before it is, and they are one turn; "
                    "give both the same loss, or leave it out of both"
                )
            made[-1] = made[-1] | {"tool_calls": [*made[-1].get("tool_calls", ()), call]}
        else:
            made.append(message | {"role": TURNS[role], "content": _as_text(message)} if role in TURNS else message)
            starts.append(index)
        before = role
    return made, starts


def _role(message: object) -> str:
    """Return the role of a message; empty where it has none that is text."""
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else ""


def _learned(message: dict[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in LEARNED if message.get(name) is not None}


def _as_text(message: dict[str, Any]) -> object:
    """Return what a tool gave as text: an object as its JSON."""
    content = message.get("content")
    return json.dumps(content, ensure_ascii=False) if isinstance(content, dict) else content


def _turn_call(place: str, field: str, value: object) -> dict[str, Any]:
    """Read a call that is the content of a message."""
    call = from_json(value)
    if not isinstance(call, dict):
        raise DataError(
            f'{place}: field {field} is {describe(value)}; a tool_call is JSON: {{"name": ..., "arguments": {{...}}}}'
        )
    if "parameters" in call and "arguments" not in call:
        call = {"arguments" if name == "parameters" else name: each for name, each in call.items()}
    return function_call(place, field, call)


def with_json_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Encode the arguments of calls as strings of JSON, for templates that read no object."""
    return [
        message | {"tool_calls": [*map(_with_json_arguments, message["tool_calls"])]} if message.get("tool_calls") else message
        for message in messages
    ]


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    return call | {"function": function | {"arguments": text}}


def _checked(place: str, field: str, call: object) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise DataError(f"{place}: field {field} is {describe(call)}; it must be {_SHAPE}")
    kept = {name: item for name, item in call.items() if item is not None}
    if "function" not in kept and "name" in kept:
        # Name and arguments beside the id, as some data sets have them.
        flat = {name: kept.pop(name) for name in sorted(_FUNCTION) if name in kept}
        kept["function"] = flat
    extra = unread(kept, _CALL)
    if extra:
        raise DataError(
            f"{place}: field {field}.{extra[0]} is {describe(kept[extra[0]])}, which no template reads; take it out"
        )
    if kept.get("type", "function") != "function":
        raise DataError(f"{place}: field {field}.type is {describe(kept['type'])}; only function calls are known")
    read = {name: item for name, item in kept.items() if name in _CALL}
    return read | {"function": _function(place, f"{field}.function", kept.get("function"))}


_SHAPE = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'


def _function(place: str, field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: field {field} is {describe(value)}; a call must be {_SHAPE}")
    extra = sorted(name for name, item in value.items() if item is not None and name not in _FUNCTION)
    if extra:
        raise DataError(
            f"{place}: field {field}.{extra[0]} is {describe(value[extra[0]])}, which no template reads; "
            "a function has a name and arguments"
        )
    name = string(place, f"{field}.name", value.get("name"))
    arguments = value.get("arguments")
    parsed = from_json(arguments)
    return {
        "name": name,
        "arguments": checked_tree(place, f"{field}.arguments", parsed if isinstance(parsed, dict) else arguments),
    }

"""`chosen` and `rejected`, with a prompt of their own or one that both begin with, to two answers to one prompt."""

import os
from collections.abc import Mapping
from typing import Any

from forge_data._chat import chat
from forge_data._completion import answer
from forge_data._describe import describe
from forge_data._errors import DataError
from forge_data._messages import Turns, checked_messages
from forge_data._sample_types import Chat, Message, Preference, Text
from forge_data._text import checked_text

_SIDES = ("chosen", "rejected")


def preference(place: str, fields: Mapping[str, Any]) -> Preference:
    """A row with `chosen` and `rejected`, text or messages.

    Without a `prompt` the prompt is what both begin with: messages as long as they are the same, text to its last character
    that is (a blank before which they differ belongs to the answers, as TRL has it). Some data sets give the prompt as text
    beside whole conversations, which hold it too; there it has to be the last message that both share.

    Raises:
        DataError: sides of two kinds, no shared beginning, or nothing left of a side behind it.
    """
    values = {name: fields[name] for name in _SIDES}
    kinds = {type(value) for value in values.values()}
    if len(kinds) > 1 or not kinds <= {str, list}:
        chosen, rejected = map(describe, values.values())
        raise DataError(f"{place}: chosen is {chosen} and rejected is {rejected}; make both strings, or both lists of messages")
    prompt = fields.get("prompt")
    if prompt is None or (isinstance(prompt, str) and kinds == {list}):
        sides = _conversations(place, fields, values, prompt) if kinds == {list} else _texts(place, values)
        return Preference(place, *sides)
    return Preference(place, *(answer(place, fields, name) for name in _SIDES))


def _texts(place: str, values: Mapping[str, Any]) -> list[Text]:
    chosen, rejected = (checked_text(place, name, values[name]) for name in _SIDES)
    shared = len(os.path.commonprefix([chosen, rejected]))
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    if not shared:
        raise DataError(f"{place}: there is no prompt, and chosen and rejected do not begin alike; give the prompt")
    for name in _SIDES:
        if not values[name][shared:].strip():
            raise DataError(
                f"{place}: there is no prompt, and of {name} nothing is left behind what chosen and rejected share; give the prompt"
            )
    return [Text(place, chosen[:shared], values[name][shared:]) for name in _SIDES]


def _conversations(place: str, fields: Mapping[str, Any], values: Mapping[str, Any], prompt: str | None) -> list[Chat]:
    turns = [checked_messages(place, name, values[name]) for name in _SIDES]
    chosen, rejected = (side.messages for side in turns)
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise DataError(f"{place}: chosen[0] and rejected[0] differ, so there is no prompt that both answer; give it as prompt")
    for name, side in zip(_SIDES, turns, strict=True):
        if len(side.messages) == shared:
            raise DataError(
                f"{place}: nothing is left of {name} behind the {shared} messages that chosen and rejected share; "
                "the two must differ in their last messages"
            )
    if prompt is not None:
        _check_prompt(place, prompt, chosen[:shared])
    return [chat(place, fields, Turns(side.messages, side.trains), shared) for side in turns]


def _check_prompt(place: str, prompt: str, shared: list[Message]) -> None:
    if shared[-1]["content"] != prompt:
        raise DataError(
            f"{place}: prompt is {describe(prompt)}, but the last message that chosen and rejected share is "
            f"{describe(shared[-1]['content'])}; give the prompt as a list of messages, or leave it out"
        )

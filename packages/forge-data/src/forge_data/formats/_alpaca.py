"""Alpaca's `instruction`, `input` and `output` to messages, so that the model's own chat template writes them."""

from collections.abc import Mapping
from typing import Any

from forge_data._errors import DataError
from forge_data._values import describe, from_json, string
from forge_data.formats._chat import chat
from forge_data.formats._messages import Turns
from forge_data.formats._samples import Chat, Message
from forge_data.formats._sharegpt import with_system


def alpaca(place: str, fields: Mapping[str, Any]) -> Chat:
    """A row as a conversation: `system` where there is one, the turns of `history`, the instruction (and, a blank line
    below, the input), the output.

    The output is a completion. With a `history` its answers are learned as well, as LLaMA-Factory learns them, and the row
    is a conversation like any other.

    Raises:
        DataError: a field that is no string, or a history that is no list of pairs.
    """
    instruction, more, output = (string(place, name, fields.get(name, "")) for name in ("instruction", "input", "output"))
    asked = "\n\n".join(part for part in (instruction, more) if part)
    before = _history(place, fields.get("history"))
    messages = [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    turns = with_system(place, fields, Turns(messages, None))
    return chat(place, fields, turns, 0 if before else len(turns.messages) - 1)


def _history(place: str, value: object) -> list[Message]:
    value = from_json(value)
    if not value:
        return []
    if not isinstance(value, list):
        raise DataError(f"{place}: field history is {describe(value)}; it must be a list of [question, answer]")
    messages: list[Message] = []
    for index, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{place}: field history[{index}] is {describe(pair)}; it must be [question, answer]")
        for side, role in enumerate(("user", "assistant")):
            messages.append({"role": role, "content": string(place, f"history[{index}][{side}]", pair[side])})
    return messages

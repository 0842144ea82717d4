"""A message as the template gets it to the field of the row that it came from, so that a finding can be looked up in the file."""

from collections.abc import Mapping
from typing import Any

from forge_data.formats._samples import Chat


def field_of(fields: Mapping[str, Any], chat: Chat, index: int, part: str = "content", answer: str = "completion") -> str:
    """The field of message `index`: `messages[3].content`, `conversations[3].value`, `prompt[0].content`, `output`, ...

    Args:
        fields: the row as it was read.
        chat: what the row became.
        index: which message.
        part: what of the message, such as `content` or `tool_calls[0].function.arguments`; empty for all of it.
        answer: the field of the answer: `completion`, or `chosen` and `rejected` of a preference.
    """
    if "messages" in fields:
        return _join("messages", index, part)
    if "conversations" in fields:
        return _sharegpt(fields, index, part)
    if "instruction" in fields:
        return _alpaca(chat, index)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        first = chat.first_completion
        return _join("prompt", index, part) if index < first else _join(answer, index - first, part)
    return answer if isinstance(fields.get(answer), str) else _join(answer, index, part)


def _join(name: str, index: int, part: str) -> str:
    return f"{name}[{index}].{part}" if part else f"{name}[{index}]"


def _sharegpt(fields: Mapping[str, Any], index: int, part: str) -> str:
    # A `system` field of its own becomes the message before the first.
    index -= bool(fields.get("system"))
    if index < 0:
        return "system"
    turns = fields["conversations"]
    spoken = isinstance(turns, list) and isinstance(turns[index], dict) and "from" in turns[index]
    if spoken and part:
        part = "from" if part == "role" else "value"
    return _join("conversations", index, part)


def _alpaca(chat: Chat, index: int) -> str:
    after = len(chat.messages) - index
    if chat.messages[index]["role"] == "system":
        return "system"
    if after <= 2:
        return "output" if after == 1 else "instruction"
    first = 1 if chat.messages[0]["role"] == "system" else 0
    return f"history[{(index - first) // 2}][{(index - first) % 2}]"

"""`prompt` and `completion`, both text or both messages, to one answer; with a `label`, to one that is wanted or not."""

from collections.abc import Mapping
from typing import Any

from forge_data._accounting import EMPTY_ANSWER
from forge_data._errors import BadPairError, DataError
from forge_data._values import checked_text, describe
from forge_data.formats._chat import TOLD, chat
from forge_data.formats._messages import REASONING, Turns, checked_messages
from forge_data.formats._samples import Chat, Message, Text, Unpaired


def prompt_completion(place: str, fields: Mapping[str, Any]) -> Chat | Text:
    """A row with `prompt` and `completion`.

    Raises:
        DataError: one is text and the other messages, or one of them is neither.
    """
    return answer(place, fields, "completion")


def unpaired(place: str, fields: Mapping[str, Any]) -> Unpaired:
    """A row with `prompt`, `completion` and `label`, true where the completion is wanted.

    Raises:
        BadPairError: the completion is empty.
        DataError: as above, or a label that is neither true nor false.
    """
    label = fields["label"]
    known = {"true": True, "false": False, "1": True, "0": False}
    desirable = known.get(str(label).lower()) if isinstance(label, (bool, int, str)) else None
    if desirable is None:
        raise DataError(
            f"{place}: field label is {describe(label)}; it must be true (wanted) or false (unwanted). "
            'Where it says something else, format="prompt_completion" passes over it'
        )
    given = answer(place, fields, "completion")
    check_says_something(place, "completion", given)
    return Unpaired(place, given, desirable)


def answer(place: str, fields: Mapping[str, Any], field: str) -> Chat | Text:
    """The prompt of a row with what `field` answers to it.

    Raises:
        DataError: one is text and the other messages, or one of them is neither.
    """
    prompt, given = fields["prompt"], fields[field]
    if isinstance(prompt, str) and isinstance(given, str):
        for name in TOLD:
            if fields.get(name):
                raise DataError(
                    f"{place}: field {name} is {describe(fields[name])}, but prompt and {field} are text, which no chat template "
                    "writes; make both lists of messages, or take it out"
                )
        return Text(place, checked_text(place, "prompt", prompt), checked_text(place, field, given))
    if not isinstance(prompt, list) or not isinstance(given, list):
        raise DataError(
            f"{place}: prompt is {describe(prompt)} and {field} is {describe(given)}; make both strings, or both lists of messages"
        )
    before, after = checked_messages(place, "prompt", prompt), checked_messages(place, field, given)
    return chat(place, fields, joined(before, after), len(before.messages))


def check_says_something(place: str, field: str, side: Chat | Text) -> None:
    """Refuse an empty answer, which nobody prefers to anything.

    Raises:
        BadPairError: there is nothing but blanks in it.
    """
    if isinstance(side, Text):
        empty = not side.completion.strip()
    else:
        empty = not any(map(_says_something, side.messages[side.first_completion :]))
    if empty:
        told = "is empty" if isinstance(side, Text) else "has no message of the assistant that says anything"
        raise BadPairError(f"{place}: field {field} {told}; give the answer, or take the row out", reason=EMPTY_ANSWER)


def _says_something(message: Message) -> bool:
    said = (message.get("content"), message.get("tool_calls"), *(message.get(name) for name in REASONING))
    return message["role"] == "assistant" and any(each.strip() if isinstance(each, str) else each for each in said)


def joined(before: Turns, after: Turns) -> Turns:
    """Two runs of messages as one."""
    said = None
    if before.trains is not None or after.trains is not None:
        said = (before.trains or (True,) * len(before.messages)) + (after.trains or (True,) * len(after.messages))
    return Turns(before.messages + after.messages, said)

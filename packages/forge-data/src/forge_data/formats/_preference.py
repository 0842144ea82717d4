"""Row of `chosen` and `rejected` → two answers to one prompt, given or shared by both."""

import os
from collections.abc import Mapping
from typing import Any

from forge_data._accounting import EMPTY_ANSWER, PROMPTS_DIFFER, SAME_ANSWERS
from forge_data._errors import BadPairError, DataError
from forge_data._values import checked_text, counted, describe
from forge_data.formats._chat import MEDIA_FIELDS, TEMPLATE_FIELDS, chat
from forge_data.formats._format import Fields, Format
from forge_data.formats._messages import Turns, checked_messages, text_of
from forge_data.formats._ms_swift import pair_of
from forge_data.formats._prompt_completion import (
    answer,
    answer_field,
    check_not_empty,
    check_unweighted,
    joined,
    of_answer,
    text_with_media,
)
from forge_data.formats._rated import KTO_TAG, rated, rejects
from forge_data.formats._rated_answers import compared
from forge_data.formats._samples import Chat, Message, Preference, Text
from forge_data.formats._tool_calls import with_call_turns
from forge_data.formats._weights import margin_of

_SIDES = ("chosen", "rejected")
_OWN_PROMPTS = (("prompt_chosen", "prompt_rejected"), ("chosen_prompt", "rejected_prompt"))


def preference(place: str, fields: Fields) -> Preference:
    """Read a row with `chosen` and `rejected`, text or messages, and its `margin` if it has one.

    Without a `prompt` (or one for each side, which must be equal) the prompt is what both sides begin with: messages as long as
    they are equal, text up to the last equal character (a space before which they differ belongs to the answers, as in TRL).
    Some data sets give the prompt as text beside whole conversations that contain it; there it must be the last message that
    both share. LLaMA-Factory's give it in `conversations`, `messages` or `instruction`, and one turn or one text for each side;
    ms-swift's have the chosen answer in the conversation, and `rejected_response` or `rejected_messages` beside it.
    Images of the prompt are those of both sides; the row's columns of images fill the places of each.

    Raises:
        BadPairError: equal answers, an empty one, or two prompts; `reason` says which.
        DataError: sides of two kinds, or fields that are not what they should be; messages with weights.
    """
    for name in () if rejects(fields) else _SIDES:
        # Null, an empty list and an empty text are the same mistake.
        given = fields.get(name)
        if given is None or (isinstance(given, (str, list)) and not given):
            what = describe(given) if name in fields else "null or not there"
            raise BadPairError(f"{place}: field {name} is {what}; give the answer, or take the row out", reason=EMPTY_ANSWER)
    if (asked := rated(fields)) is not None and rejects(fields):
        return _rejecting(place, fields)
    if asked is not None:
        before, answers = compared(place, fields, asked)
        chosen, rejected = (
            chat(place, fields, joined(before, side), len(before.messages), media=of_answer(answer_field, name))
            for name, side in zip(_SIDES, answers, strict=True)
        )
        return _pair(place, fields, chosen, rejected, len(before.messages))
    values = {name: fields[name] for name in _SIDES}
    kinds = {type(value) for value in values.values()}
    if len(kinds) > 1 or not kinds <= {str, list}:
        chosen, rejected = map(describe, values.values())
        raise DataError(f"{place}: chosen is {chosen} and rejected is {rejected}; make both strings, or both lists of messages")
    fields = _with_one_prompt(place, fields)
    prompt = fields.get("prompt")
    if prompt is None and kinds == {str}:
        sides = _texts(place, fields, values)
    elif kinds == {list} and (prompt is None or isinstance(prompt, str)):
        sides = _conversations(place, fields, values, prompt)
    else:
        sides = [answer(place, fields, name) for name in _SIDES]
    chosen, rejected = sides
    return _pair(place, fields, chosen, rejected, len(prompt) if isinstance(prompt, list) else 0)


def _rejecting(place: str, fields: Fields) -> Preference:
    """Read a row of ms-swift's: a conversation with the chosen answer, and the rejected one."""
    *rows, before = pair_of(place, fields)
    lists = [with_call_turns(place, "messages", row["messages"])[0] for row in rows]
    turns = [checked_messages(place, "messages", each, media=True) for each in lists]
    if before is None:
        before = _shared_messages(*map(_messages, turns))
    else:
        before = len(with_call_turns(place, "messages", rows[0]["messages"][:before])[0])
    if not before:
        raise BadPairError(
            f"{place}: messages and rejected_messages do not begin alike, so there is no prompt that both answer",
            reason=PROMPTS_DIFFER,
        )
    chosen, rejected = (
        chat(place, row, side, before, media=of_answer(answer_field, name))
        for name, row, side in zip(_SIDES, rows, turns, strict=True)
    )
    return _pair(place, fields, chosen, rejected, before)


def _pair(place: str, fields: Fields, chosen: Chat | Text, rejected: Chat | Text, before: int) -> Preference:
    """Make a preference of two sides; `before` counts the prompt's own messages."""
    check_unweighted(place, chosen, rejected)
    _check_pair(place, chosen, rejected, before)
    return Preference(place, chosen, rejected, margin_of(place, fields.get("margin")))


def _with_one_prompt(place: str, fields: Fields) -> Fields:
    """Replace the prompts of both sides, which must be equal, by one `prompt`."""
    names = [name for pair in _OWN_PROMPTS for name in pair if name in fields]
    if not names:
        return fields
    if len(names) != 2 or tuple(names) not in _OWN_PROMPTS:
        raise DataError(
            f"{place} has the fields {' and '.join(names)}; give one prompt, or one for chosen and one for rejected"
        )
    names = ["prompt", *names] if "prompt" in fields else names
    for name in names[1:]:
        if fields[name] != fields[names[0]]:
            raise BadPairError(
                f"{place}: field {names[0]} is {describe(fields[names[0]])} and field {name} is {describe(fields[name])}, "
                "which are two prompts; give two answers to one, or take the row out",
                reason=PROMPTS_DIFFER,
            )
    return {**fields, "prompt": fields[names[0]]}


def _texts(place: str, fields: Fields, values: Mapping[str, Any]) -> list[Text]:
    chosen, rejected = (checked_text(place, name, values[name]) for name in _SIDES)
    shared = len(os.path.commonprefix([chosen, rejected]))
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    if not shared:
        raise BadPairError(
            f"{place}: there is no prompt, and chosen and rejected do not begin alike; give the prompt", reason=PROMPTS_DIFFER
        )
    for name in _SIDES:
        if not values[name][shared:].strip():
            raise BadPairError(
                f"{place}: there is no prompt, and of {name} nothing is left after what chosen and rejected share; give the "
                "prompt",
                reason=SAME_ANSWERS if chosen == rejected else EMPTY_ANSWER,
            )
    return [text_with_media(place, fields, Text(place, chosen[:shared], values[name][shared:]), name) for name in _SIDES]


def _conversations(place: str, fields: Fields, values: Mapping[str, Any], prompt: str | None) -> list[Chat]:
    turns = [checked_messages(place, name, values[name], media=True) for name in _SIDES]
    chosen, rejected = map(_messages, turns)
    shared = _shared_messages(chosen, rejected)
    if not shared:
        raise BadPairError(
            f"{place}: chosen[0] and rejected[0] differ, so there is no prompt that both answer; give it as prompt",
            reason=PROMPTS_DIFFER,
        )
    for name, side in zip(_SIDES, turns, strict=True):
        if len(side.messages) == shared:
            raise BadPairError(
                f"{place}: nothing is left of {name} after the {counted(shared, 'messages')} that chosen and rejected share; "
                "the two must differ in their last messages",
                reason=SAME_ANSWERS if chosen == rejected else EMPTY_ANSWER,
            )
    if prompt is not None:
        _check_prompt(place, prompt, turns[0].messages[:shared])
    named = zip(_SIDES, turns, strict=True)
    return [chat(place, fields, side, shared, media=of_answer(answer_field, name)) for name, side in named]


_Given = tuple[Message, list[Any]]
"""A message with the paths or bytes of its media."""


def _messages(side: Turns | Chat) -> list[_Given]:
    """Return messages with their media, wherever in the row they were given."""
    media, found = iter(side.media), list[_Given]()
    for message in side.messages:
        parts = message["content"] if isinstance(message.get("content"), list) else ()
        own = [next(media) for part in parts if part["type"] != "text"] if side.media else []
        found.append((message, [(medium.given if medium.is_given else None, medium.fps) for medium in own]))
    return found


def _shared_messages(chosen: list[_Given], rejected: list[_Given]) -> int:
    """Count the messages that both begin with."""
    pairs = zip(chosen, rejected, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))


def _check_prompt(place: str, prompt: str, shared: list[Message]) -> None:
    if text_of(shared[-1]) != prompt:
        raise BadPairError(
            f"{place}: prompt is {describe(prompt)}, but the last message that chosen and rejected share is "
            f"{describe(text_of(shared[-1]))}; give the prompt as a list of messages, or leave it out",
            reason=PROMPTS_DIFFER,
        )


def _check_pair(place: str, chosen: Chat | Text, rejected: Chat | Text, before: int) -> None:
    """Check for two different, non-empty answers; `before` counts the prompt's own messages."""
    one, other = (_messages(side) if isinstance(side, Chat) else side for side in (chosen, rejected))
    if one == other:
        raise BadPairError(f"{place}: field rejected is the same as chosen; take the row out, or mend it", reason=SAME_ANSWERS)
    for name, side in zip(_SIDES, (chosen, rejected), strict=True):
        check_not_empty(place, name, side)
    if isinstance(chosen, Text) or isinstance(rejected, Text):
        return
    shared = _shared_messages(_messages(chosen), _messages(rejected))
    if shared < before:
        raise BadPairError(
            f"{place}: chosen and rejected have the row's media in other places of the prompt, so they answer two prompts; "
            "give them as parts of its messages",
            reason=PROMPTS_DIFFER,
        )
    for name, side in zip(_SIDES, (chosen, rejected), strict=True):
        own = side.messages[shared:]
        if own and own[0]["role"] != "assistant":
            raise BadPairError(
                f"{place}: field {name}[{shared - before}] is of the role {own[0]['role']!r}, and there chosen and rejected "
                "begin to differ, so they answer two prompts; let them differ in what the assistant says, or take the row out",
                reason=PROMPTS_DIFFER,
            )


PREFERENCE = Format(
    needs="chosen, rejected",
    matches=lambda row: ("chosen" in row and "rejected" in row) or (KTO_TAG not in row and rated(row) is not None),
    convert=preference,
    field_of=answer_field,
    reads=(*TEMPLATE_FIELDS, *MEDIA_FIELDS, "margin"),
    # The other side is null: the row is refused for that, and not as one of no known format.
    accepts=lambda row: "chosen" in row or "rejected" in row,
)
"""Two answers to one prompt."""

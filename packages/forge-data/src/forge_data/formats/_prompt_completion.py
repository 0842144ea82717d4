"""Row of `prompt` and `completion` (text or messages) → answer, with `label` wanted or not."""

import re

import attrs

from forge_data._accounting import EMPTY_ANSWER
from forge_data._errors import BadPairError, DataError
from forge_data._media import MANY, MARKS, Kind, Media
from forge_data._values import checked_text, counted, describe
from forge_data.formats import _ms_swift
from forge_data.formats._chat import MEDIA_FIELDS, TEMPLATE_FIELDS, chat, given_media
from forge_data.formats._format import FieldOf, Fields, Format, message_field
from forge_data.formats._messages import REASONING, Turns, checked_messages
from forge_data.formats._rated import KTO_TAG, rated, rejects
from forge_data.formats._rated_answers import field_of, rated_answer
from forge_data.formats._samples import Chat, Message, Text, Unpaired
from forge_data.formats._unread import is_empty

_IGNORING = {
    None: "prompt_completion",
    "conversations": "sharegpt",
    "messages": "messages",
    "instruction": "alpaca",
    "query": "ms_swift",
}
"""Field in which a row asks → the format that reads it without its label."""


def prompt_completion(place: str, fields: Fields) -> Chat | Text:
    """Read a row with `prompt` and `completion`.

    Raises:
        DataError: one is text and the other messages, or one of them is neither.
    """
    return answer(place, fields, "completion")


def unpaired(place: str, fields: Fields) -> Unpaired:
    """Read a row with `prompt`, `completion` and `label`, true where the completion is wanted.

    LLaMA-Factory calls the label `kto_tag`, and has prompt and completion in one conversation, or in Alpaca's fields.

    Raises:
        BadPairError: the completion is empty.
        DataError: as `prompt_completion`, or a label that is neither true nor false.
    """
    name, other = (KTO_TAG, "label") if KTO_TAG in fields else ("label", KTO_TAG)
    label = fields[name]
    asked = rated(fields)
    if asked is None and fields.get(other, label) != label:
        raise DataError(
            f"{place}: field label is {describe(fields['label'])} and {KTO_TAG} {describe(label)}; keep one of them"
        )
    values = {"true": True, "false": False, "1": True, "0": False}
    desirable = values.get(str(label).lower()) if isinstance(label, (bool, int, str)) else None
    if desirable is None:
        raise DataError(
            f"{place}: field {name} is {describe(label)}; it must be true (wanted) or false (unwanted). "
            f"Where it means something else, choose {_IGNORING[asked]} as `format`, which ignores it"
        )
    if asked is None:
        field, completion = "completion", answer(place, fields, "completion")
    else:
        completion = rated_answer(place, fields, asked)
        field = field_of(fields, asked, len(completion.messages) - 1, "")
    check_unweighted(place, completion)
    check_not_empty(place, field, completion)
    return Unpaired(place, completion, desirable)


def answer(place: str, fields: Fields, field: str) -> Chat | Text:
    """Read the prompt of a row, which may have images, and its answer in `field`.

    Raises:
        DataError: one is text and the other messages, or one of them is neither.
    """
    prompt, given = fields["prompt"], fields[field]
    if isinstance(prompt, str) and isinstance(given, str):
        for name in TEMPLATE_FIELDS:
            if not is_empty(fields.get(name)) and fields[name] is not False:
                raise DataError(
                    f"{place}: field {name} is {describe(fields[name])}, but prompt and {field} are text, which no chat "
                    "template writes; make both lists of messages, or take it out"
                )
        text = Text(place, checked_text(place, "prompt", prompt), checked_text(place, field, given))
        return text_with_media(place, fields, text, field)
    if not isinstance(prompt, list) or not isinstance(given, list):
        raise DataError(
            f"{place}: prompt is {describe(prompt)} and {field} is {describe(given)}; make both strings, or both lists of "
            "messages"
        )
    before, after = (checked_messages(place, *each, media=True) for each in (("prompt", prompt), (field, given)))
    return chat(place, fields, joined(before, after), len(before.messages), media=of_answer(answer_field, field))


def text_with_media(place: str, fields: Fields, text: Text, field: str = "completion") -> Text:
    """Return a text with the media of its row's columns.

    Each stands where its mark (`<image>`, `<video>`, `<audio>`) does in the prompt; without a mark of their kind all stand
    before the prompt. `field` has the completion.

    Raises:
        DataError: another number of marks than of media, or one in the completion.
    """
    given = {kind: media for kind in MARKS if (media := given_media(place, fields, kind))}
    for kind, media in given.items():
        column = media[0].field.partition("[")[0]
        if MARKS[kind] in text.completion:
            raise DataError(
                f"{place}: field {field} holds {MARKS[kind]}, and the row has {MANY[kind]}; what a model writes is text: "
                "put it into the prompt"
            )
        if (marks := text.prompt.count(MARKS[kind])) not in (0, len(media)):
            raise DataError(
                f"{place}: field {column} holds {counted(len(media), MANY[kind])}, and {MARKS[kind]} stands in the prompt "
                f"{counted(marks, 'times')}; give each {kind} its place"
            )
    if not given:
        return text
    pattern = "|".join(re.escape(MARKS[kind]) for kind in given)
    kinds: dict[str, Kind] = {MARKS[kind]: kind for kind in given}
    found = [kinds[mark] for mark in re.findall(pattern, text.prompt)]
    before: list[Media] = [medium for kind, media in given.items() if kind not in found for medium in media]
    following = {kind: iter(media) for kind, media in given.items()}
    places, prompt = [0] * len(before), ""
    for at, part in enumerate(re.split(pattern, text.prompt)):
        places += [len(prompt)] if at else []
        prompt += part
    return attrs.evolve(text, prompt=prompt, media=(*before, *(next(following[kind]) for kind in found)), places=tuple(places))


def of_answer(field_of: FieldOf, answer: str) -> FieldOf:
    """Return what names fields of one side of a row, such as `chosen`."""
    return lambda fields, index, part, _answer: field_of(fields, index, part, answer)


def check_unweighted(place: str, *answers: Chat | Text) -> None:
    """Refuse weights of messages in answers that are compared.

    Raises:
        DataError: a weight that is neither 0 nor 1.
    """
    for weights in (side.weights for side in answers if isinstance(side, Chat)):
        if weights is not None:
            odd = next(weight for weight in weights if weight not in (0, 1))
            raise DataError(
                f"{place}: a message has the weight {odd:g}, and preferences have no weights but 0 and 1; take it out"
            )


def check_not_empty(place: str, field: str, side: Chat | Text) -> None:
    """Refuse an answer of white space only, which nobody prefers to anything.

    Raises:
        BadPairError: it is empty.
    """
    if isinstance(side, Text):
        empty = not side.completion.strip()
    else:
        empty = not any(map(_has_content, side.messages[side.first_completion :]))
    if empty:
        what = "is empty" if isinstance(side, Text) else "has no message of the assistant that says anything"
        raise BadPairError(f"{place}: field {field} {what}; give the answer, or take the row out", reason=EMPTY_ANSWER)


def _has_content(message: Message) -> bool:
    values = (message.get("content"), message.get("tool_calls"), *(message.get(name) for name in REASONING))
    return message["role"] == "assistant" and any(each.strip() if isinstance(each, str) else each for each in values)


def joined(before: Turns, after: Turns) -> Turns:
    """Join two lists of messages."""
    parts = (before, after)
    trains = weights = None
    if any(part.trains is not None for part in parts):
        trains = tuple(each for part in parts for each in part.trains or (True,) * len(part.messages))
    if any(part.weights is not None for part in parts):
        # A side without weights of its own may have 0 and 1, which its `trains` say.
        weights = tuple(
            each for part in parts for each in part.weights or map(float, part.trains or (True,) * len(part.messages))
        )
    asks = {**before.asks, **{index + len(before.messages): ranges for index, ranges in after.asks.items()}}
    return Turns(before.messages + after.messages, trains, weights, before.media + after.media, asks)


def answer_field(fields: Fields, index: int, part: str, answer: str) -> str:
    """Name the field of a part of a prompt or of an answer, both text or both messages."""
    if (asked := rated(fields)) is not None:
        if rejects(fields):
            return _ms_swift.field_of(fields, index, part, answer)
        return field_of(fields, asked, index, part, answer)
    prompt = next((name for name in ("prompt", f"prompt_{answer}", f"{answer}_prompt") if name in fields), None)
    if isinstance(fields.get(answer), str):
        return prompt if index == 0 and prompt is not None else answer
    before = fields[prompt] if prompt is not None else None
    if prompt is None or not isinstance(before, list):
        return message_field(answer, index, part)
    return message_field(prompt, index, part) if index < len(before) else message_field(answer, index - len(before), part)


def _has_both(row: Fields) -> bool:
    return "prompt" in row and "completion" in row


def _has_label(row: Fields) -> bool:
    return "label" in row or KTO_TAG in row


PROMPT_COMPLETION = Format(
    needs="prompt, completion",
    matches=lambda row: _has_both(row) and not _has_label(row),
    convert=prompt_completion,
    field_of=answer_field,
    reads=(*TEMPLATE_FIELDS, *MEDIA_FIELDS),
    # Chosen by name, it ignores a label that means something else.
    accepts=_has_both,
)
"""Prompt and completion."""

UNPAIRED_PREFERENCE = Format(
    needs="prompt, completion, label",
    matches=lambda row: (_has_both(row) and _has_label(row)) or (KTO_TAG in row and rated(row) is not None),
    convert=unpaired,
    field_of=answer_field,
    reads=(*TEMPLATE_FIELDS, *MEDIA_FIELDS),
)
"""Prompt and completion, and whether the completion is wanted."""

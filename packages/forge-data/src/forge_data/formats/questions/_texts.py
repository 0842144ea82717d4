"""Row of a whole text (or messages) and its label or labels → `Question`, for classifiers."""

from collections.abc import Mapping
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._media_values import placed
from forge_data._values import checked_text, describe, from_json, string
from forge_data.formats._chat import MEDIA_FIELDS, chat
from forge_data.formats._format import message_field
from forge_data.formats._messages import checked_messages
from forge_data.formats._samples import Chat
from forge_data.formats._system_prompt import with_system_prompt
from forge_data.formats._unread import is_empty
from forge_data.formats.questions._prompts import Question, asked_messages, record_of, refuse_media, refuse_template_fields


def labelled(
    place: str,
    fields: Mapping[str, Any],
    *,
    media: bool = False,
    directory: str | None = None,
    as_messages: bool = False,
    system_prompt: str | None = None,
) -> Question:
    """Read a row with `text` or `messages`, and `label` (one) or `labels` (any number of them).

    Args:
        place: place of the row.
        fields: its fields.
        media: whether it may have images, in messages or columns. A text beside a column of images is the user's message, and
            a row with such a column needs none.
        directory: where relative paths of images begin; None where the rows lie in no directory of this machine.
        as_messages: whether every text is the user's message.
        system_prompt: first message of messages that have no system message.

    Raises:
        DataError: neither or both of two fields, or a label that is neither text nor a whole number.
    """
    if not media:
        refuse_media(place, fields)
    label, labels = fields.get("label"), from_json(fields.get("labels"))
    if label is not None and labels is not None:
        raise DataError(
            f"{place} has label beside labels; keep label where a row is one of several, labels where it may be more"
        )
    if label is None and labels is None:
        has = ", ".join(map(repr, fields)) or "(none)"
        raise DataError(
            f"{place} has the fields {has}, and no label; give label (one of several) or labels (a list, of any number); a "
            "column of another name is read with `rename_columns`, such as category=label"
        )
    if label is not None:
        columns: dict[str, Any] = {"label": _checked(place, "label", label)}
    elif not isinstance(labels, list):
        raise DataError(f"{place}: field labels is {describe(labels)}; it must be a list of labels (label holds a single one)")
    else:
        columns = {"labels": [_checked(place, f"labels[{at}]", each) for at, each in enumerate(labels)]}
        if twice := next((each for at, each in enumerate(columns["labels"]) if each in columns["labels"][:at]), None):
            raise DataError(f"{place}: field labels has {describe(twice)} twice; name each label once")
    found = _read(place, fields, media=media, directory=directory, as_messages=as_messages)
    if isinstance(found, str):
        return Question(found, record_of(place, found, columns))
    found = with_system_prompt(found, system_prompt)
    return Question(found, record_of(place, found.messages, columns))


def _read(place: str, fields: Mapping[str, Any], *, media: bool, directory: str | None, as_messages: bool) -> str | Chat:
    """Read the text or the messages of a row."""
    names = [name for name in ("text", "messages") if fields.get(name) is not None]
    pictured = media and any(not is_empty(fields.get(name)) for name in MEDIA_FIELDS)
    if len(names) != 1 and not (pictured and not names):
        has = ", ".join(map(repr, fields)) or "(none)"
        what = "which are two; keep one of them" if names else "and none of them is a text; give text, or messages"
        raise DataError(
            f"{place} has the fields {has}, {what}; a column of another name is read with `rename_columns`, such as "
            "sentence=text"
        )
    if names != ["messages"]:
        text = string(place, "text", fields["text"]) if names else ""
        refuse_template_fields(place, fields)
        if not pictured and (not as_messages or not text.strip()):
            return text
        turns = checked_messages(place, "messages", [{"role": "user", "content": text}])
    else:
        turns = asked_messages(place, "messages", from_json(fields["messages"]), media=media)
    made = chat(place, fields, turns, media=_field_of if media else None)
    return attrs.evolve(made, media=tuple(placed(place, medium, directory) for medium in made.media))


def _field_of(fields: Mapping[str, Any], index: int, part: str, _answer: str) -> str:
    return message_field("messages", index, part) if fields.get("messages") is not None else "text"


def _checked(place: str, field: str, label: object) -> str | int:
    """Return a label as it is: a text, or a whole number."""
    if isinstance(label, bool) or not isinstance(label, (int, str)):
        remedy = "write it as a text" if isinstance(label, (bool, float)) else "it must be a text or a whole number"
        if isinstance(label, (list, tuple)) and field == "label":
            remedy = "the labels of a text that has several are the field labels"
        raise DataError(f"{place}: field {field} is {describe(label)}, which is no label: {remedy}")
    if isinstance(label, int):
        return label
    if not label.strip():
        raise DataError(f"{place}: field {field} is an empty text; name the label, or take the row out")
    return checked_text(place, field, label)

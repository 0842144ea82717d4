"""Row of a query and its document, with any hard negatives → `Question` of several texts.

A text is a string, or messages that may have images or audio: what an embedding is made of, by itself.
"""

import re
from collections.abc import Mapping
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._media import MARKS
from forge_data._media_values import is_pil_image, placed
from forge_data._values import describe, from_json, string
from forge_data.formats._chat import MEDIA_FIELDS, chat
from forge_data.formats._messages import Turns
from forge_data.formats._samples import Chat
from forge_data.formats._unread import is_empty, unread
from forge_data.formats.questions._prompts import Question, asked_messages, record_of, refuse_media

QUERIES = ("query", "anchor", "question")
"""Fields that a query may be called."""
POSITIVES = ("positive", "document", "answer")
"""Fields that the document which answers it may be called."""
_NUMBERED = re.compile(r"negative_(\d+)")
"""Hard negatives in a column each, as sentence-transformers numbers them."""
_STRUCT = {"bytes", "path"}
"""Fields of an image of `datasets`."""


@attrs.frozen
class _Reader:
    """How the texts of one row are read."""

    place: str
    media: bool
    directory: str | None
    as_messages: bool

    def __call__(self, field: str, value: Any, prefix: str) -> str | Chat:
        """Read one text, with what stands before it.

        Raises:
            DataError: it is empty, or neither text nor, where media may be, messages.
        """
        if not self.media or not (isinstance(value, (dict, list, bytes)) or is_pil_image(value)):
            text = string(self.place, field, value)
            if not text.strip():
                raise DataError(
                    f"{self.place}: field {field} is an empty text, which means nothing; give one, or take the row out"
                )
            if not self.as_messages:
                return prefix + text
            value = [{"role": "user", "content": text}]
        turns = asked_messages(self.place, field, self._messages(field, value), media=self.media)
        if prefix:
            # As sentence-transformers puts a prompt before messages.
            turns = Turns([{"role": "system", "content": prefix}, *turns.messages], None, media=turns.media)
        made = chat(self.place, {}, turns, media=lambda _fields, _index, _part, _answer: field)
        if not any(message.get("content") for message in made.messages[bool(prefix) :]):
            raise self._nothing(field)
        if not made.media and not self.as_messages:
            raise DataError(
                f"{self.place}: field {field} is {describe(value)} without media, and a text of this model is a string, as "
                "whoever uses it will give it; make it one"
            )
        return attrs.evolve(made, media=tuple(placed(self.place, medium, self.directory) for medium in made.media))

    def _nothing(self, field: str) -> DataError:
        return DataError(f"{self.place}: field {field} holds neither text nor media, which means nothing; take the row out")

    def _messages(self, field: str, value: object) -> list[Any]:
        """Return the messages of a text that is no string."""
        if is_pil_image(value) or isinstance(value, bytes) or (isinstance(value, dict) and value.keys() <= _STRUCT):
            value = {"image": value}
        if isinstance(value, dict):
            if not value or (extra := unread(value, ("text", *MARKS))):
                has = f"an object with {extra[0]!r}" if value else describe(value)
                raise DataError(
                    f"{self.place}: field {field} is {has}; a text that is an object has {', '.join(('text', *MARKS))}, "
                    "or give a list of messages"
                )
            value = [part for name, given in value.items() if not is_empty(given) for part in _parts(name, given)]
        assert isinstance(value, list)
        if not value:
            raise self._nothing(field)
        of_one = all(isinstance(part, dict) and "role" not in part for part in value)
        return [{"role": "user", "content": value}] if of_one else value


def _parts(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the parts of a content that a field of an object stands for."""
    several = value if isinstance(value, list) and name != "text" else [value]
    return [{"type": name, name: each} for each in several]


def text_pair(
    place: str,
    fields: Mapping[str, Any],
    *,
    query_prefix: str = "",
    document_prefix: str = "",
    media: bool = False,
    directory: str | None = None,
    as_messages: bool = False,
) -> Question:
    """Read a row with a query and its positive, and any hard negatives.

    A prefix is put before each text of its kind, before messages as a system message; further fields are not kept.

    Args:
        place: place of the row.
        fields: its fields.
        query_prefix: before its query.
        document_prefix: before its other texts.
        media: whether a text may be messages, which may have images.
        directory: where relative paths of images begin; None where the rows lie in no directory of this machine.
        as_messages: whether every text is the user's message.

    Raises:
        DataError: a text is missing, given by two names, empty or no text.
    """
    if not media:
        refuse_media(place, fields)
    elif column := next((name for name in MEDIA_FIELDS if not is_empty(fields.get(name))), None):
        raise DataError(
            f"{place}: field {column} is {describe(fields[column])}, of no text of the row; give it in query or positive "
            f"(rename_columns: {column}=positive makes it the document)"
        )
    read = _Reader(place, media, directory, as_messages)
    texts = (
        read(*_one(place, fields, QUERIES, "query"), query_prefix),
        read(*_one(place, fields, POSITIVES, "document"), document_prefix),
        *(read(name, value, document_prefix) for name, value in _negatives(place, fields)),
    )
    query, positive, *negatives = [text.messages if isinstance(text, Chat) else text for text in texts]
    return Question(texts, record_of(place, query, {"positive": positive, "negatives": negatives}))


def _one(place: str, fields: Mapping[str, Any], names: tuple[str, ...], what: str) -> tuple[str, Any]:
    """Return the field that holds a text, and its value."""
    given = [name for name in names if fields.get(name) is not None]
    if len(given) == 1:
        return given[0], fields[given[0]]
    has = ", ".join(map(repr, fields)) or "(none)"
    if given:
        raise DataError(f"{place} has the fields {has}: {' and '.join(given)} both name its {what}; keep one of them")
    labelled = fields.get("text") is not None and fields.get("label") is not None
    remedy = (
        "a text with a label is for loss=batch_all_triplet" if labelled else "a column of another name is read with "
        "`rename_columns`, such as sentence1=anchor sentence2=positive"
    )  # fmt: skip
    raise DataError(f"{place} has the fields {has}, and no {what} ({', '.join(names)}); {remedy}")


def _negatives(place: str, fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the field of each hard negative, and its value."""
    numbered = sorted((int(found[1]), name) for name in fields if (found := _NUMBERED.fullmatch(name)))
    given = [name for name in ("negative", "negatives") if fields.get(name) is not None]
    given += [name for _, name in numbered if fields.get(name) is not None]
    if len(given) > 1 and not all(map(_NUMBERED.fullmatch, given)):
        raise DataError(
            f"{place} has {' and '.join(given)}; give negative (a text), negatives (a list of texts), or negative_1 and so on"
        )
    found: list[tuple[str, Any]] = []
    for name in given:
        value = from_json(fields[name]) if name == "negatives" else fields[name]
        if name != "negatives":
            found.append((name, value))
        elif isinstance(value, list):
            found += [(f"negatives[{at}]", each) for at, each in enumerate(value)]
        else:
            raise DataError(
                f"{place}: field negatives is {describe(value)}; it must be a list of texts (negative holds a single one)"
            )
    return found

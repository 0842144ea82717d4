"""Pretraining row → document: text or token ids, every token learned, one EOS at its end."""

import attrs
import numpy as np

from forge_data._errors import DataError
from forge_data._values import from_json, string
from forge_data.formats._format import Fields, Format
from forge_data.formats._samples import Document, Sample, Tokens
from forge_data.formats._tokenised import checked_tokens

_FIELDS = ("text", "document", "input_ids")
_MESSAGES = "messages"


def text_document(place: str, fields: Fields) -> Document:
    """Read a row with `text` or `document`.

    Raises:
        DataError: it has both, or the value is not a string.
    """
    if "text" in fields and "document" in fields:
        raise DataError(f"{place} has both text and document; keep the one that is to be learned")
    field = "text" if "text" in fields else "document"
    return Document(place, string(place, field, fields[field]))


def document(place: str, fields: Fields) -> Document | Tokens:
    """Read a row with `text`, `document` or `input_ids`, or one message of the assistant.

    ms-swift keeps a document as `messages` of one. Token ids need no labels: every token of a document is learned.

    Raises:
        DataError: it has text and token ids, or ids that are not token ids.
    """
    if "input_ids" not in fields:
        if _MESSAGES in fields and not any(name in fields for name in _FIELDS):
            return _said(place, from_json(fields[_MESSAGES]))
        return text_document(place, fields)
    other = next((name for name in _FIELDS if name != "input_ids" and name in fields), None)
    if other is not None:
        raise DataError(f"{place} has both {other} and input_ids; keep the one that is to be learned")
    given = fields if "labels" in fields else {**fields, "labels": fields["input_ids"]}
    return attrs.evolve(checked_tokens(place, given), document=True)


def _said(place: str, value: object) -> Document:
    """Read a document that is the assistant's one message."""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict) or value[0].get("role") != "assistant":
        raise DataError(
            f"{place}: field messages is no document, which is one message of the assistant; a conversation is trained by "
            "forge sft, with train_on=all every token of it"
        )
    return Document(place, string(place, "messages[0].content", value[0].get("content")))


def ended(tokens: Tokens, eos: int, bos: int | None) -> Tokens:
    """End a document of token ids with one EOS, which is learned.

    Raises:
        DataError: it ends with several, as padding leaves them, or begins with one that is not the BOS.
    """
    ids = tokens.input_ids
    ends = int(np.argmax(ids[::-1] != eos)) if np.any(ids != eos) else len(ids)
    if ends > 1:
        raise DataError(
            f"{tokens.place}: field input_ids ends with the EOS token {eos} {ends} times, and one ends a document; take the "
            "others out (if they are padding, the row is to end before them)"
        )
    if len(ids) > 1 and ids[0] == eos != bos:
        raise DataError(
            f"{tokens.place}: field input_ids begins with the EOS token {eos}, and one ends every document already; take it out"
        )
    if ends:
        return tokens
    weights = None if tokens.weights is None else np.append(tokens.weights, np.float32(1))
    return attrs.evolve(
        tokens, input_ids=np.append(ids, np.int32(eos)), trained=np.append(tokens.trained, np.True_), weights=weights
    )


def is_empty(sample: Sample) -> bool:
    """Tell whether a sample is a document without content: only white space, or no token."""
    match sample:
        case Document(text=text):
            return not text or text.isspace()
        case Tokens(document=True):
            return not len(sample.input_ids)
        case _:
            return False


def _field_of(fields: Fields, _index: int, _part: str, _answer: str) -> str:
    return next((name for name in (*_FIELDS, _MESSAGES) if name in fields), _FIELDS[0])


TEXT = Format(
    needs="text or document",
    matches=lambda row: "text" in row or "document" in row,
    convert=text_document,
    field_of=_field_of,
)
"""A document as text."""

DOCUMENT = Format(
    needs="text, document or input_ids",
    matches=lambda row: any(name in row for name in (*_FIELDS, _MESSAGES)),
    convert=document,
    field_of=_field_of,
    # The same fields are those of `text` and `tokenised`.
    detected=False,
)
"""A document of pretraining, as text or as token ids without labels."""

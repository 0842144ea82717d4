"""Rows of pretraining to documents: text, or tokens, all of it learned, with one EOS at the end of each."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from forge_data._errors import DataError
from forge_data._values import string
from forge_data.formats._samples import Document, Sample, Tokens
from forge_data.formats._tokenised import checked_tokens

_FIELDS = ("text", "document", "input_ids")


def text_document(place: str, fields: Mapping[str, Any], _: int | None = None) -> Document:
    """A row with `text` or `document`.

    Raises:
        DataError: both of them, or no string.
    """
    if "text" in fields and "document" in fields:
        raise DataError(f"{place} has both text and document; keep the one that is to be learned")
    field = "text" if "text" in fields else "document"
    return Document(place, string(place, field, fields[field]))


def document(place: str, fields: Mapping[str, Any], vocabulary: int | None) -> Document | Tokens:
    """The same, or a row with `input_ids`, which need no labels: every token of a document is learned.

    Raises:
        DataError: text and tokens, or tokens that are none.
    """
    if "input_ids" not in fields:
        return text_document(place, fields)
    other = next((name for name in _FIELDS if name != "input_ids" and name in fields), None)
    if other is not None:
        raise DataError(f"{place} has both {other} and input_ids; keep the one that is to be learned")
    given = fields if "labels" in fields else {**fields, "labels": fields["input_ids"]}
    return attrs.evolve(checked_tokens(place, given, vocabulary), document=True)


def ended(tokens: Tokens, eos: int, bos: int | None) -> Tokens:
    """A document of tokens with one EOS at its end, which is learned; the next document begins with none.

    Raises:
        DataError: several of them, as padding leaves them, or one at the beginning that is no BOS.
    """
    ids = tokens.input_ids
    ends = int(np.argmax(ids[::-1] != eos)) if np.any(ids != eos) else len(ids)
    if ends > 1:
        raise DataError(
            f"{tokens.place}: field input_ids ends with the EOS token {eos} {ends} times, and one ends a document; take the others "
            "out (if they are padding, the row is to end before them)"
        )
    if len(ids) > 1 and ids[0] == eos != bos:
        raise DataError(
            f"{tokens.place}: field input_ids begins with the EOS token {eos}, and one stands at the end of every document already; "
            "take it out"
        )
    if ends:
        return tokens
    return attrs.evolve(tokens, input_ids=np.append(ids, np.int32(eos)), trained=np.append(tokens.trained, np.True_))


def is_empty(sample: Sample) -> bool:
    """Whether a sample is a document that says nothing: no character but blanks, or no token."""
    match sample:
        case Document(text=text):
            return not text or text.isspace()
        case Tokens(document=True):
            return not len(sample.input_ids)
        case _:
            return False

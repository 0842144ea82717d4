"""Row of a query and its document, with any hard negatives → `Question` of several texts."""

import re
from collections.abc import Mapping
from typing import Any

from forge_data._errors import DataError
from forge_data._values import describe, from_json, string
from forge_data.formats._prompts import Question, record_of, refuse_media

QUERIES = ("query", "anchor", "question")
"""Fields that a query may be called."""
POSITIVES = ("positive", "document", "answer")
"""Fields that the document which answers it may be called."""
_NUMBERED = re.compile(r"negative_(\d+)")
"""Hard negatives in a column each, as sentence-transformers numbers them."""


def text_pair(place: str, fields: Mapping[str, Any], *, query_prefix: str = "", document_prefix: str = "") -> Question:
    """Read a row with a query and its positive, and any hard negatives.

    A prefix is put before each text of its kind; further fields are not kept.

    Raises:
        DataError: a text is missing, given by two names, empty or no text.
    """
    refuse_media(place, fields)
    query, positive = _one(place, fields, QUERIES, "query"), _one(place, fields, POSITIVES, "document")
    negatives = [document_prefix + text for text in _negatives(place, fields)]
    texts = (query_prefix + query, document_prefix + positive, *negatives)
    record = record_of(place, texts[0], {"positive": texts[1], "negatives": negatives})
    return Question(texts, record)


def _one(place: str, fields: Mapping[str, Any], names: tuple[str, ...], what: str) -> str:
    given = [name for name in names if fields.get(name) is not None]
    if len(given) == 1:
        return _text(place, given[0], fields[given[0]])
    has = ", ".join(map(repr, fields)) or "(none)"
    if given:
        raise DataError(f"{place} has the fields {has}: {' and '.join(given)} both name its {what}; keep one of them")
    labelled = fields.get("text") is not None and fields.get("label") is not None
    remedy = (
        "a text with a label is for loss=batch_all_triplet" if labelled else "a column of another name is read with "
        "`rename_columns`, such as sentence1=anchor sentence2=positive"
    )  # fmt: skip
    raise DataError(f"{place} has the fields {has}, and no {what} ({', '.join(names)}); {remedy}")


def _negatives(place: str, fields: Mapping[str, Any]) -> list[str]:
    numbered = sorted((int(found[1]), name) for name in fields if (found := _NUMBERED.fullmatch(name)))
    given = [name for name in ("negative", "negatives") if fields.get(name) is not None]
    given += [name for _, name in numbered if fields.get(name) is not None]
    if len(given) > 1 and not all(map(_NUMBERED.fullmatch, given)):
        raise DataError(
            f"{place} has {' and '.join(given)}; give negative (a text), negatives (a list of texts), or negative_1 and so on"
        )
    found: list[str] = []
    for name in given:
        value = from_json(fields[name]) if name == "negatives" else fields[name]
        if name != "negatives":
            found.append(_text(place, name, value))
        elif isinstance(value, list):
            found += [_text(place, f"negatives[{at}]", each) for at, each in enumerate(value)]
        else:
            raise DataError(
                f"{place}: field negatives is {describe(value)}; it must be a list of texts (negative holds a single one)"
            )
    return found


def _text(place: str, field: str, value: object) -> str:
    text = string(place, field, value)
    if not text.strip():
        raise DataError(f"{place}: field {field} is an empty text, which means nothing; give one, or take the row out")
    return text

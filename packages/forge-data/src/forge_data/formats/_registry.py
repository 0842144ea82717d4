"""The formats that rows come in, in one table: which one a row has, and the row as a sample."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from forge_data._errors import DataError
from forge_data._values import describe, from_json
from forge_data.formats._alpaca import alpaca
from forge_data.formats._chat import TOLD, chat
from forge_data.formats._documents import document, text_document
from forge_data.formats._messages import checked_messages
from forge_data.formats._preference import preference
from forge_data.formats._prompt_completion import prompt_completion, unpaired
from forge_data.formats._samples import Sample
from forge_data.formats._sharegpt import sharegpt
from forge_data.formats._tokenised import checked_tokens

_Fields = Mapping[str, Any]


class Format(NamedTuple):
    """One way to write rows."""

    needs: str
    """Its fields, for messages."""
    fits: Callable[[_Fields], bool]
    convert: Callable[[str, _Fields, int | None], Sample]
    takes: tuple[str, ...] = ()
    """Those of the fields that change what is learned which it honours."""
    asked: bool = False
    """Whether rows have it only where somebody says so: they might as well be of another."""


def _messages(place: str, fields: _Fields, _: int | None) -> Sample:
    return chat(place, fields, checked_messages(place, "messages", from_json(fields["messages"])))


FORMATS: dict[str, Format] = {
    "messages": Format("messages", lambda row: "messages" in row, _messages, TOLD),
    "sharegpt": Format("conversations", lambda row: "conversations" in row, lambda p, f, _: sharegpt(p, f), TOLD),
    "alpaca": Format(
        "instruction, output", lambda row: "instruction" in row and "output" in row, lambda p, f, _: alpaca(p, f), TOLD
    ),
    "prompt_completion": Format(
        "prompt, completion",
        lambda row: "prompt" in row and "completion" in row and "label" not in row,
        lambda p, f, _: prompt_completion(p, f),
        TOLD,
    ),
    "text": Format("text or document", lambda row: "text" in row or "document" in row, text_document),
    "preference": Format(
        "chosen, rejected",
        lambda row: "chosen" in row and "rejected" in row,
        lambda p, f, _: preference(p, f),
        (*TOLD, "margin"),
    ),
    "unpaired_preference": Format(
        "prompt, completion, label",
        lambda row: "label" in row and "prompt" in row and "completion" in row,
        lambda p, f, _: unpaired(p, f),
        TOLD,
    ),
    "tokenised": Format("input_ids, labels", lambda row: "input_ids" in row and "labels" in row, checked_tokens),
    "document": Format(
        "text, document or input_ids",
        lambda row: "text" in row or "document" in row or "input_ids" in row,
        document,
        asked=True,
    ),
}

_MASKS = "masks are not read: give input_ids and labels, and write the mask into labels as -100"
# Fields that change what a row means. To pass over them would train something else than was asked.
_MEANINGFUL = {
    "tools": "tool definitions are for chat templates, which this format does not use",
    "documents": "documents are for chat templates, which this format does not use",
    "chat_template_kwargs": "they are for chat templates, which this format does not use",
    "unmask": "it is for chat templates, which this format does not use",
    "functions": "function definitions are read from tools, as OpenAI's newer format has them",
    "images": "only text is trained",
    "videos": "only text is trained",
    "audios": "only text is trained",
    "margin": "margins are read of rows with chosen and rejected",
    "loss_mask": _MASKS,
    "completion_mask": _MASKS,
    "assistant_masks": _MASKS,
    "position_ids": "positions are counted from 0 in every row: one row, one sample",
    "token_type_ids": "token types are not passed to the model",
    "seq_lengths": "packing is done while training: one row, one sample",
}
_REFUSED = {name: {field: why for field, why in _MEANINGFUL.items() if field not in row.takes} for name, row in FORMATS.items()}


def check_name(format: str) -> None:  # noqa: A002 - what it is called everywhere else
    """Refuse a format that there is not.

    Raises:
        DataError: naming the nearest that there is.
    """
    if format == "auto" or format in FORMATS:
        return
    near = difflib.get_close_matches(str(format), FORMATS, 1, 0.4)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(f"format is {format!r}; allowed: auto, {', '.join(FORMATS)}{meant}")


def detect(place: str, fields: _Fields) -> str:
    """The name of the one format that a row has.

    Raises:
        DataError: none or several fit.
    """
    fitting = [name for name, row in FORMATS.items() if not row.asked and row.fits(fields)]
    if len(fitting) == 1:
        return fitting[0]
    has = f"{place} has the fields {', '.join(map(repr, fields)) or '(none)'}"
    if fitting:
        raise DataError(
            f"{has}, which fit more than one format: {' and '.join(fitting)}; say which is meant (format={fitting[0]!r}), "
            "or keep the fields of one"
        )
    if "chosen" in fields or "rejected" in fields:
        return "preference"  # one side is null or not there, which is a fault of the row and not of its format
    known = "; ".join(f"{name} ({row.needs})" for name, row in FORMATS.items() if not row.asked)
    raise DataError(f"{has}, which are no known format; known: {known}{_hint(fields)}")


def convert(format: str, place: str, fields: _Fields, vocabulary: int | None) -> Sample:  # noqa: A002
    """A row of a known format as a sample; `vocabulary` is the number of token ids there are.

    Raises:
        DataError: the row lacks what the format needs, has a field that cannot be honoured, or one that is not what it should be.
    """
    row = FORMATS[format]
    fits = row.fits(fields) or (format == "prompt_completion" and "prompt" in fields and "completion" in fields)
    if not fits and not (format == "preference" and ("chosen" in fields or "rejected" in fields)):
        has = ", ".join(map(repr, fields)) or "(none)"
        raise DataError(f"{place} has the fields {has}, but the format {format} needs {row.needs}")
    refused = _REFUSED[format]
    if not refused.keys().isdisjoint(fields):
        for field, why in refused.items():
            if _says_something(fields.get(field)):
                raise DataError(f"{place}: field {field} is {describe(fields[field])}, and {why}; take it out of the rows")
    return row.convert(place, fields, vocabulary)


def _says_something(value: object) -> bool:
    return bool(len(value) if isinstance(value, np.ndarray) else value)


def _hint(fields: _Fields) -> str:
    if "input_ids" in fields:
        return "; give labels beside input_ids: the id where a token is learned, -100 elsewhere"
    inside = [name for name, value in fields.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(fields) <= 3 and inside:
        return f"; if the rows stand inside {inside[0]}, write one of them a line (`jq -c '.{inside[0]}[]'` does)"
    return ""

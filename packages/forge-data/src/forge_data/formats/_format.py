"""`Format`: how rows of one format are recognised, read, and named in findings."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge_data.formats._samples import Sample

Fields = Mapping[str, Any]
"""A row: field name → value, without fields that are null."""

FieldOf = Callable[[Fields, int, str, str], str]
"""(row, index, part, answer) → name of the field that holds `part` of message `index`, such as `messages[3].content`.

In rows of text, index 0 is the prompt (or the document) and 1 the answer. `part` is `content`, `role`,
`tool_calls[0].function.name`, or empty for the whole message. `answer` is `chosen` or `rejected` for the sides of a
preference, and `completion` elsewhere."""


def message_field(name: str, index: int, part: str) -> str:
    """Name a part of a message in a list: `messages[3].content`; without a part `messages[3]`."""
    return f"{name}[{index}].{part}" if part else f"{name}[{index}]"


def _no_field(_row: Fields, _index: int, _part: str, _answer: str) -> str:
    return ""


@attrs.frozen(kw_only=True)
class Format:
    """How rows of one format are recognised and read.

    Another package adds a format with an entry point of the group `forge.formats` that names one of these.

    >>> questions = Format(
    ...     needs="question, answer",
    ...     matches=lambda row: "question" in row and "answer" in row,
    ...     convert=lambda place, row: {"prompt": row["question"], "completion": row["answer"]},
    ...     field_of=lambda row, index, part, answer: ("question", "answer")[index],
    ... )
    """

    needs: str
    """The fields that a row must have, for messages: `prompt, completion`."""

    matches: Callable[[Fields], bool]
    """Whether a row has these fields: decides which format an `auto` row has, and whether a chosen format fits."""

    convert: Callable[[str, Fields], Sample | Fields]
    """(place, row) → sample, or the row rewritten in the fields of a built-in format, which then reads and checks it.

    Raises `DataError` for a row that cannot be read, naming its place (`train.jsonl:417`) and field.
    """

    field_of: FieldOf = _no_field
    """Name of the field that a part of a message came from, for findings; by default they name the row only."""

    reads: tuple[str, ...] = ()
    """Those of the fields that change what is learned (`tools`, `unmask`, `margin`, ...) which this format reads."""

    detected: bool = True
    """Whether `auto` may choose it; otherwise it must be chosen by name."""

    accepts: Callable[[Fields], bool] | None = None
    """Further rows that it reads where it is chosen by name, or where no format matches."""

    chosen: Callable[[Fields], bool] | None = None
    """Further rows that it reads only where it is chosen by name."""

"""Values of a row that have to be text, or to hold nothing but text, as a tokenizer can take them."""

import json
from typing import Any

from forge_data._errors import DataError


def describe(value: object) -> str:
    """What a JSON value is, in few words, for a message.

    >>> describe([1, 2]), describe("hi"), describe(None)
    ('a list of 2', "the string 'hi'", 'null')
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the string {value[:40] + '…' if len(value) > 40 else value!r}"
        case dict():
            return f"an object with {', '.join(map(repr, value)) or 'no fields'}"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return f"{type(value).__name__} {str(value)[:40]}"


def checked_text(place: str, field: str, value: str) -> str:
    """A string that can be encoded.

    Raises:
        DataError: it holds half of a surrogate pair, which no tokenizer accepts.
    """
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: field {field} holds the lone surrogate U+{ord(value[error.start]):04X} at position {error.start}, "
                "half of a character; mend the text where it was cut"
            ) from error
    return value


def string(place: str, field: str, value: object) -> str:
    """A field that has to be a string.

    Raises:
        DataError: it is something else, or cannot be encoded.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a string")
    return checked_text(place, field, value)


def checked_tree(place: str, field: str, value: Any) -> Any:
    """A JSON value of which every string, keys included, can be encoded.

    Raises:
        DataError: one that cannot, by its field.
    """
    if isinstance(value, str):
        return checked_text(place, field, value)
    if isinstance(value, dict):
        for name, item in value.items():
            checked_tree(place, f"{field}.{name}", item)
            checked_text(place, field, str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            checked_tree(place, f"{field}[{index}]", item)
    return value


def from_json(value: object) -> object:
    """What a string of JSON holds, where it is one: tables and CSV files keep lists and objects so. Anything else is itself."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON; json keeps the last of several values of a key and says nothing."""
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object names the key {twice!r} more than once; keep one of them")
    return made


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no JSON number; write null or a string")


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)
"""JSON as it is written down: a key that stands twice and NaN, which Python's own reader takes, are refused as `ValueError`."""

"""Values of a row: described in a message, checked as text, decoded from JSON."""

import difflib
import errno
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge_data._errors import DataError


def describe(value: object) -> str:
    """Describe a JSON value in few words, for a message.

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


_PLURAL = re.compile("ies$|(?<=ch|ss)es$|s$")


def counted(number: int, things: str) -> str:
    """Write a number with its unit, which is given in the plural.

    >>> counted(1200, "rows"), counted(1, "micro-batches"), counted(1, "queries")
    ('1,200 rows', '1 micro-batch', '1 query')
    """
    one = "y" if things.endswith("ies") else ""
    return f"{number:,} {_PLURAL.sub(one, things) if number == 1 else things}"


def nearest(name: object, known: Iterable[str], likeness: float = 0.4) -> str:
    """Suggest the known name spelled most like `name`, to end a message with; empty if none is.

    `likeness` is how much of the two must be equal, from 0 to 1.

    >>> nearest("mesages", ["messages", "text"])
    "; did you mean 'messages'?"
    """
    near = difflib.get_close_matches(str(name), known, 1, likeness)
    return f"; did you mean {near[0]!r}?" if near else ""


# Arguments of apply_chat_template itself: passed on as the template's, they would change what is rendered, or do nothing.
NO_ARGUMENTS = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template",
    "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})  # fmt: skip


def keyword_arguments(value: Any) -> Any:
    """Read `NAME=VALUE` words as a mapping, with values in JSON; return anything else as it is.

    >>> keyword_arguments(["enable_thinking=false", "effort=low"])
    {'enable_thinking': False, 'effort': 'low'}
    """
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and "=" in word for word in words):
        return value
    pairs = [word.split("=", 1) for word in words]
    return {name: _from_json(text) for name, text in pairs}


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_FILE = "file:"


def text_given(value: Any) -> Any:
    """Return the text of a file that is given as `file:PATH`; any other value as it is.

    Line breaks at the end of the file, which editors write, are left out.

    Raises:
        ValueError: it cannot be read, saying why; the name of the setting is put before it.
    """
    if not isinstance(value, str) or not value.startswith(_FILE):
        return value
    try:
        text = text_of_file(Path(value.removeprefix(_FILE)).expanduser()).rstrip("\r\n")
    except (OSError, ValueError, RuntimeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise ValueError(f"names the file {value.removeprefix(_FILE)!r}, which cannot be read: {why}") from error
    if text.startswith(_FILE):
        # The text is kept in place of its file, and would be read as the name of another.
        raise ValueError(f"names the file {value.removeprefix(_FILE)!r}, whose text begins with {_FILE}: change its beginning")
    return text


def text_of_file(path: Path) -> str:
    """Read a file of UTF-8.

    Raises:
        OSError: it cannot be read, or is a named pipe, which may have no end.
        UnicodeDecodeError: it is in another encoding.
    """
    if path.is_fifo():
        raise OSError(errno.EINVAL, "it is a named pipe, and to read one may never end; write it to a file")
    return path.read_text(encoding="utf-8")


def text_fault(value: str) -> str | None:
    """Say why a text cannot be a message, unless it can."""
    if not value.strip():
        return "is empty: give a text, or leave it out"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"is not UTF-8: {error.reason} at character {error.start}"
    return None


MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that messages have."""


def checked_text(place: str, field: str, value: str) -> str:
    """Return a string that can be encoded.

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
    """Return the value of a field that must be a string.

    Raises:
        DataError: it is something else, or cannot be encoded.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: field {field} is {describe(value)}; it must be a string{_as_text(field, value)}")
    return checked_text(place, field, value)


def _as_text(field: str, value: object) -> str:
    """Say how a number becomes text, to end a message with; empty for any other value."""
    if not isinstance(value, int | float):
        return ""
    quoted = f": write it in quotes, {json.dumps(json.dumps(value))}"
    return (
        f"{quoted}, or make it text with `preprocess`: {{**row, '{field}': str(row['{field}'])}}"
        if field.isidentifier()
        else quoted
    )


def checked_tree(place: str, field: str, value: Any) -> Any:
    """Return a JSON value if its strings (keys too) can be encoded and its numbers be written.

    Raises:
        DataError: naming the field of the first that cannot.
    """
    if isinstance(value, str):
        return checked_text(place, field, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place}: field {field} is {value}, which is not a JSON number; write null or a string")
    if isinstance(value, dict):
        for name, item in value.items():
            checked_tree(place, f"{field}.{name}", item)
            checked_text(place, field, str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            checked_tree(place, f"{field}[{index}]", item)
    return value


def from_json(value: object) -> object:
    """Decode a string that holds a JSON list or object; return any other value as it is.

    Tables and CSV files keep lists and objects as strings.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


def parsed_json(text: str | bytes) -> Any:
    """Decode JSON of a file that a program wrote.

    Raises:
        ValueError: it is damaged, or nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply to be read") from error


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object; json itself keeps the last of several values of a key."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object names the key {twice!r} more than once; keep one of them")
    return unique


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number; write null or a string")


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
"""JSON decoder that refuses, as `ValueError`, what Python's own accepts: a key that occurs twice, NaN and infinity."""

ROW_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)
"""JSON decoder of rows. NaN and infinity may stand where nobody reads them; what reads a field checks it."""

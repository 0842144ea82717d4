"""A JSONL file to its values, line by line, each fault with its line."""

import json
from collections.abc import Iterator
from pathlib import Path

import attrs

from forge_data._errors import DataError

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_CHUNK = 1 << 20


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON; json keeps the last of several values of a key and says nothing."""
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object names the key {twice!r} more than once; keep one of them")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


@attrs.frozen
class JsonLines:
    """One JSON value a line, UTF-8, with or without a byte order mark; blank lines are passed over."""

    path: Path

    def rows(self) -> Iterator[tuple[int, object, int]]:
        """(line, value, bytes) of every line that is not blank.

        Raises:
            DataError: a line that is not UTF-8 or not JSON, or names a key twice, by `file:line`.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.startswith(_WIDE_BOMS):
                    raise DataError(f"{self.path.name}:1 begins with a UTF-16 byte order mark; save the file as UTF-8")
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip():
                    yield number, self._value(number, text), len(text)

    def count(self) -> int:
        """Lines in the file."""
        lines, last = 0, b""
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                lines += chunk.count(b"\n")
                last = chunk
        return lines + (not last.endswith(b"\n"))

    def _value(self, number: int, line: bytes) -> object:
        place = f"{self.path.name}:{number}"
        try:
            return _DECODER.decode(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1} of the line "
                f"({error.reason}); save the file as UTF-8"
            ) from error
        except json.JSONDecodeError as error:
            raise DataError(f"{place} is not valid JSON: {error.msg} at column {error.colno}{_remedy(error.doc)}") from error
        except RecursionError as error:
            raise DataError(f"{place} is nested too deeply to be read") from error
        except ValueError as error:
            raise DataError(f"{place} cannot be read: {error}") from error


def _remedy(line: str) -> str:
    if line.strip() in ("[", "{", "[{"):
        return "; the file looks like one JSON document over many lines: write one object a line (`jq -c '.[]'` does)"
    return f"; found {line.strip()[:60]!r}; write one complete object a line"

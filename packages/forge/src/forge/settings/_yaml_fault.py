"""A file that PyYAML cannot read → its line and column, what stands there, and what to do."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

import yaml

_LONGEST = 60
_TOKENS = {
    "<scalar>": "text",
    "<block mapping start>": "a line that is indented otherwise",
    "<block sequence start>": "a list",
    "<block end>": "the end of what is indented",
    "<stream end>": "the end of the file",
    "?": "a key",
    "-": "an entry of a list",
}
_BINARY = "cannot be read: it is a binary file, and no text. Give a YAML file of settings"
_GENERAL = "Check its indentation, quotes and brackets"


def read_text(path: Path) -> str:
    """Read a file of UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, or in another encoding; the message begins with its place.

    """
    if path.is_fifo() and not path.is_relative_to("/dev/fd") and not path.is_relative_to("/proc"):  # `<(command)` is there
        raise ValueError(f"{path}: is a named pipe, and to read one may never end. Write what comes from it to a file")
    try:
        content = path.read_bytes()
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: is no name of a file ({error}). Give another one") from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path}:1:1: cannot be read: it is UTF-16. Save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in content:
            raise ValueError(f"{path}: {_BINARY}") from error
        before = content[: error.start].decode("utf-8", "replace")
        where = f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        raise ValueError(
            f"{where}: cannot be read: byte 0x{content[error.start]:02x} is not UTF-8. Save the file as UTF-8"
        ) from error
    if "\0" in text:
        raise ValueError(f"{path}: {_BINARY}")
    return text


def fault_of(error: Exception, text: str, path: object) -> str:
    """Say in a line where YAML is at fault, what stands there and what to do.

    Args:
        error: PyYAML's, or the ValueError or RecursionError of a value.
        text: what was read.
        path: the file's name.

    """
    if isinstance(error, RecursionError):
        return f"{path}: cannot be read: its lists are nested without end. {_GENERAL}"
    if isinstance(error, yaml.reader.ReaderError):
        place = int(error.position)
        before = text[:place]
        where = f"{path}:{before.count(chr(10)) + 1}:{place - before.rfind(chr(10))}"
        return f"{where}: cannot be read: a control character ({error.character:#04x}) stands there. Remove it"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path}: cannot be read: {' '.join(str(error).split())}"
    lines = text.splitlines()
    mark, found, remedy = _explained(error, lines)
    line = _line(lines, mark)
    shown = f" ({line if len(line) <= _LONGEST else line[:_LONGEST] + ' ...'})" if line else ""
    return f"{path}:{mark.line + 1}:{mark.column + 1}: cannot be read: {found}{shown}. {remedy}"


def _line(lines: list[str], mark: yaml.Mark) -> str:
    return " ".join(lines[mark.line].split()) if mark.line < len(lines) else ""


def _explained(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[yaml.Mark, str, str]:
    """Return the place of a fault, what was found there, and the remedy."""
    mark, problem, context = error.problem_mark, error.problem or "", error.context or ""
    assert mark is not None
    begun = error.context_mark or mark
    before = (lines[mark.line] if mark.line < len(lines) else "")[: mark.column]
    if sign := re.fullmatch(r"found character '(.+)' that cannot start any token", problem):
        if sign[1] == "\\t":
            return mark, "a tab", "Take spaces"
        return mark, f"a value that begins with {sign[1]}", "Put it in quotes"
    if "quoted scalar" in context and "end of stream" in problem:
        return begun, "a quote that is never closed", "Close it where the value ends"
    if "escape" in problem:
        return mark, "a backslash between double quotes, which YAML reads as an escape", "Take single quotes"
    if problem == "mapping values are not allowed here":
        if re.search(r":\s", before):
            return mark, "a second colon in a line", "Put the value in quotes"
        return mark, "a line that is indented further than the one before", "Begin each setting at the start of its line"
    if problem == "could not find expected ':'":
        return begun, "a line without a colon", "Write name: value"
    if "flow node" in context:
        return mark, "the end of a list or mapping that is not closed, or a value that is missing in it", "Close its bracket"
    if "flow" in context:
        kind, end = ("list", "]") if "sequence" in context else ("mapping", "}")
        return begun, f"a {kind} that is not closed, or a comma that is missing in it", f"Close it with {end}"
    if problem.startswith("but found") and "document" in problem:
        return mark, "a second document", "Leave the line --- out: a recipe is one"
    if "alias" in problem:
        return mark, "a value that begins with *, which YAML reads as an alias", "Put it in quotes"
    if "constructor for the tag" in problem:
        return mark, "a tag, and a setting is a plain value", "Leave it out, or put the value in quotes"
    if expected := re.search(r"but found '(.*)'", problem):
        what = _TOKENS.get(expected[1], expected[1])
        return mark, f"{what}, which does not fit what stands before it", _GENERAL
    if "is given twice" in problem:
        return mark, problem, "Leave one of them out"
    return mark, problem, "Write a line name: value for each setting"

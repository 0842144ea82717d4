"""Text of a shell script → words and signs, and a word → its quoted and unquoted pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from forge._errors import RecipeError

SIGNS = (";;&", ";;", ";&", "&&", "||", ";", "|", "&", "(", ")", "\n")
_FIRSTS = frozenset(sign[0] for sign in SIGNS)
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w.-]*>(?=\s|$)")
"""`<your_path>`, which a shell would read as two redirections, and whoever wrote it as a value to be given."""
_REDIRECT = re.compile(rf"(?!{_PLACEHOLDER.pattern})(\d*|&)(>>|>\||>&|<&|<<<|<>|>|<)(?!\()")
_HERE = re.compile(r"\d*<<(-?)\s*(\\?['\"]?)([\w.]+)['\"]?")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
PLAIN = re.compile(r"[^ \t\n;|&()<>\\'\"`$]+")
"""Letters that mean nothing but themselves."""
_CLOSES = {"(": ")", "{": "}"}
_SHOWN = 60
"""Letters of a script that an error shows."""


class Token(NamedTuple):
    """A word of a script, a sign between words, an array or a text that a command reads."""

    kind: str
    """`word`, `sign`, `array` (`name=(...)`), or `here` (a here-document)."""
    text: str
    """The word as it is written; of an array `name=` or `name+=`."""
    words: tuple[str, ...] = ()
    """Words of an array, or of a here-document its text."""


def tokens(text: str, name: str) -> list[Token]:
    """Cut a script into words and signs. Raises RecipeError where a quote is not closed."""
    reader = _Reader(text.replace("\r\n", "\n"))
    try:
        return list(reader.tokens())
    except IndexError:
        line = reader.text.count("\n", 0, reader.start) + 1
        begins = reader.text[reader.start :].partition("\n")[0][:_SHOWN]
        raise RecipeError(
            f"{name}: cannot be read as a shell script: line {line}: a quote or a bracket is not closed in what begins with "
            f"{begins!r}."
        ) from None


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.start = 0
        """Where the word, array or quote begins that is being read."""
        self.here: list[tuple[str, bool]] = []
        """Ends of here-documents that begin behind this line, and whether variables stand for themselves there."""

    def tokens(self, end: str | None = None) -> Iterator[Token]:
        """Yield tokens up to the end, or up to a bracket that closes."""
        while self.at < len(self.text):
            sign = self.text[self.at]
            if end and sign == end:
                return
            if not end:
                self.start = self.at
            if sign in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif sign == "#":
                self.at = self.text.find("\n", self.at) % (len(self.text) + 1)
            elif here := _HERE.match(self.text, self.at):
                self.here.append((here[3], bool(here[2])))
                self.at = here.end()
            elif redirect := _REDIRECT.match(self.text, self.at):
                self.at = redirect.end()
                self._blanks()
                self._word()
            elif array := _ARRAY.match(self.text, self.at):
                self.at = array.end()
                words = tuple(each.text for each in self.tokens(")") if each.kind == "word")
                self._close(")")
                yield Token("array", array[0][:-1], words)
            elif sign in _FIRSTS and (found := next((each for each in SIGNS if self.text.startswith(each, self.at)), None)):
                self.at += len(found)
                yield Token("sign", found)
                if found == "\n":
                    yield from self._documents()
            else:
                yield Token("word", self._word())
        if end:
            raise IndexError

    def _documents(self) -> Iterator[Token]:
        """Read the here-documents that begin at this line."""
        for mark, plain in self.here:
            end = re.compile(rf"^[^\S\n]*{re.escape(mark)}[^\S\n]*$", re.MULTILINE).search(self.text, self.at)
            start, stop = self.at, len(self.text) if end is None else end.start()
            self.at = len(self.text) if end is None else min(len(self.text), end.end() + 1)
            yield Token(
                "here", "plain" if plain else "", (self.text[start : max(start, stop - 1)] if end else self.text[start:],)
            )
        self.here.clear()

    def _blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def _close(self, end: str) -> None:
        if self.text[self.at] != end:
            raise IndexError
        self.at += 1

    def _word(self) -> str:
        """Read one word, with quotes, variables and commands in it as they are written."""
        start = self.at
        while self.at < len(self.text):
            if plain := PLAIN.match(self.text, self.at):
                self.at = plain.end()
                continue
            sign = self.text[self.at]
            if sign in " \t\n;|&()" and self.at > start:
                break
            if sign in " \t\n;|&()":
                return ""
            if placeholder := _PLACEHOLDER.match(self.text, self.at):
                self.at = placeholder.end()
            elif sign in "<>" and self.text[self.at + 1 : self.at + 2] != "(":
                break
            elif sign in "<>":
                self._bracket()
            else:
                self._piece()
        return self.text[start : self.at]

    def _piece(self) -> None:
        """Go on behind a letter, a quoted text, a variable or a command."""
        sign = self.text[self.at]
        if sign == "\\":
            self.at += 2
        elif sign == "'":
            self.at = self._find("'", self.at + 1)
        elif sign == '"':
            self.at += 1
            while self.text[self.at] != '"':
                self._inside()
            self.at += 1
        elif sign == "`":
            self.at = self._find("`", self.at + 1)
        elif sign == "$" and self.text[self.at + 1 : self.at + 2] in ("{", "("):
            self._bracket()
        elif self.text.startswith("$'", self.at):
            self.at = self._find("'", self.at + 2)
        else:
            self.at += 1

    def _inside(self) -> None:
        """Go on within double quotes, where a single quote is a letter."""
        if self.text[self.at] == "'":
            self.at += 1
        else:
            self._piece()

    def _bracket(self) -> None:
        """Go on behind `${...}`, `$(...)`, `$((...))` or `<(...)`."""
        opens = self.text[self.at + 1]
        self.at += 2
        while self.text[self.at] != _CLOSES[opens]:
            if self.text[self.at] == opens:
                self.at -= 1
                self._bracket()
            else:
                self._piece()
        self.at += 1

    def _find(self, sign: str, start: int) -> int:
        found = self.text.find(sign, start)
        if found < 0:
            raise IndexError
        return found + 1


_PIECE = re.compile(r"\\.|\$\w+|\$[@*#?$!0-9]|[^\\$\"'`]+|.", re.DOTALL)


def pieces(word: str, *, quotes: bool = True) -> list[tuple[str, str]]:
    """Cut a word into (text, its quote): plain text, and each variable or command by itself."""
    found: list[tuple[str, str]] = []
    at, quote = 0, ""
    while at < len(word):
        sign = word[at]
        if quotes and quote != "'" and sign == "\\" and at + 1 < len(word):
            keeps = quote == '"' and word[at + 1] not in '"\\$`\n'
            goes_on = word[at + 1] == "\n"
            found.append(("" if goes_on else word[at : at + 2] if keeps else word[at + 1], "'"))
            at += 2
        elif quotes and sign in "'\"" and quote in ("", sign):
            quote = "" if quote else sign
            found += [("", sign)]
            at += 1
        elif quotes and sign == "$" and not quote and word[at + 1 : at + 2] == "'":
            end = word.find("'", at + 2)
            found.append((word[at + 2 : end].replace("\\n", "\n").replace("\\t", "\t"), "'"))
            at = end + 1
        elif quote != "'" and sign == "$" and word[at + 1 : at + 2] in ("{", "("):
            end = _closing(word, at + 1)
            found.append((word[at:end], quote))
            at = end
        elif quote == "'":
            end = word.find("'", at)
            end = len(word) if end < 0 else end
            found.append((word[at:end], "'"))
            at = end
        else:
            piece = _PIECE.match(word, at)
            assert piece is not None
            found.append((piece[0], quote))
            at = piece.end()
    return found


def _closing(word: str, at: int) -> int:
    """Return the place behind the bracket that closes the one at `at`."""
    depth, opens = 0, word[at]
    closes = {"(": ")", "{": "}"}[opens]
    for place in range(at, len(word)):
        depth += (word[place] == opens) - (word[place] == closes)
        if not depth:
            return place + 1
    return len(word)

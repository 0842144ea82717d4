"""Text of a message → string that remembers, character by character, where it came from.

`Traced` is a str, as markupsafe's `Markup` is one: a chat template slices, strips and joins it, and the result still knows
which part of which message it is. Text that is merely equal has no origin, so no text of a user can pass for another message's.
A str method that is not overridden here returns a plain str: the origin is lost then, never wrong.
"""

from collections.abc import Iterable
from typing import NamedTuple, SupportsIndex

_NEW = str.__new__

UNPLACED = -1
"""Offset of a piece that came from a leaf in another spelling (JSON), so that its characters have no places in it."""


class Leaf:
    """One string of one message; two leaves are equal only if they are one object."""

    __slots__ = ("field", "message", "text")

    def __init__(self, message: int, field: str, text: str) -> None:
        self.message = message
        self.field = field
        self.text = text


class Mark(NamedTuple):
    """A place in the text where something begins or ends."""

    kind: str
    """`enter` or `leave` the body of a loop, `learn` or `unlearn` at the ends of a generation block."""
    loop: int = 0
    message: int = -1


Piece = tuple[int, int, Leaf | Mark, int]
"""(start, stop, origin, offset): characters [start, stop) of a text are those of the origin, a leaf, from `offset` on.

A mark is a piece without characters. Plain tuples, since there are many."""


class Traced(str):
    """A string and where its characters came from; between its pieces is text of the template."""

    # A sandboxed template cannot access names with an underscore.
    __slots__ = ("_pieces",)
    _pieces: tuple[Piece, ...]

    def __new__(cls, text: str = "", pieces: tuple[Piece, ...] = ()) -> "Traced":
        """Make one of a text and its pieces, in order."""
        made = str.__new__(cls, text)
        made._pieces = pieces
        return made

    @classmethod
    def of(cls, leaf: Leaf) -> "Traced":
        """Make one of a whole leaf."""
        return _traced(leaf.text, ((0, len(leaf.text), leaf, 0),) if leaf.text else ())

    @classmethod
    def mark(cls, mark: Mark) -> "Traced":
        """Make an empty one with a mark."""
        return cls("", ((0, 0, mark, 0),))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str, /) -> str:
        if type(other) is str:
            return _traced(str.__add__(self, other), self._pieces)
        # Markup escapes what it is added to: its own __radd__ is called next.
        return concat((self, other)) if type(other) is Traced else NotImplemented

    def __radd__(self, other: str, /) -> str:
        return _traced(str.__add__(other, self), _shifted(self._pieces, len(other))) if type(other) is str else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice, /) -> str:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            place = key.__index__()
            return self._cut(place if place >= 0 else place + len(self), 1)
        start, _, step = key.indices(len(self))
        return self._cut(start, len(text)) if step == 1 else text

    def _cut(self, start: int, size: int) -> str:
        text, stop = str.__getitem__(self, slice(start, start + size)), start + size
        kept = []
        for first, last, origin, offset in self._pieces:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                kept.append((begin - start, end - start, origin, offset + begin - first if offset >= 0 else offset))
            elif first == last:
                # Marks outside of the cut go to its ends: what began before it has not ended, what begins after it ends at
                # once.
                place = min(max(first, start), stop) - start
                kept.append((place, place, origin, 0))
        return _traced(text, tuple(kept)) if kept else text

    def strip(self, chars: str | None = None, /) -> str:
        """Do as str does."""
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(str.strip(self, chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        """Do as str does."""
        left = len(str.lstrip(self, chars))
        return self._cut(len(self) - left, left)

    def rstrip(self, chars: str | None = None, /) -> str:
        """Do as str does."""
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        """Do as str does."""
        return self._cut(len(prefix), len(self) - len(prefix)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        """Do as str does."""
        return self._cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def _cut_each(self, parts: Iterable[str]) -> list[str]:
        """Cut out parts of this string, each at its next occurrence."""
        found, at = [], 0
        for part in parts:
            at = self.index(part, at)
            found.append(self._cut(at, len(part)))
            at += len(part)
        return found

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Do as str does."""
        parts = str.split(self, sep, maxsplit)
        return self._cut_each(parts) if sep is None else self._cut_evenly(parts, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Do as str does."""
        parts = str.rsplit(self, sep, maxsplit)
        return self._cut_each(parts) if sep is None else self._cut_evenly(parts, len(sep))

    def _cut_evenly(self, parts: Iterable[str], gap: int) -> list[str]:
        """Cut out parts of this string, each `gap` characters after the one before."""
        cut, at = [], 0
        for part in parts:
            cut.append(self._cut(at, len(part)))
            at += len(part) + gap
        return cut

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Do as str does."""
        lines = self._cut_evenly(str.splitlines(self, keepends=True), 0)
        return lines if keepends else [line[: len(bare)] for line, bare in zip(lines, str.splitlines(self), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Do as str does."""
        before, between, after = self._cut_evenly(str.partition(self, sep), 0)
        return before, between, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Do as str does."""
        before, between, after = self._cut_evenly(str.rpartition(self, sep), 0)
        return before, between, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """Do as str does; a replacement keeps its origin."""
        if not old:
            return str.replace(self, old, new, count)
        return join(new, self.split(old, count))

    def join(self, parts: Iterable[str], /) -> str:
        """Do as str does."""
        return join(self, parts)


def _traced(text: str, pieces: tuple[Piece, ...]) -> Traced:
    """Return `Traced(text, pieces)`, in half the time: a rendering makes dozens."""
    made = _NEW(Traced, text)
    made._pieces = pieces
    return made


def _shifted(pieces: tuple[Piece, ...], by: int) -> tuple[Piece, ...]:
    return tuple([(start + by, stop + by, origin, offset) for start, stop, origin, offset in pieces])


def concat(parts: Iterable[str]) -> str:
    """Concatenate parts, each with its origin."""
    parts = list(parts)
    pieces: list[Piece] = []
    at = 0
    for part in parts:
        if type(part) is Traced:
            pieces += _shifted(part._pieces, at)
        at += len(part)
    text = "".join(parts)
    return _traced(text, tuple(pieces)) if pieces else text


def join(between: str, parts: Iterable[str]) -> str:
    """Join parts as `between.join(parts)`, with the origin of all of them."""
    parts = list(parts)
    woven = [between] * max(2 * len(parts) - 1, 0)
    woven[::2] = parts
    # For values that are not strings, str.join raises its own error.
    return concat(woven) if all(isinstance(part, str) for part in woven) else between.join(parts)


def leaf_of(value: object) -> Leaf | None:
    """Find a leaf that some string in nested lists and objects came from."""
    if type(value) is Traced:
        return next((origin for _, _, origin, _ in value._pieces if isinstance(origin, Leaf)), None)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return next((leaf for item in value if (leaf := leaf_of(item)) is not None), None)
    return None


def pieces_of(text: str) -> tuple[Piece, ...]:
    """Return where the characters of a text came from; nothing for a plain str."""
    return text._pieces if type(text) is Traced else ()

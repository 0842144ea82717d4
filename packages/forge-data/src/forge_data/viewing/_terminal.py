"""View → lines for a terminal: roles at the left, learned text underlined, blanks visible.

Without colour the same is shown by marks: ⟦learned⟧ and ⟪special token⟫. Text cannot forge these, nor control the terminal:
whatever does not print, and whatever looks like one of these marks, is written as ⟨U+27E6⟩.
"""

import unicodedata
from collections.abc import Iterator

from forge_data._values import counted
from forge_data.viewing._view import Segment, View

LEARNED, SPECIAL, FAINT = 1, 2, 4
_GUTTER = 10
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
_OWN_MARKS = frozenset("·↵⇥⟦⟧⟪⟫⟨⟩")

Cell = tuple[str, int]
"""Text that is written, and its style: a sum of the styles above."""


def lines(view: View, *, colour: bool, width: int) -> Iterator[str]:
    """Write the lines of one sample."""
    learned = int(view.learned.sum())
    share = f" ({learned / len(view.ids):.0%})" if view.ids else ""
    standing = "".join(f" · {word}" for word in (view.standing, "held out" if view.held_out else "") if word)
    yield _bold(
        f"{view.place} · sample {view.index} · {counted(len(view.ids), 'tokens')}, {learned:,} learned{share}{standing}", colour
    )
    for segment in view.segments:
        rows = _wrapped(_cells(view, segment, colour), max(width - _GUTTER, 20))
        for number, row in enumerate(rows):
            role = segment.role if number == 0 else ""
            yield f"{role:<{_GUTTER}}{_painted(row) if colour else ''.join(text for text, _ in row)}".rstrip()


def _cells(view: View, segment: Segment, colour: bool) -> Iterator[Cell]:
    """Yield the cells of a segment in reading order; a cell of a line feed ends a line."""
    began = False
    ends = dict(view.media)
    stop = 0
    for place in range(segment.start, segment.stop):
        learned = bool(view.learned[place])
        style = LEARNED if learned else 0
        if learned != began and not colour:
            yield ("⟦" if learned else "⟧"), 0
        began = learned
        if place < stop:
            continue
        if place in ends:
            # Its name is from the row, so that only what prints is written.
            text = "".join(letter if letter == " " else shown for letter in view.texts[place] for shown, _ in visible(letter))
            stop = ends[place]
            yield (text if colour else f"⟪{text}⟫"), style | SPECIAL
            continue
        if view.pieces[place].special:
            text = "".join(shown for shown, _ in visible(view.texts[place]))
            yield (text if colour else f"⟪{text}⟫"), style | SPECIAL
            continue
        for shown, faint in visible(view.texts[place]):
            yield shown, style | (FAINT if faint else 0)
            if shown == "↵":
                yield "\n", 0
    if began and not colour:
        yield "⟧", 0


def visible(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each character as it is shown, and whether it is a mark for something else."""
    for letter in text:
        match letter:
            case " ":
                yield "·", True
            case "\n":
                yield "↵", True
            case "\t":
                yield "⇥", True
            case _ if letter in _OWN_MARKS:
                yield f"⟨U+{ord(letter):04X}⟩", True
            case _ if unicodedata.category(letter) not in _INVISIBLE:
                yield letter, False
            case _ if letter < " ":
                yield chr(0x2400 + ord(letter)), True
            case _ if "\udc80" <= letter <= "\udcff":
                yield f"⟨{ord(letter) & 0xFF:02X}⟩", True
            case _:
                yield f"⟨U+{ord(letter):04X}⟩", True


def _wrapped(cells: Iterator[Cell], width: int) -> Iterator[list[Cell]]:
    """Wrap cells into rows, after the last blank that fits, or within a word that is longer."""
    row: list[Cell] = []
    used = blank = 0
    for cell in cells:
        if cell[0] == "\n":
            yield row
            row, used, blank = [], 0, 0
            continue
        wide = _width(cell[0])
        # The closing mark may exceed the width rather than be alone on the next line.
        if used + wide > width and row and cell[0] != "⟧":
            cut = blank or len(row)
            yield row[:cut]
            row, blank = row[cut:], 0
            used = sum(_width(text) for text, _ in row)
        row.append(cell)
        used += wide
        if cell[0] == "·":
            blank = len(row)
    if row:
        yield row


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text
    )


def _painted(row: list[Cell]) -> str:
    """Write cells with as few escape sequences as possible."""
    written, style = [], 0
    for text, wanted in row:
        if wanted != style:
            written.append(_escape(wanted))
            style = wanted
        written.append(text)
    return "".join(written) + (_escape(0) if style else "")


def _escape(style: int) -> str:
    codes = ["0"]
    if style & LEARNED:
        # A blue that is readable on black and on white, and underlined: never by colour alone.
        codes += ["4", "38;5;32"]
    if style & SPECIAL:
        codes.append("7")
    if style & FAINT:
        codes.append("2")
    return f"\x1b[{';'.join(codes)}m"


def _bold(text: str, colour: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colour else text

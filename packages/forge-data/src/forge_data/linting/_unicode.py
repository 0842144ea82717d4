"""Text → first sign that its characters were lost or read in the wrong encoding."""

import re
from typing import NamedTuple

# The bytes 0x80 to 0xBF of UTF-8 as they look when read as Windows-1252 or Latin-1.
_CONTINUATION = "\u0080-\u00bf" + "".join(
    bytes([byte]).decode("cp1252") for byte in range(0x80, 0xA0) if byte not in {0x81, 0x8D, 0x8F, 0x90, 0x9D}
)
# A capital before it makes a word in capitals (NÃO”) of what looks broken; two in a row are needed where the first byte is a
# letter that begins many words (Cyrillic read as Latin).
_MOJIBAKE = re.compile(
    f"(?<![A-ZÀ-ÖØ-Þ])[ÃÂ][{_CONTINUATION}]|â[€\u0080][{_CONTINUATION}]|(?:[ÐÑ][{_CONTINUATION}]){{2}}|ï»¿|"
    f"ð[Ÿ\u009f][{_CONTINUATION}]{{1,2}}"
)
# Tab, line feed and carriage return are text; so is NEL, which old files hold as a line end.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
SUSPECTS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffdÃÂâðÐÑï\ud800-\udfff"
"""Characters, for a character class, without which `find_broken` finds nothing in a text."""


class Broken(NamedTuple):
    """The first broken place in a text."""

    at: int
    what: str
    surrogate: bool


def find_broken(text: str) -> Broken | None:
    r"""Find half a surrogate pair, or else a lost, misread or control character; the first one.

    >>> find_broken("Itâ€™s").what
    "'â€™' at character 2, which is '’' in UTF-8 read as Windows-1252"
    >>> find_broken("It’s\ta café")
    """
    if not text.isascii() and (broken := _misread(text)):
        return broken
    control = _CONTROL.search(text)
    if control:
        what = f"the control character U+{ord(control[0]):04X} at character {control.start()}"
        return Broken(control.start(), what, surrogate=False)
    return None


def _misread(text: str) -> Broken | None:
    """Find half a surrogate pair, a lost character or misread text; ASCII text holds none.

    Misread text holds C1 control characters, so it is searched for before those are.
    """
    half = re.search("[\ud800-\udfff]", text)
    if half:
        what = f"half a surrogate pair (U+{ord(half[0]):04X}) at character {half.start()}"
        return Broken(half.start(), what, surrogate=True)
    lost = text.find("\ufffd")
    if lost >= 0:
        return Broken(lost, f"U+FFFD at character {lost}, which stands for a character that was lost", surrogate=False)
    wrong = _MOJIBAKE.search(text)
    if wrong:
        meant, encoding = _meant(wrong[0])
        reading = f", which is {meant!r} in UTF-8 read as {encoding}" if meant else ", UTF-8 read in another encoding"
        return Broken(wrong.start(), f"{wrong[0]!r} at character {wrong.start()}{reading}", surrogate=False)
    return None


def _meant(wrong: str) -> tuple[str, str]:
    for encoding, name in (("cp1252", "Windows-1252"), ("latin-1", "Latin-1")):
        try:
            return wrong.encode(encoding).decode("utf-8"), name
        except UnicodeError:
            continue
    return "", ""

"""Broken characters in a text, beside correct text of many languages."""

import pytest

from forge_data.linting._unicode import SUSPECTS, find_broken

SOUND = [
    "",
    "plain\ttext\r\nwith lines\n",
    "It’s “quoted” – naïve café, Ærøskøbing, ÃO, NÃO”, MANHÃ, Âge, Â, À bientôt, SEÑOR ÑANDÚ",
    "Привет, мир. Ð is eth, Ñ is eñe.",
    "你好，世界。こんにちは 안녕하세요 שלום مرحبا हिन्दी ไทย",
    "👩‍👩‍👧 \u200d\u200b\u2028 ﬁ",
    "2 × 3 ÷ 4 ± 5 °C, § 7, £5 – €6, ½, ©®™, ð and þ",
    "a\u0085b",
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_text(text):
    """Letters of any language, joiners and signs are correct."""
    assert find_broken(text) is None


@pytest.mark.parametrize("text", [text for text in SOUND if text and not set(text) & set("“”–’")])
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_utf8_read_as_something_else(text, encoding):
    """UTF-8 that was read as one byte a character is found, with the text that was meant."""
    damaged = text.encode().decode(encoding, errors="replace")
    if text.isascii():
        assert find_broken(damaged) is None
    else:
        assert find_broken(damaged) is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("donâ€™t", "'â€™' at character 3, which is '’' in UTF-8 read as Windows-1252"),
        ("na\u00c3\u00afve", "which is 'ï'"),
        ("caf\ufffd", "U+FFFD at character 3"),
        ("a\x00b", "the control character U+0000 at character 1"),
        ("\x1b[1m", "U+001B at character 0"),
        ("a\ud83d", "half a surrogate pair (U+D83D) at character 1"),
        ("\ufffd \ud83d", "half a surrogate pair"),
    ],
)
def test_what_is_said(text, words):
    """The gravest sign is reported with its place."""
    found = find_broken(text)
    assert found is not None
    assert words in found.what
    assert found.surrogate == ("surrogate" in words)


def test_the_quick_look_misses_nothing():
    """A text without any of the suspect characters has no broken place."""
    import re

    suspect = re.compile(f"[{SUSPECTS}]")
    for code in [*range(0x2100), *range(0xD7F0, 0xE010), *range(0xFF00, 0x10000), 0x1F600]:
        for text in (chr(code), f"Ã{chr(code)}", f"â€{chr(code)}", f"x{chr(code)}y"):
            assert find_broken(text) is None or suspect.search(text), ascii(text)

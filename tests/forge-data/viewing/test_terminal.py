"""Views → lines of a terminal."""

import re
import unicodedata

import pytest
from hypothesis import given, strategies as st

from forge_data.viewing._terminal import lines, visible
from forge_data.viewing._view import views

from ..viewed import Store, chat, example

ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def shown(sample, tokenizer, *, colour=False, width=100):
    (view,) = views(Store([sample], tokenizer), [0])
    return list(lines(view, colour=colour, width=width))


def test_marks_say_all(chatml_tokenizer):
    """Without colour: place and counts, roles at the left, learned text and special tokens in marks, blanks visible."""
    sample = chat(chatml_tokenizer, ("user", "Hi\tyou "), ("assistant", "one two\n\nthree"))
    learned = int((sample.labels != -100).sum())
    head, *body = shown(sample, chatml_tokenizer)
    assert head.startswith(f"train.jsonl:1 · sample 0 · {len(sample)} tokens, {learned} learned (")
    assert body == [
        "user      ⟪<|im_start|>⟫user↵",
        "          Hi⇥you·⟪<|im_end|>⟫↵",
        "assistant ⟪<|im_start|>⟫assistant↵",
        "          ⟦one·two↵",
        "          ↵",
        "          three⟪<|im_end|>⟫⟧↵",
    ]


def test_colour_says_the_same(chatml_tokenizer):
    """With colour every learned letter is also underlined, no other letter is, and nothing else differs."""
    sample = chat(chatml_tokenizer, ("user", "Hi you"), ("assistant", "one two"))
    written, underlined, on = "", "", False
    for line in shown(sample, chatml_tokenizer, colour=True)[1:]:
        done = 0
        for code in ESCAPE.finditer(line):
            written += line[done : code.start()]
            underlined += line[done : code.start()] if on else ""
            on, done = "4" in code[1].split(";"), code.end()
        assert not on, "a style does not run on into the next line"
        written += line[done:]
    assert underlined == "one·two<|im_end|>"
    marks = "".join(shown(sample, chatml_tokenizer)[1:])
    assert written == re.sub("[⟦⟧⟪⟫]", "", marks)


def test_nobody_forges_a_mark(chatml_tokenizer):
    """Letters that look like the marks are written as their code points."""
    sample = chat(chatml_tokenizer, ("user", "⟦learned⟧ ⟪x⟫ ·↵"), ("assistant", "ok"))
    text = "\n".join(shown(sample, chatml_tokenizer))
    assert text.count("⟦") == text.count("⟧") == 1
    assert "⟨U+27E6⟩learned⟨U+27E7⟩·⟨U+27EA⟩x⟨U+27EB⟩·⟨U+00B7⟩⟨U+21B5⟩" in text


@given(text=st.text())
def test_only_what_prints_is_written(text):
    """No control, format, private or unpaired character reaches the terminal, and every character leaves something."""
    out = [mark for mark, _ in visible(text)]
    assert len(out) == len(text)
    assert all(out)
    assert not any(unicodedata.category(letter)[0] in "CZ" for letter in "".join(out))


def test_bytes_of_no_character(chatml_tokenizer):
    """Bytes that never become a character are shown as bytes, where the mask cuts them too."""
    ids = chatml_tokenizer("日", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    sample = example(chatml_tokenizer, ("user", ids[:2], False), ("assistant", "x", True))
    assert shown(sample, chatml_tokenizer)[1:] == ["user      ⟨E6⟩⟨97⟩", "assistant ⟦x⟧"]


@pytest.mark.parametrize("width", [40, 61, 100])
def test_lines_fit(chatml_tokenizer, width):
    """Long text is cut after blanks, a long word anywhere; wide letters count twice; nothing is lost."""
    content = "some words of many lengths " * 8 + "x" * 300 + " 日本" * 60
    rows = shown(chat(chatml_tokenizer, ("assistant", content)), chatml_tokenizer, width=width)[1:]
    for row in rows:
        wide = sum(2 if unicodedata.east_asian_width(letter) == "W" else 1 for letter in row.rstrip("⟧↵"))
        assert wide <= width
    joined = "".join(row[10:] for row in rows)
    assert content.replace(" ", "·") in joined
    assert rows[1].endswith("·")

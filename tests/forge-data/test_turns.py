"""Where in a turn the content stands."""

import pytest

from forge_data._turns import find_turn, is_written


@pytest.mark.parametrize(
    ("turn", "content", "begin", "end", "closing"),
    [
        ("ho<end>\n", "ho", 0, 2, 7),
        (" ho</s>", "ho", 1, 3, 7),
        ("ho<end>\n", "  ho\n", 0, 2, 7),
        ("  ho<end>", "  ho", 0, 4, 9),
        ("ho  \n", "ho  ", 0, 4, 4),
        ("ho\n\n", "ho", 0, 2, 2),
        ("<think>\n\n</think>\n\nho<end>", "ho", 19, 21, 26),
        ("<think>\n\n</think>\n\nthink<end>", "think", 19, 24, 29),
        ("<think>\na\n</think>\n\nb<end>\n", "<think>a</think>b", 0, 21, 26),
        ("s</s>\n", "s", 0, 1, 5),
        ("<end>\n", "", 0, 0, 5),
        (" <end>\n", "", 0, 0, 6),
    ],
)
def test_found(turn, content, begin, end, closing):
    """Content is found as it stands, trimmed, after a block of the template's own, or but for its blanks."""
    span = find_turn("head" + turn + "tail", 4, 4 + len(turn), content)
    assert span is not None
    assert tuple(place - 4 for place in span) == (0, begin, end, closing, len(turn))


@pytest.mark.parametrize(("turn", "content"), [("HO<end>", "ho"), ("b<end>", "<think>a</think>b"), ("<end>", "ho")])
def test_not_found(turn, content):
    """Content that is changed or missing is not found."""
    assert find_turn(turn, 0, len(turn), content) is None


def test_written():
    """A message is written out as it stands, trimmed, or as a JSON string."""
    assert is_written('<|tool|>"say \\"hi\\"\\n\\u00e9"', 'say "hi"\né')
    assert is_written("<|tool|>hi", "  hi\n")
    assert is_written("anything", "")
    assert not is_written("<|user|>hi", "42 degrees")

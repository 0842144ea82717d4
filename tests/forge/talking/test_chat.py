"""What a model writes is shown as text."""

from forge.talking._chat import visible


def test_control_characters_are_escaped() -> None:
    """None reaches the terminal; line ends, tabs and joined signs stay."""
    assert visible("a\x1b[2J\rb\x9b1m\x08\n\tc") == "a\\x1b[2J\\rb\\x9b1m\\x08\n\tc"
    assert visible("👩\u200d🚀 é") == "👩\u200d🚀 é"

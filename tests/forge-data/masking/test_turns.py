"""One turn → its span: its content, its end, and text of other messages in it."""

import pytest

from forge_data.chat_template._trace import foreign_text, render, template_prefix
from forge_data.chat_template._traced_jinja import compile_template
from forge_data.masking._turns import find_content, turn_span


@pytest.mark.parametrize(
    ("turn", "content", "begin", "end"),
    [
        ("ho<end>\n", "ho", 0, 2),
        (" ho</s>", "ho", 1, 3),
        ("ho<end>\n", "  ho\n", 0, 2),
        ("  ho<end>", "  ho", 0, 4),
        ("<think>\n\n</think>\n\nthink<end>", "think", 19, 24),
        ("<think>\na\n</think>\n\nb<end>\n", "<think>a</think>b", 0, 21),
        ("<end>\n", "", 0, 0),
    ],
)
def test_found(turn, content, begin, end):
    """Where the origin is lost, content is found by its text: as it is, stripped, or without regard to blanks."""
    assert find_content(turn, content) == (begin, end)


@pytest.mark.parametrize(("turn", "content"), [("HO<end>", "ho"), ("b<end>", "<think>a</think>b"), ("<end>", "ho")])
def test_not_found(turn, content):
    """Content that is changed or missing is not found."""
    assert find_content(turn, content) is None


def traced(template, *contents):
    messages = [{"role": "user", "content": content} for content in contents]
    return render(compile_template(template)[0], messages, {})


def test_a_span():
    """A span has the content, the blanks around it, and the closing text."""
    trace = traced("{% for m in messages %}HEAD {{ m.content }} END\n{% endfor %}", " x y ")
    assert tuple(turn_span(trace, 0, 4, len(trace.text))) == (4, 5, 10, 14, 15)
    assert template_prefix(trace, 0, 0, len(trace.text)) == ("HEAD ", True)
    assert template_prefix(trace, 1, 0, len(trace.text)) == ("HEAD ", False)
    assert template_prefix(trace, 0, 0, 3) == ("HEA", True)


def test_a_look_alike_ends_nothing():
    """Content ends where it ends, not at a look-alike of its end."""
    trace = traced("{% for m in messages %}{{ m.content }} END{% endfor %}", "x END END")
    assert turn_span(trace, 0, 0, len(trace.text)).content_end == len("x END END")


def test_a_span_of_nothing():
    """An empty turn begins and ends where its header does; its closing text remains."""
    trace = traced("{% for m in messages %}HEAD{{ m.content }}END\n{% endfor %}", "")
    assert tuple(turn_span(trace, 0, 4, 8)) == (4, 4, 4, 7, 8)
    bare = traced("{% for m in messages %}HEAD\n{% endfor %}", "")
    assert tuple(turn_span(bare, 0, 4, 5)) == (4, 4, 4, 4, 5)


def test_a_span_in_other_words():
    """Content whose origin is lost is found by its text, in its own turn only."""
    trace = traced("{% for m in messages %}{{ '%s' % m.content }}|{% endfor %}", "ab", "cd")
    assert tuple(turn_span(trace, 1, 3, 6))[:3] == (3, 3, 5)


def test_strangers():
    """Text of another message within a turn is found; blanks are ignored."""
    template = "{% for m in messages %}{{ messages[0].content }}-{{ m.content }};{% endfor %}"
    trace = traced(template, "ab", "cd")
    assert foreign_text(trace, 1, 6, len(trace.text)) == "ab"
    assert foreign_text(trace, 0, 0, 6) == ""
    assert foreign_text(traced(template, " ", "cd"), 1, 4, 9) == ""

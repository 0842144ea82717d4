"""Which message wrote which text, however a template loops over its messages."""

import pytest

from forge_data.chat_template._trace import NOBODY, assemble, render
from forge_data.chat_template._traced_jinja import compile_template
from forge_data.chat_template._traced_text import Leaf, Mark, Traced, concat

THREE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "so"}]
OWNED = {
    "<{% for m in messages %}[{{ m.content }}]{% endfor %}>": ["<", "0:[hi]", "1:[ho]", "2:[so]", ">"],
    # What is skipped or ended early is over when the next begins, or the loop ends.
    "{% for m in messages %}{% if loop.first %}a{% continue %}{% endif %}b{% if loop.index0 == 1 %}{% break %}{% endif %}"
    "{% endfor %}c": ["0:a", "1:b", "c"],
    # A look ahead, or a search, within a body is the body's.
    "{% for m in messages %}{{ m.content }}{% for other in messages %}{% if other.role == 'x' %}!{% endif %}{% endfor %}."
    "{% endfor %}": ["0:hi.", "1:ho.", "2:so."],
    # A loop over messages within a body that writes is theirs.
    "{% for m in messages[:1] %}({% for other in messages[1:] %}{{ other.content }}{% endfor %}){% endfor %}": [
        "0:(",
        "1:ho",
        "2:so",
        "0:)",
    ],
    "{% for m in messages %}{% for c in ['x', 'y'] %}{{ c }}{% endfor %}{% endfor %}": ["0:xy", "1:xy", "2:xy"],
    "{% set rest = messages[1:] %}{{ messages[0].content }}{% for m in rest %}{{ m.content }}{% endfor %}": [
        "hi",
        "1:ho",
        "2:so",
    ],
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}": ["0:hi", "2:so"],
    "{% macro all(them) %}{% for m in them %}{{ m.content }}{% endfor %}{% endmacro %}{{ all(messages) }}!": [
        "0:hi",
        "1:ho",
        "2:so",
        "!",
    ],
    "{% set text %}{% for m in messages %} {{ m.content }} {% endfor %}{% endset %}{{ text | trim }}": [
        "0:hi ",
        "1: ho ",
        "2: so",
    ],
    # A number is nobody's turn, and a copy of a message is no message: both are left open rather than guessed at.
    "{% for i in range(2) %}{{ messages[i].content }}{% endfor %}": ["hiho"],
    "{% for m in [{'content': messages[0].content}] %}{{ m.content }}{% endfor %}": ["hi"],
    "{% for i, m in [(0, messages[0])] %}{{ m.content }}{% endfor %}": ["hi"],
}


@pytest.mark.parametrize("template", OWNED)
def test_owners(template):
    """Each part of the text is owned by the message whose turn the loop was at, and by none outside of loops over messages."""
    trace = render(compile_template(template)[0], THREE, {})
    expected = [("" if owner == NOBODY else f"{owner}:") + trace.text[start:stop] for start, stop, owner in trace.runs]
    assert expected == OWNED[template]


def test_a_body():
    """A message's body is the one run it owns; blank runs do not count, a second written one does."""
    both = "{% for m in messages %} {% endfor %}|{% for m in messages %}{{ m.content }}{% endfor %}"
    trace = render(compile_template(both)[0], THREE, {})
    assert (trace.body(1), trace.end_of_turns()) == ((6, 8), 10)
    twice = render(compile_template(both.replace("%} {%", "%}x{%"))[0], THREE, {})
    assert twice.body(1) is None
    assert twice.has_body(1)
    assert render(compile_template("x")[0], THREE, {}).body(0) is None


def test_what_is_within():
    """Stretches are found by where they begin."""
    trace = render(compile_template("{% for m in messages %}{{ m.content }}{% endfor %}")[0], THREE, {})
    assert [leaf.text for _, _, leaf, _ in trace.within(2, 4)] == ["ho"]
    assert [leaf.text for _, _, leaf, _ in trace.of(2)] == ["so"]


def test_marks_of_a_block_that_was_cut():
    """The end of a generation block without its beginning marks nothing."""
    leaf = Leaf(0, "content", "ab")
    begin, end = Traced.mark(Mark("learn")), Traced.mark(Mark("unlearn"))
    assert assemble([concat([begin, Traced.of(leaf), end])], []).marked == [(0, 2)]
    assert assemble([Traced.of(leaf), end], []).marked == []
    assert assemble([begin, begin, Traced.of(leaf), end, end], []).marked == [(0, 2)]


def test_strings_of_tool_calls():
    """Every string of a message is known by its field; a role is not, since templates compare it."""
    call = {"function": {"name": "f", "arguments": {"city": ["Paris"], "n": 2}}}
    trace = render(
        compile_template("{{ messages[0].tool_calls[0].function | tojson }}")[0],
        [{"role": "assistant", "tool_calls": [call]}],
        {},
    )
    assert set(trace.leaves[0]) == {
        "tool_calls[0].function.name",
        "tool_calls[0].function.arguments.city (its name)",
        "tool_calls[0].function.arguments.n (its name)",
        "tool_calls[0].function.arguments.city[0]",
    }
    assert trace.text == '{"name": "f", "arguments": {"city": ["Paris"], "n": 2}}'

"""A template on symbols writes what it writes around any contents, or is found to look at them."""

from functools import cache

import pytest
from hypothesis import assume, given, settings, strategies as st

from forge_data.chat_template._symbolic import LooksError, SymbolicTemplate, Symbols, holds_symbol
from forge_data.chat_template._trace import render
from forge_data.chat_template._traced_jinja import compile_template

from ..families import FAMILIES
from ..nasty import LOOK_ALIKES, WORDS

ROLES = ("user", "assistant", "user", "assistant")
LOOP = "{% for m in messages %}"


def written(contents):
    """Render messages with these contents."""
    messages = [{"role": role, "content": content} for role, content in zip(ROLES, contents, strict=False)]
    return messages, {"add_generation_prompt": False, "tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}


def on_symbols(source, count=4):
    symbols = Symbols()
    contents = [symbols.symbol(index) for index in range(count)]
    messages, variables = written(contents)
    return SymbolicTemplate(source).render(messages, variables, symbols), symbols, contents


@pytest.mark.parametrize(
    "looks",
    [
        "{{ m.content | length }}",
        "{{ m.content | upper }}",
        "{{ m.content[0] }}",
        "{{ m.content[:3] }}",
        "{% for c in m.content %}{{ c }}{% endfor %}",
        "{% if m.content in 'some text' %}x{% endif %}",
        "{% if m.content < 'm' %}x{% endif %}",
        "{% if m.content == messages[0].content %}x{% else %}y{% endif %}{% if m.content == m.content + '' %}{% endif %}",
        "{% if 'text'.startswith(m.content) %}x{% endif %}",
        "{% if 'a%s' % m.content == 'ab' %}x{% endif %}",
        "{% if '%s%s' % (m.content, 1) == 'ab' %}x{% endif %}",
        "{% if '{}'.format(m.content) == 'ab' %}x{% endif %}",
        "{{ m.content | int }}",
        "{{ m.content | tojson }}",
        "{{ m | tojson }}",
        "{{ {'a': 1}[m.content] }}",
        "{{ {'a': 1}.get(m.content) }}",
        "{{ m.content * 2 }}",
        "{{ 2 * m.content }}",
        "{{ ('<' + m.content).strip() }}",
        "{% if m.content is in ['a'] %}x{% endif %}",
        "{% if m.content is lower %}x{% endif %}",
        "{% if '<' + m.content == 'x' %}y{% endif %}",
        "{{ [m.content] | string }}",
        "{{ m.content.partition('a')[0] }}",
        "{{ m.content | safe | length }}",
        "{{ messages | map(attribute='content') | map('safe') | first }}",
        "{% if ('<' | e) + m.content == '&lt;a' %}x{% endif %}",
        "{% autoescape true %}{% set c %}{{ m.content }}{% endset %}{{ c | length }}{% endautoescape %}",
        "{% if m.content.strip('.') %}x{% endif %}",
        "{% if m.content | trim('.') %}x{% endif %}",
        "{% if 'x' != m.content in 'some text' %}x{% endif %}",
    ],
)
def test_looking(looks):
    """Whatever might give other text for other contents ends the rendering."""
    with pytest.raises(LooksError):
        on_symbols(LOOP + looks + "{% endfor %}")


def test_asking_for_a_text():
    """A content that is asked whether it has a text says no, and the text is noted: the proof is for contents without it."""
    source = LOOP + (
        "{% if '</think>' in m.content %}x{% endif %}{% if m.content.startswith('<tool>') %}y{% endif %}"
        "{% if m.content == 'stop' %}z{% endif %}{{ m.content.split('|')[-1] }}{% endfor %}"
    )
    text, symbols, contents = on_symbols(source)
    assert text == "".join(contents)
    assert symbols.absent == {"</think>", "<tool>", "stop", "|"}


def test_what_a_loop_holds():
    """A method of the template's own text is called beside contents that the loop keeps in variables."""
    text, _, contents = on_symbols(LOOP + "{% set c = m.content %}{{ '\n<'.strip() + c }}{% endfor %}")
    assert text == "".join("<" + content for content in contents)


def test_json_is_not_escaped():
    """JSON of the template's own values is as transformers writes it."""
    assert on_symbols("{{ ({'a': '<b>'} | tojson) + messages[0].content }}", 1)[0][:-1] == '{"a": "<b>"}'


def test_what_is_stripped_is_another_symbol():
    """Stripped and unstripped contents are told apart, by what was stripped; equal expressions are equal."""
    text, _, _ = on_symbols("{{ messages[0].content }}{{ messages[0].content.strip() }}{{ messages[0].content | trim }}"
                            "{{ messages[0].content.lstrip('\n') }}")  # fmt: skip
    assert [text[0] == text[1], text[1] == text[2], text[1] == text[3]] == [False, True, False]
    assert all(holds_symbol(character) for character in text)


SOURCES = {
    f"{family.name} {name}": source
    for family in FAMILIES.values()
    for name, source in (family.template.items() if isinstance(family.template, dict) else [("", family.template)])
    if name != "tool_use"
}
"""Templates by name, but for the one that needs tools."""


@cache
def on_symbols_and_compiled(source):
    """What a template writes on symbols and the compiled template, once for all examples; None if it looks at contents."""
    try:
        return *on_symbols(source), compile_template(source)[0]
    except LooksError:
        return None


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@settings(max_examples=10)
@given(data=st.data())
def test_any_contents(source, data):
    """What a family's template writes on symbols is what it writes of any contents that the proof allows."""
    if (found := on_symbols_and_compiled(source)) is None:
        return
    text, symbols, used, template = found
    plain = st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS]), min_size=1, max_size=4).map(" ".join).map(str.strip)
    contents = [data.draw(plain) for _ in used]
    assume(all(contents) and not any(absent in content for content in contents for absent in symbols.absent))
    messages, variables = written(contents)
    expected = render(template, messages, variables).text
    expressions = {chr(0xF0000 + number): expression for expression, number in symbols._numbers.items()}

    def content_of(character):
        expression = expressions.get(character, character)
        while isinstance(expression, tuple):
            expression = expressions[expression[2]]
        return contents[expression] if isinstance(expression, int) else expression

    assert "".join(map(content_of, text)) == expected

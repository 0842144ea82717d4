"""Traced templates write what transformers writes, and mark whose text it is."""

import json
from functools import cache

import jinja2
import pytest
from hypothesis import given, strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from forge_data.chat_template._limits import counted
from forge_data.chat_template._trace import render
from forge_data.chat_template._traced_jinja import compile_template

WORDS = st.lists(
    st.sampled_from(["a", "<think>", "</think>", " ", "\n", '"', "é", "<b>", "{{ x }}", "\\n", ", "]), max_size=6
).map("".join)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WORDS}, optional={"name": WORDS}),
    min_size=1,
    max_size=4,
)

SNIPPETS = {
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% if loop.index > 2 %}"
             "{% break %}{% endif %}{% endfor %}",
    "filtered loop": "{% for m in messages if m.role == 'user' %}{{ m['content'] }}{% else %}none{% endfor %}",
    "reversed": "{% for m in messages[::-1] %}{{ m.content }}|{% endfor %}{{ messages[-1].content[::-1] }}",
    "concat": "{% for m in messages %}{{ loop.index ~ m.content ~ none ~ 1.5 }}{% endfor %}",
    "join": "{{ messages | map(attribute='content') | join(', ') }}{{ ', '.join(['a', messages[0].content]) }}{{ messages | "
            "join('-', attribute='role') }}",
    "trim": "{% for m in messages %}[{{ m.content | trim }}{{ m.content.strip('a') }}{{ m['content'].rstrip() | replace('a', "
            "m.role) }}]{% endfor %}",
    "think": "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}{% set c = "
             "c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}{% endfor %}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{{ m.content }}{{ caller() if caller else '' }}{% endmacro %}{% for m in "
             "messages %}{% call say(m) %}!{% endcall %}{{ say(m) | upper }}{% endfor %}",
    "capture": "{% for m in messages %}{% set text %}{{ m.content }}.{% endset %}{{ text | trim }}{% endfor %}{% filter trim "
               "%} {{ messages[0].content }} {% endfilter %}",
    "namespace": "{% set ns = namespace(text='', n=0) %}{% for m in messages %}{% set ns.text = ns.text + m.content %}{% set "
                 "ns.n = ns.n + 1 %}{% endfor %}{{ ns.text }}{{ ns.n }}",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{{ {'a': m.content} | tojson | safe }}"
            "{% endfor %}",
    "safe": "{% for m in messages %}{{ m.content | safe if loop.first else m.content }}{% set s = m.content | safe %}{{ s + "
            "'<' }}{{ '<' + s }}{% endfor %}",
    "format": "{% for m in messages %}{{ '%s:%s' % (m.role, m.content) }}{{ '{}'.format(m.content) }}{{ m.content | length "
              "}}{{ m.content[0] }}{% endfor %}",
    "copies": "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [{'role': m.role, 'content': "
              "m.content}] %}{% endfor %}{% for m in ns.all %}{{ m.content }}{% endfor %}",
    "dict": "{% for k, v in dict(a=1).items() %}{{ k ~ v }}{% endfor %}{% for m in messages %}{% for k, v in m.items() %}{{ k "
            "}}={{ v }};{% endfor %}{{ m.name }}{{ m.get('name', '-') }}{{ m.nothing is defined }}{% endfor %}",
    "iterated": "{% for m in messages %}{% for c in m.content %}{{ c }}.{% endfor %}{{ m.content | list | last if m.content "
                "else '' }}{{ m.content | first }}{% endfor %}",
    "blocks": "{%- for m in messages -%}\n    {%- if m.role == 'user' %}\n  x\n    {% endif -%}\n{{- m.content -}}\n{%- endfor "
              "%}\n",
    "recursive": "{% for m in messages recursive %}{{ m.content }}{% if m.role == 'tool' %}{{ loop(messages) }}{% endif %}"
                 "{% endfor %}",
    "generation": "{% for m in messages %}{{ m.role }}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x is "
                  "defined }}{% endfor %}",
    "strings": "{% for m in messages %}{{ m.content.startswith('a') }}{{ m.content.find('a') }}{{ m.content.count('a') }}"
               "{{ 'a' in m.content }}{{ m.content.splitlines() }}{{ m.content.title() }}{{ m.content | upper }}{{ m.content | "
               "indent }}{{ m.content | string }}{% endfor %}",
}  # fmt: skip


def native(template, messages):
    marks = "generation %}" in template
    texts, marked = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=marks, bos_token="<s>", eos_token="</s>"
    )
    return texts[0], marked[0] if marks else []


@cache
def compiled(template):
    """A compiled template, once for all examples."""
    return compile_template(template)[0]


def ours(template, messages):
    expected = {"tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>"}
    return render(compiled(template), messages, expected)


@pytest.mark.parametrize("template", SNIPPETS.values(), ids=SNIPPETS)
@given(messages=MESSAGES)
def test_as_transformers(template, messages):
    """Text and generation marks equal transformers' own, whatever a template does with strings, and origins are true."""
    trace = ours(template, messages)
    assert (trace.text, trace.marked) == native(template, messages)
    for start, stop, leaf, offset in trace.stretches:
        if offset >= 0:
            assert trace.text[start:stop] == leaf.text[offset : offset + stop - start]
            assert messages[leaf.message][leaf.field] == leaf.text
    assert "".join(trace.text[start:stop] for start, stop, _ in trace.runs) == trace.text


TWO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
REMEMBERED = {
    "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}": ["hi", "ho"],
    "{{ messages | map(attribute='content') | join(', ') }}": ["hi", "ho"],
    "{{ ', '.join([messages[0].content, 'x']) }}": ["hi"],
    "{% macro say(m) %}{{ m.content | trim }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}": ["hi", "ho"],
    "{% set x %}{{ messages[1].content }}{% endset %}{{ x }}": ["ho"],
    "{{ messages[0].content | safe }}": ["hi"],
    "{{ messages[0].content | tojson }}": ["hi"],
    "{{ messages[0].content | replace('h', 'x') }}": ["i"],
    "{{ messages | tojson }}": [json.dumps(TWO)],
    "{{ messages[0].content | upper }}": [],
}


@pytest.mark.parametrize("template", REMEMBERED)
def test_what_is_remembered(template):
    """The ways in which templates pass strings on keep their origin; what changes a string loses it."""
    trace = ours(template, TWO)
    assert [trace.text[start:stop] for start, stop, _, _ in trace.stretches] == REMEMBERED[template]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages[0].content._pieces.x }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ raise_exception('no') }}",
        "{{ 1 + messages[0].content }}",
    ],
)
def test_the_sandbox_holds(template):
    """Whatever transformers' sandbox refuses is refused here."""
    with pytest.raises((jinja2.TemplateError, TypeError)):
        ours(template, TWO)


def test_no_mark_can_be_called():
    """A template cannot name the filters that leave marks, so it cannot forge them."""
    for name in ("forge enter", "enter"):
        with pytest.raises(jinja2.TemplateError):
            compile_template("{{ 'x' | " + name + "(1) }}")


def test_what_is_read():
    """The names of the arguments that a template reads are found."""
    _, reads = compile_template("{% if enable_thinking is defined %}{{ tools }}{% endif %}{% set x = 1 %}{{ x }}")
    assert reads == {"enable_thinking", "tools"}


def test_programs_of_one_source_share_no_state():
    """A source is compiled once, and a rendering within another one of it changes neither: each keeps a budget of its own."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (outer, _), (inner, _) = compile_template(source), compile_template(source)
    begun = counted(outer, {"messages": TWO})
    first = next(begun)
    budget = outer.environment.budget
    assert render(inner, TWO, {}).text == "hiho"
    assert outer.environment.budget is budget is not inner.environment.budget
    assert "".join([first, *begun]) == "hiho"

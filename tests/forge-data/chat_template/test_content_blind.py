"""A template that may branch on content is never taken to be blind to it."""

import pytest

from forge_data.chat_template._content_blind import is_content_blind

from ..families import TEMPLATES

LOOP = "{{% for m in messages %}}{}{{% endfor %}}"
BLIND = [
    LOOP.format("<{{ m.role }}>{{ m['content'] }}</s>"),
    LOOP.format("{{ m.content | trim + eos_token }}"),
    LOOP.format("{{ '<' ~ m.content.strip() ~ '>' }}"),
    LOOP.format("{% if m.content %}{{ m.content }}{% endif %}{% if m.content is string %}.{% endif %}"),
    LOOP.format("{% if 'tool_calls' in m or m.tool_calls %}x{% endif %}{{ m.content }}"),
    LOOP.format("{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}{{ eos_token }}{% endif %}"),
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}{% else "
    "%}{% set s = false %}{% endif %}{% if s != false %}{{ s }}{% endif %}{% for m in messages[::-1] %}"
    "{{ m.content }}{% endfor %}{{ messages | length }}",
    LOOP.format("{% set c = m.content %}{% if loop.first %}{% set c = 'x' + c %}{% endif %}{{ c }}"),
]  # fmt: skip
LOOKING = [
    LOOP.format("{% if m.content == 'a' %}a{% else %}{{ m.content }}{% endif %}"),
    LOOP.format("{% if 'a' in m.content %}b{% endif %}{{ m.content }}"),
    LOOP.format("{% if m.content in 'abc' %}b{% endif %}{{ m.content }}"),
    LOOP.format("{% if 'abc'.startswith(m.content) %}b{% endif %}{{ m.content }}"),
    LOOP.format("{% if m.content.startswith('a') %}b{% endif %}{{ m.content }}"),
    LOOP.format("{{ m.content | upper }}"),
    LOOP.format("{{ m.content | length }}"),
    LOOP.format("{{ m.content | trim('a') }}"),
    LOOP.format("{{ m.content.strip('a') }}"),
    LOOP.format("{{ m.content | safe + '<' }}"),
    LOOP.format("{{ m.content[1:] }}"),
    LOOP.format("{{ m.content[0] }}"),
    LOOP.format("{{ m['con' + 'tent'] }}"),
    LOOP.format("{{ m }}"),
    LOOP.format("{{ m | tojson }}"),
    LOOP.format("{% for k, v in m.items() %}{{ v }}{% endfor %}"),
    LOOP.format("{% for c in m.content %}{{ c }}{% endfor %}"),
    LOOP.format("{% if m == messages[-1] %}x{% endif %}{{ m.content }}"),
    LOOP.format("{% if loop.changed(m.content) %}x{% endif %}{{ m.content }}"),
    LOOP.format("{% if loop.previtem is defined and loop.previtem.content == 'a' %}x{% endif %}{{ m.content }}"),
    LOOP.format("{{ {'a': 1}[m.content] }}"),
    LOOP.format("{{ [m.content] | join }}"),
    LOOP.format("{{ '%s' % m.content }}"),
    LOOP.format("{{ m.content * 2 }}"),
    LOOP.format("{% set ns.c = m.content %}{{ ns.c == 'a' }}"),
    LOOP.format("{% set c %}{{ m.content }}{% endset %}{% if c == 'a' %}b{% endif %}"),
    LOOP.format("{% set c = m.content ~ '' %}{% if c == 'a' %}b{% endif %}"),
    LOOP.format("{% filter upper %}{{ m.content }}{% endfilter %}"),
    LOOP.format("{% set c, d = m.content, 1 %}{% if c == 'a' %}b{% endif %}"),
    "{% macro f() %}{{ messages[0].content }}{% endmacro %}{% if f() == 'a' %}b{% endif %}",
    "{% set c = x %}{% for m in messages %}{% if c == 'a' %}b{% endif %}{% set c = m.content %}{% endfor %}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}",
    "{% for m in messages if m.content != 'a' %}{{ m.content }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{% with c = messages[0].content %}{{ c == 'a' }}{% endwith %}",
    "{{ messages }}",
]  # fmt: skip


@pytest.mark.parametrize("template", BLIND)
def test_blind(template):
    """Writing, stripping and passing on contents, or testing whether there are any, is no branch."""
    assert is_content_blind(template)


@pytest.mark.parametrize("template", LOOKING)
def test_looking(template):
    """Whatever compares, slices, counts, passes to a function or renames a content counts as a branch."""
    assert not is_content_blind(template)


def test_real_templates():
    """Templates that split reasoning or tool results branch; the plain ones of most families do not."""
    blind = {path.stem for path in TEMPLATES.glob("*.jinja") if is_content_blind(path.read_text(encoding="utf-8"))}
    assert blind == {
        "chatml", "command-r", "gemma", "granite-3.3", "llama-3", "llama-3-generation", "mistral", "phi-3", "phi-4", "qwen2.5",
        "vicuna", "zephyr",
    }  # fmt: skip

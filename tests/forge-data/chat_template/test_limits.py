"""Templates that never end, or ask for more memory than there is, are stopped; others are not."""

import pytest
from jinja2 import Environment
from jinja2.exceptions import SecurityError

from forge_data import DataError, TemplateError, tokenize
from forge_data.chat_template import _limits, _template
from forge_data.chat_template._limits import CHARACTERS, LimitedEnvironment, LimitError
from forge_data.chat_template._template import ChatTemplate
from forge_data.chat_template._trace import render
from forge_data.chat_template._traced_jinja import compile_template
from forge_data.formats._samples import Chat

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over pairs": "{% for a in range(99999) %}{% for b, c in [[1, 2]] * 99999 %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop that calls itself": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
}
HUGE = {
    "times": "{{ 'x' * 10**11 }}",
    "times a variable": "{% set n = 10**11 %}{{ 'x' * n }}",
    "a list": "{{ [0] * 10**11 }}",
    "a power": "{{ 10**(10**10) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "a width as an argument": "{{ '%*d' % (10**9, 1) }}",
    "the method format": "{{ '{:>1000000000}'.format(1) }}",
    "a nested field": "{{ '{:>{}}'.format(1, 10**9) }}",
    "center": "{{ 'x' | center(10**12) }}",
    "methods": "{{ 'x'.ljust(10**11) }}",
    "zfill": "{{ messages[0].content.zfill(10**11) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "replace": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "nested replaces": "{{ 'a' | replace('', 'b' * 10**6) | replace('b', 'c' * 10**6) }}",
    "join": "{{ range(99999) | join('x' * 10**6) }}",
    "the method join": "{{ ('x' * 10**6).join(range(99999) | map('string')) }}",
    "tojson": "{{ {'a': range(9999) | list} | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "doubled text": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubled by tilde": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubled blocks": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}"
                      "{% set ns.s = s %}{% endfor %}",
    "doubled by with": "".join(f"{{% with s{n + 1} = s{n} + s{n} %}}" for n in range(60)).join(
        ["{% set s0 = 'x' %}", "{% endwith %}" * 60]
    ),
    "doubled by defaults": "{% macro f(s0='x'" + "".join(f", s{n + 1}=s{n} + s{n}" for n in range(60)) + ") %}{% endmacro %}"
                           "{{ f() }}",
    "doubled by loops": "".join(f"{{% for s{n + 1} in (s{n} + s{n}).split() %}}" for n in range(15)).join(
        ["{% set s0 = 'x' * 10**6 %}", "{% endfor %}" * 15]
    ),
    "one text joined": "{% set s = 'x' * 10**6 %}{{ ([s] * 10**6) | join }}",
    "one text joined by a method": "{% set s = 'x' * 10**6 %}{{ '-'.join([s] * 10**6) }}",
    "lists of one list": "{% set s = [0] * 10**6 %}{{ ([s] * 10**6) | map('list') | list }}",
    "upper case of one text": "{% set s = 'x' * 10**6 %}{{ ([s] * 10**6) | map('upper') | list }}",
    "a sum of lists": "{{ ([[0] * 10**4] * 10**6) | sum(start=[]) }}",
    "a width as a text": "{{ '{:{w}}'.format(1, w='9' * 9) }}",
    "a width in a list": "{{ '{:{w[0]}}'.format(1, w=[10**9]) }}",
    "a specification as a text": "{{ '{:{s}}'.format(1, s='>1000000000') }}",
    "methods of a long text": "{% set s = 'x' * 10**7 %}{% for i in range(99999) %}{{ s.upper()[:1] }}{% endfor %}",
    "doubled lists": "{% set ns = namespace(s=['x']) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "lists of lists": "{% set ns = namespace(s=['x']) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
                      "{{ ns.s }}",
    "lists of lists as JSON": "{% set ns = namespace(s=['x']) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
                              "{% endfor %}{{ ns.s | tojson }}",
    "much text": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "in a branch that is never taken": "{% if false %}{{ 'x' * 10**11 }}{% endif %}",
    "in a macro that is never called": "{% macro f() %}{{ '%1000000000d' | format(1) }}{% endmacro %}",
    "where the model is prompted": "{% if add_generation_prompt %}{% set n = 10**11 %}{{ 'x' * n }}{% endif %}",
}  # fmt: skip


def rendered(source, messages=MESSAGES, **variables):
    """Text of a template in the tracing environment."""
    template, _ = compile_template(source)
    return render(template, messages, variables).text


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_never_ends_is_stopped(name, monkeypatch):
    """Rounds of loops and calls have a limit, in whatever form they come."""
    monkeypatch.setattr(_limits, "STEPS", 20_000)
    with pytest.raises(LimitError, match="it may never end|it calls itself"):
        rendered(ENDLESS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_takes_all_memory_is_stopped(name, monkeypatch):
    """What one operation or many of them make has a limit, which is known before it is made."""
    monkeypatch.setattr(_limits, "STEPS", 200_000)
    with pytest.raises(LimitError, match="it may take all memory"):
        rendered(HUGE[name], add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS["a macro that calls itself twice"],
        HUGE["times a variable"],
        HUGE["the method format"],
        HUGE["in a branch that is never taken"],
        HUGE["where the model is prompted"],
    ],
)
def test_no_row_is_rendered_with_it(source, with_template, chat, monkeypatch):
    """The error names the template and says what to do; transformers, which has no limit, never gets it to render."""
    monkeypatch.setattr(_limits, "STEPS", 20_000)
    with pytest.raises(TemplateError, match="row: the chat template of .*(may never end|calls itself|may take all memory)"):
        tokenize(chat(("user", "hi"), ("assistant", "ho")), with_template(TURNS + source))


@pytest.mark.parametrize("source", ["{{ 'x'.encode().ljust(10**11) }}", "{{ (1).to_bytes(10**11, 'big') }}"])
def test_bytes_are_refused(source):
    """Methods that make bytes, whose own have no limit, cannot be called."""
    with pytest.raises(SecurityError, match="access to attribute '(encode|to_bytes)'"):
        rendered(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [1, 2.5] | sum }}", "3.5"),
        ("{{ [[1], [2]] | sum(start=[]) }}", "[1, 2]"),
        ("{{ messages | sum(attribute='n') }}", "3"),
    ],
)
def test_sums(source, text):
    """Sums of numbers, of an attribute and of lists are as jinja2 computes them."""
    messages = [{"n": 1}, {"n": 2}]
    assert rendered(source, messages) == Environment().from_string(source).render(messages=messages) == text


def test_what_loops_keep_is_no_argument():
    """A macro that is called in a loop over long messages counts what it is given, not all that the loop holds."""
    messages = [{"role": "user", "content": "word " * 1000} for _ in range(100)]
    source = (
        "{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages %}{% set all = messages %}"
        "{% for i in range(20) %}{% set own = all %}{{ f(i) }}{% endfor %}{% endfor %}"
    )
    assert len(rendered(source, messages)) == 100 * 30


def test_what_transformers_limits_itself(with_template, chat):
    """A range beyond the sandbox's own is an error of the template, and no memory is taken."""
    with pytest.raises(DataError, match="refuses the conversation: OverflowError: Range too big"):
        tokenize(chat(("user", "hi"), ("assistant", "ho")), with_template(TURNS + "{{ range(10**12) }}"))


@pytest.mark.slow
def test_a_long_conversation_is_within_the_limits():
    """Hundreds of long messages, each compared with all others and each appended to all before it, are rendered."""
    messages = [{"role": "user", "content": "word " * 200} for _ in range(600)]
    source = (
        "{% set ns = namespace(text='', n=0) %}{% for m in messages %}{% for o in messages %}{% endfor %}"
        "{% set ns.text = ns.text + m.content | trim + ', '.join(['a', 'b']) %}{% endfor %}{{ ns.text }}"
    )
    assert len(rendered(source, messages)) == 600 * (999 + 4)


def test_each_rendering_has_a_budget_of_its_own():
    """A hundred renderings that each take a part of the limit are as right as one."""
    template, _ = compile_template("{% for m in messages %}{{ ('x' * 10**7) | length }}{% endfor %}")
    assert {render(template, MESSAGES, {}).text for _ in range(20)} == {"1000000010000000"}
    assert CHARACTERS < 20 * 2 * 10**7


def test_filters_keep_what_jinja_passes_them():
    """A filter that asks for the context or the environment gets it still."""
    environment = LimitedEnvironment()
    assert environment.from_string("{{ [3, 1] | sort | first }}{{ ['a', 'b'] | map('upper') | join('-') }}").render() == "1A-B"


def test_many_rows_wait_for_the_error_of_the_first(with_template, chat, monkeypatch):
    """A batch is not rendered to its end for a template that never does: each row would take as long as the limit."""
    monkeypatch.setattr(_limits, "STEPS", 20_000)
    rendered = []
    monkeypatch.setattr(_template, "render", lambda *given: rendered.append(given) or render(*given))
    tokenizer = with_template(
        "{% for m in messages %}{% if m.content == 'on' %}" + ENDLESS["loops in loops"] + "{% endif %}.{% endfor %}"
    )
    turns = [chat(("user", text), ("assistant", "ho")) for text in ("hi", "on", "on", "on", "hi")]
    chats = [Chat(f"f:{number}", row["messages"]) for number, row in enumerate(turns)]
    found = ChatTemplate(tokenizer).render_batch(chats)
    assert [written is not None for written in found] == [True, False, False, False, False]
    assert len(rendered) == 2

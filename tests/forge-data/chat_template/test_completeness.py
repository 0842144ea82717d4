"""What a template leaves out of messages: reasoning is noted, anything else is refused."""

import pytest

from forge_data.chat_template._completeness import LeftOutError, dropped_reasoning, tool_names
from forge_data.chat_template._trace import render
from forge_data.chat_template._traced_jinja import compile_template

LOOP = "{% for m in messages %}<{{ m.role }}>"
THINK = "<think>\nhm\n</think>\n\nho"
LAST = "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
ANEW = (
    "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n"
    "{{ m.content.split('</think>')[-1] }}"
)


def check(body, message, *others):
    template = compile_template(LOOP + body + "|{% endfor %}")[0]
    trace = render(template, [message, *others], {})
    return dropped_reasoning(
        trace, 0, message, lambda field: render(template, [message | {field: "0"}, *others], {}).text != trace.text
    )


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ("{{ m.content }}", THINK),
        ("{{ m.content | trim }}", "  ho\n"),
        ("{{ m.content | tojson }}", 'say "hi"\n'),
        ("{{ '%s' % m.content }}", "ho"),
        (ANEW, THINK),
        ("{{ m.content }}", ""),
        ("", " \n"),
        # A block without reasoning in it is no reasoning that could be lost.
        (LAST, "<think>\n\n</think>\n\nho"),
    ],
)
def test_all_is_there(body, content):
    """Content as it is, stripped, as JSON, or with its tags written anew: nothing is left out."""
    assert check(body, assistant(content)) is None


@pytest.mark.parametrize("content", [THINK, "first <think>hm</think>ho", "hm</think>ho"])
def test_reasoning_in_the_content(content):
    """Reasoning that is left out as a whole, with everything before its end, is noted by field."""
    note = check(LAST, assistant(content))
    assert (note.rule, note.field) == ("reasoning_dropped", "messages[0].content")


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_in_a_field(name):
    """Reasoning in a field of its own is noted by the name that the row gives it."""
    message = assistant("ho", **{name: "hm"})
    assert check("{{ m.content }}", message).field == f"messages[0].{name}"
    assert check("{{ m." + name + " }}{{ m.content }}", message) is None


@pytest.mark.parametrize(
    ("body", "message", "lacks"),
    [
        (LAST, assistant("<think>a</think>b<|channel>c"), None),
        ("{{ m.content[3:] }}", assistant("oh no"), "'oh' of its content"),
        ("{{ m.content | upper }}", assistant("ho"), "'ho' of its content"),
        ("{{ m.content.split('</think>')[0] }}", assistant("<think>a</think>b"), "'</think>b' of its content"),
        (ANEW, assistant("x <think>a</think>b"), "'x <think>' of its content"),
        (ANEW, assistant("<think>a</think>b</think>c"), "'</think>b</think>' of its content"),
        # The words of the reasoning without its tags would be learned as the answer.
        (
            "{{ m.content.replace('<think>', '').replace('</think>', '') }}",
            assistant("<think>a</think>b"),
            "'<think>' of its content",
        ),
        ("{{ m.content }}{{ m.thinking[1:] }}", assistant("ho", thinking="hm"), "'h' of its thinking"),
        ("x", {"role": "user", "content": "hi"}, "'hi' of its content"),
        ("{{ m.content[1:] }}", {"role": "tool", "content": "<think>a</think>b"}, "'<' of its content"),
    ],
)
def test_refused(body, message, lacks):
    """Anything else that is left out, and a part of the reasoning, is refused with the text that is missing."""
    if lacks is None:
        assert check(body, message) is not None
        return
    with pytest.raises(LeftOutError) as caught:
        check(body, message)
    assert str(caught.value) == lacks


def test_words_of_another_turn_do_not_count():
    """The content of an answer must be in its own turn; equal text in another turn does not count."""
    with pytest.raises(LeftOutError):
        check("{{ m.content if m.role == 'user' else '' }}", assistant("ho"), {"role": "user", "content": "ho"})


def test_others_may_be_moved():
    """A message that is not learned as a turn may be anywhere in the text."""
    template = compile_template("{{ messages[0].content }}{% for m in messages[1:] %}<{{ m.content }}>{% endfor %}")[0]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert dropped_reasoning(render(template, messages, {}), 0, messages[0], lambda _: False) is None


def test_words_that_happen_to_be_there():
    """Equal text in the turn (its header, or the answer) does not prove that it came from the message."""
    with pytest.raises(LeftOutError):
        check("", assistant("assistant"))
    assert check("{{ m.content }}", assistant("no, ho", reasoning_content="ho")).field == "messages[0].reasoning_content"


CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": 'Par"is', "in": {"days": ["two"]}, "n": 3}},
}


@pytest.mark.parametrize(
    ("body", "lacks"),
    [
        ("{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}", None),
        ("{% for c in m.tool_calls %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
         "{% endfor %}{% endfor %}", None),
        ("", "'weather' of its tool_calls[0].function.name"),
        ("{{ m.tool_calls[0].function.name }}", "'city' of its tool_calls[0].function.arguments.city (its name)"),
        ("{{ m.tool_calls[0].function.name }} city in days n {{ m.tool_calls[0].function.arguments.city }}",
            "'two' of its tool_calls[0].function.arguments.in.days[0]"),
    ],
)  # fmt: skip
def test_tool_calls(body, lacks):
    """A call's name and the strings of its arguments must be in the text, as they are or as JSON."""
    message = {"role": "assistant", "tool_calls": [CALL]}
    if lacks is None:
        assert check(body, message) is None
        return
    with pytest.raises(LeftOutError) as caught:
        check(body, message)
    assert str(caught.value) == lacks


def test_names_of_tools():
    """Names are found in OpenAI's form of definitions and in bare ones; a definition without name has none."""
    assert tool_names([{"type": "function", "function": {"name": "f"}}, {"name": "g"}, {"x": 1}, "h"]) == ["f", "g"]

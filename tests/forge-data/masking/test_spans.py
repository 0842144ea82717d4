"""Which characters are learned: turns with their ends, contents alone, and spans that a template marks."""

import pytest

from forge_data import TemplateError, tokenize
from forge_data.formats._samples import Chat, Encoded
from forge_data.tokenizing._encoder import Encoder

LOOP = "{% for m in messages %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKS = (
    LOOP + "{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% endfor %}"
)
TALK = [("system", "s"), ("user", "hi"), ("assistant", "ho"), ("user", "and?"), ("assistant", "so")]


def encode(tokenizer, turns, *, form="auto", **expected):
    chat = Chat("f:1", [{"role": role, "content": content} for role, content in turns], **expected)
    (encoded,) = Encoder(tokenizer, turns=form).encode([chat])
    return encoded


def shown(tokenizer, encoded):
    """Return the text, with ⟦ ⟧ around what is learned."""
    (example,) = encoded.examples
    text, inside = "", False
    for token, label in zip(example.input_ids.tolist(), example.labels.tolist(), strict=True):
        if (label != -100) != inside:
            text, inside = text + ("⟧" if inside else "⟦"), not inside
        text += tokenizer.decode([token])
    return text + ("⟧" if inside else "")


def test_unmask(with_template):
    """instructlab's flag learns the content of every role but the system, and assistant turns with their ends."""
    tokenizer = with_template(LOOP + TURN + "{% endfor %}" + PROMPT)
    expected = shown(tokenizer, encode(tokenizer, TALK[:3], unmask=True))
    assert (
        expected == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n⟦hi⟧<|im_end|>\n<|im_start|>assistant\n⟦ho<|im_end|>⟧\n"
    )


def test_unmask_with_marks(with_template):
    """A template's marks are for answers; content of other roles is found as without marks."""
    tokenizer = with_template(MARKS + PROMPT)
    expected = shown(tokenizer, encode(tokenizer, TALK[1:3], unmask=True))
    assert expected == "<|im_start|>user\n⟦hi⟧<|im_end|>\n<|im_start|>assistant\n⟦ho<|im_end|>⟧\n"


def test_unmask_in_another_spelling(with_template):
    """Content written as JSON is found by its text where possible, and otherwise refused."""
    tokenizer = with_template(LOOP + TURN.replace("m.content", "(m.content | tojson)") + "{% endfor %}" + PROMPT)
    expected = shown(tokenizer, encode(tokenizer, TALK[1:3], unmask=True))
    assert expected == '<|im_start|>user\n"⟦hi⟧"<|im_end|>\n<|im_start|>assistant\n⟦"ho"<|im_end|>⟧\n'
    with pytest.raises(TemplateError, match="message 0: the template writes its content in another spelling"):
        encode(tokenizer, [("user", 'say "hi"'), ("assistant", "ho")], unmask=True)


def test_marks_of_everybody(with_template):
    """A template that marks every turn is taken at its word for turns that are to be learned, and no others."""
    tokenizer = with_template(MARKS + PROMPT)
    expected = shown(tokenizer, encode(tokenizer, TALK, trains=(True, True, False, True, True)))
    assert expected.count("⟦") == 1
    assert "⟦so<|im_end|>⟧" in expected


def test_marks_of_nobody(with_template):
    """A mark outside of the loop over messages belongs to the message in it, or else is undecidable."""
    by_words = with_template(
        "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
        "{{ messages[2].content }}{% generation %}{{ messages[3].content }}<|im_end|>{% endgeneration %}"
    )
    assert shown(by_words, encode(by_words, TALK[1:], trains=(True, False, True, True))) == "hihoand?⟦so<|im_end|>⟧"
    blind = with_template("{{ messages[0].content }}{% generation %}{{ messages[1].content ~ messages[3].content }}"
                          "{% endgeneration %}"
                          "{{ messages[2].content }}")  # fmt: skip
    assert shown(blind, encode(blind, TALK[1:])) == "hi⟦hoso⟧and?"
    with pytest.raises(TemplateError, match="marks text for learning without saying which message it is of"):
        encode(blind, TALK[1:], trains=(True, False, True, True))


def test_marks_without_an_end(with_template):
    """A mark that leaves out the turn's end is taken at its word, and noted."""
    tokenizer = with_template(
        MARKS.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|im_end|>") + PROMPT
    )
    encoded = encode(tokenizer, TALK[1:])
    assert "⟦ho⟧<|im_end|>" in shown(tokenizer, encoded)
    assert [(note.rule, note.field) for note in encoded.notes] == [
        ("untrained_turn_end", "messages[1]"), ("untrained_turn_end", "messages[3]"),
    ]  # fmt: skip


TOOLS_WITHIN = (
    LOOP + "{% if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
    "{% if loop.nextitem and loop.nextitem.role == 'tool' %}{{ 'TOOL ' + loop.nextitem.content }}{% endif %}{{ '\n' }}{% endif "
    "%}"
    "{% endfor %}" + PROMPT
)
WITH_A_TOOL = [("user", "hi"), ("assistant", "call"), ("tool", "42"), ("assistant", "so")]


def test_another_message_within_a_turn(with_template):
    """A turn that holds text of another message ends where the conversation up to it does, if the whole begins so."""
    tokenizer = with_template(TOOLS_WITHIN.replace("{{ '\n' }}", "") + "<|endoftext|>")
    refused = "message 1: within this turn the template writes text of another message: '42'"
    with pytest.raises(TemplateError, match=refused):
        encode(tokenizer, WITH_A_TOOL, form="history")
    last = encode(tokenizer, WITH_A_TOOL, form="history", trains=(True, False, True, True))
    assert "⟦so<|im_end|>⟧" in shown(tokenizer, last)
    tokenizer = with_template(TOOLS_WITHIN.replace("{{ '\n' }}", ""))
    assert shown(tokenizer, encode(tokenizer, WITH_A_TOOL)) == (
        "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n⟦call<|im_end|>⟧TOOL 42<|im_start|>assistant\n⟦so<|im_end|>⟧"
    )


def test_an_eos_after_the_last_turn(with_template):
    """A template that ends only the conversation: each turn alone ends with it; in history the others end with nothing."""
    tokenizer = with_template(
        LOOP
        + "{{ m.role + ':' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% else %}<|endoftext|>"
        "{% endif %}"
    )
    alone = [shown(tokenizer, Encoded((example,))) for example in encode(tokenizer, TALK[1:]).examples]
    assert alone == [
        "user:hi\nassistant:⟦ho\n<|endoftext|>⟧",
        "user:hi\nassistant:ho\nuser:and?\nassistant:⟦so\n<|endoftext|>⟧",
    ]
    encoded = encode(tokenizer, TALK[1:], form="history")
    assert shown(tokenizer, encoded) == "user:hi\nassistant:⟦ho⟧\nuser:and?\nassistant:⟦so\n<|endoftext|>⟧"
    assert [(note.rule, note.field) for note in encoded.notes] == [
        ("untrained_turn_end", "messages[1]"), ("not_as_prompted", "messages[1]"),
    ]  # fmt: skip
    ends_on_user = encode(tokenizer, TALK[1:4], form="history")
    assert shown(tokenizer, ends_on_user) == "user:hi\nassistant:⟦ho⟧\nuser:and?\n<|endoftext|>"


def test_an_eos_after_a_closed_turn(with_template):
    """An EOS after a turn that has its own end is the template's (Phi-3)."""
    tokenizer = with_template(
        LOOP
        + TURN
        + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}<|endoftext|>{% endif %}"
    )
    assert shown(tokenizer, encode(tokenizer, TALK[1:3])).endswith("⟦ho<|im_end|>⟧\n<|endoftext|>")


def test_a_turn_that_is_not_written(with_template):
    """An empty assistant turn that is not written out has nothing to learn."""
    tokenizer = with_template(LOOP + "{% if m.content %}" + TURN + "{% endif %}{% endfor %}" + PROMPT)
    encoded = encode(tokenizer, [("user", "hi"), ("assistant", "")])
    assert encoded.examples[0].loss_count == 0


def test_reasoning_notes(qwen3):
    """Reasoning left out of a learned turn is noted; of one that is not learned it does not matter."""
    turns = [("user", "hi"), ("assistant", "<think>\nhm\n</think>\n\nho"), ("user", "and?"), ("assistant", "so")]
    assert encode(qwen3, turns).notes == ()
    dropped = [(note.rule, note.field) for note in encode(qwen3, turns, form="history").notes]
    assert dropped == [("reasoning_dropped", "messages[1].content"), ("not_as_prompted", "messages[1]")]
    assert encode(qwen3, turns, form="history", first_completion=3).notes == ()


def test_calls_are_learned_and_results_are_not(with_template):
    """A call is learned with everything that the template writes of it, through the turn's end; its result is not."""
    tokenizer = with_template(
        LOOP + "{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% endfor %}" + PROMPT
    )
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}],
        },
        {"role": "tool", "content": "42<|im_end|>"},
        {"role": "assistant", "content": "so"},
    ]
    (encoded,) = Encoder(tokenizer).encode([Chat("f:1", messages)])
    assert shown(tokenizer, encoded) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        '⟦<call>{"name": "f", "arguments": {"x": "<|im_end|>"}}</call><|im_end|>⟧\n'
        "<|im_start|>tool\n42<|im_end|><|im_end|>\n<|im_start|>assistant\n⟦so<|im_end|>⟧\n"
    )
    assert encoded.examples[0].roles == ("user", "assistant", "tool", "assistant")


def test_a_comment_is_no_mark(with_template, chat):
    """A generation block in a comment or as text is no mark."""
    body = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = chat(("user", "hi"), ("assistant", "ho"))
    for before in ("{# uses no {% generation %} #}", "{% raw %}{% generation %}{% endraw %}"):
        tokenizer = with_template(before + body)
        example = tokenize(row, tokenizer)
        assert tokenizer.decode(example.labels[example.labels != -100].tolist()) == "ho<|im_end|>"


def test_unmask_leaves_out_what_stands_between(with_template):
    """Where a template writes a content twice with another message's between, only its own text is learned."""
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' %} [{{ messages[0].content }}] {{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [("system", "SYS"), ("user", "one"), ("assistant", "ho")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns], "unmask": True}
    example = tokenize(row, tokenizer)
    assert "SYS" not in tokenizer.decode(example.labels[example.labels != -100].tolist())


def test_a_turn_that_is_not_marked_is_noted(with_template):
    """An assistant turn that a marking template leaves out is noted."""
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|im_end|>{% elif m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Ulm"}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "ok"},
    ]
    (encoded,) = Encoder(tokenizer).encode([Chat("row", messages)])
    assert [(note.rule, note.field) for note in encoded.notes] == [("untrained_turn", "messages[1]")]


@pytest.mark.parametrize(("header", "expected"), [("<|im_start|>assistant\n", "ho<|im_end|>"), ("\n", "\nho<|im_end|>")])
def test_marks_that_take_in_a_header(header, expected, with_template):
    """Of a header that the template marks, what its prompt has is not learned; blanks alone are taken at its word."""
    before = "<|im_start|>assistant\n".removesuffix(header)
    tokenizer = with_template(
        LOOP + "{% if m.role == 'assistant' %}{{ '" + before.replace("\n", "\\n") + "' }}{% generation %}{{ '"
        + header.replace("\n", "\\n") + "' + m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}" + TURN
        + "{% endif %}{% endfor %}" + PROMPT
    )  # fmt: skip
    assert f"⟦{expected}⟧" in shown(tokenizer, encode(tokenizer, TALK[1:3]))

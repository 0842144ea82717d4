"""Where a header ends: the generation prompt, and what the template itself writes."""

import pytest

from forge_data import TemplateError
from forge_data.chat_template._header import Opening, Renderer, UndecidableError, opening
from forge_data.chat_template._trace import render
from forge_data.chat_template._traced_jinja import compile_template
from forge_data.formats._samples import Chat
from forge_data.tokenizing._encoder import Encoder

LOOP = "{% for m in messages %}"
END = "{{ m.content }}<|im_end|>\n{% endfor %}"


def opens(template):
    program, _ = compile_template(template)

    def native(messages, opening=False):
        return render(program, messages, {"add_generation_prompt": opening}).text

    return opening(Renderer(native, lambda messages: render(program, messages, {"add_generation_prompt": False})))


@pytest.mark.parametrize(
    ("turn", "prompt", "expected"),
    [
        ("<{{ m.role }}>\n", "<assistant>\n", Opening("<assistant>\n", "<assistant>\n")),
        # What the template writes after the header is the model's: it opens its reasoning.
        (
            "<{{ m.role }}>\n{% if m.role == 'assistant' %}<think>\n{% endif %}",
            "<assistant>\n",
            Opening("<assistant>\n", "<assistant>\n"),
        ),
        # A prompt that opens the reasoning is longer than the header of a turn that has none.
        ("<{{ m.role }}>", "<assistant><think>\n", Opening("<assistant><think>\n", "<assistant>")),
        # Blanks after the header are written in either place.
        ("{{ m.role }}: ", "assistant:\n", Opening("assistant:\n", "assistant:")),
        (" ", "", Opening("", "")),
        # Not how this turn begins; others may.
        ("<{{ m.role }}>\n<think></think>", "<assistant>\n<think>\n", Opening("<assistant>\n<think>\n", None)),
    ],
)
def test_openings(turn, prompt, expected):
    """The header is the generation prompt, as far as the turn begins with it."""
    assert (
        opens(LOOP + turn + END + "{% if add_generation_prompt %}{{ '" + prompt.replace("\n", "\\n") + "' }}{% endif %}")
        == expected
    )


def test_an_eos_in_the_way():
    """An EOS after a conversation without generation prompt does not hide that prompt."""
    made = opens(LOOP + "<{{ m.role }}>" + END + "{% if add_generation_prompt %}<assistant>{% else %}</s>{% endif %}")
    assert made == Opening("<assistant>", "<assistant>")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP + "<{{ m.role }}>" + END, "opens the turn with '<assistant>', but not when add_generation_prompt asks"),
        ("{% if add_generation_prompt %}x{% endif %}" + LOOP + END, "with add_generation_prompt it writes 'x0"),
        ("{{ messages[0].content }}{% if add_generation_prompt %}x{% endif %}", "no loop of the template over its messages"),
    ],
)
def test_no_telling(template, why):
    """A template whose header is not its generation prompt leaves open where the header ends."""
    with pytest.raises(UndecidableError, match=why):
        opens(template)


def learned(tokenizer, messages):
    (encoded,) = Encoder(tokenizer).encode([Chat("f:1", messages)])
    labels = encoded.examples[0].labels
    return tokenizer.decode(labels[labels != -100].tolist())


def test_the_prompt_of_this_very_place(with_template):
    """Where a template opens a turn differently after a tool result, the prompt at that place decides."""
    tokenizer = with_template(
        LOOP + "{% if m.role == 'assistant' and loop.previtem.role == 'tool' %}{{ '|' + m.content }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '|' if messages[-1].role == 'tool' else '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("tool", "c"), ("assistant", "d"))
    ]
    assert learned(tokenizer, messages) == "b<|im_end|>d<|im_end|>"


def test_what_stands_before_the_header(chatml_tokenizer):
    """An assistant that speaks first has its header after the template's own system message; only its content is learned."""
    wanted = [{"role": "assistant", "content": "welcome"}, {"role": "user", "content": "hi"}]
    assert learned(chatml_tokenizer, wanted) == "welcome<|im_end|>"
    wanted[0]["content"] = ""
    assert learned(chatml_tokenizer, wanted) == "<|im_end|>"


def test_reasoning_in_every_turn(with_template):
    """Where the prompt opens the reasoning, turns with reasoning begin as it does; turns without it are undecidable."""
    tokenizer = with_template(
        LOOP + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{{ '<think>\n' + m.thinking + '\n</think>' if m.thinking else '<think></think>' }}{% endif %}{{ m.content "
        "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif "
        "%}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "thinking": "hm", "content": "b"}]
    assert learned(tokenizer, messages) == "hm\n</think>b<|im_end|>"
    with pytest.raises(TemplateError, match=r"prompts for message 1 with .*<think>\\n', and writes .*<think></think>b"):
        learned(tokenizer, [messages[0], {"role": "assistant", "content": "b"}])


def test_a_name_in_the_header(with_template):
    """A name in a header is learned where the prompt leaves it to the model; where the prompt has another, it is refused."""
    turn = "{{ '<|im_start|>' + m.role + ' ' + (m.name or 'x') + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant PROMPT' }}{% endif %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]
    with pytest.raises(TemplateError, match="prompts for message 1 with .*assistant y.*and writes .*assistant x"):
        learned(with_template(LOOP + turn + prompt.replace("PROMPT", "y\n")), messages)
    assert learned(with_template(LOOP + turn + prompt.replace("PROMPT", "x\n")), messages) == "b<|im_end|>"
    assert learned(with_template(LOOP + turn + prompt.replace(" PROMPT", "")), messages) == " x\nb<|im_end|>"


def test_a_template_that_needs_more_than_a_question(with_template):
    """Where the short conversation is refused, the prompt of each place decides."""
    tokenizer = with_template(
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + LOOP +
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("assistant", "b"))]
    assert learned(tokenizer, messages) == "b<|im_end|>"

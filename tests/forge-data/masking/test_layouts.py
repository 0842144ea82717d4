"""What is known of a conversation's roles never changes a sample: each row is as it is alone, whatever rows came before."""

from itertools import permutations

import pytest

from forge_data.formats._samples import Chat, Preference
from forge_data.masking._layouts import Layout
from forge_data.tokenizing._encoder import Encoder

from ..families import FAMILIES

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SWITCHED = "{% if enable_thinking is defined %}<|im_start|>system\nthink: {{ enable_thinking }}<|im_end|>\n{% endif %}"
SWITCHED_BY_CONTENT = (
    "{% if enable_thinking is defined and not enable_thinking and messages[0].content.startswith('no') %}<|im_start|>system\n"
    "/no_think<|im_end|>\n{% endif %}"
)
BLOCK_BY_CONTENT = (
    "{% set block = '<think>\n\n</think>\n\n' if LOOKS else '' %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ (block if m.role == 'assistant' else '') ~ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ block }}{% endif %}"
)


def answer(question, text):
    return Chat("f:1", [{"role": "user", "content": question}, {"role": "assistant", "content": text}], first_completion=1)


def pair(question, chosen, rejected):
    return Preference("f:1", answer(question, chosen), answer(question, rejected))


def encoded(encoder, sample):
    (made,) = encoder.encode([sample])
    return [(each.input_ids.tolist(), each.labels.tolist()) for each in made.examples], made.forms


@pytest.mark.parametrize(
    ("source", "samples"),
    [
        (SWITCHED + TURNS + PROMPT, [answer("a", "<think>b</think>c"), answer("d", "e")]),
        (SWITCHED + TURNS + PROMPT, [pair("a", "<think>b</think>c", "d"), answer("e", "f"), pair("g", "h", "i")]),
        (SWITCHED_BY_CONTENT + TURNS + PROMPT, [answer("yes", "a"), answer("no", "b")]),
        *[
            (BLOCK_BY_CONTENT.replace("LOOKS", looks), [answer("yes", "a"), answer("...no...", "b"), answer("!!!", "c")])
            for looks in (
                "'no' in (messages[0].content | safe)",
                "(('a' | e) + messages[0].content) | length > 5",
                "(('a' | tojson) + messages[0].content) | length > 7",
                "not messages[0].content.strip('!')",
                "'x' != messages[0].content in 'a!!!'",
            )
        ],
    ],
)
def test_rows_before_change_nothing(with_template, source, samples):
    """Text and labels of a row are those that it has alone: in any order, with reasoning before it, on templates that look."""
    tokenizer = with_template(source)
    alone = [encoded(Encoder(tokenizer), sample) for sample in samples]
    for order in permutations(range(len(samples))):
        encoder = Encoder(tokenizer)
        assert [encoded(encoder, samples[at]) for at in order] == [alone[at] for at in order], order


@pytest.mark.parametrize(("family", "arguments"), [("qwen3", {"enable_thinking": False}), ("llama-3.1", {})])
def test_roles_are_known(family, arguments):
    """Prompts of a family's conversations are rendered for one row, with the arguments that rows without reasoning get."""
    encoder = Encoder(FAMILIES[family].tokenizer())
    encoder.encode([answer("a", "b"), answer("c", "d")])
    (known,) = encoder._conversations._layouts._known.values()
    assert isinstance(known, Layout)
    assert known.arguments == arguments


def test_a_switch_that_changes_nothing(with_template):
    """Roles are known also where a template reads a switch that makes no difference to them."""
    encoder = Encoder(with_template("{% if tools and enable_thinking %}think{% endif %}" + TURNS + PROMPT))
    encoder.encode([answer("a", "b")])
    (known,) = encoder._conversations._layouts._known.values()
    assert isinstance(known, Layout)
    assert known.arguments == {}

"""The token that ends an answer is known of a chat template, or nothing is said."""

import pytest

from forge_data import chat_templates, load_tokenizer, prepare, turn_end
from forge_data.tokenizing._chat_template import with_template
from forge_data.tokenizing._named_templates import text_of

from ..families import FAMILIES

BARE = {"chatml": "chatml", "llama3": "llama-3", "gemma": "gemma", "zephyr": "zephyr", "alpaca": "mistral"}
"""Named template -> a family that has its tokens."""
ENDS = {
    **dict.fromkeys(("chatml", "phi-4", "qwen2.5", "qwen3", "smollm3"), "<|im_end|>"),
    **dict.fromkeys(("llama-3", "llama-3-generation", "llama-3.1"), "<|eot_id|>"),
    **dict.fromkeys(("gemma", "gemma-3"), "<end_of_turn>"),
    **dict.fromkeys(("llama-2", "mistral", "mistral-nemo", "zephyr", "vicuna"), None),  # the EOS, whatever it is
    "phi-3": "<|end|>",
    "deepseek-r1-distill": "<｜end▁of▁sentence｜>",
    "granite-3.3": "<|end_of_text|>",
    "command-r": "<|END_OF_TURN_TOKEN|>",
    "gpt-oss": "<|return|>",
}
"""Family -> what ends its turns where the EOS is another token."""
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def base(*special, plain=()):
    """A tokenizer of ChatML's tokens and others, whose EOS ends no turn."""
    made = FAMILIES["chatml"].tokenizer()
    made.add_special_tokens({"eos_token": "<|another|>"})
    made.add_tokens(list(special), special_tokens=True)
    made.add_tokens(list(plain))
    return made


def test_named_templates(tmp_path, write_rows):
    """It is known without a tokenizer, of a stored one too."""
    for name, row in chat_templates().items():
        assert turn_end(with_template(FAMILIES[BARE[name]].tokenizer(), name).chat_template) == row.end
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    store = prepare(write_rows(rows), base(), tmp_path / "s", chat_template="chatml", progress=False)
    assert turn_end(load_tokenizer(store.path / "tokenizer").chat_template) == "<|im_end|>"
    assert turn_end(FAMILIES["qwen3"].tokenizer().chat_template) is None
    assert turn_end(None) is turn_end({"default": text_of("chatml")}) is turn_end(None, base()) is turn_end("", base()) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_makers_templates(family):
    """Of each family it is the token that its makers end a turn with, and None where that is the EOS."""
    tokenizer = FAMILIES[family].tokenizer()
    eos = tokenizer.eos_token
    assert turn_end(tokenizer.chat_template, tokenizer) == (
        ENDS[family] if eos != ENDS[family] or family == "llama-3" else None
    )
    tokenizer.add_special_tokens({"eos_token": "<|another|>"})
    assert turn_end(tokenizer.chat_template, tokenizer) == ENDS[family]


def test_a_template_of_a_file():
    """It is read with the tokenizer given, which stays as it is; of several templates the default one is."""
    tokenizer = base("<|stop|>")
    before = tokenizer.chat_template
    assert turn_end(LOOP.replace("END", "<|stop|>\n") + ASK, tokenizer) == "<|stop|>"
    assert tokenizer.chat_template == before
    chosen = with_template(base(), text_of("chatml").replace("<|im_end|>", "<|im_end|>{{ x }}"), None) if False else tokenizer
    assert turn_end({"default": LOOP.replace("END", "<|stop|>\n") + ASK, "tool_use": ASK}, chosen) == "<|stop|>"


@pytest.mark.parametrize(
    "end",
    [
        "\n",  # none
        "<|gone|>",  # in pieces
        "</turn>",  # no special token
        "<|stop|><|im_end|>",  # two
        "<|im_end|><|another|>",  # one before the EOS
        "{{ '<|im_end|>' if loop.last else '<|stop|>' }}",  # another one at the end
        "{{ '<|im_end|>' if loop.first or loop.length == 2 else '' }}",  # not always
        "{{ '<|im_end|>' if m.role == 'user' else '' }}",  # of the user alone
        "!<|im_end|>",  # behind text of the template's own
    ],
)
def test_what_is_left_as_it_is(end):
    """Where not one special token, and nothing else, follows the content of each answer, nothing is guessed."""
    assert turn_end(LOOP.replace("END", end) + ASK, base("<|stop|>", plain=["</turn>"])) is None


def test_a_token_that_also_ends_a_part_of_an_answer():
    """What stands behind the reasoning as well ends no answer; without reasoning in the template it does."""
    template = LOOP.replace(
        "{{ m.content }}", "{% if m.reasoning_content %}{{ m.reasoning_content }}MARK{% endif %}{{ m.content }}"
    )
    marked = template.replace("END", "<|im_end|>\n") + ASK
    assert turn_end(marked.replace("MARK", "<|im_end|>"), base()) is None
    assert turn_end(marked.replace("MARK", "\n"), base()) == "<|im_end|>"


def test_a_token_that_stands_before_bare_tool_calls():
    """An answer of tool calls alone goes on behind a token that ends all others, which so ends none."""
    calls = "{% for call in m.tool_calls %}({{ call.function.name }}{{ call.function.arguments }}){% endfor %}"
    bare = "{% if m.tool_calls and not m.content %}MARK{% endif %}"
    template = LOOP.replace("{{ m.content }}END", "{{ m.content }}" + bare + calls + "<|im_end|>\n") + ASK
    assert turn_end(template.replace("MARK", "<|im_end|>"), base()) is None
    assert turn_end(template.replace("MARK", "\n"), base()) == "<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        "{% if",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.nothing.at_all }}",
        "plain text",
        "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{% for i in range(10 ** 9) %}x{% endfor %}{% endfor %}",
    ],
)
def test_templates_that_cannot_be_learned_from(template):
    """They end nothing, and nothing is raised."""
    assert turn_end(template, base()) is None


def test_an_unknown_token_ends_nothing():
    """A tokenizer that writes its unknown token for a mark has no token for it."""
    tokenizer = base()
    tokenizer.add_special_tokens({"unk_token": "<|im_end|>"})
    assert turn_end(LOOP.replace("END", "<|im_end|>\n") + ASK, tokenizer) is None

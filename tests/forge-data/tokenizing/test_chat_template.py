"""A chat template and arguments of the user's choice: rows are written with them, and the tokenizer keeps them."""

import json
import os

import pytest

from forge_data import DataError, DataSettings, TemplateError, load_tokenizer, prepare, prepare_prompts, tokenize
from forge_data.tokenizing._chat_template import with_template

from ..families import FAMILIES, TEMPLATES

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
QUESTION = ROW["messages"][:1]


@pytest.fixture(scope="module")
def qwen():
    return FAMILIES["qwen3"].tokenizer()


def asked(tokenizer, **given):
    return tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **given)


def test_a_file(qwen, tmp_path):
    """A template in a file takes the place of the tokenizer's; the tokenizer that was given keeps its own."""
    chosen = with_template(qwen, str(TEMPLATES / "zephyr.jinja"))
    assert asked(chosen) == "<|user|>\nHi<|im_end|>\n<|assistant|>\n"
    example = tokenize(ROW, qwen, chat_template=TEMPLATES / "chatml.jinja")
    assert qwen.decode(example.labels[example.labels != -100]) == "Hello.<|im_end|>"
    assert with_template(qwen, None, {}) is qwen


def test_an_error_names_the_template_that_was_given(qwen, tmp_path):
    """What a file refuses is not said of the model's own template."""
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no systems') }}")
    with pytest.raises(DataError, match=r"row: the chat template \S+t\.jinja refuses the conversation: no systems"):
        tokenize(ROW, qwen, chat_template=tmp_path / "t.jinja")


def test_a_name():
    """A name is that of one of the tokenizer's own templates; another one is refused with the names that there are."""
    tokenizer = FAMILIES["command-r"].tokenizer()
    assert with_template(tokenizer, "tool_use").chat_template == tokenizer.chat_template["tool_use"]
    with pytest.raises(TemplateError, match="`chat_template` is 'rag'.*own are called default, tool_use"):
        with_template(tokenizer, "rag")


@pytest.mark.parametrize("value", [False, "no", [1, None], {"a": 'say "x" %}', "é": True}, 0.5])
def test_arguments_are_defaults(qwen, value):
    """Arguments hold wherever the template is rendered without them, and what a row or caller gives wins."""
    qwen = with_template(qwen, None)
    template = (
        "{% if add_generation_prompt %}{{ effort | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    chosen = with_template(with_source(qwen, template), None, {"effort": value})
    assert json.loads(asked(chosen).removesuffix("Hi")) == value
    assert asked(chosen, effort=3) == "3Hi"


@pytest.mark.parametrize("start", ["\n{{ a }}", "  {{ a }}", "\n\n{% if a %}", "  {% if a %}", "\n  {%- if a %}"])
def test_a_template_begins_as_it_does_alone(qwen, start):
    """Defaults of arguments take no blanks from the beginning of the template, nor add any."""
    source = start + "{% if b %}b{% endif %}" + "{% endif %}" * start.count("if") + "{{ messages[0].content }}"
    given = {"a": True, "b": True}
    chosen = with_template(with_source(qwen, source), None, given)
    assert asked(chosen) == asked(with_source(qwen, source), **given)


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "tokenize"])
def test_what_is_no_argument(qwen, name):
    """What a row may not give its template, a run may not either: it would be without effect."""
    with pytest.raises(DataError, match=f"`chat_template_kwargs` has '{name}', which is no argument of a template"):
        tokenize(ROW, qwen, chat_template_kwargs={name: True})


def test_a_token_of_the_tokenizer(qwen):
    """A special token, which templates are always given, is no default."""
    template = "{{ eos_token }}" + FAMILIES["chatml"].template
    with pytest.raises(TemplateError, match="`chat_template_kwargs` has 'eos_token', which the tokenizer itself gives"):
        with_template(with_source(qwen, template), None, {"eos_token": "</s>"})


NO_JSON = {"nan": float("nan"), "inf": [float("inf")], "set": {1, 2}, "keys": {1: 1, "a": 2}, "surrogate": "\ud800"}


@pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON)
def test_a_value_that_is_no_json(qwen, value):
    """A value that neither a template nor a manifest can hold is refused by name."""
    with pytest.raises(DataError, match="`chat_template_kwargs` has 'enable_thinking' with a value that is no JSON"):
        tokenize(ROW, qwen, chat_template_kwargs={"enable_thinking": value})


def with_source(tokenizer, source):
    made = FAMILIES["qwen3"].tokenizer()
    made.chat_template = source
    return made


def test_what_no_template_reads(qwen, tmp_path):
    """Arguments that nothing reads, files that are no template and templates that are missing are refused by setting."""
    with pytest.raises(TemplateError, match="`chat_template_kwargs` has 'enable_thinkin'.*did you mean 'enable_thinking'"):
        with_template(qwen, None, {"enable_thinkin": True})
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}", encoding="utf-8")
    with pytest.raises(TemplateError, match="is no Jinja template"):
        with_template(qwen, str(broken))
    with pytest.raises(TemplateError, match="cannot be read as a file"):
        tokenize(ROW, qwen, chat_template=str(tmp_path / "none.jinja"))
    os.mkfifo(tmp_path / "pipe.jinja")
    with pytest.raises(TemplateError, match="cannot be read as a file .it is a named pipe, and to read one may never end"):
        tokenize(ROW, qwen, chat_template=str(tmp_path / "pipe.jinja"))
    with pytest.raises(DataError, match="system_prompt.* which cannot be read: it is a named pipe"):
        tokenize(ROW, qwen, system_prompt=f"file:{tmp_path / 'pipe.jinja'}")
    with pytest.raises(DataError, match="`chat_template_kwargs` is a list of 1"):
        tokenize(ROW, qwen, chat_template_kwargs=["x"])
    bare = with_source(qwen, None)
    with pytest.raises(TemplateError, match="the tokenizer has none; give `chat_template`"):
        with_template(bare, None, {"x": 1})


def test_a_store_asks_as_it_was_trained(qwen, tmp_path, write_rows):
    """A store's tokenizer has the template, the arguments, and the thinking that all of its rows have."""
    rows = write_rows([ROW])
    thinking = prepare(rows, qwen, tmp_path / "on", chat_template_kwargs={"enable_thinking": True}, progress=False)
    assert asked(thinking.tokenizer()) == asked(qwen)
    assert not thinking.accounting.forms
    assert thinking.settings["chat_template_kwargs"] == {"enable_thinking": True}
    plain = prepare(rows, qwen, tmp_path / "plain", progress=False)
    assert plain.accounting.forms == {"enable_thinking=false": 1}
    assert asked(plain.tokenizer()) == asked(qwen, enable_thinking=False) != asked(qwen)
    assert asked(plain.tokenizer(), enable_thinking=True) == asked(qwen)
    mixed = [ROW, {"messages": [*QUESTION, ROW["messages"][1] | {"reasoning_content": "Greet."}]}]
    both = prepare(write_rows(mixed, "both.jsonl"), qwen, tmp_path / "both", progress=False)
    assert asked(both.tokenizer()) == asked(qwen)
    assert len({store.inputs for store in (thinking, plain)}) == 2
    prompts = prepare_prompts(
        write_rows([{"prompt": QUESTION}], "prompts.jsonl"),
        qwen,
        tmp_path / "prompts",
        chat_template=TEMPLATES / "zephyr.jinja",
    )
    assert load_tokenizer(prompts.path / "tokenizer").decode(prompts[0].input_ids) == "<|user|>\nHi<|im_end|>\n<|assistant|>\n"


def test_words_of_a_shell():
    """NAME=VALUE words are a mapping, as a recipe has it; what is neither is refused."""
    words = DataSettings(data_path="x", chat_template_kwargs=["enable_thinking=false", "effort=low"])
    assert words.chat_template_kwargs == {"enable_thinking": False, "effort": "low"}
    assert DataSettings(data_path="x", chat_template_kwargs="a=1").chat_template_kwargs == {"a": 1}
    with pytest.raises(TypeError, match="chat_template_kwargs must be a mapping"):
        DataSettings(data_path="x", chat_template_kwargs="a")

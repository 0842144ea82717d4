"""A chat template by name writes the published text, and what is learned is what the model is asked for with it."""

import pytest

from forge_data import TemplateError, add_tokens, chat_templates, tokenize
from forge_data.tokenizing._chat_template import with_template
from forge_data.tokenizing._named_templates import CHAT_TEMPLATES, text_of

from ..families import FAMILIES, TEMPLATES

USER, BOT, AGAIN, LAST = (
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello.\nYou?"},
    {"role": "user", "content": "Fine"},
    {"role": "assistant", "content": "Good"},
)
SYSTEM = {"role": "system", "content": "Be brief."}
TALKS = [[USER, BOT], [USER, BOT, AGAIN, LAST], [SYSTEM, USER, BOT, AGAIN, LAST]]
FAMILY = {"chatml": "chatml", "llama3": "llama-3", "gemma": "gemma", "zephyr": "zephyr", "alpaca": "mistral"}
# LLaMA-Factory's slots of the templates that it writes over a tokenizer's own (src/llamafactory/data/template.py, 0.9.5).
SLOTS = {
    "chatml": {
        "system": "<|im_start|>system\n{}<|im_end|>\n",
        "user": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "assistant": "{}<|im_end|>\n",
    },
    "alpaca": {
        "default": "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
        "system": "{}\n\n",
        "user": "### Instruction:\n{}\n\n### Response:\n",
        "assistant": "{}</s>\n\n",
    },
}
PUBLISHED = {"llama3": "llama-3", "gemma": "gemma", "zephyr": "zephyr"}


def bare(name):
    """A tokenizer with the tokens of a template, and without a template."""
    made = FAMILIES[FAMILY[name]].tokenizer()
    made.chat_template = None
    return made


def written(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


def talks(name):
    return [talk for talk in TALKS if not (name == "gemma" and talk[0] is SYSTEM)]


def test_every_name_is_tested():
    """Each has a text, a source, and an oracle below."""
    assert set(FAMILY) == set(chat_templates()) == {*SLOTS, *PUBLISHED}
    assert all(row.source and text_of(name) for name, row in CHAT_TEMPLATES.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_text_is_the_published_one(name):
    """What is written is what the makers' own template writes, with and without the prompt of an answer."""
    ours, theirs = with_template(bare(name), name), with_template(bare(name), str(TEMPLATES / f"{PUBLISHED[name]}.jinja"))
    for talk in talks(name):
        for asked in (False, True):
            assert written(ours, talk, add_generation_prompt=asked) == written(theirs, talk, add_generation_prompt=asked)


@pytest.mark.parametrize("name", SLOTS)
def test_the_text_is_that_of_the_slots(name):
    """What is written is what LLaMA-Factory joins of its slots, but for blanks at the end, and a BOS before them."""
    slots, tokenizer = SLOTS[name], with_template(bare(name), name)
    for talk in talks(name):
        first = "" if talk[0] is SYSTEM or "default" not in slots else slots["system"].format(slots["default"])
        whole = first + "".join(slots[message["role"]].format(message["content"]) for message in talk)
        bos = "<s>" if name == "alpaca" else ""
        assert written(tokenizer, talk).rstrip() == bos + whole.rstrip()
        prompt = first + "".join(slots[message["role"]].format(message["content"]) for message in talk[:-1])
        assert written(tokenizer, talk[:-1], add_generation_prompt=True) == bos + prompt


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_learned_as_asked(name):
    """Each answer is learned with the token that ends it, behind the prompt with which it will be asked, token by token."""
    tokenizer = bare(name)
    end = CHAT_TEMPLATES[name].end or tokenizer.eos_token
    chosen = with_template(tokenizer, name)
    for talk in talks(name):
        example = tokenize({"messages": talk}, tokenizer, chat_template=name)
        learned = example.labels != -100
        answers = "".join(message["content"] + end for message in talk if message["role"] == "assistant")
        assert tokenizer.decode(example.labels[learned]) == answers
        prompt = chosen.apply_chat_template(talk[:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
        assert example.input_ids[: len(prompt)].tolist() == prompt
        assert learned[len(prompt)]
        assert not learned[len(prompt) - 1]


@pytest.mark.parametrize("name", [name for name, row in CHAT_TEMPLATES.items() if row.tokens])
def test_tokens_that_are_lacking(name, tmp_path):
    """A tokenizer without the marks is refused with what adds them, and takes the template once it has them."""
    row = {"messages": TALKS[0]}
    tokenizer = bare("alpaca")
    with pytest.raises(
        TemplateError, match=rf"`chat_template` {name} writes .*add_special_tokens=\[.*or take zephyr or alpaca"
    ):
        tokenize(row, tokenizer, chat_template=name)
    add_tokens(tokenizer, special=CHAT_TEMPLATES[name].tokens)
    example = tokenize(row, tokenizer, chat_template=name)
    assert tokenizer.convert_ids_to_tokens([int(example.labels[example.labels != -100][-1])]) == [CHAT_TEMPLATES[name].end]


def test_special_tokens_that_are_lacking():
    """A template that writes the EOS needs one."""
    tokenizer = bare("alpaca")
    tokenizer.eos_token = None
    with pytest.raises(TemplateError, match="`chat_template` zephyr writes the tokenizer's eos_token, and it has none"):
        with_template(tokenizer, "zephyr")


@pytest.mark.parametrize("name", ["chatlm", "ChatML"])
def test_a_name_that_is_none(name):
    """A name that is misspelt is answered with the nearest."""
    with pytest.raises(TemplateError, match="one of the names chatml, llama3, gemma, zephyr, alpaca; did you mean 'chatml'"):
        with_template(bare("chatml"), name)

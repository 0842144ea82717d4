"""Questions → ids: the template's generation prompt, and text that continues."""

import pytest
from tokenizers import processors

from forge_data import DataError, TemplateError
from forge_data.formats.questions._prompts import question
from forge_data.tokenizing._prompt_encoder import PromptEncoder

from ..families import FAMILIES

USER = {"role": "user", "content": "What is 2 + 2?"}
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, USER]


def ids(tokenizer, *rows):
    asked = [question(f"f:{at}", row) for at, row in enumerate(rows, 1)]
    return [each.tolist() for each in PromptEncoder(tokenizer).encode(asked)]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_as_the_model_is_asked(name):
    """For every family of templates the ids are those of its own `apply_chat_template` with the generation prompt."""
    tokenizer = FAMILIES[name].tokenizer()
    for messages in ([USER], MESSAGES):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids(tokenizer, {"messages": messages}, {"prompt": messages}) == [expected, expected]


def test_thinking_or_not():
    """A row can switch a template's reasoning off: its generation prompt then holds an empty block."""
    tokenizer = FAMILIES["qwen3"].tokenizer()
    plain, off = ids(tokenizer, {"messages": [USER]}, {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}})
    assert tokenizer.decode(plain).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(off).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(TemplateError, match="f:1: .* reads no argument 'enable_thinkin' .* did you mean 'enable_thinking'"):
        ids(tokenizer, {"messages": [USER], "chat_template_kwargs": {"enable_thinkin": False}})


def test_refused_by_row(with_template):
    """A template that refuses a conversation is reported with its own error and the row; a missing one with what to do."""
    strict = with_template("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x")
    with pytest.raises(DataError, match="f:2: .* refuses the conversation: no system"):
        ids(strict, {"messages": [USER]}, {"prompt": [{"role": "system", "content": "s"}, USER]})
    with pytest.raises(TemplateError, match="has no chat template"):
        ids(with_template(None), {"messages": [USER]})


def test_text_goes_on(families):
    """Text gets the tokenizer's BOS; an EOS that it adds is removed, one within the text is not."""
    tokenizer = families["llama-3"].tokenizer()
    eos, bos = tokenizer.eos_token, tokenizer.bos_token
    pieces = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (eos, bos)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=pieces)
    alone = tokenizer("What is 2?", add_special_tokens=False)["input_ids"]
    first, last = tokenizer.convert_tokens_to_ids(bos), tokenizer.eos_token_id
    assert ids(tokenizer, {"prompt": "What is 2?"}) == [[first, *alone]]
    assert ids(tokenizer, {"prompt": f"What is 2?{eos}"}) == [[first, *alone, last]]
    assert ids(tokenizer, {"prompt": f"What is 2?{eos}{eos}"}) == [[first, *alone, last, last]]


def test_both_kinds_at_once(chatml_tokenizer):
    """Text and messages in one batch keep their order, and each is what it is alone."""
    rows = [{"prompt": "a"}, {"messages": [USER]}, {"prompt": "b c"}, {"prompt": MESSAGES}, {"prompt": "é 🎈"}]
    assert ids(chatml_tokenizer, *rows) == [ids(chatml_tokenizer, row)[0] for row in rows]

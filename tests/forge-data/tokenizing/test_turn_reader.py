"""Turns of a model as messages, and observations as the tokens between turns."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forge_data import TemplateError, TurnReader

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m.get('tool_calls') or [] %}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = CHATML.replace(
    "CALL",
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ (c.function.arguments | tojson) + '}\n</tool_call>' }}",
)
LISTS = CHATML.replace(
    "CALL", "{{ '[CALLS] [' + ({'name': c.function.name, 'parameters': c.function.arguments} | tojson) + ']' }}"
)
# As DeepSeek's: what is not the last answer is written without its reasoning.
STRIPS = CHATML.replace("(m['content'] or '')", "(m['content'] if loop.last else (m['content'] or '').split('</think>')[-1])")
NO_END = CHATML.replace("<|im_end|>\n", "\n")


def tokenizer_with(template):
    """A tokenizer of bytes with three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = template
    return fast


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [CHATML, HERMES, STRIPS])
def test_an_observation_continues_the_conversation(template):
    """Prompt, turn and observation, joined, are what the template writes of the whole conversation."""
    tokenizer = tokenizer_with(template)
    reader = TurnReader(tokenizer, end_ids=[tokenizer.eos_token_id])
    asked = [{"role": "user", "content": "2 + 3?"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    turn = [*ids_of(tokenizer, "it is 6"), tokenizer.eos_token_id]
    for observation in (
        "no",
        [{"role": "tool", "content": "5"}],
        [{"role": "tool", "content": "5"}, {"role": "user", "content": "?"}],
    ):
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        whole = tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": "it is 6"}, *messages], tokenize=False, add_generation_prompt=True
        )
        joined = [*ids_of(tokenizer, prompt), *turn, *reader.observation(observation).tolist()]
        assert joined == ids_of(tokenizer, whole)


def test_text_is_appended_as_it_is():
    """Without a chat an observation is its text alone."""
    tokenizer = tokenizer_with(CHATML)
    reader = TurnReader(tokenizer, end_ids=[2])
    assert reader.observation(" and then?", chat=False).tolist() == ids_of(tokenizer, " and then?")
    assert reader.message([*ids_of(tokenizer, "six"), 2], chat=False) == {"role": "assistant", "content": "six"}
    with pytest.raises(TemplateError, match="return text"):
        reader.observation([{"role": "tool", "content": "5"}], chat=False)


@pytest.mark.parametrize(("template", "arguments"), [(HERMES, "arguments"), (LISTS, "parameters")])
def test_calls_are_parsed_as_the_template_writes_them(template, arguments):
    """A message with calls, as its template writes it, is read back; what is no JSON is text."""
    tokenizer = tokenizer_with(template)
    reader = TurnReader(tokenizer, end_ids=[2])
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [3, {"c": "}"}]}}}]
    asked = [{"role": "user", "content": "2 + 3?"}]
    opening = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(
        [*asked, {"role": "assistant", "content": "let me see", "tool_calls": calls}], tokenize=False
    )
    turn = ids_of(tokenizer, whole[len(opening) :].rstrip("\n"))
    assert reader.message(turn) == {"role": "assistant", "content": "let me see", "tool_calls": calls}
    broken = ids_of(tokenizer, '<tool_call>\n{"name": "add", [CALLS] [{"name"') + [2]
    assert "tool_calls" not in reader.message(broken)
    assert reader.message([*ids_of(tokenizer, "plain {} text"), 2]) == {"role": "assistant", "content": "plain {} text"}
    assert arguments in json.dumps(whole)


def test_a_template_that_ends_turns_otherwise_is_refused():
    """The model would go on from what no template writes."""
    tokenizer = tokenizer_with(NO_END)
    with pytest.raises(TemplateError, match="which ends no completion"):
        TurnReader(tokenizer, end_ids=[2]).observation("no")

"""Tool calls over real chat templates: any call is learned as the template writes it, and its result is not."""

import json
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from forge_data import tokenize

from ..families import FAMILIES
from ..golden import disagreements, native
from ..nasty import BLANKS, LOOK_ALIKES, WORDS

TEXT = st.lists(st.sampled_from([*LOOK_ALIKES, *WORDS, *BLANKS]), max_size=4).map("".join)
LEAF = st.one_of(TEXT, st.integers(-9, 9), st.booleans(), st.none())
VALUES = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=5)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}


def qwen(arguments, result, answer):
    yield f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call><|im_end|>', True
    yield f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n", False
    yield f"{answer}<|im_end|>", True
    yield "\n", False


def llama(arguments, result, answer):
    yield f'{{"name": "weather", "parameters": {arguments}}}<|eot_id|>', True
    # A string is iterable, so this template writes results as JSON.
    written = json.dumps(result, ensure_ascii=False)
    yield (
        f"<|start_header_id|>ipython<|end_header_id|>\n\n{written}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        False,
    )
    yield f"{answer.strip()}<|eot_id|>", True


def mistral(arguments, result, answer):
    yield f'[TOOL_CALLS][{{"name": "weather", "arguments": {arguments}, "id": "call00001"}}]</s>', True
    yield f'[TOOL_RESULTS]{{"content": {result}, "call_id": "call00001"}}[/TOOL_RESULTS]', False
    yield f"{answer}</s>", True


def harmony(arguments, result, answer):
    yield f" to=functions.weather<|channel|>commentary json<|message|>{arguments}<|call|>", True
    written = json.dumps(result, ensure_ascii=False)
    yield f"<|start|>functions.weather to=assistant<|channel|>commentary<|message|>{written}<|end|><|start|>assistant", False
    yield f"<|channel|>final<|message|>{answer}<|return|>", True


ACCOUNTS = {"qwen2.5": qwen, "llama-3.1": llama, "mistral-nemo": mistral, "gpt-oss": harmony}


@cache
def tokenizer_of(family):
    return FAMILIES[family].tokenizer()


@pytest.mark.parametrize("family", sorted(ACCOUNTS))
@settings(max_examples=60)
@given(question=TEXT, arguments=ARGUMENTS, result=TEXT, answer=TEXT)
def test_any_call(family, question, arguments, result, answer):
    """Arguments as OpenAI's JSON string reach the template as an object, and all that it writes of them is learned."""
    called = {"name": "weather", "arguments": json.dumps(arguments)}
    row = {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", "type": "function", "function": called}]},
            {"role": "tool", "tool_call_id": "call00001", "content": result},
            {"role": "assistant", "content": answer},
        ],
        "tools": [TOOL],
    }
    tokenizer = tokenizer_of(family)
    text = native(tokenizer, row, tokenize=False)
    expected = list(ACCOUNTS[family](json.dumps(arguments, ensure_ascii=False), result, answer))
    tail = "".join(part for part, _ in expected)
    assert text.endswith(tail)
    example = tokenize(row, tokenizer)
    assert example.input_ids.tolist() == native(tokenizer, row)
    assert disagreements(tokenizer, example, [(text[: len(text) - len(tail)], False), *expected]) == []

"""Fields of a request: each has an effect on its answer, or one error says that it has none."""

from __future__ import annotations

from typing import Any

import pytest

from forge.talking._request_fields import Drawing, read_fields
from forge.talking._requests import BadRequest

KNOWN = {
    *("model", "messages", "temperature", "top_p", "stop", "seed", "max_tokens", "max_completion_tokens", "n", "tools", "user"),
    *("logprobs", "response_format", "tool_choice", "logit_bias", "frequency_penalty", "presence_penalty", "stream"),
}


def test_what_is_drawn_otherwise_than_transformers_does() -> None:
    """A temperature draws by chance, penalties are no repetition penalty, and the seed is set where it is drawn."""
    asked = {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "top_k": 4, "stop": "x", "max_tokens": 5}
    passed, drawing = read_fields({"messages": [], **asked, "logit_bias": {"7": 1}, "user": None, "n": 1}, KNOWN)
    assert drawing == Drawing(sampled=True, seed=3, frequency_penalty=0.5, top_k=4, stop=("x",), length=5, biased={7: 1.0})
    assert passed == {"messages": [], "temperature": 0.7, "max_tokens": 5, "stream": False}


def test_several_answers_and_log_probabilities() -> None:
    """Under OpenAI's names for a conversation and for a text; each answer has a seed of its own."""
    passed, drawing = read_fields({"n": 3, "seed": 5, "logprobs": True, "top_logprobs": 2}, KNOWN)
    assert (drawing.choices, drawing.logprobs, passed) == (3, 2, {"stream": False})
    assert [drawing.of_choice(number).seed for number in range(3)] == [5, 6, 7]
    assert read_fields({"logprobs": True}, KNOWN)[1].logprobs == 0
    assert read_fields({"logprobs": 0}, KNOWN, "prompt")[1].logprobs == 0
    assert read_fields({"logprobs": False, "n": None}, KNOWN, "prompt")[1] == Drawing()
    for body, asked, said in (
        ({"n": 2}, "input", "n: 2 would have no effect here; ask several times"),
        ({"logprobs": True, "stream": True}, "messages", "logprobs: are not given in a stream; leave stream out"),
        ({"logprobs": 6}, "prompt", "logprobs: 6 is no whole number from 0 to 5"),
        ({"logprobs": True}, "prompt", "logprobs: True is no whole number"),
        ({"prompt": {"id": "p"}}, "input", "prompt: {'id': 'p'} would have no effect here; send the text itself as input"),
        ({"chat_template_kwargs": {}}, "prompt", "chat_template_kwargs: no field of this server"),
    ):
        with pytest.raises(BadRequest) as caught:
            read_fields(body, {*KNOWN, "prompt"}, asked)
        assert said in caught.value.as_json()["error"]["message"]


def test_what_the_model_decides() -> None:
    """Without a temperature its own settings; at 0, or next to it, the likeliest token."""
    assert read_fields({}, KNOWN)[1].sampled is None
    tools = [{"type": "function", "function": {"name": "f"}}]
    passed, drawing = read_fields({"temperature": 1e-9, "stop": [], "tools": tools, "tool_choice": "none"}, KNOWN)
    assert (passed, drawing.sampled) == ({"temperature": 0.0, "stream": False}, False)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("n", 0, "n: 0 is no whole number from 1 to 128"),
        ("best_of", 2, "best_of: 2 would have no effect here; ask several times"),
        ("logprobs", 3, "logprobs: 3 is neither true nor false"),
        ("top_logprobs", 2, "top_logprobs: needs logprobs: true"),
        ("top_logprobs", 21, "top_logprobs: 21 is no whole number from 0 to 20"),
        ("response_format", {"type": "json_object"}, "would have no effect here"),
        ("tool_choice", "required", "would have no effect here"),
        ("reasoning_effort", "high", '"chat_template_kwargs": {"reasoning_effort": ...}'),
        ("previous_response_id", "resp_1", "send the whole conversation"),
        ("temprature", 1, "temprature: no field of this server; is temperature meant?"),
        ("foo", 1, "foo: no field of this server; leave it out"),
        ("max_tokens", 0, "max_tokens: 0 is no whole number from 1"),
        ("max_tokens", True, "max_tokens: True is no whole number from 1"),
        ("temperature", -1, "temperature: -1 is no number from 0"),
        ("temperature", float("nan"), "temperature: nan is no number from 0"),
        ("temperature", "hot", "temperature: 'hot' is no number from 0"),
        ("top_p", 2, "top_p: 2 is no number from 0 to 1"),
        ("presence_penalty", 3, "presence_penalty: 3 is no number from -2 to 2"),
        ("seed", 2**64, "is no whole number from -9223372036854775808 to 9223372036854775807"),
        ("stop", [""], "stop: [''] is no text"),
        ("stop", 5, "stop: 5 is no text"),
        ("stream", "no", "stream: 'no' is neither true nor false"),
        ("logit_bias", {"a": 1}, "logit_bias: {'a': 1} must be {\"token id\": number}"),
        ("logit_bias", {"1": "x"}, "logit_bias.1: 'x' is no number from -100 to 100"),
        ("chat_template_kwargs", [1], "is no object of arguments of the chat template"),
        ("chat_template_kwargs", {"tokenize": False}, "tokenize is no argument of a chat template"),
        ("logit_bias", {"\u0661": 1}, 'must be {"token id": number}'),
        ("prompt", "\ud800", "prompt: is no UTF-8"),
        (
            "prompt",
            ["hi"],
            "prompt: ['hi'] is no text; one text is taken, and no list of texts or of token ids; ask once for each",
        ),
        ("prompt", {"a": 1}, "prompt: {'a': 1} is no text; give one in quotes"),
        ("instructions", 5, "instructions: 5 is no text"),
        ("suffix", "x", "suffix: 'x' would have no effect here; write the prompt with the model's own words for a gap"),
        ("reasoning", {"effort": "high"}, "give it to the template"),
        ("verbosity", "low", "verbosity: 'low' would have no effect here"),
        ("tools", 5, "tools: 5 is no list of tools"),
        ("tools", [{"type": "function"}], "tools[0]: {'type': 'function'} is no function; a tool is "),
        ("tools", [{"type": "web_search"}], "tools[0]: {'type': 'web_search'} is no function; a tool is "),
    ],
)
def test_what_would_have_no_effect(field: str, value: Any, said: str) -> None:
    """Nothing is passed over, and no value ends in status 500."""
    with pytest.raises(BadRequest) as caught:
        read_fields({field: value}, {*KNOWN, "prompt", "instructions", "suffix", "reasoning", "verbosity"})
    assert said in caught.value.as_json()["error"]["message"]


def test_two_lengths_are_refused() -> None:
    """transformers' server took one of them without a word; the same number twice is one."""
    with pytest.raises(BadRequest, match="is 4, and max_completion_tokens is 9; both say how long an answer may be") as caught:
        read_fields({"max_completion_tokens": 9, "max_tokens": 4}, KNOWN)
    assert caught.value.param == "max_tokens"
    assert read_fields({"max_tokens": 4, "max_completion_tokens": 4}, KNOWN)[1].length == 4

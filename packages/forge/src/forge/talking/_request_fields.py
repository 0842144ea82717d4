"""Fields of a request → how its answer is drawn, or an error for what has no effect.

transformers' server passes over what it does not know how to do (several answers, log-probabilities, a format), draws without
chance whatever the temperature where the model's own settings say so, and answers status 500 to numbers out of range.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import attrs

from forge.talking._requests import BadRequest, check_text

_NO_PART = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "stream_options", "stream", "model"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
}
"""Fields that have no part in an answer, or are read as they are."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "text": ({"format": {"type": "text"}}, {}),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "suffix": ("",),
    "reasoning": ({},),
}
"""Fields that the server knows one value of → it. None is as if the field were not there."""
_NEVER = (
    *("audio", "prediction", "web_search_options", "reasoning_effort", "previous_response_id", "conversation"),
    *("max_tool_calls", "verbosity", "moderation", "access_programs", "background_options", "context_management", "image"),
)
_CHOICES = {"messages": ("n", "logprobs", "top_logprobs"), "prompt": ("n", "logprobs")}
"""Field of what is asked → fields of several answers and log-probabilities, which such a request may have."""
_MOST_CHOICES, _MOST_LIKELIEST = 128, {"messages": 20, "prompt": 5}
_INSTEAD = {
    "n": "ask several times",
    "best_of": "ask several times",
    "reasoning": 'give it to the template: "chat_template_kwargs": {"reasoning_effort": ...}, where that has it',
    "suffix": "write the prompt with the model's own words for a gap, if it has such",
    "prompt": "send the text itself as input",
    "reasoning_effort": 'give it to the template: "chat_template_kwargs": {"reasoning_effort": ...}, where that has it',
    "previous_response_id": "send the whole conversation; none is kept",
    "conversation": "send the whole conversation; none is kept",
}
_ELSEWHERE = "leave it out, or serve the model with vLLM"
_OWN = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "chat_template_kwargs")
"""Fields beside those that transformers knows, with vLLM's names."""
_ELSEWHERE_READ = ("seed", "stop", "logit_bias")
"""Fields that `Drawing` has, and transformers' server does not read of every request."""
_OF_TEMPLATES = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "load_audio_from_video"),
    *(
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
    ),
    *("tokenizer_kwargs", "tools", "truncation"),
}
"""Arguments of `apply_chat_template` that are none of a template's."""
_LEAST = 1e-3
"""Temperature below which the likeliest token is taken."""
_SEEDS = 1 << 63
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@attrs.frozen(kw_only=True)
class Drawing:
    """How an answer is drawn, beside what transformers' server reads itself."""

    sampled: bool | None = None
    """Whether tokens are drawn by chance; None: as the model's own settings have it."""
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    length: int | None = None
    """Tokens that the answer may have, where the request says so."""
    biased: Mapping[int, float] = attrs.field(factory=dict)
    """Tokens whose logits are changed → what is added to them."""
    choices: int = 1
    """Answers that are drawn, one after another."""
    logprobs: int | None = None
    """Likeliest tokens that each token's log-probability is given with; None for no log-probabilities."""

    def of_choice(self, number: int) -> Drawing:
        """Return how one of several answers is drawn: with a seed of its own, where there is one."""
        return self if self.seed is None else attrs.evolve(self, seed=self.seed + number)


def read_fields(body: Mapping[str, Any], known: Collection[str], asked: str = "messages") -> tuple[dict[str, Any], Drawing]:
    """Check the fields of a request, but its messages.

    Args:
        body: of the request.
        known: fields that transformers' server reads of it.
        asked: field of what is asked: messages, prompt, or input.

    Returns:
        The body that transformers' server is given, and what it is not.

    Raises:
        BadRequest: a field that is not known, or a value that would have no effect or end in status 500.
    """
    given = {name: value for name, value in body.items() if value is not None}
    own = _OWN if asked != "prompt" else _OWN[:-1]  # a text has no template
    for name, value in given.items():
        if name not in {*known, *own, *_NO_PART, *_ONLY, *_NEVER}:
            near = get_close_matches(name, [*known, *own], 1)
            raise BadRequest(f"no field of this server{f'; is {near[0]} meant?' if near else '; leave it out'}", name)
        if name in _CHOICES.get(asked, ()):
            continue
        if (
            name in _NEVER
            or (name == "prompt" and asked == "input")
            or (name in _ONLY and not any(value == each for each in _ONLY[name]))
        ):
            raise BadRequest(f"{_short(value)} would have no effect here; {_INSTEAD.get(name, _ELSEWHERE)}", name)
    _check_flag(given, "stream")
    for name in ("prompt", "input", "instructions", "suffix"):
        if isinstance(given.get(name), str):
            check_text(given[name], name)
        elif name in given and name in ("prompt", "instructions"):
            several = isinstance(given[name], list)
            told = (
                "one text is taken, and no list of texts or of token ids; ask once for each"
                if several
                else "give one in quotes"
            )
            raise BadRequest(f"{_short(given[name])} is no text; {told}", name)
    temperature = _number(given, "temperature", 0)
    _number(given, "top_p", 0, 1)
    drawing = Drawing(
        sampled=None if temperature is None else temperature >= _LEAST,
        seed=_whole(given, "seed", -_SEEDS, _SEEDS - 1),
        top_k=_whole(given, "top_k", -1),
        min_p=_number(given, "min_p", 0, 1),
        repetition_penalty=_number(given, "repetition_penalty", 0.01),
        presence_penalty=_number(given, "presence_penalty", -2, 2) or 0.0,
        frequency_penalty=_number(given, "frequency_penalty", -2, 2) or 0.0,
        stop=_stops(given),
        length=min((found for name in _LENGTHS if (found := _whole(given, name, 1)) is not None), default=None),
        biased=_biased(given),
        choices=(_whole(given, "n", 1, _MOST_CHOICES) or 1) if asked in _CHOICES else 1,
        logprobs=_logprobs(given, asked) if asked in _CHOICES else None,
    )
    _check_lengths(given)
    _check_template_arguments(given)
    _check_tools(given)
    passed = {
        name: value for name, value in given.items() if name in known and name not in (*_OWN[:5], *_ONLY, *_ELSEWHERE_READ)
    }
    if "chat_template_kwargs" in given:
        passed["chat_template_kwargs"] = given["chat_template_kwargs"]
    if temperature is not None and temperature < _LEAST:
        passed["temperature"] = 0.0
    if given.get("tool_choice") == "none":
        passed.pop("tools", None)
    passed["stream"] = given.get("stream", False)
    return passed, drawing


def _logprobs(given: Mapping[str, Any], asked: str) -> int | None:
    """Return how many likeliest tokens are given with each, None for no log-probabilities."""
    most = _MOST_LIKELIEST[asked]
    if asked == "prompt":
        wanted = None if given.get("logprobs") is False else _whole(given, "logprobs", 0, most)
    else:
        _check_flag(given, "logprobs")
        likeliest = _whole(given, "top_logprobs", 0, most)
        if likeliest and not given.get("logprobs"):
            raise BadRequest("needs logprobs: true, without which nothing is given", "top_logprobs")
        wanted = (likeliest or 0) if given.get("logprobs") else None
    if wanted is not None and given.get("stream"):
        raise BadRequest("are not given in a stream; leave stream out", "logprobs")
    return wanted


def _check_flag(given: Mapping[str, Any], name: str) -> None:
    if not isinstance(given.get(name, False), bool):
        raise BadRequest(f"{_short(given[name])} is neither true nor false", name)


def _number(given: Mapping[str, Any], name: str, least: float, most: float | None = None) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < least
        or value > (most or value)
    ):
        raise BadRequest(f"{_short(value)} is no number {_bounds(least, most)}", name)
    return float(value)


def _whole(given: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or value > (most or value):
        raise BadRequest(f"{_short(value)} is no whole number {_bounds(least, most)}", name)
    return value


def _check_lengths(given: Mapping[str, Any]) -> None:
    """Refuse two lengths of an answer, of which transformers' server would take one."""
    first, *others = [name for name in _LENGTHS if name in given] or [""]
    for name in others:
        if given[name] != given[first]:
            raise BadRequest(
                f"is {given[first]}, and {name} is {given[name]}; both say how long an answer may be: give one", first
            )


def _bounds(least: float, most: float | None) -> str:
    return f"from {least}" + ("" if most is None else f" to {most}")


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise BadRequest(f"{_short(value)} is no text, and no list of texts, each with a character at least", "stop")
    return tuple(stops)


def _biased(given: Mapping[str, Any]) -> dict[int, float]:
    value = given.get("logit_bias", {})
    if not isinstance(value, Mapping) or not all(each.isascii() and each.isdecimal() for each in value):
        raise BadRequest(f'{_short(value)} must be {{"token id": number}}', "logit_bias")
    named = {f"logit_bias.{token}": each for token, each in value.items()}
    return {int(name.rpartition(".")[2]): _number(named, name, -100, 100) or 0.0 for name in named}


def _check_tools(given: Mapping[str, Any]) -> None:
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise BadRequest(f"{_short(tools)} is no list of tools", "tools")
    for number, tool in enumerate(tools):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        function = tool.get("function", tool) if kind == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            shown = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
            raise BadRequest(
                f"{_short(tool)} is no function; a tool is {shown}, and this server has none of its own", f"tools[{number}]"
            )


def _check_template_arguments(given: Mapping[str, Any]) -> None:
    value = given.get("chat_template_kwargs", {})
    if not isinstance(value, Mapping):
        raise BadRequest(f"{_short(value)} is no object of arguments of the chat template", "chat_template_kwargs")
    if others := sorted(_OF_TEMPLATES & value.keys()):
        raise BadRequest(f"{others[0]} is no argument of a chat template; leave it out", "chat_template_kwargs")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"

"""Traces with tool calls → prompts that each ask for one call, and the reward for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_OBJECT = re.compile(r"\{")


def call_prompts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Divide a trace: a prompt before each turn that calls a tool, with the expected call."""
    messages = row.get("messages") or row.get("conversations") or []
    found = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") or ([{"function": message["function_call"]}] if message.get("function_call") else [])
        if message.get("role") != "assistant" or not calls:
            continue
        function = calls[0].get("function") or calls[0]
        prompt = {"prompt": list(messages[:place]), "expected_name": function["name"]}
        prompt["expected_arguments"] = json.dumps(_arguments(function.get("arguments")), sort_keys=True)
        if row.get("tools"):
            prompt["tools"] = row["tools"]
        found.append(prompt)
    return found


def tool_call(
    prompts: Sequence[Any],  # noqa: ARG001 - every reward is given them
    completions: Sequence[Any],
    expected_name: Sequence[str],
    expected_arguments: Sequence[str],
    **_columns: object,
) -> list[float]:
    """Reward 1 for the expected tool with its arguments, 0.5 for the tool alone, else 0."""
    return [
        _score(completion, name, json.loads(arguments))
        for completion, name, arguments in zip(completions, expected_name, expected_arguments, strict=True)
    ]


def _score(completion: Any, name: str, arguments: Mapping[str, Any]) -> float:
    called = _call(completion)
    if called is None or called[0] != name:
        return 0.0
    return 1.0 if _comparable(called[1]) == _comparable(arguments) else 0.5


def _call(completion: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the first call of a completion: of its `tool_calls`, or JSON in its text."""
    for message in completion if isinstance(completion, list) else [{"content": completion}]:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            return str(function.get("name")), _arguments(function.get("arguments"))
        text = str(message.get("content") or "")
        for start in _OBJECT.finditer(text):
            try:
                found, _ = json.JSONDecoder().raw_decode(text, start.start())
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict) and isinstance(found.get("name"), str):
                return found["name"], _arguments(found.get("arguments", found.get("parameters")))
    return None


def _arguments(given: Any) -> Mapping[str, Any]:
    """Return arguments as a mapping, also where they were written as text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {}
    return given if isinstance(given, Mapping) else {}


def _comparable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in which a number and the text of it are the same."""

    def plain(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return float(value)
        except ValueError:
            return value.strip()

    return {name: plain(value) for name, value in arguments.items()}

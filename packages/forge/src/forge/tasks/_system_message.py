"""System message of training rows: that of their store, and `system_prompt` before prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forge_data

PROMPT_FILE = "forge_system_prompt.json"
"""File of an export with the `system_prompt` that its model was trained with."""
_LOOKED_AT = 100
_SYSTEM, _USER = "forge-system-message", "forge-user-message"
"""Texts that a template is rendered with to see what it writes around a system message."""


def with_system_prompt(prompt: Any, text: str | None) -> Any:
    """Put `system_prompt` before a prompt, text or messages, without a system message.

    >>> with_system_prompt("Which fruit?", "Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Which fruit?'}]
    """
    if text is None or (not isinstance(prompt, str) and has_system_message(prompt)):
        return prompt
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": text}, *asked]


def write_system_prompt(folder: Path, text: str) -> None:
    """Write the file that says how the model of an export is asked."""
    content = json.dumps({"system_prompt": text}, ensure_ascii=False, indent=2)
    (folder / PROMPT_FILE).write_text(content + "\n", encoding="utf-8")


def has_system_message(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether messages have one of the system, or of OpenAI's developer."""
    return any(message.get("role") in ("system", "developer") for message in messages)


def shared_beginning(store: forge_data.TokenStore) -> Any | None:
    """Return the rows' tokens up to the end of their system message, where all have the same.

    A hundred rows, spread over the store, stand for all. None where a row has no system message, or another one.
    """
    count = min(len(store), _LOOKED_AT)
    found = None
    for at in range(count):
        example = store[at * len(store) // count]
        first = next((index for index, role in enumerate(example.roles) if role != "template"), None)
        if first is None or example.roles[first] != "system":
            return None
        beginning = example.input_ids[: example.segments[first, 1]]
        if found is not None and not np.array_equal(found, beginning):
            return None
        found = beginning
    return found


def shared_system(store: forge_data.TokenStore, tokenizer: Any) -> str | None:
    """Return the system message that the rows share; None where they share none.

    The text is one that gives their very tokens.
    """
    beginning = shared_beginning(store)
    if beginning is None or not tokenizer.chat_template:
        return None
    before, _, after = _rendered(tokenizer, _SYSTEM).partition(_SYSTEM)
    text = tokenizer.decode(beginning, clean_up_tokenization_spaces=False).removeprefix(before)
    end = after.partition(_USER)[0]
    written = next((end[:size] for size in range(len(end), 0, -1) if text.endswith(end[:size])), "")
    text = text.removesuffix(written)
    given = tokenizer(_rendered(tokenizer, text), add_special_tokens=False)["input_ids"]
    return text if text.strip() and given[: len(beginning)] == beginning.tolist() else None


def _rendered(tokenizer: Any, system: str) -> str:
    turns = [{"role": "system", "content": system}, {"role": "user", "content": _USER}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001 - a template raises what it likes, such as for a system message
        return ""

"""Rows of a question and its demonstration → prompts of a student and of its teacher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

import forge_data
from forge._errors import SettingsError
from forge.tasks.items._items import Ints
from forge.tasks.items._prompts import Prompts

ANSWER = "completion"
"""Column of the demonstration."""


def split_answer(row: dict[str, Any]) -> dict[str, Any]:
    """Move the last answer of a conversation to the row's completion; other rows stay."""
    messages = row.get("messages")
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError:
            return row
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return row
    if messages[-1].get("role") != "assistant" or ANSWER in row:
        return row
    rest = {name: value for name, value in row.items() if name != "messages"}
    return {**rest, "prompt": messages[:-1], ANSWER: [messages[-1]]}


class Demonstrations(Prompts):
    """Prompts with a demonstration each, and room for a completion of the student.

    Args:
        store: of prompts, with the column `completion`.
        template: what the teacher is asked in place of the last question, with {prompt} and {demonstration}.
        max_new_tokens: of a completion.

    Raises:
        SettingsError: a row without a demonstration, or whose prompt cannot be written with one.

    """

    def __init__(self, store: forge_data.PromptStore, *, template: str, max_new_tokens: int) -> None:
        super().__init__(store, max_new_tokens=max_new_tokens)
        tokenizer = store.tokenizer()
        self._teacher = [self._taught(index, tokenizer, template) for index in range(len(store))]
        teacher = np.array([len(ids) for ids in self._teacher], dtype=np.int64)
        # Each is computed twice: as the student is asked and as the teacher is. Rows are packed by the longer.
        self.lengths = self.longest = np.maximum(store.lengths, teacher) + max_new_tokens

    def teacher_ids(self, indices: Sequence[int] | Ints) -> list[Any]:
        """Return int32[S] of each prompt as the teacher is asked."""
        return [self._teacher[int(i)] for i in indices]

    def size(self, index: int) -> str:
        """Return the largest length of a prompt with its demonstration and completion, in words."""
        return f"{self.source(index)} may have {self.lengths[index]:,} tokens with its demonstration and its completion"

    def _taught(self, index: int, tokenizer: Any, template: str) -> Any:
        prompt = self.store[index]
        demonstration = _text(prompt.columns.get(ANSWER))
        where = self.source(index)
        if demonstration is None:
            raise SettingsError(
                f"{where}: has no demonstration: a row has `prompt` and `completion`, texts or messages, or `messages` that "
                "end with the assistant's answer."
            )
        # What the store holds is compared, so that both are asked in the same way but for the demonstration.
        if not np.array_equal(_ids(tokenizer, prompt.prompt, prompt.columns), prompt.input_ids):
            raise SettingsError(
                f"{where}: its prompt cannot be written a second time as it was tokenized, so that the teacher would be "
                "asked in another way: leave out chat_template_kwargs, or write the prompt as text."
            )
        asked = prompt.prompt
        if isinstance(asked, str):
            return _ids(tokenizer, _filled(template, asked, demonstration), prompt.columns)
        at = max((k for k, message in enumerate(asked) if message["role"] == "user"), default=None)
        question = None if at is None else _text([asked[at]])
        if at is None or question is None:
            raise SettingsError(f"{where}: has no question in words, in whose place the teacher could be shown an example.")
        changed = {**asked[at], "content": _filled(template, question, demonstration)}
        return _ids(tokenizer, [*asked[:at], changed, *asked[at + 1 :]], prompt.columns)


def _filled(template: str, prompt: str, demonstration: str) -> str:
    """Put both texts into the template, in one pass: neither is searched for the other's place."""
    parts = {"{prompt}": prompt, "{demonstration}": demonstration}
    first, second = sorted(parts, key=template.index)
    before, _, rest = template.partition(first)
    between, _, after = rest.partition(second)
    return before + parts[first] + between + parts[second] + after


def _ids(tokenizer: Any, prompt: Any, columns: Any) -> Any:
    """Tokenize a prompt as `forge_data.prepare_prompts` does."""
    if isinstance(prompt, str):
        found = tokenizer(prompt, return_offsets_mapping=True)
        ids = list(found["input_ids"])
        last = max((k for k, (begin, end) in enumerate(found["offset_mapping"]) if begin != end), default=0)
        while len(ids) > last + 1 and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
        return np.asarray(ids, np.int32)
    more = dict(columns.get("chat_template_kwargs") or {})
    more |= {name: columns[name] for name in ("tools", "documents") if columns.get(name)}
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **more)
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _text(answer: Any) -> str | None:
    """Return an answer, a text or messages, as text; None where there is none."""
    if isinstance(answer, dict):
        answer = [answer]
    if isinstance(answer, list):
        parts = []
        for message in answer:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            parts += [content or "", json.dumps(calls, ensure_ascii=False) if calls else ""]
        answer = "\n".join(part for part in parts if part)
    return answer if isinstance(answer, str) and answer.strip() else None

"""Rows of a question and its demonstration → prompts of a student and of its teacher."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import attrs
import numpy as np

import forge_data
from forge._errors import SettingsError
from forge.tasks.items._items import Ints
from forge.tasks.items._media import MediaRows, PromptMedia, media_names
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
        template: what the teacher is asked in place of the last question, with {prompt} and {demonstration}; images of the
            question stay where they are in it.
        max_new_tokens: of a completion.
        placeholders: what the chat template writes for media; none where no row has some.

    Raises:
        SettingsError: a row without a demonstration, or whose prompt cannot be written with one.

    """

    def __init__(
        self, store: forge_data.PromptStore, *, template: str, max_new_tokens: int, placeholders: Sequence[str] = ()
    ) -> None:
        super().__init__(store, max_new_tokens=max_new_tokens)
        tokenizer = store.tokenizer()
        self._placeholders = placeholders
        self.teacher_media: PromptMedia | None = None
        """Of the prompts as the teacher is asked."""
        self._teacher = [self._taught(index, tokenizer, template) for index in range(len(store))]
        teacher = np.array([len(ids) for ids in self._teacher], dtype=np.int64)
        # Each is computed twice: as the student is asked and as the teacher is. Rows are packed by the longer.
        self.lengths = self.longest = np.maximum(store.lengths, teacher) + max_new_tokens

    def with_media(self, inputs: forge_data.MediaInputs, rows: MediaRows) -> Self:
        """Return the same prompts, whose completions are given their images, of student and teacher."""
        same = super().with_media(inputs, rows)
        same.teacher_media = PromptMedia(
            self.store, inputs, lambda row: attrs.evolve(self.store[row], input_ids=self._teacher[row])
        )
        return same

    def both_media(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the images of prompts, of student and teacher, as arguments of `taught_batches`."""
        if self.media is None or self.teacher_media is None:
            return {}
        of = [
            [partial(each.__getitem__, row) if row in each else None for row in rows]
            for each in (self.media, self.teacher_media)
        ]
        return {"media": tuple(of), "join_media": self.media.join}

    def teacher_ids(self, indices: Sequence[int] | Ints) -> list[Any]:
        """Return int32[S] of each prompt as the teacher is asked."""
        return [self._teacher[int(i)] for i in indices]

    def size(self, index: int) -> str:
        """Return the largest length of a prompt with its demonstration and completion, in words."""
        return f"{self.source(index)} may have {self.lengths[index]:,} tokens with its demonstration and its completion"

    def _taught(self, index: int, tokenizer: Any, template: str) -> Any:
        prompt = self.store[index]
        where = self.source(index)
        if prompt.media and isinstance(prompt.prompt, str):
            raise SettingsError(
                f"{where}: its prompt is plain text with {media_names(self.store)}, and a teacher is shown the demonstration "
                "in a message: make the prompt a list of messages, or take the row out."
            )
        if _has_image(prompt.columns.get(ANSWER)):
            raise SettingsError(f"{where}: its demonstration has an image; a teacher is shown an answer in words.")
        demonstration = _text(prompt.columns.get(ANSWER))
        if demonstration is None:
            raise SettingsError(
                f"{where}: has no demonstration: a row has `prompt` and `completion`, texts or messages, or `messages` that "
                "end with the assistant's answer."
            )
        written = [tokenizer.decode(prompt.input_ids[each.start : each.stop]) for each in prompt.media]
        ids = partial(_ids, tokenizer, columns=prompt.columns, media=written, placeholders=self._placeholders)
        # What the store holds is compared, so that both are asked in the same way but for the demonstration.
        if not np.array_equal(ids(prompt.prompt), prompt.input_ids):
            raise SettingsError(
                f"{where}: its prompt cannot be written a second time as it was tokenized, so that the teacher would be "
                "asked in another way: leave out chat_template_kwargs, or write the prompt as text."
            )
        asked = prompt.prompt
        if isinstance(asked, str):
            return ids("".join(_filled(template, [asked], demonstration)))
        at = max((k for k, message in enumerate(asked) if message["role"] == "user"), default=None)
        question = None if at is None else _text([asked[at]])
        if at is None or (question is None and not _has_image(asked[at])):
            raise SettingsError(f"{where}: has no question in words, in whose place the teacher could be shown an example.")
        given = asked[at]["content"]
        filled = _filled(template, given if isinstance(given, list) else [question or ""], demonstration)
        content = _joined(filled) if isinstance(given, list) and prompt.media else "".join(map(_part_text, filled))
        return ids([*asked[:at], {**asked[at], "content": content}, *asked[at + 1 :]])


def _filled(template: str, prompt: list[Any], demonstration: str) -> list[Any]:
    """Put both into the template, in one pass: neither is searched for the other's place."""
    parts = {"{prompt}": prompt, "{demonstration}": [demonstration]}
    first, second = sorted(parts, key=template.index)
    before, _, rest = template.partition(first)
    between, _, after = rest.partition(second)
    return [before, *parts[first], between, *parts[second], after]


def _part_text(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text", ""))


def _joined(parts: list[Any]) -> list[dict[str, Any]]:
    """Return texts and parts as parts, in which no two texts follow each other."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") != "text":
            found.append(part)
        elif found and found[-1]["type"] == "text":
            found[-1] = {"type": "text", "text": found[-1]["text"] + _part_text(part)}
        elif _part_text(part):
            found.append({"type": "text", "text": _part_text(part)})
    return found


def _ids(tokenizer: Any, prompt: Any, columns: Any, media: Sequence[str] = (), placeholders: Sequence[str] = ()) -> Any:
    """Tokenize a prompt as `forge_data.prepare_prompts` does.

    `media` are what the processor writes for each.
    """
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
    if media:
        pieces = re.split("|".join(map(re.escape, placeholders)), text)
        text = "".join(map("".join, zip(pieces, [*media, *[""] * len(pieces)], strict=False)))
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _has_image(answer: Any) -> bool:
    messages = answer if isinstance(answer, list) else [answer]
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


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

r"""Prompt and answer → the block of reasoning that ends the prompt, and what closes it.

Templates prompt with such a block and write answers without it, so that nothing follows from their texts alone. A closed block
says that the model has thought already: the answer follows it. An open one has to be closed first, as the template itself
closes one around reasoning. Templates that never write any, but cut a `</think>` out of earlier answers, are DeepSeek-R1's and
those made after it: their models close a block by `\n</think>\n\n`, also an empty one (README of deepseek-ai/DeepSeek-R1).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from forge_data.formats._messages import REASONING
from forge_data.formats._samples import Message

REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""Tags that begin and end reasoning within a content."""
_BLOCKS = (*REASONING_TAGS, ("<|START_THINKING|>", "<|END_THINKING|>"))
_TAGS = tuple(tag for tags in _BLOCKS for tag in tags)
# Gemma 4 names its channel within the block.
_OPEN = re.compile("(?:" + "|".join(re.escape(opening) for opening, _ in _BLOCKS) + r")(?:thought)?\s*\Z")
_CLOSED = re.compile(
    "(?:" + "|".join(rf"{re.escape(opening)}(?:thought)?\s*({re.escape(closing)})" for opening, closing in _BLOCKS) + r")\s*\Z"
)
_THINK, _END_THINK = REASONING_TAGS[0]
_SOME_REASONING = "Reasoning0"


class Block(NamedTuple):
    """A block of reasoning that ends a prompt, and that the answered text lacks."""

    text: str
    """End of the prompt."""
    instead: str = ""
    """What the answered text has in its place: nothing, or the tag that closes it."""
    closing: str = ""
    """What the model writes between the prompt and the answer's text: the end of an open block, after its reasoning."""


def block_of(
    prompt: str, answered: str, message: Message, render: Callable[[Message], str | None], source: str
) -> Block | None:
    r"""Find the block of reasoning between a prompt and its answer; None without one.

    Args:
        prompt: the messages before the answer, with the generation prompt.
        answered: the messages up to the answer.
        message: the answer.
        render: writes the messages up to the answer, with another in its place; None where the template refuses that.
        source: text of the template.

    >>> block_of("<user>hi<bot><think>\n</think>", "<user>hi<bot>ho", {"role": "assistant", "content": "ho"}, str, "").text
    '<think>\n</think>'
    """
    if closed := _CLOSED.search(prompt):
        found, tag = _written(prompt, answered, closed), next(tag for tag in closed.groups() if tag)
        if found is None or has_reasoning(message):
            return None
        instead = tag if found.startswith(tag) else ""
        rest = found.removeprefix(instead).lstrip()
        return Block(closed[0], instead) if rest and not rest.startswith(_TAGS) else None
    opened = _OPEN.search(prompt)
    written = None if opened is None else _written(prompt, answered, opened)
    if opened is None or written is None or not written.strip() or written.lstrip().startswith(_TAGS):
        return None
    with_reasoning = render({**message, **dict.fromkeys(REASONING, _SOME_REASONING)})
    if with_reasoning is None or with_reasoning.count(_SOME_REASONING) > 1:
        return None
    if _SOME_REASONING in with_reasoning:
        head, _, tail = with_reasoning.partition(_SOME_REASONING)
        closing = tail.removesuffix(written)
        fits = not has_reasoning(message) and head == prompt and tail.endswith(written) and closing.strip().startswith(_TAGS)
        return Block(opened[0], closing=closing) if fits else None
    if opened[0] != f"{_THINK}\n" or _END_THINK not in source:
        return None
    reasoning, rest = _apart(message)
    if reasoning is None or not written.lstrip().startswith(rest.strip()):
        return None
    blanks = written[: len(written) - len(written.lstrip())]
    return Block(opened[0], closing=f"{reasoning}\n{_END_THINK}" + "\n\n".removesuffix(blanks))


def has_reasoning(message: Message) -> bool:
    """Tell whether a turn has reasoning, in a field of its own or within its content."""
    content = message.get("content") or ""
    return any(message.get(name) for name in REASONING) or any(closing in content for _, closing in REASONING_TAGS)


def without_reasoning(message: Message) -> Message:
    """Return an answer without its reasoning, in a field or at the beginning of its content."""
    plain = {name: value for name, value in message.items() if name not in REASONING}
    return plain | {"content": _apart(message)[1]} if isinstance(message.get("content"), str) else plain


def _apart(message: Message) -> tuple[str | None, str]:
    """Take the reasoning of an answer from its text; None if it is not one, at the beginning."""
    content: Any = message.get("content")
    if not isinstance(content, str):
        return None, ""
    fields = {value for name in REASONING if isinstance(value := message.get(name), str) and value}
    head, tag, rest = content.partition(_END_THINK)
    if not tag:
        return None if len(fields) > 1 else "".join(fields).strip("\n"), content
    head = head.lstrip()
    own = (
        head.startswith(_THINK) and not fields and not any(each in head[len(_THINK) :] + rest for each in (_THINK, _END_THINK))
    )
    return (head[len(_THINK) :].strip("\n"), rest) if own else (None, content)


def _written(prompt: str, answered: str, block: re.Match[str]) -> str | None:
    """Return what an answered text has behind the prompt without its block."""
    before = prompt[: block.start()]
    return answered[len(before) :] if answered.startswith(before) else None

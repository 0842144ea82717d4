"""Conversation and a turn of it → its prompt, and the text once it is answered."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from forge_data.chat_template._header import Messages, RefusedError, Renderer
from forge_data.formats._messages import REASONING
from forge_data.formats._samples import Message

REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""Tags that begin and end reasoning within a content."""
_BLOCKS = (*REASONING_TAGS, ("<|START_THINKING|>", "<|END_THINKING|>"))
_TAGS = tuple(tag for tags in _BLOCKS for tag in tags)
# Gemma 4 names its channel within the block.
_EMPTY_BLOCK = re.compile(
    "(?:" + "|".join(rf"{re.escape(opening)}(?:thought)?\s*{re.escape(closing)}" for opening, closing in _BLOCKS) + r")\s*\Z"
)
SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which templates are told whether the model is to think."""


class Asked(NamedTuple):
    """A turn as the model is asked for it."""

    prompt: str
    """The messages before it with the generation prompt: the context in which the model writes the turn."""
    answered: str
    """The messages up to this one. What it has after the prompt is what the model has to write."""

    @property
    def follows(self) -> bool:
        """Whether the answered text begins with the prompt, so that something can follow from it."""
        return self.answered.startswith(self.prompt)

    @property
    def empty_block(self) -> str:
        r"""Closed block without reasoning that ends the prompt, and that the answer lacks; or "".

        The model is told that it has thought already, so that what the template writes in the place of the block follows it.

        >>> Asked("<user>hi<bot><think>\n</think>", "<user>hi<bot>ho").empty_block
        '<think>\n</think>'
        """
        found = _EMPTY_BLOCK.search(self.prompt)
        if found is None or not self.answered.startswith(self.prompt[: found.start()]):
            return ""
        written = self.answered[found.start() :].lstrip()
        return found[0] if written and not written.startswith(_TAGS) else ""


def ask(renderer: Renderer, messages: Messages, index: int) -> Asked | None:
    """Render a turn's prompt and answered text; None where the template refuses its beginning."""
    try:
        return Asked(renderer.native(messages[:index], opening=True), renderer.native(messages[: index + 1]))
    except RefusedError:
        return None


def has_reasoning(message: Message) -> bool:
    """Tell whether a turn has reasoning, in a field of its own or within its content."""
    content = message.get("content") or ""
    return any(message.get(name) for name in REASONING) or any(closing in content for _, closing in REASONING_TAGS)


def thinking(reads: frozenset[str], given: Mapping[str, Any], *, thinks: bool) -> dict[str, Any]:
    """Return the argument that switches thinking on or off; none if not read, or given already."""
    switches = [name for name in SWITCHES if name in reads]
    return {} if not switches or any(name in given for name in switches) else {switches[0]: thinks}


def as_form(name: str, value: object) -> str:
    """Name an argument and its value, as the accounting counts rows that were rendered with it."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"

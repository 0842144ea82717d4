"""Conversation and a turn of it → its prompt, and the text once it is answered."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from forge_data.chat_template._block import Block, block_of
from forge_data.chat_template._header import Messages, RefusedError, Renderer
from forge_data.formats._samples import Message

SWITCHES = ("enable_thinking", "thinking", "reasoning")
"""Arguments by which templates are told whether the model is to think."""


class Asked(NamedTuple):
    """A turn as the model is asked for it."""

    prompt: str
    """The messages before it with the generation prompt: the context in which the model writes the turn."""
    answered: str
    """The messages up to this one. What it has after the prompt is what the model has to write."""
    block: Block | None = None
    """Block of reasoning through which the answer follows the prompt, where the text does not begin with it."""

    @property
    def follows(self) -> bool:
        """Whether the answered text begins with the prompt, so that something can follow from it."""
        return self.answered.startswith(self.prompt)


def ask(renderer: Renderer, messages: Messages, index: int, source: str) -> Asked | None:
    """Render a turn's prompt and answered text; None where the template refuses its beginning.

    Args:
        renderer: the template with the arguments of the row.
        messages: the conversation.
        index: the turn.
        source: text of the template.
    """

    def answered(message: Message) -> str | None:
        try:
            return renderer.native([*messages[:index], dict(message)])
        except RefusedError:
            return None

    try:
        asked = Asked(renderer.native(messages[:index], opening=True), renderer.native(messages[: index + 1]))
    except RefusedError:
        return None
    if asked.follows:
        return asked
    return asked._replace(block=block_of(*asked[:2], messages[index], answered, source))


def thinking(reads: frozenset[str], given: Mapping[str, Any], *, thinks: bool) -> dict[str, Any]:
    """Return the argument that switches thinking on or off; none if not read, or given already."""
    switches = [name for name in SWITCHES if name in reads]
    return {} if not switches or any(name in given for name in switches) else {switches[0]: thinks}


def as_form(name: str, value: object) -> str:
    """Name an argument and its value, as the accounting counts rows that were rendered with it."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"

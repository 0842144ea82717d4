"""Conversation → text and learned spans, by one tokenizer's chat template."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import attrs

from forge_data._errors import TemplateError
from forge_data.chat_template._completeness import LeftOutError, dropped_reasoning
from forge_data.chat_template._header import Opening, RefusedError, UndecidableError, opening
from forge_data.chat_template._template import ChatTemplate, RenderedChat
from forge_data.chat_template._trace import Run
from forge_data.formats._samples import Chat, Note
from forge_data.masking._loss_mask import Span
from forge_data.masking._segments import text_owners
from forge_data.masking._spans import SpanContext, UnclearError, spans_of
from forge_data.masking._train_on import TURN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REMEDY = (
    "use a template that marks the assistant's text with {% generation %}, or give the rows as prompt and completion strings"
)


@attrs.frozen
class Conversation:
    """One conversation as text, with what masking needs to know of it."""

    text: str
    spans: list[Span]
    """Learned spans."""
    runs: list[Run]
    """Which message wrote which characters."""
    notes: tuple[Note, ...]


class ConversationReader:
    """Reads conversations with one chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._template = ChatTemplate(tokenizer)
        tokens = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.content]
        self._turn_end_tokens = re.compile("|".join([r"\s", *sorted(tokens, key=len, reverse=True)]))
        # How turns begin may depend on the template's other arguments.
        self._openings: dict[str, Opening | UndecidableError | None] = {}

    def render_batch(self, chats: Sequence[Chat]) -> list[str | None]:
        """Render conversations, as far as one call can render many."""
        return self._template.render_batch(chats)

    def read(self, chat: Chat, what: Sequence[str], text: str | None = None) -> Conversation:
        """Render a conversation and find its learned spans.

        Args:
            chat: the conversation.
            what: what is learned of each message, as `learned_parts` returns it.
            text: what `render_batch` returned for it.

        Raises:
            DataError: the template refuses the conversation; its own message is included.
            TemplateError: it leaves out text of a message, or leaves open which tokens are to be learned.
        """
        rendered = self._template.render(chat, text)
        notes = [
            note
            for index in range(len(what))
            if (note := self._dropped_reasoning(chat, rendered, index)) and what[index] == TURN
        ]
        try:
            spans, more = spans_of(SpanContext(rendered, lambda: self._opening(chat, rendered), self._ends_turn), what)
        except UnclearError as error:
            self._refuse(chat, error.index, error.why, error)
        return Conversation(rendered.trace.text, spans, text_owners(rendered.trace), (*notes, *more))

    def _dropped_reasoning(self, chat: Chat, rendered: RenderedChat, index: int) -> Note | None:
        role = chat.messages[index]["role"]
        try:
            return dropped_reasoning(
                rendered.trace, index, chat.messages[index], lambda field: _affects_text(rendered, index, field)
            )
        except LeftOutError as error:
            if role == "assistant":
                self._refuse(chat, index, f"the template writes other text than the message has: it lacks {error}", error)
            raise TemplateError(
                f"{chat.place}: {self._template.name} does not write out message {index} (role {role}) as it stands: it lacks "
                f"{error}; use a template that writes plain text of this role, or take the message out"
            ) from error

    def _opening(self, chat: Chat, rendered: RenderedChat) -> Opening | None:
        key = json.dumps([chat.template_kwargs, bool(chat.tools), bool(chat.documents)], sort_keys=True, default=repr)
        if key not in self._openings:
            try:
                self._openings[key] = opening(rendered.renderer)
            except UndecidableError as error:
                self._openings[key] = error
            except RefusedError:
                self._openings[key] = None
        found = self._openings[key]
        if isinstance(found, UndecidableError):
            raise found
        return found

    def _ends_turn(self, text: str) -> bool:
        return bool(text.strip()) and not self._turn_end_tokens.sub("", text)

    def _refuse(self, chat: Chat, index: int, why: str, error: Exception) -> NoReturn:
        raise TemplateError(
            f"{chat.place}: {self._template.name} leaves open which tokens the assistant wrote in message {index}: {why}; "
            f"{_REMEDY}"
        ) from error


def _affects_text(rendered: RenderedChat, index: int, field: str) -> bool:
    """Tell whether another value in a field of a message changes the template's text."""
    value = rendered.messages[index].get(field)
    if not isinstance(value, str):
        return True
    changed = [*rendered.messages]
    changed[index] = rendered.messages[index] | {field: value[::-1] + "0"}
    try:
        return rendered.renderer.native(changed) != rendered.trace.text
    except RefusedError:
        return True

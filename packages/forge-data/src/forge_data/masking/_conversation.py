"""Conversations to learned spans, by one tokenizer's chat template; whatever it leaves open is refused here, by place."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import attrs

from forge_data._errors import TemplateError
from forge_data.chat_template._completeness import LeftOutError, left_out
from forge_data.chat_template._header import Opening, RefusedError, UndecidableError, opening
from forge_data.chat_template._template import ChatTemplate, Written
from forge_data.chat_template._trace import Run
from forge_data.formats._samples import Chat, Note
from forge_data.masking._loss_mask import Span
from forge_data.masking._segments import speakers
from forge_data.masking._span_cache import Found, Skeletons, watched
from forge_data.masking._spans import Reading, UnclearError, spans_of
from forge_data.masking._train_on import TURN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REMEDY = (
    "use a template that marks the assistant's text with {% generation %}, or give the rows as prompt and completion strings"
)


@attrs.frozen
class Conversation:
    """One conversation as text, and what is to be known of it before it becomes tokens."""

    text: str
    spans: list[Span]
    """What is learned."""
    runs: list[Run]
    """Who wrote which characters."""
    notes: tuple[Note, ...]


class Conversations:
    """What one chat template makes of conversations."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._template = ChatTemplate(tokenizer)
        tokens = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.content]
        self._ends = re.compile("|".join([r"\s", *sorted(tokens, key=len, reverse=True)]))
        # How turns are opened may depend on what else the template is told.
        self._openings: dict[str, Opening | UndecidableError | None] = {}
        self._skeletons = Skeletons()

    def texts(self, chats: Sequence[Chat]) -> list[str | None]:
        """What the template writes for each conversation, as far as it can be asked of many at once."""
        return self._template.together(chats)

    def read(self, chat: Chat, what: Sequence[str], text: str | None = None) -> Conversation:
        """A conversation's text and spans.

        Args:
            chat: the conversation.
            what: what is learned of each message, as `_learn.learned` has it.
            text: what `texts` gave for it.

        Raises:
            DataError: the template refuses the conversation; its own words are in the message.
            TemplateError: it leaves out what a message says, or leaves open which tokens are to be learned.
        """
        if text is not None and (found := self._skeletons.find(chat, what, text)) is not None:
            return Conversation(text, *found, ())
        written, asked = watched(self._template.write(chat, text))
        notes = [note for index in range(len(what)) if (note := self._left_out(chat, written, index)) and what[index] == TURN]
        try:
            spans, noticed = spans_of(Reading(written, lambda: self._opening(chat, written), self._ends_turn), what)
        except UnclearError as error:
            self._undecidable(chat, error.index, error.why, error)
        read = Conversation(written.trace.text, spans, speakers(written.trace), (*notes, *noticed))
        if self._template.is_blind and self._skeletons.wanted(chat, what):
            known = not (asked() or read.notes)
            self._skeletons.learn(chat, what, written, Found(read.spans, read.runs) if known else None)
        return read

    def _left_out(self, chat: Chat, written: Written, index: int) -> Note | None:
        role = chat.messages[index]["role"]
        try:
            return left_out(written.trace, index, chat.messages[index], lambda field: _matters(written, index, field))
        except LeftOutError as error:
            if role == "assistant":
                self._undecidable(chat, index, f"the template writes other words than the message has: it lacks {error}", error)
            raise TemplateError(
                f"{chat.place}: {self._template.name} does not write out message {index} (role {role}) as it stands: it lacks "
                f"{error}; use a template that writes plain text of this role, or take the message out"
            ) from error

    def _opening(self, chat: Chat, written: Written) -> Opening | None:
        told = json.dumps([chat.template_kwargs, bool(chat.tools), bool(chat.documents)], sort_keys=True, default=repr)
        if told not in self._openings:
            try:
                self._openings[told] = opening(written.renderer)
            except UndecidableError as error:
                self._openings[told] = error
            except RefusedError:
                self._openings[told] = None
        found = self._openings[told]
        if isinstance(found, UndecidableError):
            raise found
        return found

    def _ends_turn(self, text: str) -> bool:
        return bool(text.strip()) and not self._ends.sub("", text)

    def _undecidable(self, chat: Chat, index: int, why: str, error: Exception) -> NoReturn:
        raise TemplateError(
            f"{chat.place}: {self._template.name} leaves open which tokens the assistant wrote in message {index}: {why}; {_REMEDY}"
        ) from error


def _matters(written: Written, index: int, field: str) -> bool:
    """Whether the template writes another text where a field of a message says something else."""
    said = written.messages[index].get(field)
    if not isinstance(said, str):
        return True
    other = [*written.messages]
    other[index] = written.messages[index] | {field: said[::-1] + "0"}
    try:
        return written.renderer.native(other) != written.trace.text
    except RefusedError:
        return True

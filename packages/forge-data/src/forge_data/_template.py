"""A conversation to its text, as the tokenizer's own chat template writes it, and the spans that the assistant wrote.

Nothing is put into the text to find the spans. Where turn i begins is how long the template's text is for the messages
before it with the generation prompt; where it ends, how long the text is with it. Both must be beginnings of the whole
text, to the character; if the template rewrites earlier turns later on, there is no telling and the row is refused.
"""

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, cast

from forge_data._errors import DataError, TemplateError
from forge_data._mask import Span
from forge_data._messages import Message
from forge_data._samples import Chat
from forge_data._turns import find_turn, is_written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "give the rows as prompt and completion (lists of messages) with the turn to learn last, or use a template that marks "
    "the assistant's text with {% generation %}"
)


class _RefusedError(Exception):
    """The template raised; the message is its own."""


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.name = f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__}"
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{self.name.removeprefix('the chat template of ')} has no chat template, and rows of messages need one: use "
                "the instruct model's tokenizer, set tokenizer.chat_template, or give rows of prompt and completion strings"
            )
        try:
            self._source = tokenizer.get_chat_template()
        except ValueError as error:
            raise TemplateError(f"{self.name} cannot be chosen: {error}") from error
        self._marks_generation = _GENERATION.search(self._source) is not None
        # Roles before an assistant's turn for which the template is known to write its header as a generation prompt.
        self._opened: set[tuple[str, ...]] = set()

    def text(self, chat: Chat) -> str:
        """The whole conversation as text.

        Raises:
            DataError: the template refuses the conversation; its own words are in the message.
            TemplateError: the template leaves a message out.
        """
        try:
            text = self._render(chat.messages)
        except _RefusedError as error:
            raise DataError(f"{chat.place}: {self.name} refuses the conversation: {error}") from error
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant" and not is_written(text, message["content"]):
                raise TemplateError(
                    f"{chat.place}: {self.name} does not write out message {index} (role {message['role']}) as it stands; "
                    "use a template that writes plain text of this role, or take the message out"
                )
        return text

    def spans(self, chat: Chat, text: str) -> list[Span]:
        """What the assistant wrote of `text`, turn by turn.

        Raises:
            TemplateError: the template leaves open where a turn begins or ends.
        """
        if self._marks_generation:
            return self._marked_spans(chat, text)
        learned = range(chat.first_trained, len(chat.messages))
        return [self._span(chat, text, i) for i in learned if chat.messages[i]["role"] == "assistant"]

    def _render(self, messages: list[Message], *, opening: bool = False) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening))
        except Exception as error:
            # A template is a program of somebody else's: it may raise whatever it likes.
            ours = type(error).__module__.startswith("jinja2")
            raise _RefusedError(str(error) if ours else f"{type(error).__name__}: {error}") from error

    def _part(self, chat: Chat, text: str, messages: list[Message], index: int, *, opening: bool) -> int:
        """How long the text of some of the messages is, which must be how the whole text begins."""
        try:
            part = self._render(messages, opening=opening)
        except _RefusedError as error:
            self._undecidable(chat, index, f"the template cannot write the messages up to there alone: {error}", error)
        if not text.startswith(part):
            at = len(os.path.commonprefix([part, text]))
            alone, whole = part[at : at + 40], text[at : at + 40]
            self._undecidable(
                chat, index, f"written up to there alone the text goes on {alone!r}, in the whole conversation {whole!r}"
            )
        return len(part)

    def _span(self, chat: Chat, text: str, index: int) -> Span:
        messages = chat.messages
        if index == 0:
            raise DataError(
                f"{chat.place}: the conversation begins with an assistant message, so there is nothing that it answers and no "
                "telling where its header ends; put a user or system message before it"
            )
        start = self._part(chat, text, messages[:index], index, opening=True)
        last = index + 1 == len(messages)
        stop = len(text) if last else self._part(chat, text, messages[: index + 1], index, opening=False)
        self._check_header(chat, index, text[:start])
        span = find_turn(text, start, stop, messages[index]["content"]) if stop >= start else None
        if span is None:
            self._undecidable(chat, index, f"the template writes other words than the message has: {text[start:stop][:60]!r}")
        return span

    def _check_header(self, chat: Chat, index: int, head: str) -> None:
        """A template that ignores add_generation_prompt must write no header, or the header would be learned."""
        before = chat.messages[:index]
        roles = tuple(message["role"] for message in before)
        if roles in self._opened:
            return
        try:
            prompted = self._render(before) != head
            # Two answers with nothing in common: what both turns begin with is the template's.
            turns = [self._render([*before, {"role": "assistant", "content": word}])[len(head) :] for word in ("0", "1")]
        except _RefusedError as error:
            self._undecidable(chat, index, f"the template cannot write the messages up to there alone: {error}", error)
        header = os.path.commonprefix(turns)
        if header.strip() and not prompted:
            why = f"the template opens the turn with {header!r}, but not when add_generation_prompt asks for it"
            self._undecidable(chat, index, why)
        self._opened.add(roles)

    def _marked_spans(self, chat: Chat, text: str) -> list[Span]:
        """The spans that the template itself marks with {% generation %}, as the tokenizer's assistant mask has them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # Typed to return a string; it returns the texts, and the marked spans of each.
        render = cast("Callable[..., tuple[list[str], list[list[tuple[int, int]]]]]", render_jinja_template)
        rendered, marked = render(
            conversations=[chat.messages],
            chat_template=self._source,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        if rendered[0] != text:
            raise TemplateError(f"{chat.place}: {self.name} writes the same conversation in two ways; it must be repeatable")
        for index, message in enumerate(chat.messages[chat.first_trained :], start=chat.first_trained):
            if message["role"] == "assistant" and find_turn(text, 0, len(text), message["content"]) is None:
                self._undecidable(chat, index, "the template writes other words than the message has")
        before, first = 0, chat.first_trained
        if first:
            before = self._part(chat, text, chat.messages[:first], first, opening=True)
        return [Span.plain(max(start, before), stop) for start, stop in marked[0] if stop > before]

    def _undecidable(self, chat: Chat, index: int, why: str, error: Exception | None = None) -> NoReturn:
        raise TemplateError(
            f"{chat.place}: {self.name} leaves open which tokens the assistant wrote in message {index}: {why}; {_REMEDY}"
        ) from error

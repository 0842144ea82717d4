"""A conversation to its text, as the tokenizer's own chat template writes it, with its trace.

The text is always the tokenizer's. The trace is written beside it, by the same template (`_trace_jinja`), and has to be the same
text to the character; so what the trace says of a place is true of the ids that are trained on. Of a template that never looks at
what messages say, one trace holds for all conversations of the same roles (`_skeleton`); the text is asked for every time.
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from forge_data._errors import DataError, TemplateError
from forge_data.chat_template._completeness import tool_names
from forge_data.chat_template._header import Messages, RefusedError, Renderer
from forge_data.chat_template._trace import Trace, render
from forge_data.chat_template._traced_messages import traced_tools
from forge_data.formats._messages import REASONING
from forge_data.formats._samples import Chat
from forge_data.formats._tool_calls import spelled_out

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

_REMEDY = "use another chat template, or give the rows as prompt and completion strings"
_SEEN = "{{ messages | tojson }}"


@attrs.frozen(eq=False)
class Written:
    """A conversation as text."""

    trace: Trace
    messages: Messages
    """As the template got them: where it cannot take a content of null, that is an empty string."""
    renderer: Renderer
    marks: bool
    """Whether the template marks what the assistant wrote."""


class _Program(NamedTuple):
    """A template as it is traced."""

    template: "Template"
    reads: frozenset[str]
    """What it reads of what it is told."""
    marks: bool


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
        self._special: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._programs: dict[str, _Program] = {}
        self._all_at_once = True

    def together(self, chats: Sequence[Chat]) -> list[str | None]:
        """What the template writes for each of many conversations, in one call; None for one that has to be asked for alone."""
        plain = [not (chat.tools or chat.documents or chat.template_kwargs) for chat in chats]
        texts: list[Any] = []
        if self._all_at_once and any(plain):
            try:
                asked = [chat.messages for chat, alone in zip(chats, plain, strict=True) if alone]
                texts = [*self._tokenizer.apply_chat_template(asked, tokenize=False)]
            except Exception:  # noqa: BLE001 - a template is a program of somebody else's; each row is to hear of its own fault
                self._all_at_once = False
        if len(texts) != sum(plain) or not all(isinstance(text, str) for text in texts):
            return [None] * len(chats)
        told = iter(texts)
        return [next(told) if alone else None for alone in plain]

    def write(self, chat: Chat, text: str | None = None) -> Written:
        """The whole conversation; `text` is what the template was found to write for it, if it was asked.

        Raises:
            DataError: the template refuses the conversation; its own words are in the message.
            TemplateError: it does not take what the row tells it, or does not write the same text twice.
        """
        source = self._source(chat)
        told = {"tools": chat.tools, "documents": chat.documents, **chat.template_kwargs}
        try:
            messages, text = (chat.messages, text) if text is not None else self._text(chat.messages, told)
        except RefusedError as error:
            raise DataError(f"{chat.place}: {self.name} refuses the conversation: {error}") from error
        program = self._program(chat.place, source)
        try:
            trace = self._trace(program.template, messages, told)
            if trace.text != text:
                # A template that writes the time may have been asked before and after midnight.
                text, trace = self._native(messages, told), self._trace(program.template, messages, told)
        except RefusedError as error:
            raise TemplateError(f"{chat.place}: {self.name} cannot be traced: {error}; {_REMEDY}") from error
        if trace.text != text:
            raise TemplateError(f"{chat.place}: {self.name} writes the same conversation in two ways; it must be repeatable")
        self._check_told(chat, told, text, program.reads)
        renderer = Renderer(
            lambda part, opening=False: self._native(part, told, opening=opening),
            lambda part: self._trace(program.template, part, told),
        )
        return Written(trace, messages, renderer, program.marks)

    def prompt(self, chat: Chat) -> str:
        """The conversation as a model is given it that is to answer: with the generation prompt.

        Raises:
            DataError: the template refuses the conversation; its own words are in the message.
            TemplateError: it does not take what the row tells it.
        """
        source = self._source(chat)
        told = {"tools": chat.tools, "documents": chat.documents, **chat.template_kwargs}
        try:
            messages, text = self._text(chat.messages, told, opening=True)
            if any(told.values()) or chat.template_kwargs:
                self._check_told(chat, told, self._native(messages, told), self._program(chat.place, source).reads)
            return text
        except RefusedError as error:
            raise DataError(f"{chat.place}: {self.name} refuses the conversation: {error}") from error

    @cached_property
    def is_blind(self) -> bool:
        """Whether it never looks at what messages say, asked without tools."""
        from forge_data.chat_template._content_blind import is_blind

        return is_blind(self._tokenizer.get_chat_template())

    def _source(self, chat: Chat) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=chat.tools)
        except ValueError as error:
            raise TemplateError(f"{self.name} cannot be chosen: {error}") from error

    def _text(self, messages: Messages, told: Mapping[str, Any], *, opening: bool = False) -> tuple[Messages, str]:
        # Null is what the format says of a turn that only calls tools, and some templates can only add strings; others (DeepSeek's)
        # want a call's arguments as the string that OpenAI has.
        filled = [message | {"content": message.get("content") or ""} for message in messages]
        refused: RefusedError | None = None
        for tried in (messages, filled, spelled_out(messages), spelled_out(filled)):
            if refused is not None and tried == messages:
                continue
            try:
                return tried, self._native(tried, told, opening=opening)
            except RefusedError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _native(self, messages: Messages, told: Mapping[str, Any], *, opening: bool = False) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening, **told))
        except Exception as error:
            # A template is a program of somebody else's: it may raise whatever it likes.
            ours = type(error).__module__.startswith("jinja2")
            raise RefusedError(str(error) if ours else f"{type(error).__name__}: {error}") from error

    def _program(self, place: str, source: str) -> "_Program":
        if source not in self._programs:
            from forge_data.chat_template._traced_jinja import compile_template, marks_turns

            try:
                template, reads = compile_template(source)
            except Exception as error:
                raise TemplateError(f"{place}: {self.name} cannot be traced: {error}; {_REMEDY}") from error
            self._programs[source] = _Program(template, reads, marks_turns(source))
        return self._programs[source]

    def _trace(self, template: "Template", messages: Messages, told: Mapping[str, Any]) -> Trace:
        variables = {"add_generation_prompt": False, **self._special, **told}
        if told.get("tools"):
            variables["tools"] = traced_tools(told["tools"])
        try:
            return render(template, self._as_seen(messages), variables)
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error

    def _as_seen(self, messages: Messages) -> Messages:
        """The messages as transformers hands them to a template, which depends on its version."""
        if not self._knows_how:
            seen = self._tokenizer.apply_chat_template(messages, chat_template=_SEEN, tokenize=False)
            return json.loads(str(seen))
        return [_as_seen(message) for message in messages]

    @cached_property
    def _knows_how(self) -> bool:
        """Whether transformers hands over messages as `_as_seen` has it; otherwise it is asked each time."""
        probe: Messages = [
            {"role": "user", "content": "0"},
            {"role": "assistant", "content": None, "tool_calls": None, "reasoning": "1"},
            {"role": "assistant", "content": "2", "reasoning_content": "", "thinking": "3"},
        ]
        seen = self._tokenizer.apply_chat_template(probe, chat_template=_SEEN, tokenize=False)
        if seen == json.dumps([_as_seen(message) for message in probe], ensure_ascii=False):
            return True
        try:
            json.loads(str(seen))
        except ValueError:
            # Whoever answers does not render the template that it is given, so there is nothing to learn from it.
            return True
        return False

    def _check_told(self, chat: Chat, told: Mapping[str, Any], text: str, reads: frozenset[str]) -> None:
        """What a row tells the template must make a difference, or it is passed over in silence."""
        for name in chat.template_kwargs:
            if name not in reads:
                near = get_close_matches(name, reads, 1)
                raise TemplateError(
                    f"{chat.place}: {self.name} reads no argument {name!r} of chat_template_kwargs"
                    f"{f'; did you mean {near[0]!r}?' if near else ''}; take it out of the row"
                )
        if chat.tools:
            missing = [name for name in tool_names(chat.tools) if name not in text]
            if missing or text == self._without(chat, told, "tools"):
                raise TemplateError(
                    f"{chat.place}: {self.name} does not write out the tool {(missing or tool_names(chat.tools) or ['?'])[0]!r} of "
                    "the row's tools; use a template that takes tools, or take the tools out of the row"
                )
        if chat.documents and text == self._without(chat, told, "documents"):
            raise TemplateError(
                f"{chat.place}: {self.name} does not write out the row's documents; use a template that takes documents, or write "
                "them into a message"
            )

    def _without(self, chat: Chat, told: Mapping[str, Any], name: str) -> str | None:
        try:
            return self._native(chat.messages, {**told, name: None})
        except RefusedError:
            return None


def _as_seen(message: dict[str, Any]) -> dict[str, Any]:
    """As transformers has it: what is null is not there, and reasoning goes by the names that templates know."""
    seen = {name: value for name, value in message.items() if value is not None}
    reasoning = next((seen[name] for name in REASONING if name in seen), None)
    return {"thinking": reasoning, **seen, "reasoning_content": reasoning} if reasoning is not None else seen

"""Conversation → its text, as the tokenizer's own chat template writes it, with a trace.

The text is always the tokenizer's. The trace is written beside it, by the same template (`_traced_jinja`), and must be the same
text to the character; so the trace holds for the ids that are trained on.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from forge_data._errors import DataError, TemplateError
from forge_data._values import nearest
from forge_data.chat_template._completeness import tool_names
from forge_data.chat_template._header import Messages, RefusedError, Renderer
from forge_data.chat_template._limits import LimitError, counted
from forge_data.chat_template._trace import Trace, render
from forge_data.chat_template._traced_messages import traced_tools
from forge_data.formats._messages import REASONING
from forge_data.formats._samples import Chat
from forge_data.formats._tool_calls import with_json_arguments

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

    from forge_data.chat_template._symbolic import SymbolicTemplate, Symbols

_REMEDY = "use another chat template, or give the rows as prompt and completion strings"
_DUMP_MESSAGES = "{{ messages | tojson }}"


class Written(NamedTuple):
    """A text as the tokenizer's own template writes it, with its trace."""

    trace: Trace
    text: str


@attrs.frozen(eq=False)
class RenderedChat:
    """A conversation as text."""

    trace: Trace
    messages: Messages
    """The messages as the template got them: an empty string where it cannot take a content of null."""
    renderer: Renderer
    marks: bool
    """Whether the template marks the assistant's text with `{% generation %}`."""


class _Program(NamedTuple):
    """A template compiled for tracing."""

    template: "Template"
    reads: frozenset[str]
    """Names of the arguments that it reads."""
    marks: bool
    symbolic: Callable[[], "SymbolicTemplate"]
    """Compiles it for symbols, once."""


GIVEN = "_given_chat_template"
"""Attribute of a tokenizer whose template is not its own: the name or file that was given for it."""


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        owner = tokenizer.name_or_path or type(tokenizer).__name__
        given = getattr(tokenizer, GIVEN, None)
        self.name = f"the chat template of {owner}" if given is None else f"the chat template {given}"
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{owner} has no chat template, and rows of messages (and "
                "ShareGPT's and Alpaca's) need one: use the instruct model's tokenizer, give one with `chat_template` (chatml "
                "and others by name, or a file), or give rows of prompt and completion strings"
            )
        self._special: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._programs: dict[str, _Program] = {}
        self.batches = True
        """Whether `render_batch` renders anything."""

    def render_batch(self, chats: Sequence[Chat]) -> list[Written | None]:
        """Render many conversations in one call; None for one that must be rendered alone."""
        rendered: list[Written | None] = [None] * len(chats)
        traces: dict[int, Trace] = {}
        for index, chat in enumerate(chats):
            if self.batches and not (chat.tools or chat.documents or chat.template_kwargs):
                try:
                    self._program(chat.place, self.source(chat.tools))
                    traces[index] = self._trace(chat.place, self._in_form(chat.messages), {})
                except RefusedError:
                    # What a template refuses is an error of its row.
                    continue
                except TemplateError:
                    # A row that goes beyond the limits took a second: those behind it wait for its error.
                    break
        if traces:
            try:
                batch = [self._in_form(chats[index].messages) for index in traces]
                texts: list[Any] = [*self._tokenizer.apply_chat_template(batch, tokenize=False)]
            except Exception:  # noqa: BLE001 - a template may raise anything; each row gets an error of its own
                texts = []
            self.batches = len(texts) == len(traces) and all(isinstance(text, str) for text in texts)
            if self.batches:
                for (index, trace), text in zip(traces.items(), texts, strict=True):
                    rendered[index] = Written(trace, text)
        return rendered

    def render(self, chat: Chat, written: Written | None = None) -> RenderedChat:
        """Render a conversation with its trace; `written` is what `render_batch` returned for it.

        Raises:
            DataError: the template refuses the conversation; its own message is included.
            TemplateError: it does not use an argument of the row, does not write the same text twice, or does not end.
        """
        program = self._program(chat.place, self.source(chat.tools))
        given = {"tools": chat.tools, "documents": chat.documents, **chat.template_kwargs}
        try:
            messages, written = (
                (self._in_form(chat.messages), written) if written else self._text(chat.place, chat.messages, given)
            )
            if written.trace.text != written.text:
                # A template that writes the date may have been rendered before and after midnight.
                written = self._written(chat.place, messages, given)
        except RefusedError as error:
            raise DataError(f"{chat.place}: {self.name} refuses the conversation: {error}{_of_lists(chat, error)}") from error
        trace, text = written
        if trace.text != text:
            raise TemplateError(f"{chat.place}: {self.name} writes the same conversation in two ways; it must be repeatable")
        self._check_used(chat, given, text, program.reads)
        return RenderedChat(trace, messages, self._renderer(chat.place, given), program.marks)

    def renderer(self, chat: Chat) -> Renderer:
        """Return what writes other messages with the arguments of a conversation."""
        given = {"tools": chat.tools, "documents": chat.documents, **chat.template_kwargs}
        return self._renderer(chat.place, given)

    def _renderer(self, place: str, given: Mapping[str, Any]) -> Renderer:
        return Renderer(
            lambda part, opening=False: self._native(place, part, given, opening=opening),
            lambda part: self._trace(place, part, given),
        )

    def reads(self, chat: Chat) -> frozenset[str]:
        """Return the names of the arguments that the template of a conversation reads."""
        return self._program(chat.place, self.source(chat.tools)).reads

    def marks(self, chat: Chat) -> bool:
        """Tell whether the template of a conversation marks the assistant's text."""
        return self._program(chat.place, self.source(chat.tools)).marks

    def repeats(self, chat: Chat) -> bool:
        """Tell whether transformers renders the template, which reads no clock and draws nothing."""
        from transformers import PreTrainedTokenizerBase

        kind = type(self._tokenizer)
        own = kind.apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        own = own and "apply_chat_template" not in vars(self._tokenizer)
        source = self.source(chat.tools)
        return own and not any(name in source for name in ("strftime_now", "lipsum", "random"))

    def symbolic(self, chat: Chat, symbols: "Symbols") -> Callable[..., str]:
        """Return a function that renders first messages with symbols in place of contents.

        The messages must have a role and a content each, and nothing else.
        """
        template = self._program(chat.place, self.source(chat.tools)).symbolic()
        messages = [{"role": message["role"], "content": symbols.symbol(index)} for index, message in enumerate(chat.messages)]
        given = {"tools": chat.tools, "documents": chat.documents, **chat.template_kwargs}

        def write(count: int, *, opening: bool = False) -> str:
            return template.render(
                self._in_form(messages[:count]), {"add_generation_prompt": opening, **self._special, **given}, symbols
            )

        return write

    def prompt(self, chat: Chat, *, opening: bool = True) -> str:
        """Render a conversation with the generation prompt, or without (`opening`).

        Raises:
            DataError, TemplateError: as `rendered_prompt`.
        """
        return self._prompt(chat, opening=opening)[1].text

    def rendered_prompt(self, chat: Chat, *, opening: bool = True) -> RenderedChat:
        """Render a conversation with the generation prompt, or without (`opening`), with its trace.

        Raises:
            DataError: the template refuses the conversation; its own message is included.
            TemplateError: it does not use an argument of the row, or does not write the same text twice.
        """
        messages, written = self._prompt(chat, opening=opening)
        if written.trace.text != written.text:
            raise TemplateError(f"{chat.place}: {self.name} writes the same conversation in two ways; it must be repeatable")
        program = self._program(chat.place, self.source(chat.tools))
        return RenderedChat(written.trace, messages, self.renderer(chat), program.marks)

    def _prompt(self, chat: Chat, *, opening: bool) -> tuple[Messages, Written]:
        program = self._program(chat.place, self.source(chat.tools))
        given = {"tools": chat.tools, "documents": chat.documents, **chat.template_kwargs}
        try:
            messages, written = self._text(chat.place, chat.messages, given, opening=opening)
            if any(given.values()) or chat.template_kwargs:
                self._check_used(chat, given, self._native(chat.place, messages, given), program.reads)
            return messages, written
        except RefusedError as error:
            raise DataError(f"{chat.place}: {self.name} refuses the conversation: {error}{_of_lists(chat, error)}") from error

    def source(self, tools: list[Any] | None) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise TemplateError(f"{self.name} cannot be chosen: {error}") from error

    def _text(
        self, place: str, messages: Messages, given: Mapping[str, Any], *, opening: bool = False
    ) -> tuple[Messages, Written]:
        # The content of a turn that only calls tools is null, and some templates can only add strings; others (DeepSeek's) want
        # a call's arguments as a string, as OpenAI writes them.
        filled = [message | {"content": message.get("content") or ""} for message in messages]
        refused: RefusedError | None = None
        messages, filled = self._in_form(messages), self._in_form(filled)
        for tried in (messages, filled, with_json_arguments(messages), with_json_arguments(filled)):
            if refused is not None and tried == messages:
                continue
            try:
                return tried, self._written(place, tried, given, opening=opening)
            except RefusedError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _written(self, place: str, messages: Messages, given: Mapping[str, Any], *, opening: bool = False) -> Written:
        trace = self._trace(place, messages, given, opening=opening)
        with self._refusals(place):
            return Written(trace, self._unlimited(messages, given, opening=opening))

    def _native(self, place: str, messages: Messages, given: Mapping[str, Any], *, opening: bool = False) -> str:
        program = self._program(place, self.source(given.get("tools")))
        with self._refusals(place):
            for _ in counted(program.template, {**self._variables(given, opening=opening), "messages": self._passed(messages)}):
                pass
            return self._unlimited(messages, given, opening=opening)

    def _unlimited(self, messages: Messages, given: Mapping[str, Any], *, opening: bool) -> str:
        """Render as the tokenizer does, without limits.

        What was not rendered within them before may never end.
        """
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening, **given))

    @contextlib.contextmanager
    def _refusals(self, place: str) -> Iterator[None]:
        """Raise what a template raises as a refusal, or that it goes beyond its limits."""
        try:
            yield
        except LimitError as error:
            raise TemplateError(f"{place}: {self.name} cannot be used: {error}; {_REMEDY}") from error
        except Exception as error:
            by_template = type(error).__module__.startswith("jinja2")
            raise RefusedError(str(error) if by_template else f"{type(error).__name__}: {error}") from error

    def _program(self, place: str, source: str) -> "_Program":
        if source not in self._programs:
            from forge_data.chat_template._symbolic import SymbolicTemplate
            from forge_data.chat_template._traced_jinja import compile_template, marks_turns

            try:
                template, reads = compile_template(source)
            except Exception as error:
                raise TemplateError(f"{place}: {self.name} cannot be traced: {error}; {_REMEDY}") from error
            self._programs[source] = _Program(template, reads, marks_turns(source), cache(partial(SymbolicTemplate, source)))
        return self._programs[source]

    def _trace(self, place: str, messages: Messages, given: Mapping[str, Any], *, opening: bool = False) -> Trace:
        variables = self._variables(given, opening=opening)
        if given.get("tools"):
            variables["tools"] = traced_tools(given["tools"])
        program = self._program(place, self.source(given.get("tools")))
        with self._refusals(place):
            return render(program.template, self._passed(messages), variables)

    def _variables(self, given: Mapping[str, Any], *, opening: bool) -> dict[str, Any]:
        return {"add_generation_prompt": opening, **self._special, **given}

    def _in_form(self, messages: Messages) -> Messages:
        """Return messages with contents as the template takes them: texts, or lists of one part."""
        if not self._takes_parts:
            return messages
        return [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes contents as lists of parts, and loses plain texts."""
        written = []
        for content in ("0x0", [{"type": "text", "text": "0x0"}]):
            try:
                written.append("0x0" in self._native("", [{"role": "user", "content": content}], {}))
            except (RefusedError, TemplateError):
                # Each row gets an error of its own.
                written.append(False)
        return written == [False, True]

    def _passed(self, messages: Messages) -> Messages:
        """Return the messages as this version of transformers passes them to a template."""
        if not self._predictable:
            dump = self._tokenizer.apply_chat_template(messages, chat_template=_DUMP_MESSAGES, tokenize=False)
            return json.loads(str(dump))
        return [_as_passed(message) for message in messages]

    @cached_property
    def _predictable(self) -> bool:
        """Whether transformers passes messages as `_as_passed` does; otherwise each call asks it."""
        probe: Messages = [
            {"role": "user", "content": "0"},
            {"role": "assistant", "content": None, "tool_calls": None, "reasoning": "1"},
            {"role": "assistant", "content": "2", "reasoning_content": "", "thinking": "3"},
        ]
        dump = self._tokenizer.apply_chat_template(probe, chat_template=_DUMP_MESSAGES, tokenize=False)
        if dump == json.dumps([_as_passed(message) for message in probe], ensure_ascii=False):
            return True
        try:
            json.loads(str(dump))
        except ValueError:
            # This tokenizer does not render the template that it is given, so the probe shows nothing.
            return True
        return False

    def _check_used(self, chat: Chat, given: Mapping[str, Any], text: str, reads: frozenset[str]) -> None:
        """Refuse an argument of the row that makes no difference to the text."""
        for name in chat.template_kwargs:
            if name not in reads:
                raise TemplateError(
                    f"{chat.place}: {self.name} reads no argument {name!r} of chat_template_kwargs"
                    f"{nearest(name, reads)}; take it out of the row"
                )
        if chat.tools:
            missing = [name for name in tool_names(chat.tools) if name not in text]
            if missing or text == self._without(chat, given, "tools"):
                raise TemplateError(
                    f"{chat.place}: {self.name} does not write out the tool "
                    f"{(missing or tool_names(chat.tools) or ['?'])[0]!r} of the row's tools; use a template that takes tools, "
                    "or take the tools out of the row"
                )
        if chat.documents and text == self._without(chat, given, "documents"):
            raise TemplateError(
                f"{chat.place}: {self.name} does not write out the row's documents; use a template that takes documents, or "
                "write them into a message"
            )

    def _without(self, chat: Chat, given: Mapping[str, Any], name: str) -> str | None:
        try:
            return self._native(chat.place, chat.messages, {**given, name: None})
        except RefusedError:
            return None


def _as_passed(message: dict[str, Any]) -> dict[str, Any]:
    """Prepare a message as transformers does: no nulls; reasoning under templates' own names."""
    passed = {name: value for name, value in message.items() if value is not None}
    reasoning = next((passed[name] for name in REASONING if name in passed), None)
    return {"thinking": reasoning, **passed, "reasoning_content": reasoning} if reasoning is not None else passed


def _of_lists(chat: Chat, error: Exception) -> str:
    """Say what to do where a template takes no contents with images, which are lists."""
    of_lists = bool(chat.media) and "list" in str(error)
    return "; contents with images are lists of parts: use the template of the model's processor" if of_lists else ""

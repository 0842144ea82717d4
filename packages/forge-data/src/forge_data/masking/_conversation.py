"""Conversation → texts and learned spans: one text, or one for each learned turn."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from forge_data._errors import DataError, TemplateError
from forge_data._media import Kind
from forge_data.chat_template._asked import Asked, as_form, ask, thinking
from forge_data.chat_template._block import Block, has_reasoning, without_reasoning
from forge_data.chat_template._completeness import LeftOutError, dropped_reasoning
from forge_data.chat_template._header import Messages, Opening, RefusedError, Renderer, UndecidableError, opening
from forge_data.chat_template._template import ChatTemplate, RenderedChat, Written
from forge_data.chat_template._trace import Run
from forge_data.formats._samples import Chat, Note
from forge_data.masking._as_prompted import TurnEnds, around_difference, not_as_prompted
from forge_data.masking._frames import Filled, Frame
from forge_data.masking._layouts import Layouts
from forge_data.masking._learned_ends import EVERY, NONE, TURN_END, UnclearEndError, unlearned_end, unlearned_ends
from forge_data.masking._loss_mask import Span
from forge_data.masking._media import placeholders
from forge_data.masking._partly import masked_of
from forge_data.masking._segments import text_owners
from forge_data.masking._spans import SpanContext, Turns, UnclearError, spans_of
from forge_data.masking._train_on import CONTENT, NOTHING, SAID, TURN
from forge_data.masking._turn_ends import StopTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REMEDY = (
    "use a template that marks the assistant's text with {% generation %}, or give the rows as prompt and completion strings"
)
ONE_A_TURN = "one_sample_a_turn"
AS_HISTORY = "as_history"
_BEHIND_EMPTY, _BEHIND_OPEN = "behind_empty_block", "behind_open_block"


@attrs.frozen
class Conversation:
    """One conversation as text, with what masking needs to know of it."""

    text: str
    spans: list[Span]
    """Learned spans."""
    runs: list[Run]
    """Which message wrote which characters."""
    notes: tuple[Note, ...]
    forms: tuple[str, ...] = ()
    """How it is rendered where the row does not say it.

    `enable_thinking=false`, `one_sample_a_turn`, `as_history`, `behind_empty_block`, `behind_open_block`.
    """
    media: int = 0
    """How many of the row's images, from the first, its text has placeholders of."""
    masked: tuple[tuple[int, int], ...] = ()
    """Characters within the spans of which no token is learned."""


class ConversationReader:
    """Reads conversations with one chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        turns: str = "auto",
        arguments: Mapping[str, Any] | None = None,
        stops: Sequence[str] = (),
        *,
        chosen: bool = False,
        learned_ends: str = TURN_END,
    ) -> None:
        """Make the reader of a tokenizer's chat template.

        Args:
            tokenizer: the tokenizer.
            turns: `auto` or `history`, as for `prepare`.
            arguments: arguments of the template that were chosen for all rows.
            stops: tokens that stop the model's answers.
            chosen: whether the user chose the one of `stops`.
            learned_ends: which ends of turns are learned, as `train_on_turn_end` says.
        """
        self._template = ChatTemplate(tokenizer)
        self._turns = turns
        self._arguments = arguments or {}
        self._ends = TurnEnds(tokenizer)
        self._stops = StopTokens(stops, self._ends, chosen=chosen)
        self._learned_ends = learned_ends
        # How turns begin may depend on the template's other arguments.
        self._openings: dict[str, Opening | UndecidableError | None] = {}
        self._layouts = Layouts(self._ends)
        self.placeholders: Mapping[Kind, str] = {}
        """Kind of media → text that the model's processor takes for one; needed before a row with some is read."""

    def render_batch(self, chats: Sequence[Chat]) -> list[Written | None]:
        """Render conversations, as far as one call can render many."""
        return self._template.render_batch(chats)

    def frame(self, chat: Chat, what: Sequence[str]) -> Frame | None:
        """Return what stands around contents of conversations with these roles; None if unknown."""
        return self._layouts.known_frame(chat, what)

    def read(
        self,
        chat: Chat,
        what: Sequence[str],
        written: Written | None = None,
        *,
        whole: bool = False,
        thinks: bool | None = None,
    ) -> list[Conversation]:
        """Render a conversation and find its learned spans.

        One text where it extends each prompt that the model gets before a learned turn, else one for each learned turn.

        Args:
            chat: the conversation.
            what: what is learned of each message, as `learned_parts` returns it.
            written: what `render_batch` returned for it.
            whole: every token is learned, so that it is one text in any case.
            thinks: whether the model is to think, for a template that can be told; by default as each turn does.

        Raises:
            DataError: the template refuses the conversation; its own message is included.
            TemplateError: it leaves out text of a message, leaves open which tokens are to be learned, or prompts for a turn
                with another text than it writes for it.
        """
        layout = self._layouts.find(chat, what) if not thinks else None
        if layout is not None:
            if layout.arguments:
                # A batch is rendered without arguments, so all of it is rendered again.
                self._template.batches = False
            rendered = self._template.render(_with(chat, layout.arguments), None if layout.arguments else written)
            prompts = layout.prompts(rendered.trace)
            if prompts is not None:
                turns = self._spans(chat, what, rendered, prompts=prompts)
                made = self._made(chat, what, rendered, turns, layout.arguments)
                self._layouts.frame(chat, what, rendered, Filled(made.text, made.spans, made.runs))
                return [made]
        learned = [index for index, part in enumerate(what) if part == TURN]
        in_one = self._turns == "history" or whole or self._learned_ends == EVERY
        if in_one or {CONTENT, SAID} & set(what) or not learned:
            return [self._in_history(chat, what, learned, self._template.render(chat, written))]
        return self._as_prompted(chat, what, learned, self._template.render(chat, written), thinks)

    def _as_prompted(
        self, chat: Chat, what: Sequence[str], learned: list[int], rendered: RenderedChat, thinks: bool | None
    ) -> list[Conversation]:
        # A turn of which the template writes nothing, such as an empty one, has nothing to learn.
        learned = [index for index in learned if rendered.trace.is_written(index) or _is_answered(rendered, index)]
        chosen = {index: self._asked(chat, rendered, index, thinks) for index in learned}
        arguments = chosen[learned[0]][0] if learned else {}
        if all(others == arguments for others, _ in chosen.values()):
            given = _with(chat, arguments)
            rendered = self._template.render(given) if arguments else rendered
            asked = {index: turn for index, (_, turn) in chosen.items() if turn is not None}
            # Its layout is for rows that are asked for as their own turns are.
            first = None if thinks else self._tried(chat, rendered, thinks=False)[0]
            turns = self._extending(given, what, rendered, asked, arguments, first)
            if turns is not None:
                return [self._made(chat, what, rendered, turns, arguments)]
        return [self._turn_alone(chat, rendered, index, *chosen[index], is_last=index == learned[-1]) for index in learned]

    def _asked(
        self, chat: Chat, rendered: RenderedChat, index: int, thinks: bool | None
    ) -> tuple[dict[str, Any], Asked | None]:
        """Choose arguments under which a turn's text follows its prompt, and render both.

        Raises:
            TemplateError: no arguments do.
        """
        thinks = has_reasoning(rendered.messages[index]) if thinks is None else thinks
        refused: Asked | None = None
        for arguments in self._tried(chat, rendered, thinks=thinks):
            turn = self._ask(chat, self._template.renderer(_with(chat, arguments)), rendered.messages, index)
            if turn is None and not arguments:
                return {}, None
            if turn is not None and (turn.follows or (turn.block and (turn.block.closing or not thinks))):
                # Where the argument changes nothing, it is not given.
                plain = self._ask(chat, rendered.renderer, rendered.messages, index) == turn
                return {} if plain else arguments, turn
            refused = turn or refused
        assert refused is not None
        wrote, prompted = around_difference(refused.answered, refused.prompt)
        raise TemplateError(
            f"{chat.place}: {self._template.name} prompts for message {index} with {prompted!r}, and writes {wrote!r} where it "
            "is answered, so nothing that it writes can be learned as it will be asked for; use a template that writes answers "
            "behind its own prompt (`chat_template`), give the message the reasoning that the prompt asks for, or learn the "
            "text as it stands all the same (`turns` set to history)"
        )

    def _ask(self, chat: Chat, renderer: Renderer, messages: Messages, index: int) -> Asked | None:
        return ask(renderer, messages, index, self._template.source(chat.tools))

    def _tried(self, chat: Chat, rendered: RenderedChat, *, thinks: bool) -> list[dict[str, Any]]:
        """List the arguments under which turns are tried, in order."""
        switch = thinking(self._template.reads(chat), {**self._arguments, **chat.template_kwargs}, thinks=thinks)
        # A template that marks the assistant's text says itself what is learned, for its default.
        return [{}] if not switch else [{}, switch] if rendered.marks else [switch, {}]

    def _extending(
        self,
        chat: Chat,
        what: Sequence[str],
        rendered: RenderedChat,
        asked: Mapping[int, Asked],
        arguments: dict[str, Any],
        first: dict[str, Any] | None,
    ) -> Turns | None:
        """Find the spans of one text for all turns; None where it does not extend their prompts.

        Its layout is kept unless there are no arguments that are tried `first`.
        """
        text = rendered.trace.text
        if not all(text.startswith(turn.prompt) for turn in asked.values()):
            return None
        try:
            turns = self._spans(chat, what, rendered, asked=asked)
        except UnclearError:
            return None
        if not all(self._extends(rendered, index, turn, turns) for index, turn in asked.items()):
            return None
        if first is not None and len(asked) == len(turns.last) == sum(part == TURN for part in what):
            with contextlib.suppress(UnclearError):
                again = self._spans(chat, what, rendered, prompts={index: len(turn.prompt) for index, turn in asked.items()})
                if again.spans == turns.spans:
                    self._layouts.learn(chat, what, arguments, first, rendered, asked, turns, self._template)
        return turns

    def _extends(self, rendered: RenderedChat, index: int, asked: Asked, turns: Turns) -> bool:
        # A turn of which the template writes nothing has nothing to learn.
        span = turns.last.get(index)
        return span is None or self._ends.extends(rendered.trace.text, span, asked, marked=rendered.marks)

    def _turn_alone(
        self, chat: Chat, rendered: RenderedChat, index: int, arguments: dict[str, Any], asked: Asked | None, *, is_last: bool
    ) -> Conversation:
        """Make the sample of one learned turn: the conversation up to it, nothing else learned."""
        turn = rendered.messages[index]
        if asked is not None and asked.block is not None and asked.block.closing:
            # Its reasoning, if any, is learned as the end of the block.
            turn = without_reasoning(turn)
        upto = attrs.evolve(_with(chat, arguments), messages=[*rendered.messages[:index], turn])
        try:
            alone = self._template.render(upto)
        except DataError as error:
            self._refuse(chat, index, f"the template cannot write the messages up to there alone: {error.__cause__}", error)
        what = [NOTHING] * index + [TURN]
        block = None if asked is None else asked.block
        if asked is not None and block is not None:
            asked = asked._replace(prompt=asked.prompt.removesuffix(block.text) + block.instead)
        try:
            turns = self._spans(upto, what, alone, asked={} if asked is None else {index: asked})
        except UnclearError as error:
            self._refuse(chat, error.index, error.why, error)
        made = self._made(chat, what, alone, turns, arguments, ONE_A_TURN, holds_last=is_last)
        partly = chat.asks.get(index) is not None
        return made if asked is None or block is None else _behind(made, len(asked.prompt), block, partly=partly)

    def _in_history(self, chat: Chat, what: Sequence[str], learned: list[int], rendered: RenderedChat) -> Conversation:
        """Make one text in any case, and note turns that are not as they are asked for."""
        asked = {
            index: turn
            for index in learned
            if (turn := self._ask(chat, rendered.renderer, rendered.messages, index)) is not None
        }
        if all(turn.follows for turn in asked.values()):
            extending = self._extending(chat, what, rendered, asked, {}, {})
            if extending is not None:
                return self._made(chat, what, rendered, extending, {})
        try:
            turns = self._spans(chat, what, rendered, history=True)
        except UnclearError as error:
            self._refuse(chat, error.index, error.why, error)
        notes = [
            not_as_prompted(rendered.trace.text, index, turns.last[index], turn, self._ends)
            for index, turn in asked.items()
            if not self._extends(rendered, index, turn, turns)
        ]
        turns.notes.extend(notes)
        return self._made(chat, what, rendered, turns, {}, *[AS_HISTORY for _ in notes[:1]])

    def _spans(
        self,
        chat: Chat,
        what: Sequence[str],
        rendered: RenderedChat,
        *,
        asked: Mapping[int, Asked] | None = None,
        prompts: Mapping[int, int] | None = None,
        history: bool = False,
    ) -> Turns:
        """Find the learned spans of a text; see `SpanContext`."""
        asked = asked or {}
        prompts = prompts or {index: len(turn.prompt) for index, turn in asked.items()}
        context = SpanContext(
            rendered,
            lambda: self._opening(chat, rendered),
            self._ends.are_special,
            self._ends.closes,
            self._ends.leading,
            self._ends.closing,
            self._ends.eos,
            prompts,
            {index: turn.answered for index, turn in asked.items()},
            history,
            self._learned_ends == EVERY,
        )
        return spans_of(context, what)

    def _made(
        self,
        chat: Chat,
        what: Sequence[str],
        rendered: RenderedChat,
        turns: Turns,
        arguments: dict[str, Any],
        *forms: str,
        holds_last: bool = True,
    ) -> Conversation:
        notes = [
            note
            for index in range(len(what))
            if (note := self._dropped_reasoning(chat, rendered, index)) and what[index] == TURN
        ]
        masked = self._masked(chat, what, rendered, turns)
        text, turns, tokens, owned = self._stops.end_turns(rendered, turns)
        masked += self._masked_ends(chat, rendered, text, turns, holds_last=holds_last)
        # What is learned of a turn has its weight, also where a template writes it outside of the loop over messages.
        runs = _owned_by(text_owners(rendered.trace), [*owned, *(turns.owned if chat.weights else [])])
        named = [as_form(name, value) for name, value in arguments.items()]
        named += [as_form("turn_end", token) for token in sorted(tokens)]
        media = placeholders(rendered, self.placeholders, chat.place, self._template.name) if chat.media else 0
        return Conversation(text, turns.spans, runs, (*notes, *turns.notes), (*named, *forms), media, masked)

    def _masked(self, chat: Chat, what: Sequence[str], rendered: RenderedChat, turns: Turns) -> tuple[tuple[int, int], ...]:
        """Find what is not learned of messages of which only some stretches are."""
        found: list[tuple[int, int]] = []
        for index, stretches in chat.asks.items():
            if stretches is None or index >= len(what) or not what[index]:
                continue
            content = chat.messages[index]["content"]
            if (masked := masked_of(rendered.trace, index, content, stretches.learned, turns, self._ends)) is None:
                raise TemplateError(
                    f"{chat.place}: {self._template.name} does not write the content of message {index} as it stands, so which "
                    "of its characters are learned (train_detail, or train of its parts) cannot be told; use a template that "
                    "does, or take that out"
                )
            found += masked
        return tuple(found)

    def _masked_ends(
        self, chat: Chat, rendered: RenderedChat, text: str, turns: Turns, *, holds_last: bool
    ) -> tuple[tuple[int, int], ...]:
        """Find the ends of turns that are not learned; note them where none is."""
        try:
            ends = unlearned_ends(self._learned_ends, rendered, text, turns, self._ends, holds_last=holds_last)
        except UnclearEndError as error:
            raise TemplateError(
                f"{chat.place}: {self._template.name} ends message {error.index} in plain text, which is not told from what it "
                f"says, so that `train_on_turn_end` cannot be {self._learned_ends}; leave it out, or use a template that ends "
                "turns with a token"
            ) from error
        if self._learned_ends == NONE:
            turns.notes.extend(unlearned_end(index) for index in ends if index in turns.last)
        return tuple(ends.values())

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

    def _refuse(self, chat: Chat, index: int, why: str, error: Exception) -> NoReturn:
        raise TemplateError(
            f"{chat.place}: {self._template.name} leaves open which tokens the assistant wrote in message {index}: {why}; "
            f"{_REMEDY}"
        ) from error


def _behind(made: Conversation, at: int, block: Block, *, partly: bool) -> Conversation:
    """Put the block that ends a turn's prompt, and what closes it, before the answer at `at`.

    Of a turn that is learned `partly` only stretches of its content are, and not what closes the block.
    """
    start, added = at - len(block.instead), block.text + block.closing
    size = len(added) - len(block.instead)
    spans = [[max(place, at) + size for place in span] for span in made.spans]
    for span in spans if block.closing else ():
        # The model writes the end of the block too.
        span[0] = span[1] = start + len(block.text)
    closing = ((start + len(block.text), start + len(added)),) if partly and block.closing else ()
    return attrs.evolve(
        made,
        text=made.text[:start] + added + made.text[at:],
        spans=[Span(*span) for span in spans],
        masked=(*closing, *((max(begin, at) + size, max(stop, at) + size) for begin, stop in made.masked)),
        runs=[(begin + size * (begin > start), stop + size * (stop > start), owner) for begin, stop, owner in made.runs],
        forms=(*made.forms, _BEHIND_OPEN if block.closing else _BEHIND_EMPTY),
    )


def _owned_by(runs: list[Run], others: Sequence[Run]) -> list[Run]:
    """Return runs, in order, in which some parts of the text have other owners."""
    for first, last, _ in others:
        apart = [((start, min(stop, first), owner), (max(start, last), stop, owner)) for start, stop, owner in runs]
        runs = [run for both in apart for run in both if run[0] < run[1]]
    return sorted([*runs, *others])


def _with(chat: Chat, arguments: Mapping[str, Any]) -> Chat:
    """Return a conversation with further arguments for its template."""
    return attrs.evolve(chat, template_kwargs={**chat.template_kwargs, **arguments}) if arguments else chat


def _is_answered(rendered: RenderedChat, index: int) -> bool:
    """Tell whether a template writes more of a turn than its prompt, where nothing is traced."""
    turn = ask(rendered.renderer, rendered.messages, index, "")
    return turn is not None and turn.follows and bool(turn.answered[len(turn.prompt) :].strip())


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

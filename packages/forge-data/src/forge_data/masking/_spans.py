"""Rendered conversation and what is to be learned of it → learned character spans.

Spans follow from where the template's loops were and from which message each character came, never from what a text looks like.
Where a template leaves that open, the row is refused.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from forge_data.chat_template._block import REASONING_TAGS, has_reasoning
from forge_data.chat_template._header import Opening, RefusedError, UndecidableError, header_end
from forge_data.chat_template._template import RenderedChat
from forge_data.chat_template._trace import NOBODY, Run, foreign_text, template_prefix
from forge_data.chat_template._traced_text import Leaf
from forge_data.formats._samples import Note
from forge_data.masking._loss_mask import Span
from forge_data.masking._train_on import CONTENT, NOTHING, SAID, TURN
from forge_data.masking._turns import find_content, turn_span

_FINAL = "<|channel|>final"
"""Channel of answers in templates that have one for reasoning (gpt-oss)."""


class UnclearError(Exception):
    """What is learned of message `index` cannot be decided."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(index, why)
        self.index = index
        self.why = why


class SpanContext(NamedTuple):
    """One rendered conversation, with questions about its template that are asked if needed."""

    rendered: RenderedChat
    opens: Callable[[], Opening | None]
    """How the template opens a turn; None if it refuses a short conversation that would show it."""
    ends: Callable[[str], bool]
    """Whether a text is special tokens and blanks, which may end the last turn."""
    closes: Callable[[str], bool]
    """Whether a text has a special token, which may end any turn."""
    stops: Callable[[str], tuple[str, int]]
    """The special token that a text begins with, blanks before it aside, and where that ends; else an empty one."""
    closing: Callable[[str, Span], tuple[int, int] | None]
    """Where the token is that ends a turn."""
    eos: str
    """The token that ends texts."""
    prompts: Mapping[int, int]
    """By turn, the length of the prompt that the text begins with, where it is known."""
    answered: Mapping[int, str]
    """By turn, the text that the template writes for the messages up to it, where it was asked."""
    history: bool
    """Whether a turn may stand behind another header than its prompt has."""
    every_end: bool = False
    """Whether the ends of turns are learned of which nothing else is."""


class Turns(NamedTuple):
    """What is learned of a conversation."""

    spans: list[Span]
    """All spans, in order."""
    last: dict[int, Span]
    """By learned turn, its span; of several that the template marks in one turn the last."""
    notes: list[Note]
    owned: list[Run]
    """Where the spans of turns are, and whose they are, although several loops may have written them."""
    ends: dict[int, tuple[int, int]]
    """By learned message of another role than the assistant, the characters of the token that ends it."""


def spans_of(context: SpanContext, what: Sequence[str]) -> Turns:
    """Find the learned spans of a conversation, and what was noticed on the way.

    Args:
        context: the conversation.
        what: `TURN`, `SAID`, `CONTENT` or `NOTHING` for each of its messages.

    Raises:
        UnclearError: the template leaves open where a turn that is to be learned begins or ends.
    """
    marks = context.rendered.marks
    turns: list[tuple[int, Span | None]] = [*_marked(context, what)] if marks else []
    turns += [(index, _turn(context, index)) for index, part in enumerate(what) if part == TURN and not marks]
    last = {index: span for index, span in turns if span is not None}
    # Of several marked spans in one turn the last one has its end.
    notes = [note for index, span in last.items() if (note := _untrained_end(context.rendered, index, span))]
    notes += [note for index in last if (note := _inline_reasoning(context.rendered, index))]
    if marks:
        notes += [_unmarked(index) for index, part in enumerate(what) if part == TURN and index not in last]
    contents = [span for index, part in enumerate(what) if part == CONTENT for span in _content(context.rendered, index)]
    ends: dict[int, tuple[int, int]] = {}
    if SAID in what or context.every_end:
        tokens = _end_tokens(context, last)
        contents += _said(context, [index for index, part in enumerate(what) if part == SAID], tokens, ends)
        if context.every_end:
            contents += _other_ends(context, [index for index, part in enumerate(what) if part in (CONTENT, NOTHING)], tokens)
    owned = [(span.start, span.stop, index) for index, span in turns if span is not None]
    return Turns(sorted([span for _, span in turns if span is not None] + contents), last, notes, owned, ends)


def _end_tokens(context: SpanContext, turns: Mapping[int, Span]) -> set[str]:
    """Return the tokens that end messages: the EOS, and what ends the assistant's turns.

    Any other token that follows a message of another role is the template's.
    """
    text = context.rendered.trace.text
    closings = [text[span.content_end : span.stop] for span in turns.values() or _answers(context)]
    return {context.eos, *(context.stops(closing)[0] for closing in closings)}


def _said(context: SpanContext, said: Sequence[int], tokens: Collection[str], ends: dict[int, tuple[int, int]]) -> list[Span]:
    """Find what messages of other roles than the assistant say, and the tokens that end them.

    Those are added to `ends`, by message.
    """
    found: list[Span] = []
    for index in said:
        spans = _content(context.rendered, index)
        if spans and (end := _end_behind(context, spans[-1].stop, tokens)) is not None:
            spans[-1] = spans[-1]._replace(stop=end[1])
            ends[index] = end
        found += spans
    return found


def _end_behind(context: SpanContext, at: int, tokens: Collection[str]) -> tuple[int, int] | None:
    """Return where the token is that ends a message whose content ends at `at`, or None."""
    token, length = context.stops(context.rendered.trace.text[at:])
    return (at + length - len(token), at + length) if token and token in tokens else None


def _other_ends(context: SpanContext, indices: Sequence[int], tokens: Collection[str]) -> list[Span]:
    """Find the tokens that end messages of which nothing else is learned, or the content alone."""
    found: list[Span] = []
    for index in indices:
        if context.rendered.messages[index]["role"] == "assistant":
            span = _turn(context, index)
            end = None if span is None else context.closing(context.rendered.trace.text, span)
        else:
            spans = _content(context.rendered, index)
            end = _end_behind(context, spans[-1].stop, tokens) if spans else None
        found += [] if end is None else [Span.plain(*end)]
    return found


def _answers(context: SpanContext) -> list[Span]:
    """Return the span of the assistant's first turn, as far as the template shows one."""
    for index, message in enumerate(context.rendered.messages):
        if message["role"] == "assistant":
            try:
                span = _turn(context, index)
            except UnclearError:
                return []
            return [] if span is None else [span]
    return []


def _turn(context: SpanContext, index: int) -> Span | None:
    """Find everything that the model has to write of a turn."""
    trace = context.rendered.trace
    body = trace.body(index)
    if not trace.is_written(index) and not context.answered.get(index, "")[context.prompts.get(index, 0) :].strip():
        return None
    if index in context.prompts:
        span = _prompted(context, index, context.prompts[index])
    elif body is None:
        raise UnclearError(index, "no loop of the template over its messages writes this turn, or more than one does")
    else:
        start = _header_end(context, index)
        span = turn_span(trace, index, start, _stop(context.rendered, index, start, body[1]))
    closing = trace.text[span.content_end : span.stop]
    if context.closes(closing):
        return span
    end = len(context.answered.get(index, "").rstrip())
    if (
        end > span.stop
        and context.answered[index].startswith(trace.text[:end])
        and not foreign_text(trace, index, span.stop, end)
    ):
        return span._replace(closing_end=end, stop=end)
    if closing.strip():
        # Plain text ends the turn, also behind the token that ends a block in it.
        return span._replace(content_end=span.closing_end)
    rest = trace.text[span.stop :]
    # Some templates write the EOS once, after the last turn.
    if trace.end_of_turns() == span.stop and context.ends(rest):
        return span._replace(closing_end=len(trace.text.rstrip()), stop=len(trace.text))
    return span


def _prompted(context: SpanContext, index: int, start: int) -> Span:
    """Find the span of a turn that begins where its prompt ends."""
    trace = context.rendered.trace
    _, stop = trace.body(index) or (0, -1)
    if stop < start or foreign_text(trace, index, start, stop):
        stop = _answered_end(context, index, start)
    if index in context.answered:
        _check_prompt(context, index, start, stop)
    return turn_span(trace, index, start, stop)


def _answered_end(context: SpanContext, index: int, start: int) -> int:
    """Find the end of a turn that several loops write, or that holds another message.

    It ends where the text ends that the template writes for the messages up to it, if the conversation continues from there.
    """
    trace, answered = context.rendered.trace, context.answered.get(index, "")
    for stop in (len(answered), len(answered.rstrip())):
        if stop >= start and trace.text.startswith(answered[:stop]) and not foreign_text(trace, index, start, stop):
            return stop
    raise UnclearError(index, "within this turn the template writes text of other messages, or goes on with it elsewhere")


def _check_prompt(context: SpanContext, index: int, start: int, stop: int) -> None:
    """Refuse a turn that opens with a header of the template that its prompt lacks.

    Raises:
        UnclearError: there is no generation prompt at this place, and the template writes text before the answer.
    """
    trace, rendered = context.rendered.trace, context.rendered
    prefix, clear = template_prefix(trace, index, start, stop)
    if not prefix.strip():
        return
    try:
        if len(rendered.renderer.native(rendered.messages[:index])) != start:
            return
        context.opens()
    except RefusedError:
        return
    except UndecidableError as error:
        raise UnclearError(index, str(error)) from error
    first = next(iter(trace.within(start, stop)), None)
    if clear and first is not None and first[2].field.startswith("content") and not has_reasoning(rendered.messages[index]):
        raise UnclearError(index, f"the template writes {prefix[-60:]!r} before the answer, and its prompt ends before that")


def _header_end(context: SpanContext, index: int) -> int:
    """Find where the header of a turn ends whose prompt is not known.

    Raises:
        UnclearError: no header fits; or, but in history, one that is not all of the generation prompt.
    """
    rendered = context.rendered
    try:
        opens = context.opens()
        start = header_end(rendered.renderer, opens, rendered.trace, rendered.messages, index)
    except UndecidableError as error:
        raise UnclearError(index, str(error)) from error
    except RefusedError as error:
        raise UnclearError(index, f"the template cannot write the messages up to there alone: {error}") from error
    if not context.history and opens is not None and not rendered.trace.text[:start].endswith(opens.prompt):
        raise UnclearError(index, f"the turn does not begin behind the generation prompt {opens.prompt[:60]!r}")
    return start


def _stop(rendered: RenderedChat, index: int, start: int, stop: int) -> int:
    """Find where a turn ends that begins at `start` in a body that ends at `stop`.

    Some templates write a tool's result into the turn that called it. Then the turn ends where the text ends that the template
    writes for the messages up to this one, if the conversation continues from there.
    """
    foreign = foreign_text(rendered.trace, index, start, stop)
    if not foreign:
        return stop
    try:
        alone = rendered.renderer.native(rendered.messages[: index + 1])
    except RefusedError:
        alone = ""
    end = len(alone)
    if not start < end <= stop or not rendered.trace.text.startswith(alone) or foreign_text(rendered.trace, index, start, end):
        raise UnclearError(index, f"within this turn the template writes text of another message: {foreign[:60]!r}")
    return end


def _unmarked(index: int) -> Note:
    return Note("untrained_turn", f"messages[{index}]", "the template marks nothing of this turn with {% generation %}")


def _content(rendered: RenderedChat, index: int) -> list[Span]:
    """Find what a message contains, without tokens of the template or text of another message."""
    contents = [leaf for field, leaf in rendered.trace.leaves[index].items() if field.partition("[")[0] == "content"]
    return [span for content in contents if content.text.strip() for span in _content_part(rendered, index, content)]


def _content_part(rendered: RenderedChat, index: int, content: Leaf) -> list[Span]:
    """Find a content, or one of the texts of one in parts."""
    trace = rendered.trace
    stretches = [(start, stop) for start, stop, leaf, offset in trace.of(index) if leaf is content and offset >= 0]
    if stretches:
        return [Span.plain(start, stop) for start, stop in stretches]
    start, stop = trace.body(index) or (0, 0)
    found = find_content(trace.text[start:stop], content.text)
    if found is None:
        raise UnclearError(
            index, "the template writes its content in another spelling, so its tokens cannot be separated from others"
        )
    return [Span.plain(start + found[0], start + found[1])]


def _marked(context: SpanContext, what: Sequence[str]) -> list[tuple[int, Span]]:
    """Find the spans that the template marks of learned turns, without what their prompts have."""
    rendered, trace = context.rendered, context.rendered.trace
    answers = {index for index, message in enumerate(rendered.messages) if message["role"] == "assistant"}
    learned = {index for index in answers if what[index] == TURN}
    spans: list[tuple[int, Span]] = []
    for start, stop in trace.marked:
        writers = {owner for first, last, owner in trace.runs if first < stop and last > start and owner != NOBODY}
        writers = writers or {leaf.message for _, _, leaf, _ in trace.within(start, stop) if leaf.message >= 0}
        writer = min(writers & answers, default=NOBODY) if len(writers) == 1 else _asked_writer(context, start, stop)
        if writer is None:
            # Which message it is of matters only if some are learned and others are not.
            if learned != answers:
                raise UnclearError(
                    min(answers - learned), "the template marks text for learning without saying which message it is of"
                )
            writer = min(answers, default=NOBODY)
        # Blanks at the end of a header that the template marks (TRL's template of Qwen2.5) are taken at its word.
        prompt = context.prompts.get(writer, start)
        first = prompt if trace.text[start:prompt].strip() else start
        if stop > first and writer in learned:
            spans.append((writer, Span.plain(first, stop)))
    for index, prompt in context.prompts.items() if context.answered and _has_prompts(context) else ():
        begins = [span.start for writer, span in spans if writer == index]
        if begins and trace.text[prompt : min(begins)].strip():
            raise UnclearError(index, "the template marks less than what follows its prompt")
    return spans


def _has_prompts(context: SpanContext) -> bool:
    """Tell whether the template has a generation prompt; without one its marks alone count."""
    try:
        context.opens()
    except UndecidableError:
        return False
    return True


def _asked_writer(context: SpanContext, start: int, stop: int) -> int | None:
    """Find the learned turn that holds a marked part, by prompts; None where none is known."""
    if not context.prompts:
        return None
    ends = {index: len(answered) for index, answered in context.answered.items()}
    inside = [index for index, prompt in context.prompts.items() if prompt < stop and start < ends.get(index, stop)]
    return max(inside, default=NOBODY)


def _untrained_end(rendered: RenderedChat, index: int, span: Span) -> Note | None:
    """Note a turn that nothing ends: the model would not learn to stop."""
    text = rendered.trace.text
    ends = [last for _, last, leaf, _ in rendered.trace.within(span.start, span.stop) if leaf.message == index]
    if text[max(ends, default=span.content_end) : span.stop].strip():
        return None
    return Note("untrained_turn_end", f"messages[{index}]", "the template writes nothing that ends this turn")


def _inline_reasoning(rendered: RenderedChat, index: int) -> Note | None:
    """Note a content that begins with reasoning behind the template's own reasoning block."""
    trace = rendered.trace
    content = next((stretch for stretch in trace.of(index) if stretch[2].field == "content"), None)
    if content is None:
        return None
    start, stop = content[:2]
    own = next((opening for opening, _ in REASONING_TAGS if trace.text[start:stop].lstrip().startswith(opening)), None)
    if own is None:
        return None
    before = trace.text[max((last for _, last, _, _ in trace.within(0, start)), default=0) : start]
    if not any(mark in before for mark in (*(closing for _, closing in REASONING_TAGS), _FINAL)):
        return None
    return Note("inline_reasoning", f"messages[{index}].content", f"{own} is text behind {before[-40:]!r}")

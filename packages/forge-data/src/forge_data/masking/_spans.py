"""Rendered conversation and what is to be learned of it → learned character spans.

Spans follow from where the template's loops were and from which message each character came, never from what a text looks like.
Where a template leaves that open, the row is refused.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forge_data.chat_template._header import Opening, RefusedError, UndecidableError, header_end
from forge_data.chat_template._template import RenderedChat
from forge_data.chat_template._trace import NOBODY, foreign_text
from forge_data.formats._samples import Note
from forge_data.masking._loss_mask import Span
from forge_data.masking._train_on import CONTENT, TURN
from forge_data.masking._turns import find_content, turn_span


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


def spans_of(context: SpanContext, what: Sequence[str]) -> tuple[list[Span], list[Note]]:
    """Find the learned spans of a conversation, in order, and what was noticed on the way.

    Args:
        context: the conversation.
        what: `TURN`, `CONTENT` or `NOTHING` for each of its messages.

    Raises:
        UnclearError: the template leaves open where a turn that is to be learned begins or ends.
    """
    marks = context.rendered.marks
    turns = _marked(context.rendered, what) if marks else []
    turns += [(index, _turn(context, index)) for index, part in enumerate(what) if part == TURN and not marks]
    spans = {index: span for index, span in turns if span is not None}
    # Of several marked spans in one turn the last one has its end.
    notes = [note for index, span in spans.items() if (note := _untrained_end(context.rendered, index, span))]
    if marks:
        notes += [_unmarked(index) for index, part in enumerate(what) if part == TURN and index not in spans]
    contents = [span for index, part in enumerate(what) if part == CONTENT for span in _content(context.rendered, index)]
    return sorted([span for _, span in turns if span is not None] + contents), notes


def _turn(context: SpanContext, index: int) -> Span | None:
    """Find everything that the model has to write of a turn."""
    rendered = context.rendered
    trace = rendered.trace
    body = trace.body(index)
    if body is None:
        if not trace.of(index) and not trace.has_body(index):
            return None
        raise UnclearError(index, "no loop of the template over its messages writes this turn, or more than one does")
    try:
        start = header_end(rendered.renderer, context.opens(), trace, rendered.messages, index)
    except UndecidableError as error:
        raise UnclearError(index, str(error)) from error
    except RefusedError as error:
        raise UnclearError(index, f"the template cannot write the messages up to there alone: {error}") from error
    span = turn_span(trace, index, start, _stop(rendered, index, start, body[1]))
    rest = trace.text[span.stop :]
    # Some templates write the EOS once, after the last turn.
    if not trace.text[span.content_end : span.stop].strip() and trace.end_of_turns() == span.stop and context.ends(rest):
        return span._replace(closing_end=len(trace.text.rstrip()), stop=len(trace.text))
    return span


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
    trace = rendered.trace
    content = trace.leaves[index].get("content")
    if content is None or not content.text.strip():
        return []
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


def _marked(rendered: RenderedChat, what: Sequence[str]) -> list[tuple[int, Span | None]]:
    """Find the spans that the template itself marks, of messages that are to be learned."""
    trace = rendered.trace
    answers = {index for index, message in enumerate(rendered.messages) if message["role"] == "assistant"}
    learned = {index for index in answers if what[index] == TURN}
    spans: list[tuple[int, Span | None]] = []
    for start, stop in trace.marked:
        writers = {owner for first, last, owner in trace.runs if first < stop and last > start and owner != NOBODY}
        writers = writers or {leaf.message for _, _, leaf, _ in trace.within(start, stop) if leaf.message >= 0}
        # Which message it is of matters only if some are learned and others are not.
        if len(writers) != 1 and learned != answers:
            raise UnclearError(
                min(answers - learned), "the template marks text for learning without saying which message it is of"
            )
        writer = min(writers & answers, default=NOBODY) if len(writers) == 1 else min(answers, default=NOBODY)
        if stop > start and writer in learned:
            spans.append((writer, Span.plain(start, stop)))
    return spans


def _untrained_end(rendered: RenderedChat, index: int, span: Span) -> Note | None:
    """Note a turn that nothing ends: the model would not learn to stop."""
    text = rendered.trace.text
    ends = [last for _, last, leaf, _ in rendered.trace.within(span.start, span.stop) if leaf.message == index]
    if text[max(ends, default=span.content_end) : span.stop].strip():
        return None
    return Note("untrained_turn_end", f"messages[{index}]", "the template writes nothing that ends this turn")

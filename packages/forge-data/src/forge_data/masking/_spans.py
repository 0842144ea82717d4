"""A conversation and what is to be learned of it to the spans of its text that are.

Spans follow from where the loops of the template were and from which message each character came, never from what a text
looks like; where a template leaves that open, it is refused and not guessed at.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forge_data.chat_template._header import Opening, RefusedError, UndecidableError, header_end
from forge_data.chat_template._template import Written
from forge_data.chat_template._trace import NOBODY, stranger
from forge_data.formats._samples import Note
from forge_data.masking._loss_mask import Span
from forge_data.masking._train_on import CONTENT, TURN
from forge_data.masking._turns import find, turn_span


class UnclearError(Exception):
    """What of message `index` is learned cannot be told."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(index, why)
        self.index = index
        self.why = why


class Reading(NamedTuple):
    """One conversation, with what is asked about its template as far as that matters."""

    written: Written
    opens: Callable[[], Opening | None]
    """How the template opens a turn; None if it will not write a short conversation to show it."""
    ends: Callable[[str], bool]
    """Whether a text is special tokens and blanks, such as may end the last turn."""


def spans_of(reading: Reading, what: Sequence[str]) -> tuple[list[Span], list[Note]]:
    """The learned spans of a conversation, in order, and what was noticed on the way.

    Args:
        reading: the conversation.
        what: `TURN`, `CONTENT` or `NOTHING` for each of its messages.

    Raises:
        UnclearError: the template leaves open where a turn that is to be learned begins or ends.
    """
    marks = reading.written.marks
    turns = _marked(reading.written, what) if marks else []
    turns += [(index, _turn(reading, index)) for index, says in enumerate(what) if says == TURN and not marks]
    spans = {index: span for index, span in turns if span is not None}
    # Of several marks in one turn the last one has its end.
    notes = [note for index, span in spans.items() if (note := _untrained_end(reading.written, index, span))]
    if marks:
        notes += [_unmarked(index) for index, says in enumerate(what) if says == TURN and index not in spans]
    contents = [span for index, says in enumerate(what) if says == CONTENT for span in _content(reading.written, index)]
    return sorted([span for _, span in turns if span is not None] + contents), notes


def _turn(reading: Reading, index: int) -> Span | None:
    """All that the model has to write of a turn."""
    written = reading.written
    trace = written.trace
    body = trace.body(index)
    if body is None:
        if not trace.of(index) and not trace.writes(index):
            return None
        raise UnclearError(index, "no loop of the template over its messages writes this turn, or more than one does")
    try:
        start = header_end(written.renderer, reading.opens(), trace, written.messages, index)
    except UndecidableError as error:
        raise UnclearError(index, str(error)) from error
    except RefusedError as error:
        raise UnclearError(index, f"the template cannot write the messages up to there alone: {error}") from error
    span = turn_span(trace, index, start, _stop(written, index, start, body[1]))
    outro = trace.text[span.stop :]
    # Some templates write the EOS once, after the last turn.
    if not trace.text[span.content_end : span.stop].strip() and trace.outro() == span.stop and reading.ends(outro):
        return span._replace(closing_end=len(trace.text.rstrip()), stop=len(trace.text))
    return span


def _stop(written: Written, index: int, start: int, stop: int) -> int:
    """Where a turn ends that begins at `start` in a body that ends at `stop`.

    Some templates write a tool's answer into the turn that asked for it. Then the turn ends where the text does that the template
    writes for the messages up to this one, if the conversation goes on from there.
    """
    foreign = stranger(written.trace, index, start, stop)
    if not foreign:
        return stop
    try:
        alone = written.renderer.native(written.messages[: index + 1])
    except RefusedError:
        alone = ""
    end = len(alone)
    if not start < end <= stop or not written.trace.text.startswith(alone) or stranger(written.trace, index, start, end):
        raise UnclearError(index, f"within this turn the template writes what another message says: {foreign[:60]!r}")
    return end


def _unmarked(index: int) -> Note:
    return Note("untrained_turn", f"messages[{index}]", "the template marks nothing of this turn with {% generation %}")


def _content(written: Written, index: int) -> list[Span]:
    """What a message says, without a token of the template's or a word of another message."""
    trace = written.trace
    said = trace.leaves[index].get("content")
    if said is None or not said.text.strip():
        return []
    stretches = [(start, stop) for start, stop, leaf, offset in trace.of(index) if leaf is said and offset >= 0]
    if stretches:
        return [Span.plain(start, stop) for start, stop in stretches]
    start, stop = trace.body(index) or (0, 0)
    found = find(trace.text[start:stop], said.text)
    if found is None:
        raise UnclearError(
            index, "the template writes its content in another spelling, so its tokens cannot be told from others"
        )
    return [Span.plain(start + found[0], start + found[1])]


def _marked(written: Written, what: Sequence[str]) -> list[tuple[int, Span | None]]:
    """The spans that the template itself marks, of messages that are to be learned."""
    trace = written.trace
    answers = {index for index, message in enumerate(written.messages) if message["role"] == "assistant"}
    learned = {index for index in answers if what[index] == TURN}
    spans: list[tuple[int, Span | None]] = []
    for start, stop in trace.marked:
        writers = {owner for first, last, owner in trace.runs if first < stop and last > start and owner != NOBODY}
        writers = writers or {leaf.message for _, _, leaf, _ in trace.within(start, stop) if leaf.message >= 0}
        # Whose it is matters only if some are learned and others are not.
        if len(writers) != 1 and learned != answers:
            raise UnclearError(
                min(answers - learned), "the template marks text for learning without saying which message it is of"
            )
        writer = min(writers & answers, default=NOBODY) if len(writers) == 1 else min(answers, default=NOBODY)
        if stop > start and writer in learned:
            spans.append((writer, Span.plain(start, stop)))
    return spans


def _untrained_end(written: Written, index: int, span: Span) -> Note | None:
    """A turn that nothing ends: the model would not learn to stop."""
    text = written.trace.text
    said = [last for _, last, leaf, _ in written.trace.within(span.start, span.stop) if leaf.message == index]
    if text[max(said, default=span.content_end) : span.stop].strip():
        return None
    return Note("untrained_turn_end", f"messages[{index}]", "the template writes nothing that ends this turn")

"""One turn as the template wrote it → the stretch of it that is learned."""

from forge_data.chat_template._trace import Trace
from forge_data.masking._loss_mask import Span


def turn_span(trace: Trace, message: int, start: int, stop: int) -> Span:
    """Make the span of a turn whose header ends at `start`, and whose body ends at `stop`.

    Where the template wrote content in another spelling, the origin of single characters is lost; then the content is searched
    in this turn's text.
    """
    text = trace.text
    own = [(first, last) for first, last, leaf, _ in trace.within(start, stop) if leaf.message == message]
    content = trace.leaves[message].get("content")
    if content is not None and content.text.strip() and all(leaf is not content for _, _, leaf, _ in trace.of(message)):
        found = find_content(text[start:stop], content.text)
        own += [(start + found[0], start + found[1])] if found is not None else []
    begin, end = (min(first for first, _ in own), max(last for _, last in own)) if own else (start, start)
    closing = start + len(text[start:stop].rstrip()) if text[end:stop].strip() else end
    return Span(start, begin, end, closing, stop)


def find_content(turn: str, content: str) -> tuple[int, int] | None:
    """Find where in a turn its content is: as it is, stripped, or without regard to blanks."""
    if turn.startswith(content):
        return 0, len(content)
    lead = len(turn) - len(turn.lstrip())
    for wanted in (content.lstrip(), content.strip()):
        if turn.startswith(wanted, lead):
            return lead, lead + len(wanted)
    # The last place, since what comes before the content (an empty reasoning block) is the template's own.
    wanted = content.strip()
    at = turn.rfind(wanted)
    return (at, at + len(wanted)) if at >= 0 else _find_without_blanks(turn, content)


def _find_without_blanks(turn: str, content: str) -> tuple[int, int] | None:
    squeezed, wanted = "".join(turn.split()), "".join(content.split())
    at = 0 if squeezed.startswith(wanted) else squeezed.rfind(wanted)
    if at < 0:
        return None
    solid = [position for position, character in enumerate(turn) if not character.isspace()]
    return solid[at], solid[at + len(wanted) - 1] + 1

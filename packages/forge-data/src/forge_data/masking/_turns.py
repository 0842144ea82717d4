"""One turn as the template wrote it, to the stretch of it that is learned."""

from forge_data.chat_template._trace import Trace
from forge_data.masking._loss_mask import Span


def turn_span(trace: Trace, message: int, start: int, stop: int) -> Span:
    """The span of a turn whose header ends at `start`, and whose body ends at `stop`.

    Where the template wrote what was said in another spelling, memory of single characters is lost; then its content is
    looked for in this very stretch.
    """
    text = trace.text
    own = [(first, last) for first, last, leaf, _ in trace.within(start, stop) if leaf.message == message]
    content = trace.leaves[message].get("content")
    if content is not None and content.text.strip() and all(leaf is not content for _, _, leaf, _ in trace.of(message)):
        found = find(text[start:stop], content.text)
        own += [(start + found[0], start + found[1])] if found is not None else []
    begin, end = (min(first for first, _ in own), max(last for _, last in own)) if own else (start, start)
    closing = start + len(text[start:stop].rstrip()) if text[end:stop].strip() else end
    return Span(start, begin, end, closing, stop)


def find(turn: str, content: str) -> tuple[int, int] | None:
    """Where in a turn its content stands, by its words: as it is, trimmed, or but for its blanks."""
    if turn.startswith(content):
        return 0, len(content)
    lead = len(turn) - len(turn.lstrip())
    for wanted in (content.lstrip(), content.strip()):
        if turn.startswith(wanted, lead):
            return lead, lead + len(wanted)
    # The last place, for what stands before the content (an empty reasoning block) is the template's own.
    wanted = content.strip()
    at = turn.rfind(wanted)
    return (at, at + len(wanted)) if at >= 0 else _find_but_for_blanks(turn, content)


def _find_but_for_blanks(turn: str, content: str) -> tuple[int, int] | None:
    squeezed, wanted = "".join(turn.split()), "".join(content.split())
    at = 0 if squeezed.startswith(wanted) else squeezed.rfind(wanted)
    if at < 0:
        return None
    solid = [position for position, character in enumerate(turn) if not character.isspace()]
    return solid[at], solid[at + len(wanted) - 1] + 1

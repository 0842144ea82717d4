"""One assistant turn as the template wrote it: where in it stands what was said."""

import json

from forge_data._mask import Span


def find_turn(text: str, start: int, stop: int, content: str) -> Span | None:
    """The span of a turn that the template wrote as `text[start:stop]`, or None if the content is not all there.

    Templates trim the content, or set blanks or an empty reasoning block before it; all of that is what the model has to
    write. Content that is changed in more than its blanks is not found.
    """
    turn = text[start:stop]
    found = _find(turn, content)
    if found is None:
        return None
    content_begin, content_end = found
    closing_end = len(turn.rstrip()) if turn[content_end:].strip() else content_end
    return Span(start, start + content_begin, start + content_end, start + closing_end, stop)


def is_written(text: str, content: str) -> bool:
    """Whether a template wrote a message's content: as it stands, trimmed, or as a JSON string (tool results)."""
    wanted = content.strip()
    return wanted in text or json.dumps(wanted)[1:-1] in text or json.dumps(wanted, ensure_ascii=False)[1:-1] in text


def _find(turn: str, content: str) -> tuple[int, int] | None:
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

"""Check that a template writes everything that the messages contain."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from forge_data.chat_template._block import REASONING_TAGS
from forge_data.chat_template._trace import Stretch, Trace
from forge_data.chat_template._traced_text import Leaf
from forge_data.formats._messages import REASONING
from forge_data.formats._samples import Note

_CALL = re.compile(r"tool_calls\[\d+\](\.function)?\.(name$|arguments)")


class LeftOutError(Exception):
    """Something that a message contains is not in the text; the error's text names it."""


def dropped_reasoning(trace: Trace, message: int, given: Mapping[str, Any], matters: Callable[[str], bool]) -> Note | None:
    """Check that a message is written in full; return a note if only its reasoning is left out.

    Args:
        trace: the conversation.
        message: index of the message.
        given: that message, as the row has it.
        matters: whether a change of this field would change the text; asked where the origin of characters was lost, since
            equal text in the turn does not prove that it came from the field.

    Raises:
        LeftOutError: something else is left out, or only a part of the reasoning.
    """
    leaves, answers = trace.leaves[message], given["role"] == "assistant"
    if len(leaves) == 1 and _is_verbatim(trace, message, leaves.get("content"), answers=answers):
        return None
    # The content of an answer must be in its own turn, if it has one; the same text elsewhere does not count.
    begin, end = trace.body(message) or (0, len(trace.text))
    # The template may write other messages anywhere: none of them is learned as a turn.
    inside = [stretch for stretch in trace.of(message) if not answers or begin <= stretch[0] < end]
    dropped: Note | None = None
    for field, leaf in leaves.items():
        if field.startswith("content"):
            gaps = _gaps(leaf, inside)
            if not gaps or (_is_written(trace.text[begin:end], leaf.text) and matters(field)):
                continue
            if not answers or not _reasoning_only(leaf.text, gaps, trace.text[begin:end]):
                raise LeftOutError(f"{_excerpt(leaf.text, gaps)} of its {field}")
            if any(_has_words(leaf.text[first:last]) for first, last in gaps):
                dropped = _dropped(message, field)
        elif answers and _CALL.match(field) and _gaps(leaf, inside) and not _is_written(trace.text[begin:end], leaf.text):
            raise LeftOutError(f"{leaf.text[:60]!r} of its {field}")
    reasoning = [leaf for field, leaf in leaves.items() if field in REASONING] if answers else []
    # Transformers passes one text to the template under several names; the row has it under one.
    names = {leaf.text: next((name for name in REASONING if given.get(name) == leaf.text), leaf.field) for leaf in reasoning}
    field = _field_dropped(reasoning, names, inside, trace.text[begin:end], matters)
    return dropped if field is None else _dropped(message, field)


def _is_verbatim(trace: Trace, message: int, leaf: Leaf | None, *, answers: bool) -> bool:
    """Check quickly whether a message is its content alone, in one piece in its turn."""
    stretches = trace.of(message)
    if leaf is None or len(stretches) != 1:
        return False
    start, stop, origin, offset = stretches[0]
    begin, end = trace.body(message) or (0, len(trace.text))
    return origin is leaf and not offset and stop - start == len(leaf.text) and (not answers or begin <= start < end)


def _field_dropped(
    leaves: list[Leaf], names: Mapping[str, str], inside: list[Stretch], text: str, matters: Callable[[str], bool]
) -> str | None:
    """Name the field of reasoning that is left out as a whole."""
    for leaf in leaves:
        same = [other for other in leaves if other.text == leaf.text]
        gaps = min((_gaps(other, inside) for other in same), key=lambda gaps: sum(last - first for first, last in gaps))
        if not gaps or (_is_written(text, leaf.text) and matters(names[leaf.text])):
            continue
        if any(origin in same for _, _, origin, _ in inside):
            raise LeftOutError(f"{_excerpt(leaf.text, gaps)} of its {leaf.field}")
        return names[leaf.text]
    return None


def _dropped(message: int, field: str) -> Note:
    return Note("reasoning_dropped", f"messages[{message}].{field}", "the template leaves out the reasoning of this turn")


def _gaps(leaf: Leaf, stretches: Iterable[Stretch]) -> list[tuple[int, int]]:
    """List the characters [first, last) of a leaf that are not in the text and not blank."""
    gaps, at = [], 0
    for start, stop, _, offset in sorted(
        (stretch for stretch in stretches if stretch[2] is leaf and stretch[3] >= 0), key=lambda stretch: stretch[3]
    ):
        if offset > at:
            gaps.append((at, offset))
        at = max(at, offset + stop - start)
    gaps.append((at, len(leaf.text)))
    return [(first, last) for first, last in gaps if leaf.text[first:last].strip()]


def _reasoning_only(content: str, gaps: list[tuple[int, int]], written: str) -> bool:
    """Tell whether the missing part of a content is all of the reasoning that it begins with.

    Or the tags of that reasoning, which the template writes anew.
    """
    closing = next((closing for _, closing in REASONING_TAGS if closing in content), "")
    end = content.rfind(closing) + len(closing) if closing else 0
    if any(last > end and content[max(first, end) : last].strip() for first, last in gaps):
        return False
    kept, at = [], 0
    for first, last in [*gaps, (end, end)]:
        kept.append(content[at:first])
        at = max(last, at)
    keeps = any(_has_words(part) for part in kept)
    if any(_has_words(content[first : min(last, end)]) for first, last in gaps):
        return not keeps
    return not keeps or closing in written


def _has_words(text: str) -> bool:
    """Tell whether a text has more than blanks and tags of reasoning."""
    for tag in (tag for tags in REASONING_TAGS for tag in tags):
        text = text.replace(tag, "")
    return bool(text.strip())


def _is_written(text: str, content: str) -> bool:
    """Tell whether a text has a content as it is, stripped, or as a JSON string (tool results)."""
    wanted = content.strip()
    return wanted in text or json.dumps(wanted)[1:-1] in text or json.dumps(wanted, ensure_ascii=False)[1:-1] in text


def _excerpt(content: str, gaps: list[tuple[int, int]]) -> str:
    first, last = next((gap for gap in gaps if _has_words(content[slice(*gap)])), gaps[0])
    return repr(content[first:last].strip()[:60])


def tool_names(tools: Iterable[Any]) -> list[str]:
    """List the names of tool definitions that have one."""
    functions = (tool.get("function", tool) for tool in tools if isinstance(tool, dict))
    return [name for function in functions if isinstance(function, dict) and isinstance(name := function.get("name"), str)]

"""Whether a template wrote out all that the messages say; what it left out of its own accord is told, or refused."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from forge_data.chat_template._trace import Stretch, Trace
from forge_data.chat_template._traced_text import Leaf
from forge_data.formats._messages import REASONING
from forge_data.formats._samples import Note

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""What begins and ends reasoning that stands within the content."""
_CALL = re.compile(r"tool_calls\[\d+\](\.function)?\.(name$|arguments)")


class LeftOutError(Exception):
    """Something that a message says is not in the text; the message says what."""


def left_out(trace: Trace, message: int, said: Mapping[str, Any], matters: Callable[[str], bool]) -> Note | None:
    """Reasoning that the template left out of a message, if it did.

    Args:
        trace: the conversation.
        message: which of its messages.
        said: that message, as the row has it.
        matters: whether the text is another one if this field of the message is; asked where memory was lost, for that the same
            words stand in the turn does not say that they are these.

    Raises:
        LeftOutError: something else is left out, or a part of the reasoning only.
    """
    leaves, answers = trace.leaves[message], said["role"] == "assistant"
    if len(leaves) == 1 and _as_it_stands(trace, message, leaves.get("content"), answers=answers):
        return None
    # What an answer says must be in its own turn, if it has one; the same words elsewhere do not count.
    begin, end = trace.body(message) or (0, len(trace.text))
    # Of others than the assistant the template may write what they say wherever it likes: none of it is learned as a turn.
    inside = [stretch for stretch in trace.of(message) if not answers or begin <= stretch[0] < end]
    dropped: Note | None = None
    for field, leaf in leaves.items():
        if field.startswith("content"):
            gaps = _gaps(leaf, inside)
            if not gaps or (_is_written(trace.text[begin:end], leaf.text) and matters(field)):
                continue
            if not answers or not _reasoning_only(leaf.text, gaps, trace.text[begin:end]):
                raise LeftOutError(f"{_in_short(leaf.text, gaps)} of its {field}")
            if any(_worded(leaf.text[first:last]) for first, last in gaps):
                dropped = _dropped(message, field)
        elif answers and _CALL.match(field) and _gaps(leaf, inside) and not _is_written(trace.text[begin:end], leaf.text):
            raise LeftOutError(f"{leaf.text[:60]!r} of its {field}")
    reasoning = [leaf for field, leaf in leaves.items() if field in REASONING] if answers else []
    # Transformers gives one text to the template under several names; the row has it under one.
    names = {leaf.text: next((name for name in REASONING if said.get(name) == leaf.text), leaf.field) for leaf in reasoning}
    field = _field_dropped(reasoning, names, inside, trace.text[begin:end], matters)
    return dropped if field is None else _dropped(message, field)


def _as_it_stands(trace: Trace, message: int, leaf: Leaf | None, *, answers: bool) -> bool:
    """A quick look: true only where all that a message says is its content, and its turn has it in one piece, as most have."""
    told = trace.of(message)
    if leaf is None or len(told) != 1:
        return False
    start, stop, origin, offset = told[0]
    begin, end = trace.body(message) or (0, len(trace.text))
    return origin is leaf and not offset and stop - start == len(leaf.text) and (not answers or begin <= start < end)


def _field_dropped(
    leaves: list[Leaf], names: Mapping[str, str], inside: list[Stretch], text: str, matters: Callable[[str], bool]
) -> str | None:
    """The field of reasoning that is left out whole."""
    for leaf in leaves:
        twins = [twin for twin in leaves if twin.text == leaf.text]
        gaps = min((_gaps(twin, inside) for twin in twins), key=lambda gaps: sum(last - first for first, last in gaps))
        if not gaps or (_is_written(text, leaf.text) and matters(names[leaf.text])):
            continue
        if any(origin in twins for _, _, origin, _ in inside):
            raise LeftOutError(f"{_in_short(leaf.text, gaps)} of its {leaf.field}")
        return names[leaf.text]
    return None


def _dropped(message: int, field: str) -> Note:
    return Note("reasoning_dropped", f"messages[{message}].{field}", "the template leaves the reasoning of this turn out")


def _gaps(leaf: Leaf, stretches: Iterable[Stretch]) -> list[tuple[int, int]]:
    """The characters [first, last) of a leaf that are not in the text, as far as they are more than blanks."""
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
    """Whether what is missing from a content is the whole reasoning that it begins with, or its tags, written anew."""
    closing = next((closing for _, closing in _TAGS if closing in content), "")
    end = content.rfind(closing) + len(closing) if closing else 0
    if any(last > end and content[max(first, end) : last].strip() for first, last in gaps):
        return False
    kept, at = [], 0
    for first, last in [*gaps, (end, end)]:
        kept.append(content[at:first])
        at = max(last, at)
    keeps = any(_worded(part) for part in kept)
    if any(_worded(content[first : min(last, end)]) for first, last in gaps):
        return not keeps
    return not keeps or closing in written


def _worded(text: str) -> bool:
    """Whether there is more to a text than blanks and the tags of reasoning."""
    for tag in (tag for tags in _TAGS for tag in tags):
        text = text.replace(tag, "")
    return bool(text.strip())


def _is_written(text: str, said: str) -> bool:
    """Whether a text has what was said, as it stands, trimmed, or as a JSON string (tool results)."""
    wanted = said.strip()
    return wanted in text or json.dumps(wanted)[1:-1] in text or json.dumps(wanted, ensure_ascii=False)[1:-1] in text


def _in_short(said: str, gaps: list[tuple[int, int]]) -> str:
    first, last = next((gap for gap in gaps if _worded(said[slice(*gap)])), gaps[0])
    return repr(said[first:last].strip()[:60])


def tool_names(tools: Iterable[Any]) -> list[str]:
    """The names of tool definitions, as far as they have any."""
    functions = (tool.get("function", tool) for tool in tools if isinstance(tool, dict))
    return [name for function in functions if isinstance(function, dict) and isinstance(name := function.get("name"), str)]

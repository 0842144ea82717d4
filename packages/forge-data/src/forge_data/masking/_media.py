"""Conversation with media as its template wrote it → the placeholders that stand for them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forge_data._errors import DataError, TemplateError
from forge_data._media import MANY, ONE, Kind
from forge_data._values import counted
from forge_data.chat_template._template import RenderedChat
from forge_data.chat_template._trace import NOBODY
from forge_data.masking._loss_mask import Span


def placeholders(rendered: RenderedChat, known: Mapping[Kind, str], place: str, template: str) -> int:
    """Count the placeholders of a text: one for each medium, each written by the template.

    Args:
        rendered: the text, and what wrote it.
        known: kind → its placeholder.
        place: of the row.
        template: its name, for errors.

    Raises:
        DataError: a text of the row has one in it, which would take a medium's place.
        TemplateError: the template writes another number of them, or in another order than the messages.
    """
    return sum(_of_kind(rendered, kind, placeholder, place, template) for kind, placeholder in known.items())


def _of_kind(rendered: RenderedChat, kind: Kind, placeholder: str, place: str, template: str) -> int:
    trace = rendered.trace
    wanted = [index for index, message in enumerate(rendered.messages) for part in _parts(message) if part["type"] == kind]
    found = [match.span() for match in re.finditer(re.escape(placeholder), trace.text)]
    for start, stop in found:
        for first, last, leaf, _ in trace.stretches:
            if first < stop and start < last:
                # JSON that a template writes at once is the first leaf's.
                field = leaf.field if placeholder in leaf.text else leaf.field.partition(".")[0]
                named = f"messages[{leaf.message}].{field}" if leaf.message >= 0 else field
                raise DataError(
                    f"{place}: field {named} has {placeholder!r} in its text, which stands for {ONE[kind]} of this model; "
                    f"{MANY[kind]} are parts of a content, or in the column {kind}s, so take it out of the text"
                )
    if len(found) != len(wanted):
        raise TemplateError(
            f"{place}: {template} writes {len(found)} of {placeholder!r}, the placeholder of {ONE[kind]}, where the messages "
            f"have {counted(len(wanted), MANY[kind])}; use the template of the model's processor, or one that writes each"
        )
    owners = [owner for at, _ in found for start, stop, owner in trace.runs if start <= at < stop]
    if any(owner not in (NOBODY, message) for owner, message in zip(owners, wanted, strict=True)):
        raise TemplateError(
            f"{place}: {template} writes the {MANY[kind]} of messages in another order, so that each would be taken for "
            f"another; use the template of the model's processor, or one that writes each {kind} in its turn"
        )
    return len(wanted)


def moved(places: Sequence[int], starts: Sequence[int], stops: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return places of a text in the text in which other texts stand for its placeholders.

    Args:
        places: characters of the text.
        starts: where each placeholder begins, in order.
        stops: where each ends.
        sizes: characters of what stands for each.

    >>> moved([0, 2, 5, 6], [2], [5], [10])
    [0, 2, 12, 13]
    """
    found = []
    for at in places:
        grown = sum(size - (stop - start) for start, stop, size in zip(starts, stops, sizes, strict=True) if stop <= at)
        found.append(at + grown)
    return found


def moved_span(span: Span, starts: Sequence[int], stops: Sequence[int], sizes: Sequence[int]) -> Span:
    """Return a span in the text in which other texts stand for its placeholders."""
    return Span(*moved(span, starts, stops, sizes))


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []

"""An assistant's turn to where its header ends and the model takes over.

The header is what `add_generation_prompt` asks for, since that is what the model is given when it answers. It is tried once
on a short conversation of its own, and then compared with what the template itself wrote at the beginning of the turn, which
`Trace` tells from what was said. Where the two disagree, the generation prompt for this very conversation decides.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from forge_data.chat_template._trace import Trace, literal

Messages = list[dict[str, Any]]

_ASKED: Messages = [{"role": "user", "content": "0"}]
_ANSWERED: Messages = [*_ASKED, {"role": "assistant", "content": "1"}]


class RefusedError(Exception):
    """A template raised; the message is its own."""


class UndecidableError(Exception):
    """Which tokens of a turn the assistant wrote cannot be told; the message says why."""


class Opening(NamedTuple):
    """How a template opens an assistant's turn."""

    prompt: str
    """What `add_generation_prompt` adds."""
    header: str | None
    """What of a turn's beginning the model does not write; None if that is not how this short one begins."""


class Renderer(NamedTuple):
    """A template with all that a row tells it but the messages."""

    native: Callable[..., str]
    """native(messages, opening=False): what the tokenizer's own template writes, or a `RefusedError`."""
    traced: Callable[[Messages], Trace]


def opening(renderer: Renderer) -> Opening:
    """How turns are opened, from a question and an answer of one character.

    Raises:
        RefusedError: the template will not write so short a conversation.
        UndecidableError: the template writes a header that it does not give as a generation prompt.
    """
    asked, prompted = renderer.native(_ASKED), renderer.native(_ASKED, opening=True)
    if not prompted.startswith(asked):
        # What it writes after the last turn (an EOS) stands in the way, unless it is cut off.
        asked = asked[: renderer.traced(_ASKED).outro()]
    if not prompted.startswith(asked):
        raise UndecidableError(f"with add_generation_prompt it writes {prompted[:60]!r}, and without {asked[:60]!r}")
    prompt = prompted[len(asked) :]
    trace = renderer.traced(_ANSWERED)
    body = trace.body(1)
    if body is None:
        raise UndecidableError("no loop of the template over its messages writes this turn, or more than one does")
    begins, clear = literal(trace, 1, *body)
    if begins.strip() and not prompt:
        raise UndecidableError(
            f"the template opens the turn with {begins!r}, but not when add_generation_prompt asks for its header"
        )
    size = _header_size(begins, prompt, clear=clear)
    return Opening(prompt, None if size is None else begins[:size])


def header_end(renderer: Renderer, opens: Opening | None, trace: Trace, messages: Messages, index: int) -> int:
    """The place in the text where the header of message `index` ends; `opens` is None if `opening` was refused.

    Raises:
        RefusedError: the template will not write the messages before this one alone.
        UndecidableError: neither the usual header nor the one for this conversation fits.
    """
    start, stop = trace.body(index) or (0, 0)
    begins, clear = literal(trace, index, start, stop)
    header = opens.header if opens is not None else None
    if header is not None and begins.startswith(header):
        return start + len(header)
    size = _header_size(begins, opens.prompt, clear=clear) if opens is not None else None
    if size is not None:
        return start + size
    # After a tool result some templates open the turn otherwise, and then as the generation prompt for that very place says.
    given = renderer.native(messages[:index], opening=True) if index else ""
    if given.startswith(trace.text[:start]) and index:
        prompt = given[start:]
        size = _header_size(begins, prompt, clear=clear) if prompt or opens is not None else None
    if size is None and header is not None and clear and (trace.within(start, stop) or not trace.said(index)):
        size = _later_size(begins, header)
    if size is not None:
        return start + size
    told = opens.prompt if opens is not None else given[start:]
    raise UndecidableError(f"the template opens the turn with {begins[:60]!r}, but add_generation_prompt gives {told[:60]!r}")


def _later_size(begins: str, header: str) -> int | None:
    """The same where the template writes something before the header: its own system message, the end of a tool's turn."""
    return begins.index(header) + len(header) if header.strip() and begins.count(header) == 1 else None


def _header_size(begins: str, prompt: str, *, clear: bool) -> int | None:
    r"""How much of what a turn begins with is the header, if the generation prompt is this one.

    >>> (
    ...     _header_size("<assistant>\n<think>", "<assistant>\n", clear=True),
    ...     _header_size("<assistant>", "<assistant><think>", clear=True),
    ... )
    (12, 11)
    >>> _header_size("<bot>", "<assistant>", clear=True)
    """
    if begins.startswith(prompt):
        return len(prompt)
    if not clear:
        return None
    if begins.strip() and prompt.startswith(begins):
        return len(begins)
    shared = len(os.path.commonprefix([begins, prompt]))
    return shared if not begins[shared:].strip() and not prompt[shared:].strip() else None

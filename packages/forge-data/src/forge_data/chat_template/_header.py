"""Assistant's turn → end of its header, where the model takes over.

The header is what `add_generation_prompt` writes, since that is what the model gets before it answers. It is tried once on a
short conversation, and then compared with what the template itself wrote at the beginning of the turn, which `Trace` separates
from content. Where the two disagree, the generation prompt for this very conversation decides.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from forge_data.chat_template._trace import Trace, template_prefix

Messages = list[dict[str, Any]]

_QUESTION: Messages = [{"role": "user", "content": "0"}]
_ANSWERED_QUESTION: Messages = [*_QUESTION, {"role": "assistant", "content": "1"}]


class RefusedError(Exception):
    """A template raised an error; the text is its own."""


class UndecidableError(Exception):
    """Which tokens of a turn the assistant wrote cannot be decided; the text is the reason."""


class Opening(NamedTuple):
    """How a template opens an assistant's turn."""

    prompt: str
    """Text that `add_generation_prompt` adds."""
    header: str | None
    """Part of the beginning of a turn that the model does not write; None if the short turn does not begin so."""


class Renderer(NamedTuple):
    """A template with all arguments of a row but the messages."""

    native: Callable[..., str]
    """native(messages, opening=False): text of the tokenizer's own template, or a `RefusedError`."""
    traced: Callable[[Messages], Trace]


def opening(renderer: Renderer) -> Opening:
    """Find how turns are opened, from a question and an answer of one character.

    Raises:
        RefusedError: the template refuses so short a conversation.
        UndecidableError: the template writes a header that is not its generation prompt.
    """
    bare, prompted = renderer.native(_QUESTION), renderer.native(_QUESTION, opening=True)
    if not prompted.startswith(bare):
        # Cut off what it writes after the last turn (an EOS).
        bare = bare[: renderer.traced(_QUESTION).end_of_turns()]
    if not prompted.startswith(bare):
        raise UndecidableError(f"with add_generation_prompt it writes {prompted[:60]!r}, and without {bare[:60]!r}")
    prompt = prompted[len(bare) :]
    trace = renderer.traced(_ANSWERED_QUESTION)
    body = trace.body(1)
    if body is None:
        raise UndecidableError("no loop of the template over its messages writes this turn, or more than one does")
    prefix, clear = template_prefix(trace, 1, *body)
    if prefix.strip() and not prompt:
        raise UndecidableError(
            f"the template opens the turn with {prefix!r}, but not when add_generation_prompt asks for its header"
        )
    size = _header_size(prefix, prompt, clear=clear)
    return Opening(prompt, None if size is None else prefix[:size])


def header_end(renderer: Renderer, opens: Opening | None, trace: Trace, messages: Messages, index: int) -> int:
    """Find where the header of message `index` ends; `opens` is None if `opening` was refused.

    Raises:
        RefusedError: the template refuses the messages before this one alone.
        UndecidableError: neither the usual header nor the one for this conversation fits.
    """
    start, stop = trace.body(index) or (0, 0)
    prefix, clear = template_prefix(trace, index, start, stop)
    header = opens.header if opens is not None else None
    if header is not None and prefix.startswith(header):
        return start + len(header)
    size = _header_size(prefix, opens.prompt, clear=clear) if opens is not None else None
    if size is not None:
        return start + size
    # After a tool result some templates open the turn differently, as the generation prompt at that place does.
    given = renderer.native(messages[:index], opening=True) if index else ""
    if given.startswith(trace.text[:start]) and index:
        prompt = given[start:]
        size = _header_size(prefix, prompt, clear=clear) if prompt or opens is not None else None
    if size is None and header is not None and clear and (trace.within(start, stop) or not trace.has_text(index)):
        size = _later_size(prefix, header)
    if size is not None:
        return start + size
    prompt = opens.prompt if opens is not None else given[start:]
    raise UndecidableError(f"the template opens the turn with {prefix[:60]!r}, but add_generation_prompt gives {prompt[:60]!r}")


def _later_size(prefix: str, header: str) -> int | None:
    """Return the header's size where the template writes something before it.

    For example its own system message, or the end of a tool's turn.
    """
    return prefix.index(header) + len(header) if header.strip() and prefix.count(header) == 1 else None


def _header_size(prefix: str, prompt: str, *, clear: bool) -> int | None:
    r"""Return how much of the beginning of a turn is the header, given the generation prompt.

    >>> (
    ...     _header_size("<assistant>\n<think>", "<assistant>\n", clear=True),
    ...     _header_size("<assistant>", "<assistant><think>", clear=True),
    ... )
    (12, 11)
    >>> _header_size("<bot>", "<assistant>", clear=True)
    """
    if prefix.startswith(prompt):
        return len(prompt)
    if not clear:
        return None
    if prefix.strip() and prompt.startswith(prefix):
        return len(prefix)
    shared = len(os.path.commonprefix([prefix, prompt]))
    return shared if not prefix[shared:].strip() and not prompt[shared:].strip() else None

"""Kernels that are tried on a device before they take the place of operators.

A kernel is used only where it compiles and gives the numbers of what it replaces, on the very device. Whatever a try raises
means that it does not, but for two things: a device without memory left says nothing of the kernel, and what ends a run from
elsewhere ends it here too.
"""

from collections.abc import Callable, Iterator

import attrs
import torch

_OUT_OF_MEMORY = "out of memory"
"""What drivers say, whose errors have no class of their own where another library than torch asks them."""


@attrs.frozen(kw_only=True)
class TriedKernel:
    """What was found when a kernel was tried on a device."""

    kernel: str
    """What it computes, such as `losses`."""
    device: str
    """Device on which it was tried, or kind of it."""
    instead: str
    """What computes the same without the kernel."""
    problem: str | None
    """Why it is not used there; None where it is."""

    def __str__(self) -> str:
        if self.problem is None:
            return f"{self.kernel} by one kernel, tried on {self.device} first"
        return f"{self.kernel} by {self.instead}, for its kernel was given up on {self.device}: {self.problem}"


_found: dict[tuple[str, str, str], TriedKernel] = {}
_asked: dict[TriedKernel, None] = {}


def try_kernel(kernel: str, device: str, problem: Callable[[], str | None], *, instead: str, variant: str = "") -> bool:
    """Return whether a kernel is used on a device; it is tried once.

    Args:
        kernel: what it computes.
        device: where.
        problem: tries it; returns what is wrong with it, or None.
        instead: what computes the same without it.
        variant: the kernel's, where each is tried by itself.

    Raises:
        torch.OutOfMemoryError: there was no memory for the try, which is then made again when the kernel is next asked for.
    """
    key = kernel, device, variant
    if key not in _found:
        why = _problem(problem)
        why = f"{why} ({variant})" if why and variant else why
        _found[key] = TriedKernel(kernel=kernel, device=device, instead=instead, problem=why)
    _asked[_found[key]] = None
    return _found[key].problem is None


def is_given_up(kernel: str, device: str) -> bool:
    """Return whether a kernel was tried on a device and is not used there."""
    found = _found.get((kernel, device, ""))
    return found is not None and found.problem is not None


def asked_kernels() -> list[TriedKernel]:
    """Return what was found of the kernels that were asked for since the last call.

    Those that are never asked for, as on a CPU, are not among them.
    """
    found = list(_asked)
    _asked.clear()
    return found


def _problem(problem: Callable[[], str | None]) -> str | None:
    try:
        return problem()
    except Exception as error:
        for each in _chain(error):
            if isinstance(each, torch.OutOfMemoryError | MemoryError) or getattr(each, "exit_status", None) is not None:
                raise each from None
            if _OUT_OF_MEMORY in str(each).lower():
                raise torch.OutOfMemoryError(str(each)) from error
        return f"{type(error).__name__}: {_first_line(error)}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, of which a compiler's is an attribute."""
    link: BaseException | None = error
    seen: set[int] = set()  # an error may be the cause of its own cause
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = getattr(link, "inner_exception", None) or link.__cause__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")

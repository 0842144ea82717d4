"""Errors of one rank raised on every rank, so that none waits for one that has left."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from forge_dist._errors import ExportError

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

Item = TypeVar("Item")


@contextmanager
def errors_on_all_ranks(ranks: "Ranks", known: tuple[type[Exception], ...], what: str) -> Iterator[None]:
    """Raise an error on every rank if the body raised on any; collective.

    An ExportError keeps its message, one of the `known` kinds becomes ExportError("WHAT: ..."), and any other passes unchanged
    on its own rank. The ranks whose body ran through raise ExportError with the message of the first rank that failed; where
    that rank had no memory left, they raise torch.OutOfMemoryError, or have it as the cause of their ExportError, as it has.

    The body must make the same collective calls on every rank up to where it raises.
    """
    own: Exception | None = None
    try:
        yield
    except ExportError as error:
        own = error
    except torch.OutOfMemoryError as error:  # a RuntimeError, and no fault of a file
        own = error
    except known as error:
        own = ExportError(f"{what}: {error}")
        own.__cause__ = error
    except Exception as error:  # noqa: BLE001  raised again below, once the other ranks know
        own = error
    found = ranks.gather(None if own is None else [_message(own), lacks_memory(own), isinstance(own, ExportError)])
    if own is not None:
        raise own
    for rank, failed in enumerate(found):
        if failed is not None:
            message, memory, named = failed
            # Rank 0 writes, and its message is complete; for another rank the message names it.
            text = message if rank == 0 else f"{message} (rank {rank})"
            if memory and not named:
                raise torch.OutOfMemoryError(text)
            raise ExportError(text) from (torch.OutOfMemoryError(message) if memory else None)


@contextmanager
def exhausted(items: Iterator[Item]) -> Iterator[Iterator[Item]]:
    """Run an iterator, each step of which is collective, to its end even if the body raises.

    The other ranks are still taking part in its steps. Gradients are off meanwhile: two generators that switched them off while
    they run side by side would leave them off for good.
    """
    with torch.no_grad():
        try:
            yield items
        except Exception:
            for _ in items:
                pass
            raise
        for _ in items:
            pass


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error, or its cause, says that device or host have no memory left.

    Some devices, and the host's allocator, say so in a plain RuntimeError.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    # `raise error.__cause__ from error` makes a circle.
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link).lower()
        said = isinstance(link, RuntimeError) and ("out of memory" in text or "allocate memory" in text)
        if said or isinstance(link, MemoryError | torch.OutOfMemoryError):
            return True
        link = link.__cause__
    return False


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {error}"

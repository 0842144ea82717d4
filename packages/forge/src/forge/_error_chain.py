"""Error → the errors that it came from."""

from __future__ import annotations

from collections.abc import Iterator


def error_chain(error: BaseException, *, implicit: bool = True) -> Iterator[BaseException]:
    """Yield an error and what it came from, each once.

    `raise error.__cause__ from error` makes a circle.

    Args:
        error: the first one.
        implicit: follow, where an error names no cause, the one that was being handled.

    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (link.__context__ if implicit else None)

"""Error → the errors that it came from, or, of a `sys.exit()`, one that says where."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from forge._errors import PreemptedError, RunExitError


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


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise RunExitError for a SystemExit."""
    try:
        yield
    except SystemExit as error:
        raise as_error(error) from error


def as_error(error: SystemExit) -> RunExitError:
    """Return the error of a `sys.exit()`, with its status, or 1 where that has a meaning."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    code = "" if error.code is None else repr(error.code)
    raised = RunExitError(
        f"the run was ended by sys.exit({code}) at {at.filename}:{at.lineno}, and is not finished. Raise an error there, or "
        "take it out."
    )
    if isinstance(error.code, int) and 0 < error.code < 256 and error.code != PreemptedError.exit_status:
        raised.__dict__["exit_status"] = error.code
    return raised

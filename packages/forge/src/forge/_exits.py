"""`sys.exit()` in a function of the user's → an error that says where it is, with its status."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from forge._errors import PreemptedError, RunExitError


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise RunExitError for a SystemExit."""
    try:
        yield
    except SystemExit as error:
        raise as_error(error) from error


def as_error(error: SystemExit) -> RunExitError:
    """Return the error of a `sys.exit()`, with its status, or 1 for one that has another meaning."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    code = "" if error.code is None else repr(error.code)
    raised = RunExitError(
        f"the run was ended by sys.exit({code}) at {at.filename}:{at.lineno}, and is not finished. Raise an error there, or "
        "take it out."
    )
    if isinstance(error.code, int) and 0 < error.code < 256 and error.code != PreemptedError.exit_status:
        raised.__dict__["exit_status"] = error.code
    return raised

"""Paths of users → paths with `~` and `~user` expanded."""

import os
from pathlib import Path

from forge_data._errors import ForgeDataError


def expand_user(path: str | os.PathLike[str], error: type[ForgeDataError]) -> Path:
    """Return `path` with `~` expanded.

    Raises:
        ForgeDataError: of the given class, for a `~user` that this machine does not know.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as unknown:
        raise error(
            f"{os.fspath(path)!r} begins with the home of a user that this machine does not know; check the name, or give "
            "the whole path if a directory has this name"
        ) from unknown

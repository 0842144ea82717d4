"""A path as a person writes it to a path: `~` and `~user` are the homes that they stand for, or it is said that there is none."""

import os
from pathlib import Path

from forge_data._errors import ForgeDataError


def at_home(path: str | os.PathLike[str], error: type[ForgeDataError]) -> Path:
    """The path.

    Raises:
        ForgeDataError: of the given family, for a `~user` whom this machine does not know.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as unknown:
        raise error(
            f"{os.fspath(path)!r} begins with the home of a user whom this machine does not know; check the name, or give "
            "the whole path where a directory is called so"
        ) from unknown

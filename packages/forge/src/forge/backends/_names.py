"""Name of a backend → an instance of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.settings._backends import backend_class, backend_names

if TYPE_CHECKING:
    from forge.backends._backend import Backend


def get(name: str) -> Backend:
    """Make the backend of a name.

    Raises:
        SettingsError: there is none of this name, or it cannot be imported.

    """
    return backend_class(name)()


def names() -> list[str]:
    """Return the names of all backends: the shipped ones, then those of entry points, sorted."""
    return backend_names()

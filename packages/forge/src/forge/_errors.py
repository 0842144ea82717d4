"""What can be wrong with a request, as a family of exceptions.

    ForgeError
    ├── SettingsError (ValueError)       a setting is unknown, mistyped, out of range, or would have no effect
    ├── RecipeError (ValueError)         a recipe file cannot be read as settings
    ├── DataLintError (ValueError)       the rows would teach something false, as their lint says
    ├── RunDirectoryError (OSError)      the output directory holds something else, is in use, or cannot be written
    ├── RunWriteError (OSError)          the disk refused a file of a run that had begun: exit status 1
    └── PreemptedError (RuntimeError)    a signal asked the run to stop, and its state is saved: exit status 75

Each room has a family of its own. All of them agree by shape: an exception that carries `exit_status` is an answer to the
user, said in one message; any other exception is a defect of forge.
"""

from __future__ import annotations

from typing import ClassVar


class ForgeError(Exception):
    """Root of the facade's errors: bad input, exit status 2."""

    exit_status: ClassVar[int] = 2


class SettingsError(ForgeError, ValueError):
    """A setting is unknown, mistyped, out of range, or would have no effect."""


class RecipeError(ForgeError, ValueError):
    """A recipe file cannot be read as settings."""


class DataLintError(ForgeError, ValueError):
    """The rows would teach something false, as their lint says; `lint=off` overrules it."""


class RunDirectoryError(ForgeError, OSError):
    """The output directory holds something else, is in use, or cannot be written."""


class RunWriteError(ForgeError, OSError):
    """The disk refused a file of a run that had begun: the run failed, its input was right."""

    exit_status: ClassVar[int] = 1


class PreemptedError(ForgeError, RuntimeError):
    """A signal asked the run to stop; its step was finished and its state saved. The same command goes on from there."""

    exit_status: ClassVar[int] = 75

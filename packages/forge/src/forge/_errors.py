"""Exceptions of the facade.

    ForgeError
    ├── SettingsError (ValueError)       a setting is unknown, mistyped, out of range, or would have no effect
    ├── RecipeError (ValueError)         a recipe file cannot be read as settings
    ├── DataLintError (ValueError)       the lint found rows that would teach something wrong
    ├── RunDirectoryError (OSError)      the output directory holds something else, is in use, or cannot be written
    ├── OutOfMemoryError (MemoryError)   a phase of the run asked for more memory than there is: exit status 1
    ├── PushError (OSError)              the Hub does not answer, or refuses an upload: exit status 1
    ├── RunTakenOverError (RuntimeError)  another run took the output directory over: exit status 1
    ├── RunWriteError (OSError)          a file of a run that had begun cannot be written: exit status 1
    ├── StorageError (OSError)           checkpoint_storage does not answer, or has not got the whole run: exit status 1
    ├── BackendError (RuntimeError)      another trainer's loop failed, or left no model: exit status 1
    ├── RunExitError (RuntimeError)      a function of the user's called sys.exit(): its status, or 1 for 0
    ├── TrackingError (RuntimeError)     a tracker has not got the whole record: exit status 1
    └── PreemptedError (RuntimeError)    a signal asked the run to stop, and its state is saved: exit status 75

    RunInterruptedError (KeyboardInterrupt)  Ctrl-C stopped a run of a script: as Python has it, with what became of the run

Each package has its own; `forge.ERRORS` holds the base of each. In all of them an exception with an `exit_status` is an answer
to the user, one message long; any other exception is a defect of forge.
"""

from __future__ import annotations

from typing import ClassVar


class ForgeError(Exception):
    """Base class of the facade's errors: bad input, exit status 2."""

    exit_status: ClassVar[int] = 2


class SettingsError(ForgeError, ValueError):
    """A setting is unknown, mistyped, out of range, or would have no effect."""


class RecipeError(ForgeError, ValueError):
    """A recipe file cannot be read as settings."""


class DataLintError(ForgeError, ValueError):
    """The lint found rows that would teach something wrong; `lint=off` overrules it."""


class RunDirectoryError(ForgeError, OSError):
    """The output directory holds something else, is in use, or cannot be written."""


class OutOfMemoryError(ForgeError, MemoryError):
    """A phase asked for more memory than there is; the message names settings that take less."""

    exit_status: ClassVar[int] = 1


class PushError(ForgeError, OSError):
    """The Hub does not answer, or refuses an upload: nothing of it is there."""

    exit_status: ClassVar[int] = 1


class RunTakenOverError(ForgeError, RuntimeError):
    """Another run took over the output directory of this one, which stood still for its lease."""

    exit_status: ClassVar[int] = 1


class RunWriteError(ForgeError, OSError):
    """A file of a run that had begun cannot be written: the run failed, its input was right."""

    exit_status: ClassVar[int] = 1


class StorageError(ForgeError, OSError):
    """`checkpoint_storage` cannot be read or written, or has not got the whole of a run."""

    exit_status: ClassVar[int] = 1


class BackendError(ForgeError, RuntimeError):
    """Another trainer's loop failed, or ended without a model; the message names its own log."""

    exit_status: ClassVar[int] = 1


class RunExitError(ForgeError, RuntimeError):
    """A function of the user's called `sys.exit()` or `sys.exit(0)`: the run did not finish."""

    exit_status: ClassVar[int] = 1


class TrackingError(ForgeError, RuntimeError):
    """A tracker has not got the whole record of a run; the same command sends what is missing."""

    exit_status: ClassVar[int] = 1


class PreemptedError(ForgeError, RuntimeError):
    """A signal asked the run to stop, and its state is saved; the same command resumes it."""

    exit_status: ClassVar[int] = 75
    received: str | None = None
    """Name of the signal, where it is known."""


class RunInterruptedError(KeyboardInterrupt):
    """Ctrl-C stopped a run that was called from Python; its message says what became of the run.

    `exit_status` is 75 where the same call resumes the run, 130 where there is nothing to resume.
    """

    exit_status: int = PreemptedError.exit_status

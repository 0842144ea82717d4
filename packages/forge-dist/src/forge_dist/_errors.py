"""Exceptions of this package.

::

    ForgeDistError                    exit status 2: a request that cannot be fulfilled
    ├── ModelError (ValueError)       a model or adapter that cannot be trained from, merged, or written as asked
    ├── LaunchError (RuntimeError)    settings and environment that contradict each other, or ranks that do not agree
    │   └── MeetingError              exit status 1: nodes or ranks that do not meet, as they may at the next attempt
    ├── StrategyError (ValueError)    a strategy that these ranks, this model or this installation cannot follow
    ├── WorkerError (RuntimeError)    exit status 1: a rank ended without a report, or is silent
    │   └── StallError                a rank stands still: it was not heard of for stall_timeout
    ├── CheckpointError (RuntimeError)  exit status 1: a full state cannot be written, or is not whole
    └── ExportError (RuntimeError)    exit status 1: what was trained could not be written, or does not read back the same
"""

from typing import Any, ClassVar


class ForgeDistError(Exception):
    """Base of this package's exceptions.

    One message for a person: what, where, what was found, what to do.
    """

    exit_status: ClassVar[int] = 2
    """Exit status of a command that ends by this error."""


class ModelError(ForgeDistError, ValueError):
    """A model or adapter that cannot be trained from, merged, or written as requested."""


class LaunchError(ForgeDistError, RuntimeError):
    """Settings and environment contradict each other, or the ranks do not agree."""


class MeetingError(LaunchError):
    """Nodes or ranks did not meet: one did not come, or the network is in the way."""

    exit_status: ClassVar[int] = 1


class StrategyError(ForgeDistError, ValueError):
    """These ranks, this model or this installation do not fit the strategy."""


class WorkerError(ForgeDistError, RuntimeError):
    """A rank ended without a report, or is silent."""

    exit_status: ClassVar[int] = 1
    cause: dict[str, Any] | None = None
    """Report of the failure that this one follows from, where it is known."""


class StallError(WorkerError):
    """A rank stood still for longer than stall_timeout; the same command goes on."""


class CheckpointError(ForgeDistError, RuntimeError):
    """A full state could not be written, or what is there is not a whole one of this run."""

    exit_status: ClassVar[int] = 1


class ExportError(ForgeDistError, RuntimeError):
    """A model could not be written, or what was written is not the model in memory."""

    exit_status: ClassVar[int] = 1

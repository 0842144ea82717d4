"""What this room raises.

::

    ForgeDistError                    exit status 2: something that was asked for cannot be done
    ├── ModelError (ValueError)       a model path or directory that cannot be trained from
    ├── LaunchError (RuntimeError)    an environment that asks for another number of processes than run
    └── ExportError (RuntimeError)    exit status 1: what was trained could not be written, or does not read back the same
"""

from typing import ClassVar


class ForgeDistError(Exception):
    """Root of the family. Holds one message for a person: what, where, what was found, what to do."""

    exit_status: ClassVar[int] = 2
    """Status with which a command that ends by this error leaves."""


class ModelError(ForgeDistError, ValueError):
    """The model path names nothing that this package loads for training."""


class LaunchError(ForgeDistError, RuntimeError):
    """The environment asks for a number of processes that is not the number that runs."""


class ExportError(ForgeDistError, RuntimeError):
    """A model could not be written, or what was written is not the model in memory."""

    exit_status: ClassVar[int] = 1

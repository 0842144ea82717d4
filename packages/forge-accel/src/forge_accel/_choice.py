"""A decision together with its reason, for a log."""

from __future__ import annotations

from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen
class Choice(Generic[T]):
    """A value and the reason for it.

    >>> Choice("gloo", "gloo: NCCL moves no tensors of a CPU").reason
    'gloo: NCCL moves no tensors of a CPU'
    """

    value: T
    """The value that was decided on."""

    reason: str
    """The reason, in one sentence that begins with the value's name."""

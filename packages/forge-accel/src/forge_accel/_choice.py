"""A decision and why it fell as it did, so that a log can say both."""

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
    """What was decided."""

    reason: str
    """Why, in one plain sentence that begins with the value's name."""

"""What forge_accel raises.

ForgeAccelError
├── AccelError (ValueError)       a device, dtype or attention that does not exist, or that this machine does not have
└── AttentionError (ValueError)   a call of document attention that it cannot answer exactly
"""

from __future__ import annotations

from typing import ClassVar


class ForgeAccelError(Exception):
    """Root of the errors of this room."""

    exit_status: ClassVar[int] = 2
    """What a command ends with when this error ends it: 2, the request was wrong."""


class AccelError(ForgeAccelError, ValueError):
    """The machine does not have what was asked for; the message names what it has."""


class AttentionError(ForgeAccelError, ValueError):
    """Attention was called in a way that it would answer wrongly; the message names the remedy."""

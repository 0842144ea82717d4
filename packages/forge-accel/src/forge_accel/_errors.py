"""Exceptions of forge_accel.

ForgeAccelError
├── AccelError (ValueError)       a device, dtype or attention that does not exist, or that this machine does not have
└── AttentionError (ValueError)   a call of document attention that it cannot answer exactly
"""

from __future__ import annotations

from typing import ClassVar


class ForgeAccelError(Exception):
    """Root of the exceptions of forge_accel."""

    exit_status: ClassVar[int] = 2
    """Exit status of a command that ends with this error: 2, the request was wrong."""


class AccelError(ForgeAccelError, ValueError):
    """Request that the machine cannot meet; the message names what it has."""


class AttentionError(ForgeAccelError, ValueError):
    """Call of document attention that it would answer wrongly; the message names the remedy."""

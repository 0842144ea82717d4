"""Exceptions of forge_packing.

ValueError
  └─ PackingError    lengths, counts, budgets or files that no plan or packed row can be made from
"""

from typing import ClassVar


class PackingError(ValueError):
    """Bad input; the message names the index or file, what was found, and what to do."""

    exit_status: ClassVar[int] = 2
    """Exit status of a command that ends with this error."""

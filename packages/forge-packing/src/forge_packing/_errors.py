"""What this room raises for bad input.

ValueError
  └─ PackingError    lengths, counts, budgets or files that no plan or packed row can be made from
"""

from typing import ClassVar


class PackingError(ValueError):
    """Bad input: the message says what was wrong, where (an index or a file), what was found, and what to do.

    `exit_status` is what a command that ends with this error should exit with.
    """

    exit_status: ClassVar[int] = 2

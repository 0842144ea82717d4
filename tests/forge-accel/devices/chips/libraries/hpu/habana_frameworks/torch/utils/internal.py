"""Stand-in for the module that says in which mode Gaudi's library was loaded."""

import os

_LAZY = os.getenv("PT_HPU_LAZY_MODE", "1") != "0"


def is_lazy() -> bool:
    """Return the mode as the variable had it when the library was loaded: lazy by default, as in its 1.19."""
    return _LAZY

"""The errors of all six packages as one tuple, for `except`."""

from __future__ import annotations

import forge_accel
import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._errors import ForgeError

ERRORS: tuple[type[Exception], ...] = (
    ForgeError,
    forge_accel.ForgeAccelError,
    forge_algos.ForgeAlgosError,
    forge_data.ForgeDataError,
    forge_dist.ForgeDistError,
    forge_packing.PackingError,
)
"""Base errors of all six packages: what a call of forge raises as an answer, with an `exit_status`.

Any other exception is a defect of forge; Ctrl-C is a KeyboardInterrupt, as Python has it. The packages' own classes have no
common base, because none of the packages imports another.
"""

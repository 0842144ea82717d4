"""Setting of packed rows; no torch."""

from typing import Literal

import attrs

from forge_algos.settings._validators import one_of

Packing = Literal["auto", "on", "off"]


@attrs.frozen(kw_only=True)
class PackingSettings:
    """Whether the samples of a micro-batch share one row of the forward.

    >>> PackingSettings(packing="off").packing
    'off'
    """

    packing: Packing = attrs.field(default="auto", validator=one_of(Packing))
    """Samples of a micro-batch in one row ("on"), or in ordinary forwards beside each other ("off"); losses are the same.
    By default on, and off for a model that would let the samples of a row see each other."""

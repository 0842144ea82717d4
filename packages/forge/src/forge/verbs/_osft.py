"""`forge.osft`: supervised fine-tuning in an orthogonal subspace, which leaves what the model knows alone."""

from __future__ import annotations

from typing import Any, Literal

import attrs

import forge_algos
from forge.verbs._registry import verb
from forge.verbs._sft import SFT, SFTSettings

_only: Any = attrs.validators.in_(("osft",))


@attrs.frozen(kw_only=True)
class OSFTAdapterSettings(forge_algos.AdapterSettings):
    """How much of each weight moves (OSFT, arXiv 2504.07097)."""

    adapter: Literal["osft"] = attrs.field(default="osft", validator=_only)
    """This verb's adapter; the other verbs take it too, as adapter=osft."""


@attrs.frozen(kw_only=True)
class OSFTSettings(SFTSettings):
    """Every setting of `forge.osft`, grouped by the room that owns it."""

    adapter: OSFTAdapterSettings


class OSFT(SFT):
    """Imitate the learned tokens of every row, and move only what large singular values leave free."""

    name = "osft"
    settings = OSFTSettings
    about = "Orthogonal-subspace fine-tuning: learn new rows and leave alone what the model knows best (arXiv 2504.07097)."


TASK = OSFT()
osft = verb(TASK)

"""`forge.osft`: supervised fine-tuning in an orthogonal subspace (arXiv 2504.07097)."""

from __future__ import annotations

from typing import Any, Literal

import attrs

import forge_algos
from forge.verbs._registry import verb
from forge.verbs._sft import SFT, SFTSettings

_only: Any = attrs.validators.in_(("osft",))


@attrs.frozen(kw_only=True)
class OSFTAdapterSettings(forge_algos.AdapterSettings):
    """Settings of OSFT: how much of each weight may move."""

    adapter: Literal["osft"] = attrs.field(default="osft", validator=_only)
    """This verb's adapter; the other verbs take it too, as adapter=osft."""


@attrs.frozen(kw_only=True)
class OSFTSettings(SFTSettings):
    """Settings of `forge.osft`."""

    adapter: OSFTAdapterSettings


class OSFT(SFT):
    """SFT in the singular directions of small singular values."""

    name = "osft"
    settings = OSFTSettings
    about = "Orthogonal-subspace fine-tuning: learn new rows and leave alone what the model knows best (arXiv 2504.07097)."


osft = verb(OSFT())

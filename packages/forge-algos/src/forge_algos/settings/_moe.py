"""Setting of mixtures of experts; no torch."""

from typing import Literal

import attrs

from forge_algos.settings._validators import one_of

MoEAuxLoss = Literal["global", "trl", "off"]


@attrs.frozen(kw_only=True)
class MoESettings:
    """Auxiliary loss of a mixture of experts.

    >>> MoESettings(moe_aux_loss="off").moe_aux_loss
    'off'
    """

    moe_aux_loss: MoEAuxLoss = attrs.field(default="global", validator=one_of(MoEAuxLoss))
    """Load-balancing loss of the routers, times the model's `router_aux_loss_coef`: over all tokens of a step ("global", which
    does not depend on how the step is cut), the mean of each micro-batch's own ("trl", as TRL does), or none ("off")."""

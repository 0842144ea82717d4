"""Setting of mixtures of experts; no torch."""

from typing import Any, Literal

import attrs

from forge_algos.settings._validators import number, one_of

MoEAuxLoss = Literal["global", "trl", "off"]

_number_or_none: Any = attrs.validators.optional(number(kind=float))


@attrs.frozen(kw_only=True)
class MoESettings:
    """Auxiliary loss of a mixture of experts.

    >>> MoESettings(moe_aux_loss="off").moe_aux_loss
    'off'
    """

    moe_aux_loss: MoEAuxLoss = attrs.field(default="global", validator=one_of(MoEAuxLoss))
    """Load-balancing loss of the routers, times `router_aux_loss_coef`: over all tokens of a step ("global", which
    does not depend on how the step is cut), the mean of each micro-batch's own ("trl", as TRL does), or none ("off")."""
    router_aux_loss_coef: float | None = attrs.field(default=None, validator=_number_or_none)
    """Weight of that loss, in the place of the one in the model's configuration."""

    def __attrs_post_init__(self) -> None:
        if self.router_aux_loss_coef == 0:
            raise ValueError("router_aux_loss_coef must be above 0; moe_aux_loss='off' adds no such loss")
        if self.moe_aux_loss == "off" and self.router_aux_loss_coef is not None:
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef} has no effect with moe_aux_loss='off'; leave one out"
            )

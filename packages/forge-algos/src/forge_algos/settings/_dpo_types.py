"""Table of the forms of DPO: what each reads beside the log-ratios and β.
It is data, so that reading settings loads no torch.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
ALPHA, TAU = 0.5, 0.05
"""Defaults of `f_divergence_alpha` and `discopop_tau`, TRL's and the paper's."""


class DPOType(NamedTuple):
    """Form of DPO; `forge_algos.losses.preference._dpo_types` has its terms, by the same name."""

    smoothing: bool = False
    """Whether it reads `label_smoothing`."""
    divergence: bool = False
    """Whether it is defined for other divergences than reverse KL:
    only the difference of the scores counts in it."""
    lengths: tuple[str, ...] = ()
    """Numbers of tokens that it divides by."""
    sorts: bool = False
    """Whether it sorts the pairs of one call, so that its value depends on how a step is cut."""


_BOTH = ("chosen_lengths", "rejected_lengths")

DPO_TYPES = {
    "sigmoid": DPOType(divergence=True),
    "hinge": DPOType(divergence=True),
    "ipo": DPOType(divergence=True, lengths=_BOTH),
    "exo_pair": DPOType(smoothing=True, divergence=True),
    "nca_pair": DPOType(),
    "robust": DPOType(smoothing=True, divergence=True),
    "bco_pair": DPOType(),
    "sppo_hard": DPOType(),
    "aot": DPOType(smoothing=True, sorts=True),
    "aot_unpaired": DPOType(smoothing=True, sorts=True),
    "apo_zero": DPOType(),
    "apo_down": DPOType(),
    "cdpo": DPOType(smoothing=True, divergence=True),
    "discopop": DPOType(divergence=True),
    "sft": DPOType(lengths=("chosen_lengths",)),
    "sigmoid_norm": DPOType(divergence=True, lengths=_BOTH),
}
"""By the name that `DPOSettings.loss_type` takes."""

# The choices follow from the table, which no static type can express: to type checkers a form is any string.
if TYPE_CHECKING:
    DPOLoss = str
else:
    DPOLoss = Literal[tuple(DPO_TYPES)]


def readers(field: str) -> list[str]:
    """Return the sorted names of the forms whose row has `field`."""
    return sorted(name for name, kind in DPO_TYPES.items() if getattr(kind, field))

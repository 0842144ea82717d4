"""The settings of the preference objectives: DPO, ORPO, SimPO, KTO and reward models; torch is not loaded to read them.

Each option has the name that it has in its loss (`forge_algos.losses`), which says what it means; one that the others leave
without an effect is refused here, before a model is loaded.
"""

from collections.abc import Callable
from typing import Any, Literal

import attrs

from forge_algos.settings._validators import number, one_of

DPOLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
ReferenceKind = Literal["stored", "adapter_off", "live"]
Normalize = Literal["global", "trl"]

SMOOTHED = ("aot", "aot_unpaired", "exo_pair", "robust")
"""The losses that read `label_smoothing`."""
DIVERGENT = ("discopop", "exo_pair", "hinge", "ipo", "robust", "sigmoid", "sigmoid_norm")
"""Those that read `f_divergence`."""
SORTED = ("aot", "aot_unpaired")
"""Those that sort the pairs of a micro-batch."""


def _names(value: Any) -> Any:
    """A name, or a list of them → a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _tuple_of(check: Callable[..., None]) -> Callable[..., None]:
    """A validator for a tuple with at least one element, each of which passes `check`."""

    def checked(instance: Any, field: Any, value: Any) -> None:
        if not isinstance(value, tuple):
            raise TypeError(f"{field.name} must be a list, got {value!r} ({type(value).__name__})")
        if not value:
            raise ValueError(f"{field.name} must hold at least one element")
        for element in value:
            check(instance, field, element)

    return checked


def _check_path(instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{field.name} must be a path or a model's name, got {value!r}")
    if instance.reference == "adapter_off":
        raise ValueError(
            f"reference_path={value!r} has no effect with reference='adapter_off', whose reference is the model under the "
            "adapter; leave it out, or set reference='stored' or 'live'"
        )


_any_number = number(kind=float, low=float("-inf"))
_beta = number(kind=float, above=True)
_smoothing = number(kind=float, below=0.5)


@attrs.frozen(kw_only=True)
class DPOSettings:
    """Direct preference optimisation (arXiv 2305.18290): which of its forms, how strong, and where the reference comes from.

    >>> DPOSettings(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2]).loss_type
    ('sigmoid', 'sft')
    >>> DPOSettings(label_smoothing=0.1)
    Traceback (most recent call last):
        ...
    ValueError: label_smoothing=0.1 has no effect with loss_type=sigmoid; those that read it: aot, aot_unpaired, exo_pair, robust
    """

    beta: float = attrs.field(default=0.1, validator=_beta)
    """How much a log-probability may leave the reference's: above 0, and the larger, the nearer it stays."""
    loss_type: tuple[DPOLoss, ...] = attrs.field(default=("sigmoid",), converter=_names, validator=_tuple_of(one_of(DPOLoss)))
    """The loss, or several that are added up."""
    loss_weights: tuple[float, ...] | None = attrs.field(
        default=None, converter=_names, validator=attrs.validators.optional(_tuple_of(_beta))
    )
    """A weight above 0 for each of `loss_type`; 1 for each by default."""
    label_smoothing: float = attrs.field(default=0.0, validator=_smoothing)
    """How often a preference is taken to be the wrong way round; read by exo_pair (which needs it), robust and aot."""
    f_divergence: Divergence = attrs.field(default="reverse_kl", validator=one_of(Divergence))
    """The divergence that keeps the model near its reference (arXiv 2309.16240)."""
    f_alpha: float | None = attrs.field(default=None, validator=attrs.validators.optional(_any_number))
    """α of alpha_divergence; 0.5 by default."""
    discopop_tau: float | None = attrs.field(default=None, validator=attrs.validators.optional(_beta))
    """Temperature of discopop's mixture; 0.05 by default."""
    ld_alpha: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.and_(number(kind=float), attrs.validators.le(1)))
    )
    """Weight, from 0 to 1, of the tokens beyond the shorter completion's length (LD-DPO, arXiv 2409.06411); 1 by default."""
    reference: ReferenceKind = attrs.field(default="stored", validator=one_of(ReferenceKind))
    """Where the reference's log-probabilities come from: computed once before training ("stored"), the model with its adapter
    switched off ("adapter_off"), or a second model beside it ("live")."""
    reference_path: str | None = attrs.field(default=None, validator=attrs.validators.optional(_check_path))
    """The reference model of "stored" and "live"; by default the model that training starts from."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over all pairs of a step, whatever its cut ("global"), or each micro-batch's own mean, averaged, as TRL ("trl")."""

    def __attrs_post_init__(self) -> None:
        types = ", ".join(self.loss_type)
        if len(set(self.loss_type)) < len(self.loss_type):
            raise ValueError(f"loss_type names a loss twice: {types}; give it a weight in loss_weights instead")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights must hold a number for each of loss_type={types}, got {len(self.loss_weights)}: {self.loss_weights}"
            )
        if self.label_smoothing:
            _read("label_smoothing", self.label_smoothing, self.loss_type, SMOOTHED)
        elif "exo_pair" in self.loss_type:
            raise ValueError(
                "label_smoothing must be above 0 with loss_type=exo_pair, which takes its logarithm; the paper has 1e-3"
            )
        if self.f_divergence != "reverse_kl":
            # The likelihood has no reference to be near to, so it may stand beside any divergence.
            for kind in [kind for kind in self.loss_type if kind != "sft"] or self.loss_type:
                _read("f_divergence", self.f_divergence, (kind,), DIVERGENT)
        if self.f_alpha is not None and self.f_divergence != "alpha_divergence":
            raise ValueError(
                f"f_alpha={self.f_alpha} has no effect with f_divergence={self.f_divergence}; leave it out, or set "
                "f_divergence='alpha_divergence'"
            )
        if self.discopop_tau is not None:
            _read("discopop_tau", self.discopop_tau, self.loss_type, ("discopop",))
        if self.ld_alpha is not None and set(self.loss_type) == {"sft"}:
            raise ValueError(f"ld_alpha={self.ld_alpha} has no effect with loss_type=sft, which learns every token alike")
        for kind in SORTED:
            if kind in self.loss_type and self.normalize == "global":
                raise ValueError(
                    f"loss_type={kind} sorts the pairs of a micro-batch, so its gradients depend on how a step is cut, which "
                    "normalize='global' rules out; set normalize='trl', or take another loss"
                )


@attrs.frozen(kw_only=True)
class ORPOSettings:
    """Odds-ratio preference optimisation (arXiv 2403.07691): likelihood and preference together, without a reference."""

    beta: float = attrs.field(default=0.1, validator=_beta)
    """Weight of the odds ratio beside the likelihood (the paper's λ), above 0."""
    learn_prompt: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether the likelihood part learns the chosen completion's prompt too, as the paper's code and TRL do."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over a step's pairs and tokens, whatever its cut ("global"), or over each micro-batch's, averaged, as TRL ("trl")."""


@attrs.frozen(kw_only=True)
class SimPOSettings:
    """Simple preference optimisation (arXiv 2405.14734): log-probabilities a token, and a margin, without a reference."""

    beta: float = attrs.field(default=2.0, validator=_beta)
    """Scale of the rewards, above 0; the paper has 2 to 10."""
    gamma: float = attrs.field(default=1.0, validator=number(kind=float))
    """By how much the chosen completion's reward should exceed the other's."""
    label_smoothing: float = attrs.field(default=0.0, validator=_smoothing)
    """How often a preference is taken to be the wrong way round."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over all pairs of a step, whatever its cut ("global"), or each micro-batch's own mean, averaged, as TRL ("trl")."""


@attrs.frozen(kw_only=True)
class KTOSettings:
    """Kahneman-Tversky optimisation (arXiv 2402.01306): completions that are good or bad each by itself."""

    beta: float = attrs.field(default=0.1, validator=_beta)
    """How much a log-probability may leave the reference's: above 0, and the larger, the nearer it stays."""
    desirable_weight: float = attrs.field(default=1.0, validator=_beta)
    """Weight of the good completions; the paper balances weight times number of both kinds."""
    undesirable_weight: float = attrs.field(default=1.0, validator=_beta)
    """Weight of the bad ones."""
    reference: ReferenceKind = attrs.field(default="stored", validator=one_of(ReferenceKind))
    """Where the reference's log-probabilities come from: computed once before training ("stored"), the model with its adapter
    switched off ("adapter_off"), or a second model beside it ("live")."""
    reference_path: str | None = attrs.field(default=None, validator=attrs.validators.optional(_check_path))
    """The reference model of "stored" and "live"; by default the model that training starts from."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean and KL over a whole step, whatever its cut ("global"), or over each micro-batch, averaged, as TRL ("trl")."""


@attrs.frozen(kw_only=True)
class RewardSettings:
    """Reward models (Bradley-Terry; arXiv 2203.02155): a number for a completion, higher for the better of two."""

    centering: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the square of a pair's summed rewards, which pulls their mean towards 0 (arXiv 2312.09244)."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over all pairs of a step, whatever its cut ("global"), or each micro-batch's own mean, averaged, as TRL ("trl")."""


def _read(name: str, value: object, types: tuple[str, ...], readers: tuple[str, ...]) -> None:
    if not set(types) & set(readers):
        raise ValueError(
            f"{name}={value} has no effect with loss_type={', '.join(types)}; those that read it: {', '.join(readers)}"
        )

"""Settings of the preference objectives: DPO, ORPO, SimPO, KTO, rewards; no torch is loaded.

Each option has the name that it has in its loss (`forge_algos.losses`), where its meaning stands; one that would have no effect
beside the others is refused here, before a model is loaded.
"""

from collections.abc import Callable
from typing import Any, Literal

import attrs

from forge_algos.settings._dpo_types import ALPHA, DPO_TYPES, TAU, Divergence, DPOLoss, readers
from forge_algos.settings._validators import key_of, logits_divisor, number, one_of

KTOLoss = Literal["kto", "apo_zero_unpaired"]
ReferenceKind = Literal["stored", "adapter_off", "live", "moving"]
Normalize = Literal["global", "trl"]


def _names(value: Any) -> Any:
    """Turn a name, or a list of names, into a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _tuple_of(check: Callable[..., None]) -> Callable[..., None]:
    """Return a validator for a tuple with at least one element, each of which passes `check`."""

    def checked(instance: Any, field: Any, value: Any) -> None:
        if not isinstance(value, tuple):
            raise TypeError(f"{field.name} must be a list, got {value!r} ({type(value).__name__})")
        if not value:
            raise ValueError(f"{field.name} must hold at least one element")
        for element in value:
            check(instance, field, element)

    return checked


def _check_path(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{field.name} must be a path or a model's name, got {value!r}")


_beta = number(kind=float, low=1e-9)
"""Validator of β, by which some losses divide: the square of what they make of it stays within float32."""
_above = number(kind=float, above=True)
_smoothing = number(kind=float, below=0.5)
_share = number(kind=float, high=1)
_above_share = number(kind=float, above=True, high=1)


@attrs.frozen(kw_only=True)
class DPOSettings:
    """Direct preference optimisation (arXiv 2305.18290): form, strength, and reference.

    >>> DPOSettings(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2]).loss_type
    ('sigmoid', 'sft')
    >>> DPOSettings(loss_type="exo_pair")
    Traceback (most recent call last):
        ...
    ValueError: label_smoothing must be above 0 with loss_type=exo_pair, which takes its logarithm; the paper has 1e-3
    """

    beta: float = attrs.field(default=0.1, validator=_beta)
    """Strength of the pull towards the reference, above 0:
    the larger, the nearer log-probabilities stay to the reference's."""
    loss_type: tuple[DPOLoss, ...] = attrs.field(default=("sigmoid",), converter=_names, validator=_tuple_of(key_of(DPO_TYPES)))
    """Form of the loss, or several that are added up."""
    loss_weights: tuple[float, ...] | None = attrs.field(
        default=None, converter=_names, validator=attrs.validators.optional(_tuple_of(_above))
    )
    """Weight above 0 of each of `loss_type`; 1 for each by default."""
    label_smoothing: float = attrs.field(default=0.0, validator=_smoothing)
    """Assumed share of preferences that are the wrong way round;
    read by cdpo, exo_pair (which needs it), robust and aot."""
    f_divergence: Divergence = attrs.field(default="reverse_kl", validator=one_of(Divergence))
    """Divergence that keeps the model near its reference (arXiv 2309.16240)."""
    f_divergence_alpha: float = attrs.field(default=ALPHA, validator=number(kind=float))
    """α of f_divergence=alpha_divergence: 0 is forward_kl, 1 reverse_kl."""
    discopop_tau: float = attrs.field(default=TAU, validator=logits_divisor)
    """Temperature of loss_type=discopop (arXiv 2406.08414), above 0."""
    ld_alpha: float | None = attrs.field(default=None, validator=attrs.validators.optional(_share))
    """Weight of the tokens of an answer beyond the length of the shorter one (LD-DPO, arXiv 2409.06411),
    from 0 to 1; by default all count alike."""
    wpo: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether a pair counts the more, the likelier both answers are under the model itself
    (WPO, arXiv 2406.11827)."""
    reference: ReferenceKind = attrs.field(default="stored", validator=one_of(ReferenceKind))
    """Source of the reference's log-probabilities:
    computed once before training ("stored"), the model with its adapter switched off ("adapter_off"), a second model beside it
    ("live"), or one that follows the trained model ("moving"; TR-DPO, arXiv 2404.09656)."""
    reference_path: str | None = attrs.field(default=None, validator=attrs.validators.optional(_check_path))
    """Reference model of "stored" and "live", or the one that "moving" begins as;
    by default the model that training starts from."""
    reference_sync_steps: int = attrs.field(default=512, validator=number(kind=int, low=1))
    """Number of steps after which reference=moving moves towards the trained model, each time."""
    reference_mixup: float = attrs.field(default=0.6, validator=_above_share)
    """Share of the trained weights that reference=moving then takes on, above 0; 1 makes it a copy of them."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over all pairs of a step, whatever its cut ("global"),
    or each micro-batch's own mean, averaged, as TRL ("trl")."""

    def __attrs_post_init__(self) -> None:
        types = ", ".join(self.loss_type)
        if len(set(self.loss_type)) < len(self.loss_type):
            raise ValueError(f"loss_type names a loss twice: {types}; give it a weight in loss_weights instead")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights must hold a number for each of loss_type={types}, got {len(self.loss_weights)}: "
                f"{self.loss_weights}"
            )
        if self.label_smoothing:
            _check_read("label_smoothing", self.label_smoothing, self.loss_type, readers("smoothing"))
        elif "exo_pair" in self.loss_type:
            raise ValueError(
                "label_smoothing must be above 0 with loss_type=exo_pair, which takes its logarithm; the paper has 1e-3"
            )
        if self.f_divergence != "reverse_kl":
            # The likelihood has no reference, so it goes with any divergence.
            for kind in [kind for kind in self.loss_type if kind != "sft"] or self.loss_type:
                _check_read("f_divergence", self.f_divergence, (kind,), readers("divergence"))
        if self.f_divergence_alpha != ALPHA and self.f_divergence != "alpha_divergence":
            raise ValueError(
                f"f_divergence_alpha={self.f_divergence_alpha} has no effect with f_divergence={self.f_divergence}: leave it "
                "out, or set f_divergence=alpha_divergence"
            )
        if self.discopop_tau != TAU:
            _check_read("discopop_tau", self.discopop_tau, self.loss_type, ["discopop"])
        if self.ld_alpha is not None:
            _check_read("ld_alpha", self.ld_alpha, self.loss_type, [kind for kind in DPO_TYPES if kind != "sft"])
        _check_reference(self)
        for kind in self.loss_type:
            if DPO_TYPES[kind].sorts and self.wpo:
                raise ValueError(
                    f"wpo=True weighs pairs, and loss_type={kind} sorts them, so that no term is that of one pair; leave wpo "
                    "out, or take another loss"
                )
            if DPO_TYPES[kind].sorts and self.normalize == "global":
                raise ValueError(
                    f"loss_type={kind} sorts the pairs of a micro-batch, so its gradients depend on how a step is cut, which "
                    "normalize='global' rules out; set normalize='trl', or take another loss"
                )


@attrs.frozen(kw_only=True)
class ORPOSettings:
    """Odds-ratio preference optimisation (arXiv 2403.07691): likelihood and preference together.
    It has no reference.
    """

    beta: float = attrs.field(default=0.1, validator=_beta)
    """Weight of the odds ratio beside the likelihood (the paper's λ), above 0."""
    learn_prompt: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether the likelihood part learns the chosen completion's prompt too,
    as the paper's code and TRL do."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over a step's pairs and tokens, whatever its cut ("global"),
    or over each micro-batch's, averaged, as TRL ("trl")."""


@attrs.frozen(kw_only=True)
class SimPOSettings:
    """Simple preference optimisation (arXiv 2405.14734): log-probabilities a token, a margin."""

    beta: float = attrs.field(default=2.0, validator=_beta)
    """Scale of the rewards, above 0; the paper has 2 to 10."""
    gamma: float = attrs.field(default=1.0, validator=number(kind=float))
    """Margin by which the chosen completion's reward should exceed the other's."""
    label_smoothing: float = attrs.field(default=0.0, validator=_smoothing)
    """Assumed share of preferences that are the wrong way round."""
    cpo_alpha: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the chosen completion's likelihood beside the preference (CPO, arXiv 2401.08417); 0 is SimPO."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over all pairs of a step, whatever its cut ("global"),
    or each micro-batch's own mean, averaged, as TRL ("trl")."""


@attrs.frozen(kw_only=True)
class KTOSettings:
    """Kahneman-Tversky optimisation (arXiv 2402.01306): completions that are good or bad.
    Each is judged by itself, not beside another.
    """

    beta: float = attrs.field(default=0.1, validator=_beta)
    """Strength of the pull towards the reference, above 0:
    the larger, the nearer log-probabilities stay to the reference's."""
    desirable_weight: float = attrs.field(default=1.0, validator=_above)
    """Weight of the good completions; the paper balances weight times number of both kinds."""
    undesirable_weight: float = attrs.field(default=1.0, validator=_above)
    """Weight of the bad completions."""
    loss_type: KTOLoss = attrs.field(default="kto", validator=one_of(KTOLoss))
    """What an answer is judged against: the KL to the reference, which the step's mismatched answers
    estimate ("kto"), or 0 ("apo_zero_unpaired", arXiv 2408.06266): good answers become likelier than under the reference, bad
    ones less likely."""
    reference: ReferenceKind = attrs.field(default="stored", validator=one_of(ReferenceKind))
    """Source of the reference's log-probabilities:
    computed once before training ("stored"), the model with its adapter switched off ("adapter_off"), a second model beside it
    ("live"), or one that follows the trained model ("moving"; TR-DPO, arXiv 2404.09656)."""
    reference_path: str | None = attrs.field(default=None, validator=attrs.validators.optional(_check_path))
    """Reference model of "stored" and "live", or the one that "moving" begins as;
    by default the model that training starts from."""
    reference_sync_steps: int = attrs.field(default=512, validator=number(kind=int, low=1))
    """Number of steps after which reference=moving moves towards the trained model, each time."""
    reference_mixup: float = attrs.field(default=0.6, validator=_above_share)
    """Share of the trained weights that reference=moving then takes on, above 0; 1 makes it a copy of them."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean and KL over a whole step, whatever its cut ("global"), or over each micro-batch,
    averaged, as TRL ("trl")."""

    def __attrs_post_init__(self) -> None:
        _check_reference(self)

    @property
    def estimates_kl(self) -> bool:
        """Whether mismatched answers are run, from which the KL is estimated."""
        return self.loss_type == "kto"


@attrs.frozen(kw_only=True)
class RewardSettings:
    """Reward model (Bradley-Terry; arXiv 2203.02155): one number a completion, higher if better."""

    centering: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the square of a pair's summed rewards,
    which pulls their mean towards 0 (arXiv 2312.09244)."""
    normalize: Normalize = attrs.field(default="global", validator=one_of(Normalize))
    """Mean over all pairs of a step, whatever its cut ("global"),
    or each micro-batch's own mean, averaged, as TRL ("trl")."""


def _check_read(name: str, value: object, types: tuple[str, ...], known: list[str]) -> None:
    """Raise ValueError where none of the types reads the setting."""
    if not set(types) & set(known):
        raise ValueError(
            f"{name}={value} has no effect with loss_type={', '.join(types)}; those that read it: {', '.join(known)}"
        )


def _check_reference(settings: DPOSettings | KTOSettings) -> None:
    """Raise ValueError for a path or a move that the kind of reference does not read."""
    if settings.reference_path is not None and settings.reference == "adapter_off":
        raise ValueError(
            f"reference_path={settings.reference_path!r} has no effect with reference='adapter_off', whose reference is the "
            "model under the adapter; leave it out, or set reference='stored', 'live' or 'moving'"
        )
    if settings.reference == "moving":
        return
    for name in ("reference_sync_steps", "reference_mixup"):
        value = getattr(settings, name)
        if value != getattr(attrs.fields(type(settings)), name).default:
            raise ValueError(
                f"{name}={value} has no effect with reference={settings.reference!r}; leave it out, or set reference='moving'"
            )

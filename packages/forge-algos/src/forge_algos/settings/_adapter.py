"""Settings of adapters: how much of the model moves. Reading them loads no torch, no peft.

A docstring under a field becomes its line in `--help` and in the reference page.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import regex

from forge_algos.settings._adapter_table import ADAPTERS, Adapter
from forge_algos.settings._validators import either, key_of, number, one_of

QuantType = Literal["nf4", "fp4", "int8"]
OSFTDirections = Literal["weights", "inputs"]
OSFTRule = Literal["strict", "paper"]
OSFTForm = Literal["direct", "factors"]
OSFTRank = Literal["uniform", "adaptive"]
OSFTSvd = Literal["exact", "randomized"]
Rest = Literal["embeddings", "head", "norms", "biases", "all"]
InitLoraWeights = Literal["default", "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_16", "mica", "eva"]

# A constant, because the type checker takes a literal of more than four for any string.
_INIT: InitLoraWeights = "default"

SUBTRACTED = ("olora", "pissa", "pissa_niter_16")
"""Initialisations whose first product B₀ A₀ is subtracted again, so that training begins at the base."""
STORED = ("pissa", "olora", "mica")
"""Initialisations that say, of an adapter in a directory too, what of it stays."""

LAYERS = re.compile(r"(?P<end>first|last):(?P<number>\d{1,6})(?P<rest>(\..*)?)")
"""One of `unfrozen_parameters` that means so many layers, and what of each."""
EXPRESSION = "re:"
"""Begins a target that is a regular expression of whole names."""
_ROWS = re.compile(r"\[\d*:\d*\]$")
_COUNTS = re.compile(r"\{(?:\d*,)?(\d+)\}")
_MOST_REPEATS = 10_000
"""Counted repeats of an expression, which are written out before it is searched for."""
_POSITIVE = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _pattern(value: Any) -> Any:
    return tuple(f"{name}={rank}" for name, rank in value.items()) if isinstance(value, Mapping) else _tuple(value)


def _check_names(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field.name} must be a list of names, got {value!r} ({type(value).__name__})")
    if not value or not all(value):
        raise ValueError(f"{field.name} must hold at least one name and no empty one, got {value!r}")


def unfrozen(pattern: str) -> regex.Pattern[str]:
    """Return the expression of one of `unfrozen_parameters`: the beginning of names."""
    return regex.compile(rf"(?:{pattern})(?=\.|\Z)")


def whole_name(target: str) -> regex.Pattern[str]:
    """Return the expression of one of `target_modules` that begins with `re:`: whole names."""
    return regex.compile(target.removeprefix(EXPRESSION))


def _check_parameters(_instance: Any, field: Any, value: Any) -> None:
    _check_names(_instance, field, value)
    for pattern in value:
        if _ROWS.search(pattern):
            raise ValueError(f"{field.name}={pattern}: a weight trains as a whole, without [FROM:TO] behind its name")
        _check_expression(field.name, pattern, unfrozen)


def _check_targets(_instance: Any, field: Any, value: Any) -> None:
    _check_names(_instance, field, value)
    for target in value:
        if target.startswith(EXPRESSION):
            _check_expression(field.name, target, whole_name)


def _check_expression(name: str, pattern: str, compiled: Callable[[str], object]) -> None:
    if math.prod(int(count[:9]) for count in _COUNTS.findall(pattern)) > _MOST_REPEATS:
        raise ValueError(f"{name}={pattern}: repeats more than {_MOST_REPEATS:,} times: write * or + instead")
    try:
        compiled(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}={pattern} is no regular expression: {error}") from error


def _check_rest(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple):
        raise TypeError(f"{field.name} must be a list of names, got {value!r} ({type(value).__name__})")
    for name in value:
        one_of(Rest)(_instance, field, name)


def _check_pattern(_instance: Any, field: Any, value: Any) -> None:
    _check_names(_instance, field, value)
    for entry in value:
        name, _, rank = entry.rpartition("=")
        if not name or not rank.isdecimal():
            raise ValueError(
                f"{field.name} must hold NAME=RANK, a target's name or pattern and its rank (of osft: how many of its "
                f"directions may move), got {entry!r}"
            )


def _check_alphas(_instance: Any, field: Any, value: Any) -> None:
    _check_names(_instance, field, value)
    for entry in value:
        name, _, alpha = entry.rpartition("=")
        if not name or not _POSITIVE.fullmatch(alpha) or not float(alpha):
            raise ValueError(
                f"{field.name} must hold NAME=ALPHA, a target's name or pattern and a number above 0 in place of lora_alpha, "
                f"got {entry!r}"
            )


def _text(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{field.name} must be text, got {value!r} ({type(value).__name__})")


_names: Any = {"default": None, "converter": _tuple, "validator": attrs.validators.optional(_check_names)}
_flag: Any = attrs.validators.instance_of(bool)
_share: Any = attrs.validators.and_(number(kind=float), attrs.validators.le(1))


@attrs.frozen(kw_only=True)
class AdapterSettings:
    """Part of the model that moves: all, an adapter beside it, or a subspace of its weights.

    >>> AdapterSettings(adapter="lora", lora_r=8).lora_r
    8
    >>> AdapterSettings(lora_fa=True)
    Traceback (most recent call last):
        ...
    ValueError: lora_fa=True has no effect with adapter='none'; leave it out, or set adapter=lora, qlora or rslora
    """

    adapter: Adapter = attrs.field(default="none", validator=key_of(ADAPTERS))
    """What is trained: every weight (none); low-rank adapters beside frozen layers and experts
    (lora, arXiv 2106.09685), on a base in 4 or 8 bits (qlora, 2305.14314), with a magnitude of their own (dora, 2402.09353) or
    scaled for high ranks (rslora, 2312.03732); a factor for each channel (ia3, 2205.05638); virtual tokens before each layer
    (prefix, 2101.00190) or before the first (prompt, 2104.08691), or gated beside the attention (adapter_prompt,
    2303.16199); rotations of each layer's inputs (oft, 2306.07280), also on a base in 4 or
    8 bits (qoft), or reflections (hra, 2405.17484); products
    of small matrices, of each element (loha, 2108.06098) or Kronecker's (lokr, 2212.10650); one small matrix for all blocks of
    inputs (miss, 2409.15371); factors on shared random matrices (vera, 2310.11454; randlora, 2502.00987); coefficients of a
    Fourier transform (fourierft, 2405.03003) or circulant blocks (c3a, 2407.19342); or the directions of each matrix with small
    singular values (osft, 2504.07097)."""
    adapter_path: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text))
    """Directory of an adapter to go on from, of the kind that `adapter` names.
    forge, PEFT, TRL, Axolotl and LLaMA-Factory write such. Its shape (rank, scale, block size, number of virtual tokens,
    targets) is that of the run, and it is exported beside the same base."""
    target_modules: tuple[str, ...] | None = attrs.field(
        default=None, converter=_tuple, validator=attrs.validators.optional(_check_targets)
    )
    """Which linear layers and experts: names or last parts of names, patterns with * and ?, re: and a regular expression of
    whole names, or kinds (attention, mlp, experts, router, all-linear). By default all but the head; for ia3 those that PEFT
    has for the architecture."""
    modules_to_save: tuple[str, ...] | None = attrs.field(**_names)
    """Modules that are trained whole beside the adapter and exported with it, such as embed_tokens and lm_head;
    named as targets are. A tied embedding and head stay one weight."""
    unfrozen_parameters: tuple[str, ...] | None = attrs.field(
        default=None, converter=_tuple, validator=attrs.validators.optional(_check_parameters)
    )
    """Which weights train with adapter=none, as regular expressions that their names begin with
    (`lm_head`, `model.layers.2[0-9]`, `.*.mlp.down_proj`), or as so many layers (`last:8`, `first:2.mlp`); the others are
    frozen. By default all."""
    lora_r: int = attrs.field(default=16, validator=number(kind=int, low=1))
    """Rank of the adapters; of hra the number of reflections."""
    lora_alpha: float = attrs.field(default=32.0, validator=number(kind=float, above=True))
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_r,
    with rslora by lora_alpha / √lora_r."""
    lora_dropout: float = attrs.field(default=0.0, validator=number(kind=float, below=1.0))
    """Share of the adapters' inputs set to zero while training, from 0 to below 1."""
    init_lora_weights: InitLoraWeights = attrs.field(default=_INIT, validator=one_of(InitLoraWeights))
    """First values of A and B; with each the model begins as its base.
    B = 0 with A uniform (default), gaussian, or the directions in which the inputs of the run's first rows vary most (eva,
    arXiv 2410.07170); both orthogonal (orthogonal); the weight's first singular vectors (pissa, 2404.02948, or pissa_niter_16,
    a faster approximation) or those of its QR (olora, 2406.01775), whose product is subtracted again; its last ones in a B that
    stays (mica, 2604.01694)."""
    lora_fa: bool = attrs.field(default=False, validator=_flag)
    """Train B alone, by the gradient that is nearest to the whole matrix's (LoRA-FA, arXiv 2308.03303):
    A keeps its first values and needs no gradient and no optimizer state."""
    quant_type: QuantType = attrs.field(default="nf4", validator=one_of(QuantType))
    """How the base of qlora and qoft is stored: in 4 bits as NormalFloat (nf4) or floats (fp4),
    or in 8 bits as integers with a scale for each row (int8, arXiv 2208.07339)."""
    double_quant: bool = attrs.field(default=True, validator=_flag)
    """Whether the constants of nf4 and fp4 are stored in 8 bits, which saves 0.4 bits a weight."""
    feedforward_modules: tuple[str, ...] | None = attrs.field(**_names)
    """Which of ia3's targets are scaled at their input instead of their output,
    named as targets are. By default those that PEFT has for the architecture."""
    num_virtual_tokens: int = attrs.field(default=20, validator=number(kind=int, low=1))
    """Number of virtual tokens that prefix, prompt and adapter_prompt learn."""
    prefix_projection: bool = attrs.field(default=False, validator=_flag)
    """Whether prefix learns its keys and values through a small network,
    which is dropped at the end."""
    prompt_init_text: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text))
    """Text whose embeddings the virtual tokens of prompt are initialised from;
    by default tokens drawn from the vocabulary."""
    adapter_layers: int | None = attrs.field(default=None, validator=attrs.validators.optional(number(kind=int, low=1)))
    """Number of the uppermost layers that adapter_prompt acts on; by default all."""
    oft_block_size: int = attrs.field(default=32, validator=number(kind=int, low=2))
    """Number of inputs that each of oft's rotations turns; it must divide every target's inputs."""
    vera_rank: int = attrs.field(default=256, validator=number(kind=int, low=1))
    """Rank of vera's two random matrices, which all targets share."""
    fourier_n_frequency: int = attrs.field(default=1000, validator=number(kind=int, low=1))
    """Number of coefficients that fourierft learns for each target."""
    fourier_scaling: float = attrs.field(default=150.0, validator=number(kind=float, above=True))
    """Factor on what fourierft adds to a weight."""
    c3a_block_size: int = attrs.field(default=256, validator=number(kind=int, low=1))
    """Side of c3a's circulant blocks; it must divide every target's inputs and outputs."""
    unfreeze_rank_ratio: float = attrs.field(default=0.25, validator=_share)
    """Share of each target's singular directions that osft lets move,
    those of the smallest singular values: 0 moves no target, 1 trains the targets as they are."""
    osft_directions: OSFTDirections | None = attrs.field(
        default=None, validator=attrs.validators.optional(one_of(OSFTDirections))
    )
    """Which directions of a target osft protects first. weights: those of its large singular values.
    inputs: those in which its inputs and outputs are largest on the rows of osft_calibration_path, which shows what the model
    is to keep. By default inputs where there are such rows and osft_rank=uniform, else weights."""
    osft_rule: OSFTRule = attrs.field(default="strict", validator=one_of(OSFTRule))
    """Moves that osft's protected directions forbid.
    strict: any on their input side or on their output side. paper: only those that lead from the one to the other (the
    paper's formula), which leaves far more free."""
    osft_form: OSFTForm = attrs.field(default="direct", validator=one_of(OSFTForm))
    """How osft_rule=strict is kept. direct: a matrix between the free directions on both sides,
    orthogonal under any optimizer, without projection. factors: singular vectors and values of the free part, projected
    around each step, as in mini-trainer."""
    osft_rank: OSFTRank = attrs.field(default="uniform", validator=one_of(OSFTRank))
    """Whether every target frees the same share (uniform),
    or less of one that turns its input little (adaptive, the paper's importance), with unfreeze_rank_ratio as their mean."""
    osft_calibration_path: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text))
    """Rows of what the model is to keep, of earlier tasks and of general use.
    osft_directions=inputs, which needs them and is the default with them, and osft_rank=adaptive measure on them, the latter
    by default on the first rows that are trained on."""
    rank_pattern: tuple[str, ...] | Mapping[str, int] | None = attrs.field(
        default=None, converter=_pattern, validator=attrs.validators.optional(_check_pattern), metadata={"words": tuple}
    )
    """Rank of certain targets, as NAME=RANK (`q_proj=8`, `layers.0.*=0`) or a mapping;
    0 is no adapter, and the last that fits counts; the others have lora_r. With osft the number of directions that it
    frees; the others follow osft_rank."""
    alpha_pattern: tuple[str, ...] | Mapping[str, float] | None = attrs.field(
        default=None, converter=_pattern, validator=attrs.validators.optional(_check_alphas), metadata={"words": tuple}
    )
    """Scale of certain targets in place of lora_alpha, as NAME=ALPHA or a mapping;
    the last that fits counts."""
    osft_train_rest: tuple[Rest, ...] = attrs.field(default=(), converter=_tuple, validator=_check_rest)
    """Further weights that osft trains whole: any of embeddings, head, norms, biases, or all that the model has of them.
    By default none."""
    osft_svd: OSFTSvd = attrs.field(default="exact", validator=one_of(OSFTSvd))
    """exact, or randomized (arXiv 0909.4061) for the protected directions alone,
    with the error bound in the log. It pays where unfreeze_rank_ratio is 0.85 or more; where it does not converge the exact
    ones are computed."""
    osft_cache: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text))
    """Directory in which osft keeps singular vectors, for other runs on the same weights;
    by default `osft/` of the run."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            readers = [adapter for adapter, kind in ADAPTERS.items() if field.name in kind.fields]
            if readers:
                self._refuse_unread(field.name, "adapter", readers)
        self._refuse_unread("double_quant", "quant_type", ["nf4", "fp4"])
        for name in ("init_lora_weights", "prompt_init_text", "prefix_projection") if self.adapter_path is not None else ():
            possible = (getattr(attrs.fields(type(self)), name).default, *(STORED if name == "init_lora_weights" else ()))
            if (value := getattr(self, name)) not in possible:
                raise ValueError(
                    f"{name}={value!r} has no effect with adapter_path, which holds the first values; leave one out"
                )
        if self.lora_fa and self.init_lora_weights in (*SUBTRACTED, "mica"):
            raise ValueError(
                f"init_lora_weights={self.init_lora_weights!r} with lora_fa=True: the one trains A, the other keeps it; "
                "leave one out"
            )
        if self.adapter != "osft":
            return
        self._refuse_unread("osft_form", "osft_rule", ["strict"])
        if self.protects == "weights":
            if self.osft_calibration_path is not None and self.osft_rank == "uniform":
                raise ValueError(
                    f"osft_calibration_path={self.osft_calibration_path!r} has no effect with osft_directions='weights' and "
                    "osft_rank='uniform': leave it or osft_directions out, or set osft_rank=adaptive"
                )
        else:
            of_weights = {"osft_form": "direct", "osft_svd": "exact", "osft_cache": None}
            for name in (name for name, usual in of_weights.items() if getattr(self, name) != usual):
                chosen = "osft_directions='inputs'" if self.osft_directions else "what osft_calibration_path protects"
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is of singular vectors, and {chosen} takes none: leave one out"
                )
        if self.osft_form == "factors" and self.osft_svd == "randomized":
            raise ValueError(
                "osft_svd='randomized' finds the protected directions alone, and osft_form='factors' trains the others: leave "
                "one out"
            )

    @property
    def protects(self) -> OSFTDirections:
        """Which directions OSFT protects first: `osft_directions`, or what it is where left open."""
        return self.osft_directions or self.usual_directions(self.osft_calibration_path, self.osft_rank)

    @staticmethod
    def usual_directions(osft_calibration_path: str | None, osft_rank: OSFTRank) -> OSFTDirections:
        """Return what `osft_directions` is where it is left open, beside these settings."""
        return "inputs" if osft_calibration_path is not None and osft_rank == "uniform" else "weights"

    def accepts(self, name: str, value: object) -> bool:
        """Return whether a setting may have a value here: a subclass may be of one adapter alone."""
        field = getattr(attrs.fields(type(self)), name)
        try:
            field.validator(self, field, value)
        except (TypeError, ValueError):
            return False
        return True

    def reads(self, name: str) -> bool:
        """Return whether a setting has an effect with the chosen adapter."""
        return name in ADAPTERS[self.adapter].fields

    @property
    def subtracts(self) -> bool:
        """Whether the adapters' first product is subtracted, so that training begins at the base."""
        return self.init_lora_weights in SUBTRACTED

    def _refuse_unread(self, name: str, setting: str, readers: Sequence[str]) -> None:
        """Raise ValueError where `name` was set and the chosen value of `setting` does not read it."""
        value, chosen = getattr(self, name), getattr(self, setting)
        if chosen not in readers and value != getattr(attrs.fields(type(self)), name).default:
            possible = [reader for reader in readers if self.accepts(setting, reader)]
            raise ValueError(
                f"{name}={value!r} has no effect with {setting}={chosen!r}; leave it out"
                + (f", or set {setting}={either(possible)}" if possible else "")
            )

"""Table of adapters: settings that each reads, its learning rate, and what attaches it.

An adapter is one row here. `attach` and `peft` are names, imported when an adapter is attached, so that reading settings loads
neither torch nor peft.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

_PEFT = "forge_algos.adaptations.peft._attach:attach_peft"


@attrs.frozen(kw_only=True)
class AdapterKind:
    """One adapter.

    With the default `attach`, PEFT's layers are put into the linear layers that `target_modules` selects: the configuration
    class `peft` is given the fields of AdapterSettings named in `arguments`, and `options` as they are. Any other adapter
    brings a function of its own.
    """

    learning_rate: float
    """Default of AdamW's highest learning rate."""
    attach: str | Callable[..., Any] = _PEFT
    """Function (model, settings, context) → Adaptation, or "module:function", which names one."""
    peft: str = ""
    """PEFT's configuration class, such as LoraConfig; empty where PEFT has no part in it."""
    arguments: Mapping[str, str] = attrs.field(factory=dict)
    """Argument of that class → field of AdapterSettings that is its value."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Further arguments of that class, which are the same for every model."""
    reads: tuple[str, ...] = ()
    """Fields of AdapterSettings that it reads beside those in `arguments`;
    any other is refused if it is set."""
    quantized: bool = False
    """Whether its base model is loaded in 4 or 8 bits; on any other base it is refused."""
    child: str = ""
    """Name of the modules that it adds beside layers, where it is not PEFT's:
    a model with such modules has this adapter."""

    divides: Mapping[str, Sequence[Literal["inputs", "outputs"]]] = attrs.field(factory=dict)
    """Setting → sides of every target that it must divide."""
    most: Mapping[str, Literal["inputs", "numbers"]] = attrs.field(factory=dict)
    """Setting → what of every target it may be at most."""
    even: Sequence[str] = ()
    """Settings that must be even, so that it begins as its base."""
    linear: bool = False
    """Whether PEFT puts it into nn.Linear alone, and not into GPT-2's Conv1D."""
    reads_shapes: bool = False
    """Whether PEFT asks the base's weights for their shapes, which ZeRO-3 leaves empty."""
    vectors: Sequence[str] = ()
    """Names of its weights that have the shape of matrices and are none:
    they do not decay, and are not Muon's."""
    zero: Sequence[str] = ()
    """Names of its weights that begin at zero, for which Adafactor's steps have a floor."""
    full: str = ""
    """Name of a weight that is one matrix where its rank would not make it smaller."""

    @property
    def rank(self) -> str | None:
        """Setting of its rank; None where it has none."""
        return self.arguments.get("r")

    @property
    def fields(self) -> frozenset[str]:
        """Fields of AdapterSettings that have an effect with this adapter."""
        return frozenset({*self.arguments.values(), *self.reads, *(["adapter_path"] if self.peft else [])})

    @property
    def peft_type(self) -> str:
        """PEFT's name for the kind of adapter in adapter_config.json, without its underscores."""
        return self.peft.removesuffix("Config").upper()


_TARGETS = ("target_modules", "modules_to_save")
_OF_DORA = (*_TARGETS, "init_lora_weights", "rank_pattern", "alpha_pattern")
_OF_LORA = (*_OF_DORA, "lora_fa")
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_OSFT = (
    "unfreeze_rank_ratio osft_directions osft_rule osft_form osft_rank osft_calibration_path rank_pattern osft_train_rest "
    "osft_svd osft_cache"
)

_OFT = AdapterKind(
    learning_rate=1e-4,
    peft="OFTConfig",
    arguments={"oft_block_size": "oft_block_size"},
    reads=_TARGETS,
    divides={"oft_block_size": ("inputs",)},
    vectors=("oft_R",),
    zero=("oft_R",),
    linear=True,
)

ADAPTERS: dict[str, AdapterKind] = {
    "none": AdapterKind(
        learning_rate=2e-5,
        attach="forge_algos.adaptations.base._adaptation:train_all",
        reads=("unfrozen_parameters",),
    ),
    "lora": AdapterKind(learning_rate=2e-4, peft="LoraConfig", arguments=_LORA, reads=_OF_LORA),
    "qlora": AdapterKind(
        learning_rate=2e-4,
        peft="LoraConfig",
        arguments=_LORA,
        reads=(*_OF_LORA, "quant_type", "double_quant"),
        quantized=True,
    ),
    "dora": AdapterKind(learning_rate=2e-4, peft="LoraConfig", arguments=_LORA, options={"use_dora": True}, reads=_OF_DORA),
    "rslora": AdapterKind(learning_rate=2e-4, peft="LoraConfig", arguments=_LORA, options={"use_rslora": True}, reads=_OF_LORA),
    "ia3": AdapterKind(
        learning_rate=3e-3,
        peft="IA3Config",
        attach="forge_algos.adaptations.peft._ia3:attach_ia3",
        reads=(*_TARGETS, "feedforward_modules"),
        vectors=("ia3_l",),
    ),
    "prefix": AdapterKind(
        learning_rate=1e-2,
        peft="PrefixTuningConfig",
        attach="forge_algos.adaptations.peft._prompts:attach_prefix",
        arguments={"num_virtual_tokens": "num_virtual_tokens", "prefix_projection": "prefix_projection"},
    ),
    "prompt": AdapterKind(
        learning_rate=3e-2,
        peft="PromptTuningConfig",
        attach="forge_algos.adaptations.peft._prompts:attach_prompt",
        arguments={"num_virtual_tokens": "num_virtual_tokens"},
        reads=("prompt_init_text",),
    ),
    "adapter_prompt": AdapterKind(
        learning_rate=1e-2,
        peft="AdaptionPromptConfig",
        attach="forge_algos.adaptations.peft._prompts:attach_adapter_prompt",
        arguments={"adapter_len": "num_virtual_tokens"},
        reads=("adapter_layers",),
    ),
    "oft": _OFT,
    "qoft": attrs.evolve(_OFT, reads=(*_OFT.reads, "quant_type", "double_quant"), quantized=True),
    "hra": AdapterKind(
        learning_rate=1e-4,
        peft="HRAConfig",
        arguments={"r": "lora_r"},
        reads=_TARGETS,
        even=("lora_r",),
        vectors=("hra_u",),
        linear=True,
    ),
    "loha": AdapterKind(
        learning_rate=1e-4,
        peft="LoHaConfig",
        arguments={"r": "lora_r", "alpha": "lora_alpha"},
        reads=_TARGETS,
        zero=("hada_w2_b",),
        linear=True,
        reads_shapes=True,
    ),
    "lokr": AdapterKind(
        learning_rate=1e-3,
        peft="LoKrConfig",
        arguments={"r": "lora_r", "alpha": "lora_alpha"},
        reads=_TARGETS,
        zero=("lokr_w1",),
        linear=True,
        full="lokr_w2",
    ),
    "miss": AdapterKind(
        learning_rate=1e-4,
        peft="MissConfig",
        arguments={"r": "lora_r", "miss_dropout": "lora_dropout"},
        reads=_TARGETS,
        most={"lora_r": "inputs"},
        zero=("miss_block",),
        linear=True,
    ),
    "vera": AdapterKind(
        learning_rate=4e-3,
        peft="VeraConfig",
        arguments={"r": "vera_rank", "vera_dropout": "lora_dropout"},
        reads=_TARGETS,
    ),
    "randlora": AdapterKind(
        learning_rate=1e-3,
        peft="RandLoraConfig",
        arguments={"r": "lora_r", "randlora_alpha": "lora_alpha", "randlora_dropout": "lora_dropout"},
        reads=_TARGETS,
        vectors=("randlora_lambda", "randlora_gamma"),
        zero=("randlora_lambda",),
    ),
    "fourierft": AdapterKind(
        learning_rate=1e-2,
        peft="FourierFTConfig",
        arguments={"n_frequency": "fourier_n_frequency", "scaling": "fourier_scaling"},
        options={"init_weights": True},
        reads=_TARGETS,
        most={"fourier_n_frequency": "numbers"},
    ),
    "c3a": AdapterKind(
        learning_rate=1e-1,
        peft="C3AConfig",
        arguments={"block_size": "c3a_block_size"},
        options={"init_weights": True},
        reads=_TARGETS,
        divides={"c3a_block_size": ("inputs", "outputs")},
        zero=("c3a_kernel",),
        linear=True,
    ),
    "osft": AdapterKind(
        learning_rate=1e-4,
        attach="forge_algos.adaptations.osft._attach:attach_osft",
        reads=("target_modules", *_OSFT.split()),
        child="osft",
    ),
}
"""By the name that `AdapterSettings.adapter` takes."""

# The choices follow from the table, which no static type can express: to type checkers an adapter is any string.
if TYPE_CHECKING:
    Adapter = str
else:
    Adapter = Literal[tuple(ADAPTERS)]


def default_learning_rate(adapter: Adapter) -> float:
    """Return the highest learning rate of AdamW that an adapter trains with where none is set."""
    return ADAPTERS[adapter].learning_rate

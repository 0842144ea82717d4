"""An adapter directory of PEFT → the same adapter on a model, to be trained on.

PEFT attaches what the directory's own configuration says; tensors are compared before they are loaded, as PEFT itself goes on
with new values, and a warning, where one is missing.
"""

import dataclasses
import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from forge_algos._counted import counted
from forge_algos._errors import AdapterError
from forge_algos._experts import expert_stacks
from forge_algos.adaptations.base._adaptation import Adaptation, Context
from forge_algos.adaptations.base._modalities import Parts
from forge_algos.adaptations.base._targets import is_linear, resolve_targets
from forge_algos.adaptations.peft import _trained_rows as trained_rows
from forge_algos.adaptations.peft._attach import (
    PeftAdaptation,
    attached_by,
    check_tops,
    described,
    task_type_of,
    with_full_factors,
)
from forge_algos.adaptations.peft._directory import CONFIG, WEIGHTS, StoredAdapter, stored_adapter
from forge_algos.adaptations.peft._dora import dora_attached
from forge_algos.adaptations.peft._experts import keep_order
from forge_algos.adaptations.peft._input_casts import follow_autocast
from forge_algos.adaptations.peft._limits import check_layers
from forge_algos.adaptations.peft._lora_init import Lora
from forge_algos.adaptations.peft._lora_patterns import alphas_of, ranks_of
from forge_algos.adaptations.peft._prompts import described_tokens, with_virtual_tokens
from forge_algos.adaptations.peft._stored_base import PREFIX, check_biases, compare_with_base, weights_of_base
from forge_algos.adaptations.peft._stored_subtracted import (
    check_subtracted,
    double,
    doubled_shapes,
    scale_of_double,
    with_second_halves,
)
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS

if TYPE_CHECKING:
    from peft import PeftModel

_FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that an adapter's tensors may have."""
_TOKENS = "prompt_embeddings"
"""Tensor of a prefix or prompt in its file."""
_OF_THE_MODEL = ("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules")
"""Fields of virtual tokens' configurations that PEFT takes from the model."""
_DROPOUTS = ("rank_dropout", "module_dropout")
"""Further kinds of dropout, for which there is no setting: as dropout itself they are the run's, and are left out."""


def attach_stored(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Put the adapter of `settings.adapter_path` onto `model`, with its values, in float32.

    On an outline, whose parameters have no numbers, names and shapes alone are compared.

    Raises:
        AdapterError: the directory holds none, or one of another kind; it is the adapter of another model; a setting that was
            given is not what it has; new tokens, whose rows it has not.
    """
    assert settings.adapter_path is not None
    stored = stored_adapter(settings.adapter_path, settings.adapter)
    if context.new_tokens:
        raise AdapterError(
            f"adapter_path {stored.folder}: has no rows for new tokens: add them in the run that begins the adapter, whose "
            "base_model has them"
        )
    _check_kind(stored, model)
    settings = _with_shape(settings, stored)
    config, shapes = _config(stored, settings, task_type_of(model)), _shapes(stored)
    if isinstance(config, _prompt_classes()):
        return _with_virtual_tokens(model, settings, stored, config, shapes)
    modules = dict(model.named_modules())
    holders = _holders(shapes, modules)
    linear = [name for name in holders if is_linear(modules[name])]
    ranks = {name: shapes[f"{PREFIX}{name}.lora_A.weight"][0] for name in linear if f"{PREFIX}{name}.lora_A.weight" in shapes}
    wanted = _Wanted.of(model, settings, context.parts)
    if settings.subtracts:
        check_subtracted(model, settings, config, ranks, holders)
        double(config)
        shapes = doubled_shapes(shapes)
    check_tops(model, linear, stored=True)
    check_layers(model, settings, linear)
    rows = getattr(config, "trainable_token_indices", None)
    if isinstance(rows, list):  # PEFT's short form: rows of the embedding
        config.trainable_token_indices = rows = {trained_rows.embedding_name(model): rows}
    if any(len(set(ids)) < len(ids) for ids in (rows or {}).values()):
        raise AdapterError(f"adapter_path {stored.folder}: its {CONFIG} names a row twice in trainable_token_indices")
    whole = getattr(config, "modules_to_save", None)
    beside = {name: value for name, value in (("modules_to_save", whole), ("trainable_token_indices", rows)) if value}
    stacks = expert_stacks(model) if getattr(config, "target_parameters", None) else {}
    lines = described(model, settings, linear, stacks)
    with (
        dora_attached(model, linear) if getattr(config, "use_dora", False) else nullcontext(),
        trained_rows.readable(model, beside),
    ):
        attached: Any = attached_by(model, config)
    check_biases(attached, stored)
    _compare(attached, stored, shapes)
    keep_order(attached, sorted(getattr(attached.base_model, "targeted_parameter_names", ())))
    trained_rows.prepare(attached)
    wanted.check(attached, stored)
    halves = None
    if settings.reads("init_lora_weights"):
        own = attached.base_model.targeted_module_names
        found = {name: rank for name, rank in ranks.items() if name in own}
        lora = Lora(settings=settings, ranks=found, left_out=(), directions={}, arguments={})
        lines += lora.notes
        halves = lora.initialise(attached, stored=True)
    _load(attached, stored, halved=settings.subtracts)
    follow_autocast(attached)
    lines = with_full_factors(lines, attached, settings)
    attach = trained_rows.read_onto if beside else None
    return PeftAdaptation(attached, *lines, _goes_on(stored), attach=attach, halves=halves, identity=_digest(stored))


def _with_virtual_tokens(
    model: nn.Module, settings: AdapterSettings, stored: StoredAdapter, config: Any, shapes: Mapping[str, tuple[int, ...]]
) -> Adaptation:
    """Put stored virtual tokens before documents or beside the attention.
    Collective on a divided model.
    """
    kept = {name: getattr(config, name) for name in ("prompt_tuning_init",) if hasattr(config, name)}
    for name in kept:
        setattr(config, name, "RANDOM")  # every value is read
    for name in (name for name in _OF_THE_MODEL if hasattr(config, name)):
        setattr(config, name, None)
    if getattr(config, "prefix_projection", False):
        config.prefix_projection = False  # PEFT stores what the network computed, and not the network
    attached = with_virtual_tokens(model, settings, config)
    _compare(attached, stored, shapes)
    _load(attached, stored)
    for name, value in kept.items():
        setattr(config, name, value)
    return PeftAdaptation(attached, described_tokens(settings), _goes_on(stored), identity=_digest(stored))


def _prompt_classes() -> tuple[type, ...]:
    from peft import AdaptionPromptConfig, PromptLearningConfig

    return PromptLearningConfig, AdaptionPromptConfig


def _goes_on(stored: StoredAdapter) -> str:
    """Return the log's line on where the adapter comes from."""
    left = [f"{name}={value:g}" for name in _DROPOUTS if (value := stored.config.get(name))]
    without = f", without its {' and '.join(left)}" if left else ""
    return f"goes on from the adapter in {stored.folder}{without}"


def _holders(names: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the full names of the base's modules to which tensors of an adapter belong."""
    found: dict[str, None] = {}
    for name in names:
        holder = own = name.removeprefix(PREFIX)
        while holder and holder not in modules:
            holder = holder.rpartition(".")[0]
        own = own.removeprefix(f"{holder}.")
        # Not those of modules_to_save, whose tensors have the names of the base's, and not rows of tokens.
        if holder and not hasattr(modules[holder], own) and not own.startswith("token_adapter."):
            found[holder] = None
    return list(found)


def _with_shape(settings: AdapterSettings, stored: StoredAdapter) -> AdapterSettings:
    fields = attrs.fields_dict(AdapterSettings)
    for name, value in stored.shape.items():
        given = getattr(settings, name)
        if given not in (value, fields[name].default):
            raise AdapterError(
                f"{stored.as_setting(name, given)}: the adapter in adapter_path {stored.folder} has {stored.said(name)}: "
                f"leave {name} out"
            )
    try:
        return attrs.evolve(settings, **{name: value for name, value in stored.shape.items() if value is not None})
    except ValueError as error:
        raise AdapterError(f"adapter_path {stored.folder}: {error}") from error


def _config(stored: StoredAdapter, settings: AdapterSettings, task_type: str | None) -> Any:
    from peft import PeftConfig

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unexpected keyword arguments", category=UserWarning)  # told below
            warnings.filterwarnings("ignore", message="Specified to not save", category=UserWarning)  # what the file says
            config: Any = PeftConfig.from_pretrained(str(stored.folder))
    except (ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"adapter_path {stored.folder}: PEFT cannot read its {CONFIG}: {error}") from error
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := [name for name, value in stored.config.items() if name not in known and value]:
        raise AdapterError(
            f"adapter_path {stored.folder}: its {CONFIG} has {unknown[0]}={stored.config[unknown[0]]!r}, which PEFT "
            f"{version('peft')} does not know: install the version that wrote it"
            + (f" ({stored.config['peft_version']})" if stored.config.get("peft_version") else "")
        )
    config.inference_mode = False
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # every value is read
    for argument, field in ADAPTERS[settings.adapter].arguments.items():
        if field == "lora_dropout":
            setattr(config, argument, settings.lora_dropout)
    for name in (name for name in _DROPOUTS if hasattr(config, name)):
        setattr(config, name, 0.0)
    config.base_model_name_or_path = config.revision = None  # those of the model that it is attached to
    config.task_type = task_type
    if getattr(config, "modules_to_save", None) is not None:
        config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    return config


def _shapes(stored: StoredAdapter) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the tensors in the file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(stored.folder / WEIGHTS), "pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"adapter_path {stored.folder}: its {WEIGHTS} cannot be read: {error}") from error
    if codes := [name for name, each in found.items() if each.get_dtype() not in _FLOATS]:
        kind = found[codes[0]].get_dtype()
        raise AdapterError(
            f"adapter_path {stored.folder}: {codes[0]}{_more(codes)} in its {WEIGHTS} is of the type {kind}, and an adapter is "
            "of floating-point numbers: write it with PEFT's save_pretrained"
        )
    return {name: tuple(each.get_shape()) for name, each in found.items()}


def _compare(model: "PeftModel", stored: StoredAdapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise AdapterError where the file is not the adapter that was attached, tensor for tensor."""
    expected = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    of_base = {name: layer for name, layer in weights_of_base(model, shapes).items() if name not in expected}
    given = _as_now(model, {name: shape for name, shape in shapes.items() if name not in of_base})
    if _is_outline(model):
        # It may have fewer layers than its model.
        kinds = {_numberless(name) for name in expected}
        given = {name: shape for name, shape in given.items() if name in expected or _numberless(name) not in kinds}
    kind = type(model.get_base_model()).__name__
    where = f"adapter_path {stored.folder}: is not an adapter of this {kind}"
    remedy = f"Give the model that it was trained beside{f' ({stored.base})' if stored.base else ''} as model_path"
    if unexpected := [name for name in given if name not in expected]:
        raise AdapterError(f"{where}: it holds {unexpected[0]}{_more(unexpected)}, for which the model has no place. {remedy}")
    if missing := [name for name in expected if name not in given]:
        raise AdapterError(f"{where}: it lacks {missing[0]}{_more(missing)}. {remedy}")
    # Of trained rows beside a divided model only names are known.
    differing = [name for name, shape in expected.items() if shape != given[name] and 0 not in shape]
    if differing:
        name = differing[0]
        raise AdapterError(
            f"{where}: {name}{_more(differing)} is {list(given[name])} there, and {list(expected[name])} here. {remedy}"
        )
    for name, layer in of_base.items():
        compare_with_base(model, stored, name, layer, shapes[name])


def _tensors(model: "PeftModel") -> Mapping[str, torch.Tensor]:
    """Return name in the file → tensor of the adapter as it was attached."""
    from peft import get_peft_model_state_dict
    from peft.utils.other import ModulesToSaveWrapper

    if model.active_peft_config.is_prompt_learning:
        encoder: Any = model.prompt_encoder["default"]
        beside = {
            f"{name}.{own}": parameter
            for name, module in model.named_modules()
            if isinstance(module, ModulesToSaveWrapper)
            for own, parameter in module.modules_to_save["default"].named_parameters()
        }
        return {_TOKENS: encoder.embedding.weight, **beside}
    # Given the state, PEFT takes no bias of a B matrix for a torn one.
    return get_peft_model_state_dict(model, state_dict=model.state_dict(), save_embedding_layers=False)


_KINDS = {
    "CAUSAL_LM": "a language model",
    "SEQ_CLS": "a reward model or classifier",
    "FEATURE_EXTRACTION": "an embedding model",
}
"""PEFT's kind of model → what it is."""


def _check_kind(stored: StoredAdapter, model: nn.Module) -> None:
    """Raise AdapterError for another kind of model's adapter, which may have the same tensors."""
    its, kind = stored.config.get("task_type"), task_type_of(model)
    if not its or kind not in _KINDS or its == kind:
        return
    remedy = "give an adapter of such a model, or leave adapter_path out"
    if its == "CAUSAL_LM":
        remedy = "merge it first (`forge export --merge`, or PEFT's merge_and_unload), and give what that writes as model_path"
    raise AdapterError(
        f"adapter_path {stored.folder}: is not an adapter of this {type(model).__name__}: its {CONFIG} has task_type={its}. It "
        f"is that of {_KINDS.get(its, f'a model for {its}')}, and this run trains {_KINDS[kind]}: {remedy}"
    )


def _as_now(model: "PeftModel", shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes by the names that PEFT reads the tensors under; older ones are renamed."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:
        return dict(shapes)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = model.peft_config["default"]
    found = convert_peft_adapter_state_dict_for_transformers(model, config, tensors)
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def _load(model: "PeftModel", stored: StoredAdapter, *, halved: bool = False) -> None:
    """Give the adapter its values; on a divided model collective where PEFT divides them.

    With `halved` the file has the first halves, and the second ones stay.
    """
    if _is_outline(model):
        return
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = load_file(stored.folder / WEIGHTS)
    for name in weights_of_base(model, tensors).keys() - _tensors(model).keys():
        del tensors[name]  # it was compared
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise AdapterError(
            f"adapter_path {stored.folder}: {broken[0]}{_more(broken)} in its {WEIGHTS} has a number that is NaN or infinite: "
            "the run that wrote it diverged. Give an earlier export of it"
        )
    if halved:
        tensors = with_second_halves(tensors, _tensors(model))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        # Matrices that were not saved follow from the seed in the configuration.
        warnings.filterwarnings("ignore", message="Specified to not load", category=UserWarning)
        found: Any = set_peft_model_state_dict(model, tensors)
    if model.active_peft_config.is_prompt_learning:
        return  # PEFT has loaded the tokens itself, strictly
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lost := sorted({*found.unexpected_keys, *trained.intersection(found.missing_keys)}):
        raise AdapterError(f"adapter_path {stored.folder}: PEFT did not read {lost[0]}{_more(lost)}")


def _is_outline(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters() if parameter.requires_grad)


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".N", name)


def _more(names: Sequence[str]) -> str:
    return f" (and {counted(len(names) - 1, 'others')})" if len(names) > 1 else ""


def _digest(stored: StoredAdapter) -> str:
    digest = hashlib.sha256((stored.folder / CONFIG).read_bytes())
    with (stored.folder / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@attrs.frozen(kw_only=True)
class _Wanted:
    """What settings that were given would attach, to be compared with the directory's."""

    settings: AdapterSettings
    targets: frozenset[str] | None
    """Full names of layers and parameters that target_modules selects; None where it was left out."""
    whole: frozenset[str] | None
    """Full names of modules that modules_to_save selects; None where it was left out."""
    inputs: frozenset[str] | None
    """Full names of layers that feedforward_modules selects; None where it was left out."""

    @classmethod
    def of(cls, model: nn.Module, settings: AdapterSettings, parts: Parts) -> "_Wanted":
        """Resolve names on the bare model."""
        targets = whole = inputs = None
        if settings.target_modules is not None:
            stacks = expert_stacks(model)
            names = resolve_targets(model, settings.target_modules, parts)
            targets = frozenset(stacks[name].parameter if name in stacks else name for name in names)
        if settings.modules_to_save is not None:
            whole = frozenset(trained_rows.resolve(model, settings.modules_to_save, sorted(targets or ())))
        if settings.feedforward_modules is not None:
            inputs = frozenset(resolve_targets(model, settings.feedforward_modules))
        return cls(settings=settings, targets=targets, whole=whole, inputs=inputs)

    def check(self, model: "PeftModel", stored: StoredAdapter) -> None:
        """Raise AdapterError for a setting that says something else than the adapter has."""
        from peft.utils.other import ModulesToSaveWrapper

        tuner: Any = model.base_model
        base: Any = model.get_base_model()
        layers: dict[str, Any] = {name: base.get_submodule(name) for name in tuner.targeted_module_names}
        parameters = {name.removesuffix(".weight") for name in getattr(tuner, "targeted_parameter_names", ())}
        names = {*layers, *parameters}
        whole = {name for name, module in base.named_modules() if isinstance(module, ModulesToSaveWrapper)}
        settings, linear = self.settings, [name for name in layers if name not in parameters]
        times, scale = (2, scale_of_double(tuner.peft_config["default"])) if settings.subtracts else (1, 1)
        same = {
            "target_modules": self.targets is None or self.targets == names,
            # The head of a tied embedding is wrapped too.
            "modules_to_save": self.whole is None or self.whole <= whole,
            "feedforward_modules": self.inputs is None
            or self.inputs == {name for name, layer in layers.items() if layer.is_feedforward},
            "rank_pattern": settings.rank_pattern is None
            or ranks_of(settings, linear, parameters) == {name: layers[name].r["default"] // times for name in linear},
            "alpha_pattern": settings.alpha_pattern is None
            or alphas_of(settings, linear, parameters) == {name: layers[name].lora_alpha["default"] / scale for name in linear},
        }
        for setting in (name for name, is_same in same.items() if not is_same):
            raise AdapterError(
                f"{setting}={getattr(settings, setting)}: the adapter in adapter_path {stored.folder} has another one, which "
                f"cannot be changed: leave {setting} out"
            )

"""An adapter directory of PEFT → the same adapter on a model, to be trained on.

PEFT attaches what the directory's own configuration says; tensors are compared before they are loaded, as PEFT itself goes on
with new values, and a warning, where one is missing.
"""

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
from forge_algos.adaptations.peft._attach import PeftAdaptation, attached_by, check_tops, described, task_type_of
from forge_algos.adaptations.peft._directory import CONFIG, WEIGHTS, StoredAdapter, stored_adapter
from forge_algos.adaptations.peft._dora import dora_attached
from forge_algos.adaptations.peft._experts import keep_order
from forge_algos.adaptations.peft._input_casts import follow_autocast
from forge_algos.adaptations.peft._lora_init import Lora
from forge_algos.adaptations.peft._lora_patterns import alphas_of, ranks_of
from forge_algos.settings._adapter import AdapterSettings

if TYPE_CHECKING:
    from peft import PeftModel

_PREFIX = "base_model.model."
_A = ".lora_A.weight"


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
    settings = _with_shape(settings, stored)
    shapes = _shapes(stored)
    targets = [name.removeprefix(_PREFIX).removesuffix(_A) for name in shapes if name.endswith(_A)]
    modules = dict(model.named_modules())
    linear = [name for name in targets if name in modules and is_linear(modules[name])]
    wanted = _Wanted.of(model, settings, context.parts)
    check_tops(model, linear)
    config = _config(stored, settings, task_type_of(model))
    if isinstance(config.trainable_token_indices, list):  # PEFT's short form: rows of the embedding
        config.trainable_token_indices = {trained_rows.embedding_name(model): config.trainable_token_indices}
    if any(len(set(ids)) < len(ids) for ids in (config.trainable_token_indices or {}).values()):
        raise AdapterError(f"adapter_path {stored.folder}: its {CONFIG} names a row twice in trainable_token_indices")
    beside = {name: getattr(config, name) for name in ("modules_to_save", "trainable_token_indices") if getattr(config, name)}
    stacks = {} if not config.target_parameters else expert_stacks(model)
    lines = described(model, settings, linear, stacks)
    with (
        dora_attached(model, linear) if config.use_dora else nullcontext(),
        trained_rows.readable(model, beside),
    ):
        attached: Any = attached_by(model, config)
    _compare(attached, stored, shapes)
    keep_order(attached, sorted(getattr(attached.base_model, "targeted_parameter_names", ())))
    trained_rows.prepare(attached)
    _load(attached, stored)
    wanted.check(attached, stored)
    found = attached.base_model.targeted_module_names
    of_a = {name: module.r["default"] for name, module in attached.get_base_model().named_modules() if name in found}
    Lora(settings=settings, ranks=of_a, left_out=(), directions={}, arguments={}).initialise(attached)
    follow_autocast(attached)
    notes = [f"goes on from the adapter in {stored.folder}", *(["lora_fa: A stays, B trains"] if settings.lora_fa else [])]
    attach = trained_rows.read_onto if beside else None
    return PeftAdaptation(attached, *lines, *notes, attach=attach, identity=_digest(stored))


def _with_shape(settings: AdapterSettings, stored: StoredAdapter) -> AdapterSettings:
    fields = attrs.fields_dict(AdapterSettings)
    for name, value in stored.shape.items():
        given = getattr(settings, name)
        if given not in (value, fields[name].default):
            raise AdapterError(
                f"{name}={given:g}: the adapter in adapter_path {stored.folder} has {name}={value:g}: leave {name} out"
            )
    return attrs.evolve(settings, **stored.shape)


def _config(stored: StoredAdapter, settings: AdapterSettings, task_type: str | None) -> Any:
    from peft import PeftConfig

    try:
        config: Any = PeftConfig.from_pretrained(str(stored.folder))
    except (ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"adapter_path {stored.folder}: PEFT cannot read its {CONFIG}: {error}") from error
    config.inference_mode = False
    config.init_lora_weights = True  # every value is read
    config.lora_dropout = settings.lora_dropout
    config.base_model_name_or_path = config.revision = None  # those of the model that it is attached to
    config.task_type = task_type
    if config.modules_to_save is not None:
        config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    return config


def _shapes(stored: StoredAdapter) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the tensors in the file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(stored.folder / WEIGHTS), "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"adapter_path {stored.folder}: its {WEIGHTS} cannot be read: {error}") from error


def _compare(model: "PeftModel", stored: StoredAdapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise AdapterError where the file is not the adapter that was attached, tensor for tensor."""
    from peft import get_peft_model_state_dict

    expected = {
        name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    if frozen := [name for name in shapes if name.endswith(".base_layer.weight")]:
        raise AdapterError(
            f"adapter_path {stored.folder}: it trains {frozen[0].removesuffix('.base_layer.weight').removeprefix(_PREFIX)} by "
            "low-rank factors and holds that layer's own weight too, which belongs to the base: merge it (forge export --merge "
            "or PEFT's merge_and_unload) and begin another adapter"
        )
    given = _as_now(model, shapes)
    if _is_outline(model):
        # It may have fewer layers than its model.
        kinds = {_numberless(name) for name in expected}
        given = {name: shape for name, shape in given.items() if name in expected or _numberless(name) not in kinds}
    kind = type(model.get_base_model()).__name__
    where = f"adapter_path {stored.folder}: is not an adapter of this {kind}"
    remedy = _of_another_kind(stored, str(model.peft_config["default"].task_type))
    remedy = remedy or f"Give the model that it was trained beside{f' ({stored.base})' if stored.base else ''} as model_path"
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


_KINDS = {
    "CAUSAL_LM": "a language model",
    "SEQ_CLS": "a reward model or classifier",
    "FEATURE_EXTRACTION": "an embedding model",
}
"""PEFT's kind of model → what it is."""


def _of_another_kind(stored: StoredAdapter, kind: str) -> str | None:
    """Say what to do with an adapter of another kind of model; None where it names no other."""
    its = stored.config.get("task_type")
    if its not in _KINDS or its == kind:
        return None
    remedy = "give an adapter of such a model, or leave adapter_path out"
    if its == "CAUSAL_LM":
        remedy = "merge it first (`forge export --merge`, or PEFT's merge_and_unload), and give what that writes as model_path"
    return f"It is that of {_KINDS[its]}, and this run trains {_KINDS[kind]}: {remedy}"


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


def _load(model: "PeftModel", stored: StoredAdapter) -> None:
    """Give the adapter its values; on a divided model collective where PEFT divides them."""
    if _is_outline(model):
        return
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        found: Any = set_peft_model_state_dict(model, load_file(stored.folder / WEIGHTS))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lost := sorted({*found.unexpected_keys, *trained.intersection(found.missing_keys)}):
        raise AdapterError(f"adapter_path {stored.folder}: PEFT did not read {lost[0]}{_more(lost)}")


def _is_outline(model: nn.Module) -> bool:
    return any(parameter.is_meta for name, parameter in model.named_parameters() if ".lora_" in name)


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

    @classmethod
    def of(cls, model: nn.Module, settings: AdapterSettings, parts: Parts) -> "_Wanted":
        """Resolve names on the bare model."""
        targets = whole = None
        if settings.target_modules is not None:
            stacks = expert_stacks(model)
            names = resolve_targets(model, settings.target_modules, parts)
            targets = frozenset(stacks[name].parameter if name in stacks else name for name in names)
        if settings.modules_to_save is not None:
            whole = frozenset(trained_rows.resolve(model, settings.modules_to_save, sorted(targets or ())))
        return cls(settings=settings, targets=targets, whole=whole)

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
        same = {
            "target_modules": self.targets is None or self.targets == names,
            # The head of a tied embedding is wrapped too.
            "modules_to_save": self.whole is None or self.whole <= whole,
            "rank_pattern": settings.rank_pattern is None
            or ranks_of(settings, linear, parameters) == {name: layers[name].r["default"] for name in linear},
            "alpha_pattern": settings.alpha_pattern is None
            or alphas_of(settings, linear, parameters) == {name: layers[name].lora_alpha["default"] for name in linear},
        }
        for setting in (name for name, is_same in same.items() if not is_same):
            raise AdapterError(
                f"{setting}={getattr(settings, setting)}: the adapter in adapter_path {stored.folder} has another one, which "
                f"cannot be changed: leave {setting} out"
            )

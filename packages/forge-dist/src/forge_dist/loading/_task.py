"""Tasks of a model: transformers' class, a classifier's new head, labels, padding token.

A reward, or the number of each label, is an output of one linear layer, `score`, at a row's last token.
"""

import inspect
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import MULTIMODAL, Classifier, Task, expand_user, is_hub_name
from forge_dist.loading._unwrap import base_of, is_partitioned, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Broadcast = Callable[[torch.Tensor], torch.Tensor]
"""Function that replaces a tensor on the CPU by rank 0's."""

HEAD = "score"
"""transformers' name of a sequence classifier's head."""

MULTI_LABEL, SINGLE_LABEL = "multi_label_classification", "single_label_classification"
"""transformers' values of problem_type."""

Pool = Literal["last", "mean", "cls"]
"""Hidden states of a text that are its embedding: its last token's, their mean, its first one's."""

_POOLING = "1_Pooling/config.json"
_MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
_TRAINED_MODULES = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers after which an embedding is what is trained here."""
_POOLS: dict[str, Pool] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    # Newer versions of sentence-transformers name one mode.
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
"""Name in sentence-transformers → ours."""

_NEVER_LAST = ("pad", "reserved", "unused")
"""Words in the names of special tokens that end no row."""


def auto_class(task: Task, config: "PreTrainedConfig") -> Any:
    """Return transformers' auto class for `task` that makes the class which `config` names.

    A configuration of several modalities stands for two classes: its `architectures` tell whether the directory holds that of
    all modalities or that of text alone.

    Raises:
        ModelError: transformers has no such class.
    """
    import transformers

    named, kind = list(config.architectures or ()), type(config)
    if task == "embedding":
        if kind not in transformers.MODEL_MAPPING:
            raise ModelError(
                f"model_path {config.name_or_path}: a model of the type {config.model_type} gives no embeddings: transformers "
                f"{transformers.__version__} has no class without a head for it"
            )
        return _Headless(transformers.AutoModel, transformers.MODEL_MAPPING[kind])
    if task != "causal":
        if kind not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            lacks = "gives no rewards" if task == "reward" else "gives no labels"
            raise ModelError(
                f"model_path {config.name_or_path}: a model of the type {config.model_type} {lacks}: transformers "
                f"{transformers.__version__} has no class ...ForSequenceClassification for it"
            )
        return transformers.AutoModelForSequenceClassification
    known = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if kind in known and getattr(known[kind], "__name__", None) in named:
        return transformers.AutoModelForMultimodalLM
    # Audio Flamingo 3, a decoder that hears, is listed with models of encoder and decoder.
    listed = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    decodes = hasattr(config, "text_config") and not config.is_encoder_decoder
    if decodes and kind in listed and getattr(listed[kind], "__name__", None) in named:
        return transformers.AutoModelForSeq2SeqLM
    if any(name.endswith(MULTIMODAL) for name in named):
        lacks = "does not list it in AutoModelForMultimodalLM" if hasattr(transformers, named[0]) else "has none of that name"
        raise ModelError(
            f"{config.name_or_path}/config.json names the class {named[0]}, and transformers {transformers.__version__} "
            f"{lacks} for model_type {config.model_type!r}"
        )
    return transformers.AutoModelForCausalLM


class _Headless:
    """transformers' AutoModel, without the pooling layer that BERT and its like have.

    No embedding of sentence-transformers is read from it, so it would never get a gradient.
    """

    def __init__(self, auto: Any, kind: Any) -> None:
        self._auto, self._arguments = auto, class_arguments(kind)

    def from_config(self, config: Any, **arguments: Any) -> Any:
        return self._auto.from_config(config, **self._arguments, **arguments)

    def from_pretrained(self, path: str, **arguments: Any) -> Any:
        return self._auto.from_pretrained(path, **self._arguments, **arguments)


_POOLER = "add_pooling_layer"


def class_arguments(kind: Any) -> dict[str, Any]:
    """Return the arguments with which a class of a model without a head is made."""
    takes = isinstance(kind, type) and _POOLER in inspect.signature(kind.__init__).parameters
    return {_POOLER: False} if takes else {}


def makes_head(task: Task) -> bool:
    """Return whether a model for this task has a head of its own, one number or one a label."""
    return task not in ("causal", "embedding")


def drop_unread(config: "PreTrainedConfig", report: dict[str, Any]) -> None:
    """Remove the tensors of a head from `report`, for a model without one.

    They are those of the class that config.json names that AutoModel's class has not, and a pooling layer's.
    """
    import transformers

    if not report["unexpected_keys"]:
        return
    # Of each name the directory may write: with the prefix of a model within another, or without.
    named = next((kind for name in config.architectures or () if (kind := getattr(transformers, name, None))), None)
    with torch.device("meta"):
        whole = named(config) if isinstance(named, type) else transformers.AutoModel.from_config(config)
    prefix = f"{whole.base_model_prefix}."
    body = set(auto_class("embedding", config).from_config(config).state_dict())
    names = {name.removeprefix(prefix) for name in whole.state_dict()} - body
    unread = {name for name in report["unexpected_keys"] if name.removeprefix(prefix) in names or _is_pooler(name)}
    report["unexpected_keys"] = set(report["unexpected_keys"]) - unread


def _is_pooler(name: str) -> bool:
    return "pooler" in name.split(".")


def is_headless(model: Any) -> bool:
    """Return whether `model` (no PeftModel around it) gives hidden states and no more."""
    return getattr(model, "base_model", None) is model and model.get_output_embeddings() is None


def is_sequence_classifier(model: object) -> bool:
    """Return whether `model` (no PeftModel around it) is a reward model or classifier."""
    return type(model).__name__.endswith("ForSequenceClassification")


def task_of(model: "PreTrainedModel") -> Task:
    """Return the task for which `model` (not a PeftModel around it) was loaded."""
    if is_sequence_classifier(model):
        return _task_of_config(model.config)
    return "embedding" if is_headless(model) else "causal"


def _task_of_config(config: "PreTrainedConfig") -> Task:
    """Return the task of a sequence classifier's configuration."""
    names: Any = config.id2label
    if names is None or config.num_labels == 1:
        return "reward" if config.num_labels == 1 else Classifier()
    return Classifier(
        labels=tuple(str(names[number]) for number in sorted(names)), multi_label=config.problem_type == MULTI_LABEL
    )


def directory_task(path: str) -> Task:
    """Return the task that the model or adapter of a directory was trained for.

    An adapter of a classifier with several labels has their names in a config.json of its own.

    Raises:
        ModelError: its configuration cannot be read.
    """
    from transformers import AutoConfig

    folder = Path(expand_user(path))
    try:
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            kind = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("task_type")
            return "reward" if kind == "SEQ_CLS" else "embedding" if kind == "FEATURE_EXTRACTION" else "causal"
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"model_path {path}: its configuration cannot be read: {error}") from error
    if is_classifier(config):
        return _task_of_config(config)
    return "embedding" if _names_headless(config) else "causal"


def _names_headless(config: "PreTrainedConfig") -> bool:
    """Return whether a configuration names a class without a head, or of masked language models."""
    import transformers

    kind = transformers.MODEL_MAPPING.get(type(config), None)
    named = [each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)) if each is not None]
    # What transformers takes for Llama 4's plain model has a head.
    named = [name for name in named if not name.endswith(("ForConditionalGeneration", "ForCausalLM"))]
    return any(name in named or str(name).endswith(("ForMaskedLM", "ForPreTraining")) for name in config.architectures or ())


def model_pooling(model_path: str) -> tuple[Pool, str]:
    """Return which hidden states of a text are its embedding, and why.

    What 1_Pooling/config.json of a sentence-transformers directory says; without one the mean of a model of a type that has
    masked language models (BERT, XLM-R, ModernBERT), and the last token's of any other.

    Raises:
        ModelError: the file cannot be read, or names another way of pooling; the directory has a module that is not trained
            here (a Dense layer); the configuration cannot be read.
    """
    import transformers

    if (modules := _stored_file(model_path, _MODULES)) is not None:
        _check_modules(modules)
    file = _stored_file(model_path, _POOLING)
    if file is not None:
        return _stored(file), f"{_POOLING} of the model says so"
    try:
        config = transformers.AutoConfig.from_pretrained(expand_user(model_path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"model_path {model_path}: its configuration cannot be read: {error}") from error
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        return "mean", f"a model of the type {config.model_type} looks at a text from both sides"
    return "last", "the last token of a causal model has seen the whole text"


def model_prompts(model_path: str) -> dict[str, str]:
    """Return the prompts that sentence-transformers stored with a model, by name.

    They are those of config_sentence_transformers.json; without that file there are none.

    Raises:
        ModelError: the file cannot be read, or its prompts are no texts.
    """
    if (file := _stored_file(model_path, _PROMPTS)) is None:
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("prompts") or {}
        if not all(isinstance(text, str) for text in found.values()):
            raise ValueError("a prompt is no text")
        return dict(found)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read: {error}; correct it") from error


def hidden_size(model: Any) -> int:
    """Return the width of a model's hidden states, bare, wrapped or with an adapter."""
    return int(base_of(unwrapped(model)).config.get_text_config().hidden_size)


def _stored_file(model_path: str, name: str) -> Path | None:
    if not is_hub_name(model_path):
        file = Path(expand_user(model_path)) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    # A model without the file is the rule, and offline the hub cannot be asked for it.
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(model_path, name, **quietly)
    return None if found is None else Path(found)


def _check_modules(file: Path) -> None:
    """Refuse modules after the pooling, which an export would not have."""
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file} cannot be read: {error}; correct it, or set `pooling`") from error
    if other := [kind for kind in kinds if kind not in _TRAINED_MODULES]:
        raise ModelError(
            f"{file} names the module {other[0]}, which is not trained here, and which the exports would not have: set "
            "`pooling` to train the model without it"
        )


def _stored(file: Path) -> Pool:
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        named = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
        named += [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read: {error}; correct it, or set `pooling`") from error
    if len(named) != 1 or named[0] not in _POOLS:
        raise ModelError(
            f"{file} pools by {', '.join(map(str, named)) or 'nothing'}; embeddings are trained by the last token, the mean or "
            "the first (cls): set `pooling` to one of them"
        )
    return _POOLS[named[0]]


def task_config(path: str, task: Task) -> "PreTrainedConfig":
    """Return the configuration of `path` for `task`, with labels and padding token.

    It is that of exports.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if not makes_head(task):
        return config
    pad = _pad_id(path, config.get_text_config())
    for part in (config, config.get_text_config()):
        if isinstance(task, Classifier):
            _set_labels(part, task, keep=is_classifier(config))
        else:
            part.num_labels = 1
        part.pad_token_id = pad
    return config


def _set_labels(config: "PreTrainedConfig", task: Classifier, *, keep: bool) -> None:
    """Write the names of labels into a configuration; `keep` its own where there are none."""
    if task.labels:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {name: number for number, name in enumerate(task.labels)}
    elif not keep:
        config.num_labels = 2
    config.problem_type = MULTI_LABEL if task.multi_label else SINGLE_LABEL


def _pad_id(path: str, config: "PreTrainedConfig") -> int | None:
    """Choose a padding token that no row ends with; None where there is none.

    transformers reads a reward at the last token that is not padding. The end of a text is no such token, though many models
    name it for
    padding: the reward would be read before it.
    """
    known = config.eos_token_id
    ends = set(known if isinstance(known, list) else [known])
    declared = config.pad_token_id
    if declared is not None and declared >= 0 and declared not in ends:
        return declared
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception:  # noqa: BLE001  of any kind: many models come without a tokenizer
        return config.bos_token_id if config.bos_token_id not in ends else None
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [number for number, token in special.items() if any(word in token.lower() for word in _NEVER_LAST)]
    ends.add(tokenizer.eos_token_id)
    candidates = [tokenizer.pad_token_id, *named, tokenizer.bos_token_id, tokenizer.unk_token_id, *reversed(special)]
    return next((number for number in candidates if number is not None and number not in ends), None)


def preserved_random_state() -> AbstractContextManager[None]:
    """Preserve torch's random state while a model is read.

    transformers draws a classifier's new head, and under ZeRO-3 other weights before it reads them: as many random numbers
    as the division needs.
    """
    return torch.random.fork_rng(devices=[])


def init_classifier_head(
    model: "PreTrainedModel", config: "PreTrainedConfig", report: dict[str, Any], where: str, broadcast: Broadcast
) -> None:
    """Initialize a classifier's head where a causal model's directory was read.

    The head is drawn from N(0, initializer_range²) in float32 on the CPU, from torch's seeded state, however the model is
    divided. The tensors that this explains are removed from `report`.

    Args:
        model: as it was read, divided or not.
        config: the directory's configuration, with the labels of the task.
        report: transformers' report of missing and unexpected tensors; changed in place.
        where: the model_path, for errors.
        broadcast: replaces what this rank drew by what rank 0 drew.

    Raises:
        ModelError: the architecture's head is not a linear layer `score`.
    """
    head = getattr(model, HEAD, None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"model_path {where}: {type(model).__name__} has no linear layer {HEAD!r}, so it cannot give rewards or labels"
        )
    names = {f"{HEAD}.{name}" for name, _ in head.named_parameters()}
    if is_classifier(config) or not names <= set(report["missing_keys"]):
        return
    report["missing_keys"] = set(report["missing_keys"]) - names
    if report["unexpected_keys"]:
        report["unexpected_keys"] = set(report["unexpected_keys"]) - _causal_head(config)
    deviation = getattr(config.get_text_config(), "initializer_range", 0.02)
    drawn = broadcast(torch.empty(head.out_features, head.in_features).normal_(0.0, deviation))
    with torch.no_grad():
        _set_values(head.weight, drawn)
        if head.bias is not None:
            _set_values(head.bias, torch.zeros(head.out_features))


def is_classifier(config: Any) -> bool:
    """Return whether a configuration (or its dictionary) is a sequence classifier's."""
    found = config.get("architectures") if isinstance(config, dict) else config.architectures
    return any(str(name).endswith("ForSequenceClassification") for name in found or ())


def _causal_head(config: "PreTrainedConfig") -> set[str]:
    """Return the tensors that only the causal model of this configuration has."""
    with torch.device("meta"):
        kinds = auto_class("causal", config), auto_class("reward", config)
        causal, classifier = (kind.from_config(config, trust_remote_code=False) for kind in kinds)
    return set(causal.state_dict()) - set(classifier.state_dict())


def _set_values(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Set a parameter, divided or not, to `whole`, the same on every rank."""
    if is_partitioned(parameter):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(whole)
        return
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)

"""Tasks of a model: transformers' class, a classifier's new head, labels, padding token.

A reward, or the number of each label, is an output of one linear layer, `score`, at a row's last token.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import MULTIMODAL, Classifier, Task, expand_user
from forge_dist.loading._unwrap import is_partitioned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Broadcast = Callable[[torch.Tensor], torch.Tensor]
"""Function that replaces a tensor on the CPU by rank 0's."""

HEAD = "score"
"""transformers' name of a sequence classifier's head."""

MULTI_LABEL, SINGLE_LABEL = "multi_label_classification", "single_label_classification"
"""transformers' values of problem_type."""

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
    if any(name.endswith(MULTIMODAL) for name in named):
        raise ModelError(
            f"{config.name_or_path}/config.json names the class {named[0]}, and transformers {transformers.__version__} has "
            f"none of that name for model_type {config.model_type!r}"
        )
    return transformers.AutoModelForCausalLM


def is_sequence_classifier(model: object) -> bool:
    """Return whether `model` (no PeftModel around it) is a reward model or classifier."""
    return type(model).__name__.endswith("ForSequenceClassification")


def task_of(model: "PreTrainedModel") -> Task:
    """Return the task for which `model` (not a PeftModel around it) was loaded."""
    return _task_of_config(model.config) if is_sequence_classifier(model) else "causal"


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
            return "reward" if kind == "SEQ_CLS" else "causal"
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"model_path {path}: its configuration cannot be read: {error}") from error
    return _task_of_config(config) if is_classifier(config) else "causal"


def task_config(path: str, task: Task) -> "PreTrainedConfig":
    """Return the configuration of `path` for `task`, with labels and padding token.

    It is that of exports.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if task == "causal":
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

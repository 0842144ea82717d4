"""Loading of a model on one device, every weight from its files; no pickles, no remote code."""

import copy
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from forge_dist._counted import counted
from forge_dist._errors import ModelError
from forge_dist._third_party_logs import quiet_imports, quiet_transformers
from forge_dist.loading._attention import AttentionFunction, register_attention
from forge_dist.loading._config_changes import change_config
from forge_dist.loading._dtype import base_dtype
from forge_dist.loading._modalities import LANGUAGE, attend_plainly, freeze_parts, is_multimodal, mark_text, processor_files
from forge_dist.loading._model_path import check_config, check_model_path, expand_user, is_hub_name
from forge_dist.loading._moving import moved
from forge_dist.loading._mxfp4 import dequantizing
from forge_dist.loading._quantization import QuantizedLoad, keep_as_loaded
from forge_dist.loading._request import LoadRequest
from forge_dist.loading._task import (
    Broadcast,
    Task,
    auto_class,
    class_arguments,
    drop_unread,
    init_classifier_head,
    makes_head,
    preserved_random_state,
    task_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.distributed import DistributedConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

LOADING_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    SafetensorError,
    # A configuration with a field of another type, or fields that contradict each other.
    StrictDataclassError,
    # The same, where transformers checks nothing and computes with it: no attention heads, a kind of layer that it has not.
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
)
"""What transformers raises for a model that it cannot load."""


def load_model(
    model_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str | None = "sdpa",
    attention_function: AttentionFunction | None = None,
    task: Task = "causal",
    quantization: "QuantizationConfigMixin | None" = None,
    other_dtype: torch.dtype | None = None,
    trained: Collection[str] = LANGUAGE,
) -> "PreTrainedModel":
    """Load the language model of `model_path` on `device`, its floats as `dtype`, in eval mode.

    `attention` is transformers' name of an implementation, or None for transformers' own choice (sdpa, or eager where the
    architecture has no sdpa), whatever the directory names. With `attention_function` (AttentionFunction) it is registered
    under that name, and models of that name are given a mask only where a 2-D mask or a cache comes with the call.
    `config.use_cache` stays what the directory says: a packed row needs `use_cache=False` in the call.

    With task="reward" it becomes a *ForSequenceClassification of one label, whose `score` gives a number a row. From the
    directory of a causal model the head is new, drawn from torch's random state on the CPU, and the causal head's weights are
    left unread; from that of a classifier with one label it is read. `config.pad_token_id` becomes a token that ends no row
    (plain transformers reads a reward at the last token that is another), or stays None where none is known: then it takes one
    row at a time. With task="embedding" it is what AutoModel loads, without a head and without a pooling layer: the weights of
    those are left unread. With a `Classifier` it has as many labels as that names, in `config.id2label`, and its problem_type.

    Of a model of several modalities the `trained` parts alone need gradients: any of language_model (the default),
    vision_tower, audio_tower, multi_modal_projector. The others stay in the dtype of their files, or in `other_dtype` where
    that is wider.

    With a `quantization` of transformers' (a BitsAndBytesConfig) its linear layers but the head are quantized while they are
    read; such weights are neither trained nor exported: an adapter is put beside them.

    Transformers only warns where a tensor is missing, left over or of another shape, and trains on with random weights; here
    that is an error. The weights are memory-mapped, so no second copy of the model is held while loading.

    Raises:
        ModelError: `check_model_path` refuses it; the hub has no such model or does not answer; a weight is missing, unexpected
            or of the wrong shape; transformers knows no model of this type for the task; a classifier has another number of
            labels than one; the attention does not exist or does not fit, or the architecture has no place for an attention
            function; what the quantization needs is not installed, or this device cannot hold it; a part that is to train is
            not there, or cannot be told from others.
    """
    request = LoadRequest(
        model_path=model_path,
        dtype=dtype,
        attention=attention,
        attention_function=attention_function,
        task=task,
        quantization=quantization,
        other_dtype=other_dtype,
        trained=tuple(trained),
    )
    return moved(read_model(request, torch.device(device)), device)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def read_model(
    request: LoadRequest,
    device: torch.device,
    *,
    broadcast: Broadcast = _unchanged,
    divided: "DistributedConfig | None" = None,
    repair: "Callable[[PreTrainedModel, str, dict[str, Any]], None] | None" = None,
) -> "PreTrainedModel":
    """Read a model to the device that transformers reads it to; see `load_model`.

    That is the CPU; with `divided` this rank's own device, for its shards; `device` for a quantized base.

    Args:
        request: model, task, dtype and attention.
        device: where a quantized base is quantized.
        broadcast: replaces what each rank draws for a new head by what rank 0 drew.
        divided: transformers' configuration of FSDP, to read this rank's shards alone.
        repair: function of the model, its path and transformers' report, called before the report is checked.
    """
    quiet_imports()
    from transformers import AutoConfig

    model_path, task, attention = request.model_path, request.task, request.attention
    check_model_path(model_path, task=task)
    path = expand_user(model_path)
    register_attention(attention, request.attention_function)
    from_hub = is_hub_name(model_path)
    try:
        with quiet_transformers(bars=from_hub), preserved_random_state():  # a download shows its progress
            if from_hub:
                _check_hub_config(model_path, task)
            config = _config(path, attention, task)
            arguments: dict[str, object] = {} if config is None else {"config": config}
            named = AutoConfig.from_pretrained(path, trust_remote_code=False) if config is None else config
            kind: Any = auto_class(task, named)
            quantized = request.quantization is not None
            dequantized = dequantizing(path, named, request.dtype, whole=divided is None, quantized=quantized)
            if divided is not None:
                kind, arguments = _divided_class(path, config, divided, request)
            if request.quantization is not None:
                outline = None
                if is_multimodal(named):
                    with torch.device("meta"):
                        outline = kind.from_config(copy.deepcopy(named), trust_remote_code=False, attn_implementation=attention)
                arguments |= QuantizedLoad(request.quantization, device).arguments(model_path, task, outline)
            arguments |= dequantized
            model, report = kind.from_pretrained(
                path,
                dtype=request.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # so that the report below names the tensor, instead of a generic exception
                output_loading_info=True,
                **arguments,
            )
    except (ModelError, torch.OutOfMemoryError):
        raise
    except LOADING_ERRORS as error:
        # Falcon, GPT-J and GPT-Neo choose the class of their attention from a table of their own, by its name.
        if request.attention_function is not None and isinstance(error, KeyError) and error.args == (attention,):
            raise ModelError(
                f"model_path {model_path}: this architecture has no place for an attention function of ours "
                f"(attention={attention}): use attention=eager"
            ) from error
        raise ModelError(f"model_path {model_path} cannot be loaded: {error}") from error
    if task == "embedding":
        drop_unread(task_config(path, task), report)
    elif makes_head(task):
        init_classifier_head(model, task_config(path, task), report, model_path, broadcast)
    if repair is not None:
        repair(model, path, report)
    check_report(report, model_path)
    if divided is None and request.quantization is None:
        _freeze_as_made(model)
    keep_as_loaded(model)
    change_config(model)
    if is_multimodal(model.config) or request.trained != LANGUAGE:
        stored = request.other_dtype or base_dtype(model_path, task=task)
        freeze_parts(model, stored, model_path, request.trained)
        mark_text(model)
        if request.attention_function is not None:
            attend_plainly(model)
        processor_files(model_path, fetch=True)
    check_attention_fits(model, request)
    return model


def _freeze_as_made(model: "PreTrainedModel") -> None:
    """Freeze the weights that the architecture itself freezes (Marian's sinusoids).

    transformers reads each weight whole as one that learns, and a shard as the architecture has it (5.23, 5.24).
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():  # values are copied into what was made
        return
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    for name, weight in made.named_parameters():
        if not weight.requires_grad:
            model.get_parameter(name).requires_grad = False


def check_attention_fits(model: "PreTrainedModel", request: LoadRequest) -> None:
    """Raise ModelError for layers that an attention function does not compute."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if request.attention_function is not None and "chunked_attention" in layer_types:
        raise ModelError(
            f"model_path {request.model_path}: its layers attend in chunks, which only a mask expresses, and "
            f"attention={request.attention} gets none for a packed row: use attention=sdpa or eager"
        )


def _config(path: str, attention: str | None, task: Task) -> "PreTrainedConfig | None":
    """Return the configuration to load with, where it differs from the directory's."""
    if makes_head(task):
        config = task_config(path, task)
        if attention is None:
            config._attn_implementation = None
        return config
    return _config_without_attention(path) if attention is None else None


def _divided_class(
    path: str, config: "PreTrainedConfig | None", divided: "DistributedConfig", request: LoadRequest
) -> "tuple[type[PreTrainedModel], dict[str, object]]":
    """Return the class that reads this rank's shards alone, and its arguments."""
    from transformers import AutoConfig

    from forge_dist.loading._fsdp_groups import shardable_class

    task = request.task
    config = AutoConfig.from_pretrained(path, trust_remote_code=False) if config is None else config
    # Asked with a configuration of its own: the other may name an attention that is not installed.
    asked = task_config(path, task)
    asked._attn_implementation = None
    kind = shardable_class(asked, task, media=request.media)
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = config.get_text_config()  # what AutoModelForCausalLM does for a model of text inside a larger one
    made = class_arguments(kind) if task == "embedding" else {}
    return kind, {"config": config, "distributed_config": divided, **made}


def check_report(report: dict[str, object], where: str, kind: str = "the architecture") -> None:
    """Raise ModelError, with numbers and first tensors, if transformers' report has differences."""
    differences = []
    for what, key in (
        ("lacks", "missing_keys"),
        ("has the unexpected", "unexpected_keys"),
        ("has another shape of", "mismatched_keys"),
    ):
        found = sorted(map(_describe, report[key]))  # pyrefly: ignore[bad-argument-type]
        if found:
            others = f" and {counted(len(found) - 1, 'others')}" if len(found) > 1 else ""
            differences.append(f"{what} weight {found[0]}{others}")
    if differences:
        raise ModelError(f"{where} {', '.join(differences)}: its safetensors do not fit {kind} in its config.json")
    if report["error_msgs"]:
        raise ModelError(f"{where} cannot be loaded: {report['error_msgs']}")


def _describe(entry: object) -> str:
    """Return a tensor's name, and for a mismatch its shapes in the file and in the model."""
    if isinstance(entry, tuple):
        name, in_file, in_model = entry
        return f"{name} ({list(in_file)} in the file, {list(in_model)} in the model)"
    return str(entry)


def _config_without_attention(path: str) -> "PreTrainedConfig":
    """Return the configuration of `path` without its attention implementation.

    It may name a kernel, which transformers would download from the hub.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    config._attn_implementation = None
    return config


def _check_hub_config(model_path: str, task: Task) -> None:
    from transformers import AutoConfig

    check_config(AutoConfig.from_pretrained(model_path, trust_remote_code=False).to_dict(), f"{model_path} (hub)", task)

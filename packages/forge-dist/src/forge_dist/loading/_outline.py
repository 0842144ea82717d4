"""Model directory → what loading it would report: headers are read, and no weights."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_dist._errors import ModelError
from forge_dist._safetensors import read_directory
from forge_dist._third_party_logs import quiet_imports, quiet_transformers
from forge_dist.loading._attention import register_attention
from forge_dist.loading._config_changes import change_config
from forge_dist.loading._dtype import base_dtype
from forge_dist.loading._load import LOADING_ERRORS, check_report
from forge_dist.loading._modalities import LANGUAGE, attend_plainly, freeze_parts, is_multimodal
from forge_dist.loading._model_path import check_model_path, expand_user, has_no_weights, is_hub_name, is_mxfp4
from forge_dist.loading._quantization import quantize_outline
from forge_dist.loading._request import LoadRequest
from forge_dist.loading._task import (
    Task,
    auto_class,
    class_arguments,
    drop_unread,
    init_classifier_head,
    makes_head,
    task_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor in the files → its shape."""


def check_model(model_path: str, *, task: Task = "causal", weights: bool = True) -> int:
    """Check that a model's class exists and its weights fit it; return its embedding's rows.

    It takes seconds at most, whatever the size of the model: of a directory only the headers of its weights are read. (A name
    on the hub is downloaded first, as loading would.)

    Args:
        model_path: directory, or name on the hub.
        task: what the model is trained for.
        weights: whether they must be here. Without, of a directory that holds none only the configuration is checked.

    Raises:
        ModelError: `check_model_path` refuses it; the installed transformers has no such class; weights are missing, left over
            or of another shape, as those of another class are.
    """
    quiet_imports()
    check_model_path(model_path, task=task, weights=weights)
    path = expand_user(model_path)
    try:
        with quiet_transformers(bars=is_hub_name(model_path)):
            config = _config(model_path, path, task)
            if has_no_weights(model_path) or is_mxfp4(getattr(config, "quantization_config", None)):
                # Of MXFP4 tensors are codes and scales, which have other names and shapes than what they are read as.
                with torch.device("meta"):
                    return rows_of(auto_class(task, config).from_config(config, trust_remote_code=False), model_path)
            if is_hub_name(model_path):
                model, report = load_outline(config, task, path)
            else:
                shapes = {name: entry.shape for name, entry in read_directory(Path(path)).items()}
                model, report = load_outline(config, task, shapes)
            if task == "embedding":
                drop_unread(config, report)
            elif makes_head(task):
                with torch.random.fork_rng(devices=[]):
                    init_classifier_head(model, config, report, model_path, lambda drawn: drawn)
    except ModelError:
        raise
    except LOADING_ERRORS as error:
        raise ModelError(f"model_path {model_path} cannot be loaded: {_short(error)}") from error
    check_report(report, f"model_path {model_path}", type(model).__name__)
    return rows_of(model, model_path)


def outline_model(request: LoadRequest) -> "PreTrainedModel":
    """Make the model of a directory without any data, as large as it is, on the meta device.

    Its classes, attention, dtypes and quantized layers are those that `load_model` gives; it is in eval mode.

    Raises:
        ModelError: no such model can be made.
    """
    quiet_imports()
    path = expand_user(request.model_path)
    register_attention(request.attention, request.attention_function)
    try:
        with quiet_transformers(bars=False), torch.random.fork_rng(devices=[]):
            config = _config(request.model_path, path, request.task)
            config._attn_implementation = None
            kind: Any = auto_class(request.task, config)
            how = {"dtype": request.dtype, "attn_implementation": request.attention}
            with torch.device("meta"):
                model = kind.from_config(config, trust_remote_code=False, **how)
            if request.quantization is not None:
                quantize_outline(model, request.quantization, request.task)
            change_config(model)
    except ModelError:
        raise
    except LOADING_ERRORS as error:
        raise ModelError(f"model_path {request.model_path}: no outline of it can be made: {_short(error)}") from error
    if is_multimodal(model.config) or request.trained != LANGUAGE:
        stored = request.other_dtype or base_dtype(request.model_path, task=request.task)
        freeze_parts(model, stored, request.model_path, request.trained)
        if request.attention_function is not None:
            attend_plainly(model)
    return model.eval()


def rows_of(model: "PreTrainedModel", model_path: str) -> int:
    """Return the rows of a model's embedding: it takes token ids below that number."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if not isinstance(rows, int):
        raise ModelError(f"model_path {model_path}: {type(model).__name__} has no embedding of token ids")
    return rows


def load_outline(config: "PreTrainedConfig", task: Task, weights: Shapes | str) -> "tuple[PreTrainedModel, dict[str, Any]]":
    """Return a model without data, and transformers' report of weights of these shapes.

    `weights` are shapes by name, or the name of a model on the hub.
    """
    # Before that the class is only known by the configuration's; a kernel that the directory names is not downloaded.
    config._attn_implementation = None
    with torch.device("meta"):
        kind: Any = type(auto_class(task, config).from_config(config, trust_remote_code=False))
    if kind.config_class is not None and not isinstance(config, kind.config_class):
        config = config.get_text_config()  # as for a model of text inside a larger one
    if isinstance(weights, str):
        given = {"pretrained_model_name_or_path": weights, "use_safetensors": True}
    else:
        state = {name: torch.empty(shape, device="meta") for name, shape in weights.items()}
        given = {"pretrained_model_name_or_path": None, "state_dict": state}
    with torch.random.fork_rng(devices=[]):
        return kind.from_pretrained(
            **given,
            **(class_arguments(kind) if task == "embedding" else {}),
            config=config,
            dtype=torch.float32,
            device_map="meta",
            attn_implementation="eager",
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # so that the report names them
            output_loading_info=True,
        )


def _config(model_path: str, path: str, task: Task) -> "PreTrainedConfig":
    """Read the configuration, if the installed transformers has the classes that it names."""
    from transformers import PreTrainedConfig

    found, _ = PreTrainedConfig.get_config_dict(path)
    _check_classes(found, f"model_path {model_path}")
    return task_config(path, task)


def _check_classes(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError where config.json names a type or class that transformers lacks."""
    import transformers

    kind, version = config.get("model_type"), transformers.__version__
    code = " Code that comes with a model (auto_map) is never run." if "auto_map" in config else ""
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"{where}: its config.json has model_type {kind!r}, which transformers {version} does not know. A newer one may: "
            f"`pip install --upgrade transformers`.{code}"
        )
    named = [str(name) for name in config.get("architectures") or ()]
    if named and not any(_is_class(name) for name in named):
        raise ModelError(
            f"{where}: its config.json has architectures {json.dumps(named)}, and transformers {version} has no such class. A "
            f"newer one may: `pip install --upgrade transformers`.{code}"
        )


def _is_class(name: str) -> bool:
    """Return whether transformers has a class of a name.

    Its module is imported, as it is to make the model.
    """
    import transformers

    try:
        if isinstance(getattr(transformers, name, None), type):
            return True
    except ImportError:
        pass  # the class is there, and something that it needs is not: making the model says what
    # A few published configurations write a class with other capitals.
    return name.lower() in _class_names()


@functools.cache
def _class_names() -> set[str]:
    """Return the public names of transformers in small letters."""
    import transformers  # which takes a sixth of a second to list them

    return {name.lower() for name in dir(transformers)}


def _short(error: Exception) -> str:
    """Return transformers' message without its list of classes; of a bare one, what it is about."""
    text = (" ".join(str(error).split()) or type(error).__name__).partition(" Model type should be one of")[0]
    if isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError):
        return f"the values in its config.json make no model: {type(error).__name__}: {text}"
    return text

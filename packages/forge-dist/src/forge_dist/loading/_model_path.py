"""Check of a model path before training; reads headers only, and loads no torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs

from forge_dist._errors import ModelError
from forge_dist._safetensors import read_directory


@attrs.frozen(kw_only=True)
class Classifier:
    """Task of a sequence classifier: one number for each label of a row."""

    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of the head's outputs. Empty: the directory's own where it is a classifier; else two,
    until the names are known."""

    multi_label: bool = False
    """Whether a row may have several of them, or none (transformers' problem_type multi_label_classification)."""


Task = Literal["causal", "reward", "embedding"] | Classifier
"""Task that a model is loaded for. causal: the next token's logits. reward: one number a row. embedding: hidden states, without
a head. Classifier: one number a label."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "BertGenerationDecoder", "ReformerModelWithLMHead")
_CLASSIFIER = "ForSequenceClassification"
_HIDDEN_STATES = ("Model", "ForMaskedLM", "ForPreTraining")
"""Ends of the names of further classes whose hidden states are trained as embeddings."""
MULTIMODAL = "ForConditionalGeneration"
"""End of the names of classes of several modalities, of which the language part trains."""
_CONVERT_GGUF = (
    "convert it once: `model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME)`, `model.hf_quantizer = None`, "
    "`del model.config.quantization_config` if there is one, `model.save_pretrained(NEW_FOLDER)`, and the same for the "
    "tokenizer"
)
_CONVERT_PICKLE = (
    "pickles can run code and are not read; convert once, where you trust them: "
    "`AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=False).save_pretrained(NEW_FOLDER)`"
)
_MERGE = (
    "make a plain model of it: `forge export RUN --merge` (virtual tokens cannot be merged), or by hand "
    "`PeftModel.from_pretrained(BASE_MODEL, FOLDER).merge_and_unload().save_pretrained(NEW_FOLDER)` and the base's tokenizer "
    "beside it. To train this {kind}adapter further, give its base as model_path and it as adapter_path"
)


def check_model_path(model_path: str, *, task: Task = "causal", weights: bool = True) -> None:
    """Check that training can start from `model_path`, in milliseconds and without network.

    A directory must hold a config.json of a causal language model (for task="reward": or of a classifier with one label; for a
    Classifier: or of one with as many labels; for task="embedding": or of a model without a head, or a masked language model)
    and whole safetensors files. A name of the form org/name that is no directory
    here is left to `load_model`, which asks the hub.

    Args:
        model_path: directory, or name on the hub.
        task: what the model is trained for.
        weights: whether they must be here. Without, a directory that holds none passes: shapes follow from its config.json.

    Raises:
        ModelError: neither; a path that cannot be looked up or read; a file; an adapter; pickled, GGUF, quantized or missing
            weights; another kind of model.
    """
    path = find_path(model_path)
    if path is not None and path.is_dir():
        try:
            _check_directory(path, task, weights=weights)
        except PermissionError as error:
            raise ModelError(f"model_path {path} may not be read: {error}") from None
    elif path is not None:
        what = "is a GGUF file" if path.suffix.lower() == ".gguf" else "is a file"
        remedy = f"; {_CONVERT_GGUF}" if path.suffix.lower() == ".gguf" else ""
        raise ModelError(f"model_path {model_path} {what}; it must be a directory with config.json and safetensors{remedy}")
    elif not is_hub_name(model_path):
        raise ModelError(
            f"model_path {model_path!r} is neither a directory here nor a name on the Hugging Face Hub (org/name, "
            f"for example HuggingFaceTB/SmolLM2-135M-Instruct); looked in {Path.cwd()}"
        )


def find_path(model_path: str) -> Path | None:
    """Return `model_path` with `~` expanded, or None where nothing exists there.

    Raises:
        ModelError: it cannot be looked up: a folder on the way may not be entered, links form a loop, no file can have such a
            name.
    """
    if not model_path:  # pathlib takes it for the current folder
        return None
    try:
        path = Path(model_path).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RuntimeError) as error:  # the latter: a NUL in it; a ~user that is unknown
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"model_path {model_path!r} cannot be looked up: {reason}") from None
    return path


def is_hub_name(model_path: str) -> bool:
    """Return whether `model_path` is no path here and has the form org/name."""
    return find_path(model_path) is None and _HUB_NAME.fullmatch(model_path) is not None


def expand_user(model_path: str) -> str:
    """Return `model_path` with `~` expanded; a hub name as it is."""
    return model_path if is_hub_name(model_path) else str(Path(model_path).expanduser())


def check_config(config: Mapping[str, object], where: str, task: Task = "causal") -> None:
    """Raise ModelError unless `config` is an unquantized model's that fits `task`.

    `where` is the file that it was read from, for the message.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"{where}: architectures is {architectures!r}; it must be a list of class names")
    inner = [part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict)]
    ends = (*_CAUSAL, MULTIMODAL) if inner else _CAUSAL
    if any(part.get("is_encoder_decoder") for part in (config, *inner)):
        raise ModelError(f"{where}: an encoder-decoder model ({architectures}); only causal language models are trained")
    classifier = any(str(name).endswith(_CLASSIFIER) for name in architectures)
    if task == "embedding":
        _check_hidden_states(architectures, where, several=bool(inner))
    elif classifier and task != "causal":
        _check_labels(config, where, task)
    elif classifier:
        raise ModelError(
            f"{where}: architectures is {architectures}, which is no causal language model but a classifier or reward model"
        )
    elif architectures and not any(str(name).endswith(ends) for name in architectures):
        raise ModelError(
            f"{where}: architectures is {architectures}, which is no causal language model: a class named ...ForCausalLM is "
            f"needed, or one named ...{MULTIMODAL} with the configurations of its parts (text_config and others)"
        )
    if not config.get("model_type"):
        raise ModelError(f"{where}: no model_type, so transformers cannot tell what model this is")
    if (quantized := config.get("quantization_config")) and not is_mxfp4(quantized):
        raise ModelError(f"{where}: quantized weights (quantization_config) are not trained; use the unquantized model")


def _check_hidden_states(architectures: list[object], where: str, *, several: bool) -> None:
    """Raise ModelError for a class whose hidden states are not trained as embeddings."""
    ends = (*_CAUSAL, *_HIDDEN_STATES, *((MULTIMODAL,) if several else ()))
    if architectures and not any(str(name).endswith(ends) for name in architectures):
        raise ModelError(
            f"{where}: architectures is {architectures}; embeddings are trained of a model without a head (a class named "
            "...Model), of a causal or masked language model (...ForCausalLM, ...ForMaskedLM), or of one of several modalities "
            f"(...{MULTIMODAL})"
        )


def _check_labels(config: Mapping[str, object], where: str, task: "Classifier | Literal['reward']") -> None:
    """Raise ModelError for a classifier with another number of labels than `task` has."""
    labels = config.get("id2label")
    # Transformers leaves two labels, its default, out of the file.
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if not isinstance(task, Classifier):
        if count != 1:
            raise ModelError(f"{where}: a classifier with {count} labels; a reward model has one")
    elif count == 1:
        raise ModelError(f"{where}: a reward model, which gives one number; a classifier has two labels or more")
    elif task.labels and count != len(task.labels):
        named = f" ({', '.join(map(str, labels.values()))})" if isinstance(labels, Mapping) else ""
        raise ModelError(
            f"{where}: a classifier with {count} labels{named}; {len(task.labels)} are wanted ({', '.join(task.labels)}). Name "
            "as many, in the order of its outputs, or start from a model without such a head"
        )


def is_mxfp4(quantization: object) -> bool:
    """Return whether a directory's quantization_config is MXFP4, which is read dequantized."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


def has_no_weights(model_path: str) -> bool:
    """Return whether a model is a directory here with no file of weights of any kind."""
    directory = find_path(model_path)
    kinds = ("*.safetensors", "*.index.json", "*.bin", "*.pt*", "*.gguf")
    return directory is not None and directory.is_dir() and not any(any(directory.glob(kind)) for kind in kinds)


def _kind_of(adapter: Path) -> str:
    """Return the kind of an adapter as PEFT writes it, with a blank; "" where there is none."""
    try:
        kind = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["peft_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f"{kind} " if isinstance(kind, str) and kind.isidentifier() else ""


def _check_directory(directory: Path, task: Task, *, weights: bool) -> None:
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"model_path {directory} is an adapter, not a model; {_MERGE.format(kind=_kind_of(directory))}")
    config_file = directory / "config.json"
    if not config_file.is_file():
        # snapshots/HASH: a folder of the Hub's cache.
        inside = [file.parent for pattern in ("*", "snapshots/*") for file in sorted(directory.glob(f"{pattern}/config.json"))]
        remedy = f"; {inside[0]} has one" if inside else ""
        remedy = f"; it holds GGUF: {_CONVERT_GGUF}" if any(directory.glob("*.gguf")) else remedy
        raise ModelError(f"model_path {directory} is no model directory: it has no config.json{remedy}")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise ModelError(f"{config_file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{config_file} must hold a JSON object; found {type(config).__name__}")
    check_config(config, str(config_file), task)
    try:
        stored = read_directory(directory)
    except FileNotFoundError as error:
        if not weights and has_no_weights(str(directory)):
            return
        raise ModelError(f"model_path {directory} has no complete weights: {error}{_other_weights(directory)}") from None
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise ModelError(f"model_path {directory} has broken weights: {error}; fetch or write it again") from None
    if not stored:
        raise ModelError(f"model_path {directory} has empty weights: its safetensors files hold no tensor")


def _other_weights(directory: Path) -> str:
    """Name files that may have been taken for weights, with a remedy."""
    for pattern, remedy in (
        ("*.bin", _CONVERT_PICKLE),
        ("*.pt*", _CONVERT_PICKLE),
        ("*.gguf", _CONVERT_GGUF),
        ("*.safetensors", "transformers reads only those two names"),
    ):
        names = sorted(file.name for file in directory.glob(pattern))
        if names:
            return f"; it holds {', '.join(names[:3])}: {remedy}"
    return "; fetch them (a dry run for another machine, with --for, needs config.json and the tokenizer alone)"

"""Models of several modalities: the language part trains on text, the rest stays as read.

Such a directory holds a vision tower, a projector, perhaps audio layers beside a language model. A forward on text alone does
not run them, so they get no gradient. They are kept in the dtype of their files.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import expand_user, is_hub_name
from forge_dist.loading._unwrap import is_partitioned

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files by which transformers makes a processor: a tokenizer beside what turns images and sounds into tensors."""


def is_multimodal(config: "PreTrainedConfig") -> bool:
    """Return whether a configuration holds that of a language model beside others."""
    return config.get_text_config() is not config


def other_modalities(model: "PreTrainedModel") -> dict[str, nn.Parameter]:
    """Return name → parameter outside of the language part: decoder, embeddings, head.

    Under all of its names; empty for a model of text alone.
    """
    if not is_multimodal(model.config):
        return {}
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, "score", None))
    language = {id(parameter) for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if id(parameter) not in language}


def modules_beside_language(model: "PreTrainedModel") -> list[str]:
    """Return names of the outermost modules that hold weights, none of the language part."""
    others, found = set(other_modalities(model)), list[str]()
    for name, module in model.named_modules() if others else ():
        own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if own and others.issuperset(own) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def language_dtype(model: "PreTrainedModel") -> torch.dtype:
    """Return the dtype of the language part; of a model of text alone, of the model."""
    if not is_multimodal(model.config):
        return model.dtype
    decoder: Any = model.get_decoder()
    return next(parameter.dtype for parameter in decoder.parameters() if parameter.is_floating_point())


def freeze_other_modalities(model: "PreTrainedModel", stored: torch.dtype, where: str) -> None:
    """Freeze what is outside of the language part, and keep it as narrow as `stored`.

    Args:
        model: as it was read, divided or not; before its first forward.
        stored: dtype of the directory's weights, or another in which the rest is to compute.
        where: the model_path, for errors.

    Raises:
        ModelError: the model names no language part: a decoder and a head over the vocabulary.
    """
    if not is_multimodal(model.config):
        return
    if model.get_decoder() is model or (model.get_output_embeddings() is None and not hasattr(model, "score")):
        raise ModelError(f"model_path {where}: {type(model).__name__} names no decoder and head that could be trained on text")
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in other_modalities(model).items():
        parameter.requires_grad = False
        # ZeRO-3 keeps its partitions in one dtype.
        if parameter.is_floating_point() and parameter.dtype.itemsize > stored.itemsize and not is_partitioned(parameter):
            narrow = replaced.setdefault(id(parameter), nn.Parameter(parameter.detach().to(stored), requires_grad=False))
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, narrow)


def attend_plainly(model: "PreTrainedModel") -> None:
    """Give the parts beside the language an attention of transformers.

    Ours is causal, and theirs sees a whole image.
    """
    text = model.config.get_text_config()
    others = [name for name in model.config.sub_configs if getattr(model.config, name, None) not in (None, text)]
    for name in others:
        for attention in ("sdpa", "eager"):
            try:
                model.set_attn_implementation({name: attention})
            except ValueError:  # this part has none of that kind
                continue
            break


def processor_files(model_path: str, *, fetch: bool = False) -> list[Path]:
    """Return the processor files of a directory, or of a hub name: those in its cache.

    With `fetch` they are downloaded, so that they are there when the network is not.
    """
    if not is_hub_name(model_path):
        folder = Path(expand_user(model_path))
        return [file for name in PROCESSOR_FILES if (file := folder / name).is_file()]
    from transformers.utils import cached_file

    found = []
    for name in PROCESSOR_FILES:
        try:
            file = cached_file(model_path, name, local_files_only=not fetch)
        except (OSError, ValueError):
            continue  # most models have some of them
        found += [] if file is None else [Path(file)]
    return found

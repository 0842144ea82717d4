"""Files of an export beside the weights: configurations, tokenizer, permissions."""

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forge_dist.loading._config_changes import restore_config
from forge_dist.loading._modalities import is_multimodal, language_dtype, processor_files
from forge_dist.loading._task import is_headless, is_sequence_classifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_configs(model: "PreTrainedModel", folder: Path, dtype: torch.dtype | None) -> Path:
    """Write config.json (whose path is returned) and generation_config.json.

    `dtype` is that of the export; None: as in memory.
    """
    config = copy.deepcopy(model.config)
    restore_config(config, model)
    # As save_pretrained sets them; fully_shard has made a class of its own, named after the model's.
    config.dtype = str(language_dtype(model)).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if model.can_generate() and generation is not None:
        generation = copy.deepcopy(generation)
        if getattr(generation, "use_cache", None) is False:
            generation.use_cache = True
        # Not save_pretrained, which refuses what loading merely warns about (a temperature without do_sample): a finished
        # training must not be lost over that.
        generation.to_json_file(folder / "generation_config.json")
    _clean_config(folder / "config.json", dtype)
    return folder / "config.json"


def _clean_config(file: Path, dtype: torch.dtype | None) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    # A model of several modalities has a configuration of each part within its own.
    for part in (config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))):
        for key in [key for key in part if key.endswith("name_or_path")]:
            del part[key]
        if part.get("use_cache") is False:
            part["use_cache"] = True
        if part.get("dtype") is not None:
            part["dtype"] = config["dtype"]
        rope = part.get("rope_parameters")
        # Readers older than transformers 5 (mlx-lm among them) look for rope_theta beside it only, and silently take 10000
        # where it is not: a model that answers wrongly.
        if isinstance(rope, dict) and isinstance(rope.get("rope_theta"), int | float):
            part.setdefault("rope_theta", rope["rope_theta"])
    file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path, model: "PreTrainedModel") -> None:
    """Write the tokenizer's files.

    Beside a reward `model` it pads with the token by which the model finds the end of a row, whatever it pads with in memory.
    Beside one without a head it pads with the end of a text where it has no padding token: embeddings are made in batches.

    Raises:
        OSError: as `write_tokenizer_files`.
    """
    pad = model.config.get_text_config().pad_token_id if is_sequence_classifier(model) else None
    if pad is not None and tokenizer.pad_token_id != pad:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    if is_headless(model) and tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    write_tokenizer_files(tokenizer, folder)


def write_tokenizer_files(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the tokenizer's files as it is.

    Raises:
        OSError: for whatever the tokenizers library raises; on a full disk that is a bare Exception.
    """
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"the tokenizer cannot be saved: {error}") from error


def write_processor(model: "PreTrainedModel", folder: Path) -> None:
    """Copy the processor files of the directory that a model of several modalities came from."""
    source = model.name_or_path
    if source and is_multimodal(model.config):
        copy_missing(processor_files(source), folder)


def copy_missing(files: Iterable[Path], folder: Path) -> None:
    """Copy files into a folder; what it has already, such as a chat template, stays."""
    for file in files:
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def set_permissions(folder: Path, reference: Path) -> None:
    """Give every file the mode of `reference`, which the umask decided.

    Files that safetensors writes are readable by their owner alone.
    """
    mode = reference.stat().st_mode & 0o777
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)

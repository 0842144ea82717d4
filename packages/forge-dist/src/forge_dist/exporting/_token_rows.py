"""Model directory and new token ids → a model directory with rows for them.

Every new row is the mean of the rows of the tokens that were there before: a new token begins as the average one, the same on
every machine, and the probabilities of the others hardly move (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
Gemma 3n and 4 have a second table by token id, whose rows go into each layer: it grows as the embedding does.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from forge_dist._errors import ModelError
from forge_dist._files import atomic_directory
from forge_dist._safetensors import TensorEntry, read_directory
from forge_dist._third_party_logs import quiet_imports, quiet_transformers
from forge_dist.exporting._directory import copy_missing, write_tokenizer_files
from forge_dist.exporting._safetensors_writer import header_of
from forge_dist.loading._modalities import is_multimodal, processor_files
from forge_dist.loading._model_path import Task, expand_user, is_hub_name
from forge_dist.loading._outline import check_model, load_outline
from forge_dist.loading._task import task_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_CHUNK = 4096
"""Rows that are summed at a time."""
_PER_LAYER = "vocab_size_per_layer_input"
"""Key of a configuration: rows of Gemma 3n's and 4's table of an input to each layer for each token id."""


def write_with_token_rows(
    model_path: str,
    directory: str | os.PathLike[str],
    new_ids: Sequence[int],
    *,
    tokenizer: "PreTrainedTokenizerBase",
    task: Task = "causal",
) -> int:
    """Write a model to `directory` with a row for each new id; return its number of rows.

    Rows that the embedding has already beyond the tokenizer's ids are used first; it grows only by those that are lacking
    (`config.vocab_size` follows). A new row of the embedding, of an untied head, of the head's bias and of a table of inputs
    to each layer that is as long is the mean of that tensor's rows below the smallest new id, added up in float64. All other
    weights stay as they are: files without such a tensor become links to the model's own. Beside a model of several
    modalities stand its processor's files.

    Args:
        model_path: directory, or name on the hub.
        directory: to write; it must not exist.
        new_ids: token ids of `tokenizer` that the model has not been trained with; all ids below the smallest one were.
        tokenizer: with the new tokens; written beside the model.
        task: task that the model is loaded for.

    Raises:
        ModelError: as `check_model`; the tensors that have a row for each token cannot be found in the files; the class reads a
            new id elsewhere than in the embedding.
        OSError: `directory` cannot be written.
    """
    quiet_imports()
    rows = check_model(model_path, task=task)
    source = _local(model_path)
    size = max(rows, *(number + 1 for number in new_ids))
    stored = read_directory(source)
    with quiet_transformers():
        config = _read_config(source, task)
        _check_ids(config, rows, max(new_ids), model_path)
        names = _vocabulary(source, stored, rows, task)
    with atomic_directory(directory) as folder:
        for file in sorted({entry.file for entry in stored.values()}):
            inside = {name for name in names if stored[name].file == file}
            if inside:
                _write_file(file, folder / file.name, inside, new_ids, size)
            else:
                (folder / file.name).symlink_to(file.resolve())
        for file in ("model.safetensors.index.json", "generation_config.json"):
            if (source / file).is_file():
                shutil.copyfile(source / file, folder / file)
        _write_config(source, folder, config, rows, size)
        write_tokenizer_files(tokenizer, folder)
        if is_multimodal(config):
            copy_missing(processor_files(model_path, fetch=True), folder)
        found = check_model(str(folder), task=task)
        if found != size:
            raise ModelError(f"model_path {model_path}: with new tokens it should have {size} rows and has {found}")
    return size


def _local(model_path: str) -> Path:
    """Return the directory of a model; one on the hub is downloaded."""
    if not is_hub_name(model_path):
        return Path(expand_user(model_path))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(model_path, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"model_path {model_path} cannot be downloaded: {error}") from error


def _read_config(source: Path, task: Task) -> "PreTrainedConfig":
    return task_config(str(source), task)


def _check_ids(config: "PreTrainedConfig", rows: int, largest: int, model_path: str) -> None:
    """Raise ModelError where the class would not read the largest new id as a token."""
    text: Any = config.get_text_config()
    table = getattr(text, _PER_LAYER, rows)
    if getattr(text, "hidden_size_per_layer_input", 0) and table != rows and largest >= table:
        raise ModelError(
            f"model_path {model_path}: no tokens can be added: its table of inputs to each layer has {table:,} rows "
            f"({_PER_LAYER}) beside the embedding's {rows:,}, and none for the new id {largest}"
        )
    for name in config.sub_configs:
        offset = getattr(getattr(config, name, None), "vocab_offset", None)
        if offset is not None and largest >= offset:
            raise ModelError(
                f"model_path {model_path}: no tokens can be added: its class takes ids from {offset} on for those of "
                f"{name.removesuffix('_config')} ({name}.vocab_offset), and the new id {largest} would be read as one of them"
            )


def _vocabulary(source: Path, stored: Mapping[str, TensorEntry], rows: int, task: Task) -> list[str]:
    """Return the names in the files of the tensors that have a row for each token.

    transformers itself is asked, by shapes: a model of more tokens would lack rows in them and nowhere else.
    """

    def misfits(grown: Sequence[str]) -> set[str]:
        config = _read_config(source, task)
        text: Any = config.get_text_config()
        for key in _keys(text, rows):
            setattr(text, key, rows + 1)
        shapes = {
            name: (entry.shape[0] + 1, *entry.shape[1:]) if name in grown else entry.shape for name, entry in stored.items()
        }
        _, report = load_outline(config, task, shapes)
        return {entry[0] for entry in report["mismatched_keys"]}

    ends = {_end(name) for name in misfits(())}
    names = sorted(name for name, entry in stored.items() if entry.shape[:1] == (rows,) and _end(name) in ends)
    if not names or misfits(names):
        raise ModelError(
            f"model_path {source}: the tensors that have a row for each token could not be found in its files, so that no "
            "tokens can be added: resize it with transformers (`model.resize_token_embeddings`), and train from that"
        )
    return names


def _keys(text: "PreTrainedConfig", rows: int) -> list[str]:
    """Return the names of the numbers in a language model's configuration that are its rows."""
    return ["vocab_size", *([_PER_LAYER] if getattr(text, _PER_LAYER, None) == rows else [])]


def _end(name: str) -> str:
    """Return the last two parts of a tensor's name; what stands before may differ in the files."""
    return ".".join(name.split(".")[-2:])


def _write_file(source: Path, target: Path, grown: set[str], new_ids: Sequence[int], size: int) -> None:
    """Write a safetensors file anew, with rows for the new ids in the tensors `grown`."""
    try:
        with safe_open(source, framework="pt") as opened:
            shapes = {}
            for name in opened.keys():  # noqa: SIM118  it is no dictionary
                part = opened.get_slice(name)
                shape = part.get_shape()
                shapes[name] = torch.empty(
                    [size, *shape[1:]] if name in grown else shape, dtype=opened.get_tensor(name).dtype, device="meta"
                )
            header, places, length = header_of(shapes)
            with open(target, "xb") as stream:
                stream.write(header)
                stream.truncate(length)
                for name, planned in shapes.items():
                    tensor = opened.get_tensor(name)
                    stream.seek(places[name])
                    stream.write(_bytes(_with_rows(tensor, new_ids, size) if name in grown else tensor))
                    assert stream.tell() == places[name] + planned.numel() * planned.element_size()
    except (SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"{source} cannot be read: {error}") from error


def _with_rows(tensor: torch.Tensor, new_ids: Sequence[int], size: int) -> torch.Tensor:
    """Return tensor[V, ...] with `size` rows, those of new ids the mean of the known ones."""
    known = tensor[: min(new_ids)]
    total = torch.zeros(tensor.shape[1:], dtype=torch.float64)
    for start in range(0, len(known), _CHUNK):
        total += known[start : start + _CHUNK].double().sum(0)
    mean = (total / len(known)).to(tensor.dtype)
    # Rows between the old ones and a new id that nobody uses are the mean too.
    grown = torch.cat([tensor, mean.expand(size - len(tensor), *mean.shape)])
    grown[list(new_ids)] = mean
    return grown


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _write_config(source: Path, folder: Path, read: "PreTrainedConfig", rows: int, size: int) -> None:
    """Write config.json with another number of tokens."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = read.get_text_config()
    place = config
    if text is not read:
        # Only that part: a vision or audio part may have a vocab_size too. Published files leave it, or the number, out where
        # it is the class's default.
        name = next(name for name in read.sub_configs if getattr(read, name, None) is text)
        place = config.setdefault(name, {"model_type": text.model_type})
    written = [(text.attribute_map or {}).get(key, key) for key in _keys(text, rows)]
    for key in written:
        place[key] = size
        if key in config:
            config[key] = size
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

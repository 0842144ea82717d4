"""Model directory and new token ids → a model directory with rows for them.

Every new row is the mean of the rows of the tokens that were there before: a new token begins as the average one, the same on
every machine, and the probabilities of the others hardly move (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
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
from forge_dist.exporting._directory import write_tokenizer_files
from forge_dist.exporting._safetensors_writer import header_of
from forge_dist.loading._model_path import Task, expand_user, is_hub_name
from forge_dist.loading._outline import check_model, load_outline
from forge_dist.loading._task import reward_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_CHUNK = 4096
"""Rows that are summed at a time."""


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
    (`config.vocab_size` follows). A new row of the embedding, of an untied head and of the head's bias is the mean of that
    tensor's rows below the smallest new id, added up in float64. All other weights stay as they are: files without such a
    tensor become links to the model's own.

    Args:
        model_path: directory, or name on the hub.
        directory: to write; it must not exist.
        new_ids: token ids of `tokenizer` that the model has not been trained with; all ids below the smallest one were.
        tokenizer: with the new tokens; written beside the model.
        task: task that the model is loaded for.

    Raises:
        ModelError: as `check_model`; the tensors that have a row for each token cannot be found in the files.
        OSError: `directory` cannot be written.
    """
    quiet_imports()
    rows = check_model(model_path, task=task)
    source = _local(model_path)
    size = max(rows, *(number + 1 for number in new_ids))
    stored = read_directory(source)
    with quiet_transformers():
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
        _write_config(source, folder, size)
        write_tokenizer_files(tokenizer, folder)
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
    from transformers import AutoConfig

    return reward_config(str(source)) if task == "reward" else AutoConfig.from_pretrained(str(source), trust_remote_code=False)


def _vocabulary(source: Path, stored: Mapping[str, TensorEntry], rows: int, task: Task) -> list[str]:
    """Return the names in the files of the tensors that have a row for each token.

    transformers itself is asked, by shapes: a model of more tokens would lack rows in them and nowhere else.
    """

    def misfits(more: int, grown: Sequence[str]) -> set[str]:
        config = _read_config(source, task)
        text: Any = config.get_text_config()
        text.vocab_size += more
        shapes = {
            name: (entry.shape[0] + more, *entry.shape[1:]) if name in grown else entry.shape for name, entry in stored.items()
        }
        _, report = load_outline(config, task, shapes)
        return {entry[0] for entry in report["mismatched_keys"]}

    ends = {_end(name) for name in misfits(1, ())}
    names = sorted(name for name, entry in stored.items() if entry.shape[:1] == (rows,) and _end(name) in ends)
    if not names or misfits(1, names):
        raise ModelError(
            f"model_path {source}: the tensors that have a row for each token could not be found in its files, so that no "
            "tokens can be added: resize it with transformers (`model.resize_token_embeddings`), and train from that"
        )
    return names


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


def _write_config(source: Path, folder: Path, size: int) -> None:
    """Write config.json with another number of tokens."""
    from transformers import AutoConfig

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    read = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    text = read.get_text_config()
    key = (text.attribute_map or {}).get("vocab_size", "vocab_size")
    # Where the language model's configuration is inside a larger one.
    places = [config] if text is read else [part for part in config.values() if isinstance(part, dict) and key in part]
    for place in [*places, *([config] if key in config else [])]:
        place[key] = size
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

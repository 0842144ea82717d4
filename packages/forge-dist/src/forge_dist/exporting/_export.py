"""A model in memory → a directory that plain transformers (or plain PEFT) loads, complete under its name or not there.

Nothing of the model in memory changes, so training goes on from where it was. `_export_divided` does it for a model that is divided over
ranks.
"""

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from forge_dist._errors import ExportError
from forge_dist._files import atomic_directory
from forge_dist._third_party_logs import quiet
from forge_dist.adapters._adapter import base_of, is_peft, unwrapped, write_adapter
from forge_dist.exporting._dtype import cast_state_dict
from forge_dist.exporting._plain import check_without
from forge_dist.exporting._plain_from_plain import Plain
from forge_dist.loading._task import is_reward

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from forge_dist.strategies._strategy import Strategy

EXPORTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WRITING = (OSError, SafetensorError, ValueError, TypeError, RuntimeError)


def export_model(
    model: "PreTrainedModel | PeftModel | torch.nn.Module",
    directory: str | os.PathLike[str],
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    dtype: torch.dtype | None = None,
    strategy: "Strategy | None" = None,
    without: Sequence[str] = (),
    plain: Plain | None = None,
) -> Path:
    """Write `model` to `directory` and return its absolute path.

    A PreTrainedModel becomes config.json, generation_config.json and safetensors of at most 5 GB under the names of the checkpoint
    that it came from, tied weights once. A PeftModel becomes adapter_config.json and adapter_model.safetensors. With `tokenizer` its
    files and chat template come along. Floats are written as `dtype` (default: as they are in memory), except those that the
    architecture keeps in float32. The directory names neither our attention function nor where this machine keeps its files (but
    for an adapter's base model, which it must name), and a cache that was switched off for training is on again.

    A reward model becomes a directory that AutoModelForSequenceClassification loads, and its `tokenizer` is written with the
    padding token of the configuration. An adapter on a reward model holds its head; the base model that it names is loaded
    with `num_labels=1`. Modules that the run added to the model, and that plain transformers does not know, are left out by their
    names in `without` ("value_head"), however many and however deep ("model.layers.0.mlp.up_proj.osft"). Where a run keeps its
    changes beside a weight, `plain(name, tensor)` is the tensor that a plain model has there, given the name in `model.state_dict()` and the whole tensor of
    that name: it is asked of each tensor that is written, on rank 0, tied weights once under their first name, and of adapters' files not at all.

    With the `strategy` that the model was loaded by, all ranks call this together, with what `wrap` returned. Rank 0 writes the same
    files that one process would, each tensor as it comes, and holds no more than two at a time; of an architecture whose files are laid out
    otherwise than its memory, the tensors of one layer, or, where even those are not enough, the whole model.

    Raises:
        ExportError: `directory` exists or cannot be written (full disk, no permission); the model is quantized, sharded off
            to disk, or of another class; a module of `without` is not there. Nothing is left under the name then. With a strategy it is raised on all ranks.
    """
    if dtype is not None and dtype not in EXPORTABLE:
        raise ExportError(f"{directory}: dtype {dtype} cannot be exported; known: {', '.join(map(str, EXPORTABLE))}")
    check_without(unwrapped(model), without, directory)
    if strategy is not None and strategy.name != "single":
        from forge_dist.exporting._export_divided import export_divided

        where = Path(os.path.abspath(directory))
        return export_divided(model, where, tokenizer=tokenizer, dtype=dtype, strategy=strategy, without=without, plain=plain)
    if strategy is not None:
        model = unwrapped(model)
    with atomic_directory(directory) as temporary:
        try:
            with quiet():
                marker = (
                    write_adapter(model, temporary, dtype)
                    if is_peft(model)
                    else _write_model(model, temporary, dtype, without, plain)
                )
                if tokenizer is not None:
                    save_tokenizer(tokenizer, temporary, base_of(unwrapped(model)))
            share(temporary, marker)
        except WRITING as error:
            raise ExportError(f"{directory} cannot be written: {error}") from error
    return Path(os.path.abspath(directory))


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path, model: "PreTrainedModel") -> None:
    """Write its files. Raises OSError for whatever the tokenizers library raises: on a full disk that is a bare Exception.

    Beside a reward `model` it pads with the token by which the model finds the end of a row, whatever it pads with in memory.
    """
    pad = model.config.get_text_config().pad_token_id if is_reward(model) else None
    try:
        if pad is not None and tokenizer.pad_token_id != pad:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"the tokenizer cannot be saved: {error}") from error


def _write_model(model: object, folder: Path, dtype: torch.dtype | None, without: Sequence[str], plain: Plain | None) -> Path:
    known = exportable(model)
    state = cast_state_dict(known, dtype, without=without, plain=plain)
    with _own_config(known):
        known.save_pretrained(folder, state_dict=state, max_shard_size="5GB")
    return finish_configs(known, folder, dtype)


def exportable(model: object) -> "PreTrainedModel":
    """`model`, if its weights can be exported.

    Raises:
        TypeError: it is no transformers model.
        ValueError: it is quantized.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a {type(model).__name__} is neither a transformers model nor a PeftModel")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantized, and its weights would not be what was trained; export a LoRA adapter instead")
    return model


def finish_configs(model: "PreTrainedModel", folder: Path, dtype: torch.dtype | None) -> Path:
    """Beside the config.json that transformers wrote, which is cleaned, put generation_config.json; return the former's path."""
    generation = getattr(model, "generation_config", None)
    if model.can_generate() and generation is not None:
        generation = copy.deepcopy(generation)
        if getattr(generation, "use_cache", None) is False:
            generation.use_cache = True
        generation.to_json_file(folder / "generation_config.json")
    _clean_config(folder / "config.json", dtype)
    return folder / "config.json"


@contextmanager
def _own_config(model: "PreTrainedModel") -> Iterator[None]:
    """Let save_pretrained write into a copy of the configuration: it sets dtype and architectures on the one that it finds.

    The generation configuration is replaced by an empty one: transformers refuses to save one that it merely warns about when
    loading (a temperature without do_sample), and a finished training must not be lost over that.
    """
    from transformers import GenerationConfig

    config, generation = model.config, getattr(model, "generation_config", None)
    model.config = copy.deepcopy(config)
    if generation is not None:  # a model that writes no text has none
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.config = config
        if generation is not None:
            model.generation_config = generation


def _clean_config(file: Path, dtype: torch.dtype | None) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if not key.endswith("name_or_path")}
    if config.get("use_cache") is False:
        config["use_cache"] = True
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    rope = config.get("rope_parameters")
    # Readers older than transformers 5 (mlx-lm among them) look for rope_theta at the top level only, and without a
    # word take 10000 where it is not: a model that answers wrongly.
    if isinstance(rope, dict) and isinstance(rope.get("rope_theta"), int | float):
        config.setdefault("rope_theta", rope["rope_theta"])
    file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def share(folder: Path, marker: Path) -> None:
    """Give every file the mode of `marker`, which the umask decided: safetensors makes its files readable by their owner alone."""
    mode = marker.stat().st_mode & 0o777
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)

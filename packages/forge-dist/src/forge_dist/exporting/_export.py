"""Export of a model, whole or divided over ranks, for plain transformers or plain PEFT.

The directory is complete under its name or not there. Nothing of the model in memory changes, so training can go on. Rank 0
writes; the other ranks take part in gathering each tensor, and get the same error. A model that no strategy loaded is written
as one process's.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from forge_dist._errors import ExportError
from forge_dist._files import atomic_directory
from forge_dist._third_party_logs import quiet_transformers
from forge_dist.adapters._adapter import active_adapter, write_adapter
from forge_dist.exporting._adapter_state import adapter_state
from forge_dist.exporting._directory import set_permissions, write_configs, write_processor, write_tokenizer
from forge_dist.exporting._layout import Layout, WholeTensors, in_file_layout, layout_of
from forge_dist.exporting._plain import Plain, check_without, plain_tensors
from forge_dist.exporting._safetensors_writer import SafetensorsWriter
from forge_dist.loading._unwrap import base_of, is_peft, unwrapped
from forge_dist.ranks._errors_on_all_ranks import errors_on_all_ranks, exhausted
from forge_dist.strategies._torch import one_process

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from forge_dist.strategies._strategy import Strategy

EXPORTABLE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WRITING_ERRORS = (OSError, SafetensorError, ValueError, TypeError, RuntimeError)


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

    A PreTrainedModel becomes config.json, generation_config.json and safetensors of at most 5 GB under the names of the
    checkpoint that it came from, tied weights once. A PeftModel becomes adapter_config.json and adapter_model.safetensors. With
    `tokenizer` its files and chat template are written too. Floats are written as `dtype` (default: as they are in memory),
    except those that the architecture keeps in float32. The directory names neither our attention function nor where this
    machine keeps its files (but for an adapter's base model, which it must name), and a cache that was switched off for
    training is on again.

    A reward model becomes a directory that AutoModelForSequenceClassification loads, and its `tokenizer` is written with the
    padding token of the configuration. An adapter on a reward model holds its head; the base model that it names is loaded with
    `num_labels=1`. Modules that the run added to the model, and that plain transformers does not know, are left out by their
    names in `without` ("value_head"), however many and however deep ("model.layers.0.mlp.up_proj.osft"). Where a run keeps its
    changes beside a weight, `plain(name, tensor)` is the tensor that a plain model has there, given the name in
    `model.state_dict()` and the whole tensor of that
    name: it is called for each tensor that is written, on rank 0, tied weights once under their first name, and not for
    adapters' files.

    With the `strategy` that the model was loaded by, all ranks call this together, with what `wrap` returned. Rank 0 writes
    each tensor as it is gathered, and holds no more than two at a time; for an architecture whose files are laid out otherwise
    than its memory, the tensors of one layer, or, where those are not enough, the whole model.

    Raises:
        ExportError: `directory` exists or cannot be written (full disk, no permission); the model is quantized, offloaded to
            disk, or of another class; a module of `without` is not there. Nothing is left under the name then. It is raised on
            all ranks.
    """
    if dtype is not None and dtype not in EXPORTABLE_DTYPES:
        raise ExportError(f"{directory}: dtype {dtype} cannot be exported; known: {', '.join(map(str, EXPORTABLE_DTYPES))}")
    inner = unwrapped(model)
    check_without(inner, without, directory)
    strategy = one_process(torch.device("cpu")) if strategy is None else strategy
    path, ranks = Path(os.path.abspath(directory)), strategy.ranks
    cannot = f"{directory} cannot be written"
    with errors_on_all_ranks(ranks, WRITING_ERRORS, cannot), quiet_transformers():
        # What can be refused is refused before anything is gathered. The layout is made on every rank: reading the state of a
        # divided model may free what its last forward gathered, and ranks must not differ in that.
        layout = None if is_peft(inner) else layout_of(_exportable(inner), dtype, without)
        if is_peft(inner):
            active_adapter(inner)
        if ranks.is_first and os.path.lexists(path):
            raise ExportError(f"{path} exists already, and nothing is written over it: remove it or choose another name")
    whole: WholeTensors = iter(()) if layout is None else plain_tensors(inner, strategy.whole(model), plain, without)
    with errors_on_all_ranks(ranks, WRITING_ERRORS, cannot), exhausted(whole) as tensors:
        state = adapter_state(inner, model, strategy) if is_peft(inner) else {}
        if ranks.is_first:
            with atomic_directory(path) as temporary, quiet_transformers():
                if is_peft(inner):
                    config_file = write_adapter(inner, temporary, dtype, state)
                else:
                    assert layout is not None
                    config_file = _write_model(base_of(inner), temporary, layout, tensors, dtype)
                if tokenizer is not None:
                    write_tokenizer(tokenizer, temporary, base_of(inner))
                if not is_peft(inner):
                    write_processor(base_of(inner), temporary)
                set_permissions(temporary, config_file)
    return path


def _exportable(model: object) -> "PreTrainedModel":
    """Return `model` if its weights can be exported.

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


def _write_model(
    model: "PreTrainedModel", folder: Path, layout: Layout, tensors: WholeTensors, dtype: torch.dtype | None
) -> Path:
    config_file = write_configs(model, folder, dtype)
    with SafetensorsWriter(folder, layout.files, parameters=model.num_parameters()) as writer:
        for name, tensor in in_file_layout(model, layout, tensors):
            writer.write(name, tensor)
            del tensor  # or it would stay while the next one is gathered
    return config_file

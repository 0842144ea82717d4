"""A model divided over ranks → the directory that `export_model` writes for one process, byte for byte.

Rank 0 writes; the others take part in putting each tensor together, and learn how it ended.
"""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forge_dist._errors import ExportError
from forge_dist._files import atomic_directory
from forge_dist._third_party_logs import quiet
from forge_dist.adapters._adapter import active_adapter, adapter_sources, base_of, is_peft, unwrapped, write_adapter
from forge_dist.exporting._export import WRITING, exportable, finish_configs, save_tokenizer, share
from forge_dist.exporting._layout import Layout, Whole, first_names, in_file_layout, layout_of
from forge_dist.exporting._plain_from_plain import Plain, plain_tensors
from forge_dist.exporting._safetensors_writer import SafetensorsStream
from forge_dist.ranks._errors_on_all_ranks import gathering, together

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from forge_dist.strategies._strategy import Strategy


def export_divided(
    model: torch.nn.Module,
    directory: Path,
    *,
    tokenizer: "PreTrainedTokenizerBase | None",
    dtype: torch.dtype | None,
    strategy: "Strategy",
    without: Sequence[str],
    plain: Plain | None,
) -> Path:
    """Write `model` (as `wrap` returned it) to `directory`, which is absolute; collective. See `export_model`.

    Raises:
        ExportError: on every rank, as `export_model`.
    """
    inner, ranks = unwrapped(model), strategy.ranks
    cannot = f"{directory} cannot be written"
    with together(ranks, WRITING, cannot), quiet():
        # What can be refused is refused before anything is put together. The layout is asked for on every rank: reading the state of a
        # divided model may free what its last forward gathered, and ranks must not differ in that.
        plan = (
            layout_of(exportable(inner), dtype, without)
            if not is_peft(inner)
            else adapter_sources(inner, active_adapter(inner))
        )
        if ranks.is_first and os.path.lexists(directory):
            raise ExportError(f"{directory} exists already, and nothing is written over it: remove it or choose another name")
    with (
        together(ranks, WRITING, cannot),
        gathering(plain_tensors(inner, strategy.whole(model), None if is_peft(inner) else plain, without)) as tensors,
    ):
        if ranks.is_first:
            _write(inner, directory, plan, tensors, dtype, tokenizer)
    return directory


def _write(
    inner: "PreTrainedModel | PeftModel",
    directory: Path,
    plan: Layout | dict[str, str],
    tensors: Whole,
    dtype: torch.dtype | None,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    with atomic_directory(directory) as temporary, quiet():
        if isinstance(plan, Layout):
            marker = _write_model(exportable(inner), temporary, plan, tensors, dtype)
        else:
            assert is_peft(inner)
            names = first_names(inner)
            wanted = {names[name] for name in plan.values()}
            found = {name: tensor for name, tensor in tensors if name in wanted and tensor is not None}
            state = {name: found[names[name]] for name in plan.values()}
            marker = write_adapter(inner, temporary, dtype, state)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary, base_of(inner))
        share(temporary, marker)


def _write_model(model: "PreTrainedModel", folder: Path, layout: Layout, tensors: Whole, dtype: torch.dtype | None) -> Path:
    config = copy.deepcopy(model.config)
    # What save_pretrained sets; fully_shard has made a class of its own, named after the model's.
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    with SafetensorsStream(folder, layout.files, parameters=model.num_parameters()) as stream:
        for name, tensor in in_file_layout(model, layout, tensors):
            stream.write(name, tensor)
            del tensor  # or it would stay while the next one is put together
    return finish_configs(model, folder, dtype)

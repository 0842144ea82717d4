"""Export of a model, whole or divided over ranks, for plain transformers or plain PEFT.

The directory is complete under its name or not there. Nothing of the model in memory changes, so training can go on. Each rank
writes some of the files, of which each has one writer, and reads back those of another; all take part in gathering each tensor,
and get the same error. A model that no strategy loaded is written as one process's.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from forge_dist._errors import ExportError
from forge_dist._files import atomic_directory, room_lacking
from forge_dist._third_party_logs import quiet_transformers
from forge_dist.adapters._adapter import active_adapter, write_adapter
from forge_dist.exporting._adapter_state import adapter_state
from forge_dist.exporting._directory import set_permissions, write_configs, write_processor, write_tokenizer
from forge_dist.exporting._layout import Layout, WholeTensors, first_names, in_file_layout, layout_of
from forge_dist.exporting._plain import Plain, check_without, plain_tensors
from forge_dist.exporting._read_back import read_back
from forge_dist.exporting._safetensors_writer import SafetensorsWriter, split_into_files
from forge_dist.exporting._shares import Beside, by_tensor, destinations, files_of, rank_of_files
from forge_dist.loading._model_path import Classifier
from forge_dist.loading._task import task_of
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
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write `model` to `directory` and return its absolute path.

    A PreTrainedModel becomes config.json, generation_config.json and safetensors of at most 5 GB under the names of the
    checkpoint that it came from, tied weights once. A PeftModel becomes adapter_config.json and adapter_model.safetensors. With
    `tokenizer` its files and chat template are written too. Floats are written as `dtype` (default: as they are in memory),
    except those that the architecture keeps in float32. The directory names neither our attention function nor where this
    machine keeps its files (but for an adapter's base model, which it must name), and a cache that was switched off for
    training is on again.

    A reward model or a classifier becomes a directory that AutoModelForSequenceClassification loads, and its `tokenizer` is
    written with the padding token of the configuration. An adapter on one holds its head; the base model that it names is
    loaded with `num_labels=1`, or with the config.json that is written beside an adapter of several labels.

    Modules that the run added to the model, and that plain transformers does not know, are left out by their names in `without`
    ("value_head"), however many and however deep ("model.layers.0.mlp.up_proj.osft"). Where a run keeps its changes beside a
    weight, `plain(name, tensor)` is the tensor that a plain model has there, given the name in `model.state_dict()` and the
    whole tensor of that name: it is called for each tensor that is written, on the rank that writes it, tied weights once under
    their first name, and not for adapters' files.

    `beside` writes further files into the directory before it gets its name; it is called on the first rank.

    With the `strategy` that the model was loaded by, all ranks call this together, with what `wrap` returned. The files are
    divided over the ranks, each of which writes a tensor as it is gathered, and holds no more than two at a time; for an
    architecture whose files are laid out otherwise than its memory, the tensors of one layer, or, where those are not enough,
    the whole model, and then on rank 0 alone. Before the directory gets its name another rank reads each file back. The files
    are the same, byte for byte, on any number of ranks.

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
    takes = sum(part.nbytes for part in ([] if layout is None else layout.files.values()))
    with _room_said(path, takes), _shared_directory(path, strategy, cannot) as folder:
        if is_peft(inner):
            with errors_on_all_ranks(ranks, WRITING_ERRORS, cannot), quiet_transformers():
                state = adapter_state(inner, model, strategy)
                if ranks.is_first:
                    write_adapter(inner, folder, dtype, state)
        else:
            assert layout is not None
            with errors_on_all_ranks(ranks, WRITING_ERRORS, cannot), quiet_transformers():
                if ranks.is_first:
                    write_configs(base_of(inner), folder, dtype)
            _write_weights(base_of(inner), model, folder, layout, strategy, plain, without, cannot)
        with errors_on_all_ranks(ranks, WRITING_ERRORS, cannot), quiet_transformers():
            if ranks.is_first:
                if beside is not None:
                    beside(folder)
                _write_rest(inner, folder, tokenizer)
    return path


@contextmanager
def _room_said(path: Path, takes: int) -> Iterator[None]:
    """Let an ExportError of a full disk say what the tensors take and what is free."""
    try:
        yield
    except ExportError as error:
        if not takes or not (room := room_lacking(path, takes, str(error))):
            raise
        raise ExportError(f"{error}{room}") from error.__cause__


@contextmanager
def _shared_directory(path: Path, strategy: "Strategy", cannot: str) -> Iterator[Path]:
    """Yield one temporary directory on all ranks, renamed to `path` after the body; collective.

    The body raises on all ranks or on none.
    """
    with ExitStack() as stack:
        temporary = None
        with errors_on_all_ranks(strategy.ranks, WRITING_ERRORS, cannot):
            if strategy.ranks.is_first:
                temporary = str(stack.enter_context(atomic_directory(path)))
        yield Path(strategy.ranks.broadcast(temporary))
        with errors_on_all_ranks(strategy.ranks, WRITING_ERRORS, cannot):
            stack.close()


def _write_weights(
    inner: "PreTrainedModel",
    wrapped: torch.nn.Module,
    folder: Path,
    layout: Layout,
    strategy: "Strategy",
    plain: Plain | None,
    without: Sequence[str],
    cannot: str,
) -> None:
    """Write the files of this rank, and read back those of another; collective."""
    ranks = strategy.ranks
    split = split_into_files(layout.files)
    owners = rank_of_files(list(split.filename_to_tensors), layout, ranks.world_size)
    wanted = destinations(layout, first_names(inner), by_tensor(owners, split.tensor_to_filename))
    own = None if ranks.world_size == 1 else files_of(owners, ranks.rank)
    hashes: dict[str, dict[str, str]] = {}
    whole: WholeTensors = plain_tensors(inner, strategy.whole(wrapped, wanted), plain, without)
    with errors_on_all_ranks(ranks, WRITING_ERRORS, cannot), exhausted(whole) as tensors:
        with (
            SafetensorsWriter(folder, layout.files, parameters=inner.num_parameters(), files=own) as writer,
            Beside(writer.write) as beside,
        ):
            for name, tensor in in_file_layout(inner, layout, tensors):
                if name in writer:
                    beside.call(name, tensor)
                del tensor  # or it would stay while the next one is gathered
        hashes = writer.hashes
    if ranks.world_size > 1:
        read_back(folder, owners, hashes, ranks, WRITING_ERRORS, cannot)


def _write_rest(inner: "PreTrainedModel | PeftModel", folder: Path, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Write tokenizer and processor beside the weights."""
    base = base_of(inner)
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder, base)
    write_processor(base, folder)
    if is_peft(inner) and isinstance(task_of(base), Classifier):
        # PEFT's files do not say what the outputs of the head are called, nor how many there are.
        write_configs(base, folder, None)
    set_permissions(folder, folder / ("adapter_config.json" if is_peft(inner) else "config.json"))


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

"""Export of a model and its tokenizer to one GGUF file, for llama.cpp and similar programs."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from forge_dist._errors import ExportError, ModelError
from forge_dist.gguf._architectures import Architecture
from forge_dist.gguf._layout import FileTensor, gguf_architecture, gguf_tensors, model_fields, names_in_file
from forge_dist.gguf._rotary import rotary_tensors
from forge_dist.gguf._tokenizer import tokenizer_fields
from forge_dist.gguf._types import (
    FILE_TYPES,
    GGUFType,
    ggml_name,
    gguf_type,
    in_blocks,
    quantize,
    stored_bytes,
    type_counts,
    unheld,
)
from forge_dist.loading._outline import outline_model
from forge_dist.loading._request import LoadRequest
from forge_dist.loading._task import Task
from forge_dist.loading._unwrap import base_of, merged_shapes

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FURTHER_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

Progress = Callable[[int, int], None]
"""Called with the tensors done and their number."""


def require_gguf() -> None:
    """Raise ModelError unless gguf and accelerate are installed; loads no model.

    transformers needs the latter to read such files. `export_gguf` and `check_gguf` ask it themselves; who loads or merges a
    model first asks before.
    """
    for name in ("gguf", "accelerate"):
        try:
            __import__(name)
        except ImportError:
            raise ModelError(f"GGUF files need {name}, which is not installed: `pip install 'forge-dist[gguf]'`") from None


def refuse_gguf(
    model_path: str,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    dtype: GGUFType,
    where: str | os.PathLike[str],
    task: Task = "causal",
    adapter: bool = False,
) -> None:
    """Raise ModelError where a model cannot be a GGUF file, by its configuration and tokenizer.

    No weights are read: what `export_gguf` refuses is known in a second so, before a model is loaded or merged.

    Args:
        model_path: directory of the model, or name on the Hugging Face Hub; of an adapter its base.
        tokenizer: that of the file.
        dtype: type of the matrices.
        where: file to be written, for the message.
        task: that the model was trained for.
        adapter: whether an adapter is merged into it, which may have embeddings of new tokens.

    Raises:
        ModelError: as `export_gguf`.
    """
    require_gguf()
    file = Path(where)
    model = outline_model(LoadRequest(model_path=model_path, dtype=torch.float32, attention="eager", task=task))
    arch, rows = gguf_architecture(model, file), model.config.vocab_size
    tokenizer_fields(
        tokenizer, max(rows, *(number + 1 for number in tokenizer.get_vocab().values())) if adapter else rows, file
    )
    _refuse_blocks(model, gguf_tensors(model, arch, file), dtype, file)


def rounded_weights(
    model: "PreTrainedModel | PeftModel", dtype: GGUFType, *, without: Sequence[str] = ()
) -> dict[str, tuple[GGUFType, int]]:
    """Return the weights that a file of `dtype` rounds, with type and dimension of their blocks.

    By the model's own names, those of the merged model where it has an adapter; of a head that is tied to the embedding the
    embedding's. The rows of a weight may stand in another order in the file, and each is rounded by itself. They lie along
    dimension -1, or -2 where the file has a matrix transposed (the experts of gpt-oss). Ranks may divide the model; no number
    of it is read.

    Args:
        model: a causal language model, perhaps with an adapter.
        dtype: type of the file's matrices.
        without: names of modules that are no part of the file, as of `export_model`.

    Raises:
        ModelError: as `export_gguf`.
    """
    require_gguf()
    where, found, base = Path(f"{dtype}.gguf"), {}, base_of(model)
    state = {name: torch.empty(shape, device="meta") for name, shape in merged_shapes(model).items()}
    state = {name: tensor for name, tensor in state.items() if name.partition(".")[0] not in without}
    for name, parts in names_in_file(state, base.config, gguf_architecture(base, where), where).items():
        kinds = set()
        for known, view in parts.items():
            part = view(state[name])
            kind = gguf_type(known, part.shape, dtype)
            kinds.add((kind, 0 if kind == "float32" else state[name].stride().index(part.stride(-1)) - part.ndim))
        found[name] = kinds.pop()
        if kinds:
            raise ModelError(f"{where}: the tensor {name} is divided into tensors of several types, which cannot be one")
    return {name: (kind, dim) for name, (kind, dim) in found.items() if kind != "float32"}


def export_gguf(
    model: "PreTrainedModel",
    file: str | os.PathLike[str],
    *,
    tokenizer: "PreTrainedTokenizerBase",
    dtype: GGUFType,
    name: str,
    progress: Progress | None = None,
) -> Path:
    """Write a model with tokenizer and chat template to a GGUF file; return its absolute path.

    Matrices are written as `dtype`, rounded once, vectors as float32, as readers expect; tied weights once. `gguf_type` says
    which tensors of a file of blocks are of another type; a model of which none can be in blocks is refused. The file is not
    made durable: write it inside `atomic_directory`. `check_gguf` proves it.

    Args:
        model: a causal language model of a type in `ARCHITECTURES` (llama, qwen3_moe, ...), in float32 on the CPU.
        file: path that must not exist.
        tokenizer: a fast one, BPE.
        dtype: type of the matrices.
        name: name of the model that readers show.
        progress: called with the tensors done and their number.

    Raises:
        ModelError: an architecture, a setting of it, or a tokenizer that is not supported; no matrix can be q8_0; a number that
            the type cannot hold; gguf is not installed.
        ExportError: the file exists or cannot be written.
    """
    require_gguf()
    path = Path(os.path.abspath(file))
    if dtype not in get_args(GGUFType):
        raise ExportError(f"{path}: dtype {dtype!r} is none of GGUF's: {', '.join(get_args(GGUFType))}")
    if path.exists():
        raise ExportError(f"{path} exists already, and nothing is written over it: remove it or choose another name")
    arch = gguf_architecture(model, path)
    fields = gguf_fields(model, tokenizer, dtype=dtype, name=name, where=path)
    tensors = tensors_to_write(model, arch, path)
    _refuse_blocks(model, tensors, dtype, path)
    try:
        _write(path, fields, tensors, dtype, progress)
    except ModelError:
        path.unlink(missing_ok=True)  # half of a file
        raise
    except (OSError, ValueError) as error:
        reason = _reason(path, error)
        path.unlink(missing_ok=True)
        raise ExportError(f"{path} cannot be written: {reason}") from error
    return path


def _reason(path: Path, error: Exception) -> Exception:
    """Return the system's error where numpy says only how many numbers it wrote."""
    if isinstance(error, OSError) and error.errno is None:
        try:
            with open(path, "ab", buffering=0) as file:
                file.writelines(2 * [bytes(1 << 20)])  # what there is room for, and more
        except OSError as found:
            return found
    return error


def gguf_fields(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", *, dtype: GGUFType, name: str, where: Path
) -> dict[str, Any]:
    """Return all keys and values of the file.

    Raises:
        ModelError: as `export_gguf`.
    """
    arch = gguf_architecture(model, where)
    fields = model_fields(model.config, arch)
    fields |= {"general.file_type": FILE_TYPES[dtype], "general.quantization_version": 2}
    fields |= tokenizer_fields(tokenizer, model.config.vocab_size, where, name)
    # Further tokens that end an answer: the end of a turn beside the end of a text. Readers have two more keys for them.
    ends = getattr(model.generation_config, "eos_token_id", None)
    known = (None, fields.get("tokenizer.ggml.eos_token_id"))
    others = [end for end in (ends if isinstance(ends, list) else [ends]) if end not in known]
    return fields | dict(zip(_FURTHER_ENDS, others, strict=False))


def tensors_to_write(model: "PreTrainedModel", arch: Architecture, where: Path) -> dict[str, FileTensor]:
    """Return name in the file → tensor, with those of the rotary embeddings.

    Raises:
        ModelError: a tensor has no name in GGUF.
    """
    rotary = {name: FileTensor(tensor, tuple(tensor.shape)) for name, tensor in rotary_tensors(model).items()}
    return rotary | gguf_tensors(model, arch, where)


def _refuse_blocks(model: "PreTrainedModel", tensors: Mapping[str, FileTensor], dtype: GGUFType, where: Path) -> None:
    """Raise ModelError where no matrix can be in blocks, or mxfp4 finds no experts."""
    counts = type_counts(tensors, dtype)
    if in_blocks(dtype) and counts.keys() <= {"float32", "float16"}:
        raise ModelError(
            f"{where}: no matrix of this model can be {dtype}, which holds blocks of 32 numbers: no row of one is a multiple "
            f"of 32 long (hidden_size {model.config.hidden_size}); take dtype=float16"
        )
    if dtype == "mxfp4" and "mxfp4" not in counts:
        raise ModelError(
            f"{where}: mxfp4 is the type of experts, and this {model.config.model_type} model has none whose rows are a "
            "multiple of 32 long; take dtype=q4_0"
        )


def _write(
    path: Path, fields: dict[str, Any], tensors: dict[str, FileTensor], dtype: GGUFType, progress: Progress | None
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer: Any = GGUFWriter(path, fields["general.architecture"])
    try:
        for key, value in fields.items():
            if key != "general.architecture":  # the writer's own
                _add(writer, key, value)
        for name, tensor in tensors.items():
            kind = gguf_type(name, tensor.shape, dtype)
            writer.add_tensor_info(
                name,
                tensor.shape,
                None,  # numpy's type, which raw_dtype replaces
                stored_bytes(tensor.shape, kind),
                raw_dtype=GGMLQuantizationType[ggml_name(kind)],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, tensor) in enumerate(tensors.items(), start=1):
            kind, values = gguf_type(name, tensor.shape, dtype), tensor.values()
            written = quantize(values, kind)
            if why := unheld(values, written, kind):
                raise ModelError(f"{path}: the tensor {name} {why}")
            writer.write_tensor_data(written)
            if progress is not None:
                progress(done, len(tensors))
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)

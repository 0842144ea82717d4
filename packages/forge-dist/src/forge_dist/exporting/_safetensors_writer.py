"""Writer of safetensors files: one tensor at a time, in any order, straight to its place.

The places follow from names, shapes and dtypes alone, so no more than one tensor need be in memory. The files are the same,
byte for byte, as those of safetensors' own writer, which needs all tensors of a file at once.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

import torch

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

FILE_SIZE = 5 * 10**9
"""Largest size of a file in bytes, but for a single tensor that is larger; transformers' older default."""

_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Dtype → name, in the order of safetensors' own enumeration: a file holds the last of them first, so that all are aligned."""

_ORDER = {dtype: -position for position, dtype in enumerate(_TYPES)}


def split_into_files(tensors: Mapping[str, torch.Tensor]) -> "StateDictSplit":
    """Divide `tensors` into files of at most FILE_SIZE, as transformers does.

    Only shapes and dtypes are used.

    Raises:
        ValueError: a dtype that safetensors files of models do not hold.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in _TYPES]
    if unknown:
        raise ValueError(f"the tensor {unknown[0]} is of type {tensors[unknown[0]].dtype}, which is not written")
    return split_torch_state_dict_into_shards(
        # New tensors: a view would count with the whole tensor that it is a view of.
        {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_SIZE,
    )


class SafetensorsWriter:
    """Writer of model.safetensors, or of several files with their index; a context manager.

    Leaving it without an error checks that every tensor was written; each file is made durable with its last tensor.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], *, parameters: int, files: Collection[str] | None = None
    ) -> None:
        """Create the files of `tensors` in `folder`; only shapes and dtypes are used.

        `parameters` is the number of parameters that an index states. With `files`, some of those of `split_into_files`, only
        these are written, by a process beside others; what is written is hashed then. The index is written with the first.

        Raises:
            ValueError: a dtype that safetensors files of models do not hold.
            OSError: the files cannot be created.
        """
        split = split_into_files(tensors)
        own = {file: names for file, names in split.filename_to_tensors.items() if files is None or file in files}
        self._tensors = tensors
        self._hashed = files is not None
        self._files: dict[str, BinaryIO] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._left = {file: set(names) for file, names in own.items()}
        self.hashes: dict[str, dict[str, str]] = {file: {} for file in own}
        """File → name → SHA-256 of the tensor's bytes; with `files` alone."""
        try:
            for file, names in own.items():
                header, places, size = header_of({name: tensors[name] for name in names})
                self._files[file] = stream = open(folder / file, "xb")  # noqa: SIM115  closed when its last tensor is there
                stream.write(header)
                stream.truncate(size)
                self._places |= {name: (file, at) for name, at in places.items()}
            if split.is_sharded and next(iter(split.filename_to_tensors)) in own:
                index = {
                    "metadata": {"total_parameters": parameters, **split.metadata},
                    "weight_map": split.tensor_to_filename,
                }
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        except BaseException:
            self._close()
            raise

    def __contains__(self, name: object) -> bool:
        """Return whether the tensor is in one of the files that are written here."""
        return name in self._places

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write `tensor` (CPU) to its place, cast to the announced dtype.

        Raises:
            ValueError: it has another shape than was announced, or was written before.
            KeyError: it was not announced.
            OSError: it cannot be written.
        """
        planned = self._tensors[name]
        file, at = self._places[name]
        if tensor.shape != planned.shape:
            raise ValueError(f"the tensor {name} came with shape {list(tensor.shape)} instead of {list(planned.shape)}")
        if name not in self._left[file]:
            raise ValueError(f"the tensor {name} came twice")
        flat = tensor.detach().to(device="cpu", dtype=planned.dtype).contiguous().reshape(-1)
        stream = self._files[file]
        stream.seek(at)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        stream.write(data)
        if self._hashed:
            self.hashes[file][name] = hashlib.sha256(data).hexdigest()
        self._left[file].discard(name)
        if not self._left[file]:
            # At once, not at the end: the other ranks wait, and a collective that takes too long is an error there.
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close()
        missing = sorted(name for names in self._left.values() for name in names)
        if kind is None and missing:
            raise ValueError(f"the tensor {missing[0]} never came ({len(missing)} such)")

    def _close(self) -> None:
        for stream in self._files.values():
            stream.close()


def header_of(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return a file's header, the position of each tensor, and the file's size.

    `_safetensors` has the format.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0].encode())):
        places[name], end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [places[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + at for name, at in places.items()}, begin + end

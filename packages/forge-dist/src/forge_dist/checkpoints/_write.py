"""Write a rank's pieces to one safetensors file, hashed as it is written.

The bytes are those of torch.distributed.checkpoint's own safetensors storage (`HuggingFaceStorageReader` reads them too): every
entry is named after its tensor and the header's DCP_SHARDING_INFO has its offsets in the tensor. Written here because torch's
writer builds the whole file in memory first and cannot hash it on the way.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from forge_dist.checkpoints._plan import Piece

_BLOCK = 8 << 20  # bytes per write and hash update: few calls, and caches are soon freed


class WrittenFile(NamedTuple):
    """Size and digest of a file, as in the manifest."""

    size: int  # bytes
    sha256: str


def file_of(rank: int) -> str:
    """Return the name of the file that `rank` writes."""
    return f"rank_{rank}.safetensors"


def write_file(
    path: Path, pieces: Mapping[str, Piece], values: Mapping[str, torch.Tensor], names: Sequence[str]
) -> WrittenFile:
    """Write the pieces `names` (any device, any strides) to a new file and make it durable.

    Raises:
        OSError: the file cannot be written.
    """
    # Wide types first keeps every entry aligned, as the format's own writer does.
    names = sorted(names, key=lambda name: (-values[name].dtype.itemsize, name))
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": pieces[name].offsets} for name in names}),
        }
    }
    end = 0
    for name in names:
        start, end = end, end + values[name].nbytes
        header[name] = {"dtype": pieces[name].dtype, "shape": pieces[name].sizes, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:

        def put(data: memoryview) -> None:
            for start in range(0, len(data), _BLOCK):
                block = data[start : start + _BLOCK]
                digest.update(block)
                while block:  # a raw file may take a part only
                    block = block[file.write(block) :]

        put(memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            flat = values[name].detach().to("cpu").contiguous().reshape(-1)
            if flat.numel():
                put(flat.view(torch.uint8).numpy().data)
        os.fsync(file.fileno())
    return WrittenFile(8 + len(text) + end, digest.hexdigest())

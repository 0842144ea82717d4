"""Types of a GGUF file's tensors: which tensor is of which, and how it is rounded."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

GGUFType = Literal["float32", "float16", "bfloat16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]
"""Type of a file's matrices: plain floats, or blocks of 32 numbers.

A block has one scale and integers of 8, 5 or 4 bits, those of `_1` with an offset too; mxfp4 (OCP Microscaling Formats v1.0)
has floats of 4 bits and a power of two.
"""

BLOCK = 32
"""Numbers of a block, in all types that have blocks."""

FILE_TYPES: dict[str, int] = {
    "float32": 0,
    "float16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "bfloat16": 32,
    "mxfp4": 38,
}
"""Type → llama.cpp's llama_ftype."""

_GGML_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ENDS = ("token_embd.weight", "output.weight")


def in_blocks(dtype: GGUFType) -> bool:
    """Return whether a type holds blocks of 32 numbers."""
    return dtype not in _GGML_NAMES


def gguf_type(name: str, shape: Sequence[int], dtype: GGUFType) -> GGUFType:
    """Return the type that one tensor has in a file whose matrices are `dtype`.

    Vectors, biases and the routers of experts are float32, as llama.cpp's converter writes them. In files of blocks, a row
    that 32 does not divide makes a matrix float16, as in llama-quantize. The embedding and the head are q8_0 in files of 5
    and 4 bits (llama-quantize has q6_K for the head, which is coarser, and the file's own type for the embedding). Of mxfp4
    only experts are mxfp4 and other matrices q8_0, as llama.cpp's MXFP4_MOE.

    >>> gguf_type("blk.0.ffn_up.weight", (96, 64), "q4_0"), gguf_type("token_embd.weight", (400, 64), "q4_0")
    ('q4_0', 'q8_0')

    Args:
        name: that of the tensor in the file.
        shape: its shape, rows along the last dimension.
        dtype: type of the file.
    """
    if len(shape) < 2 or not name.endswith(".weight") or ".ffn_gate_inp" in name:
        return "float32"
    if not in_blocks(dtype):
        return dtype
    if shape[-1] % BLOCK:
        return "float16"
    if dtype == "mxfp4":
        return "mxfp4" if len(shape) == 3 else "q8_0"
    return "q8_0" if name in _ENDS else dtype


class _Shaped(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def type_counts(tensors: Mapping[str, _Shaped], dtype: GGUFType) -> dict[str, int]:
    """Return type → how many matrices of a `dtype` file are of it."""
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) >= 2 and name.endswith(".weight"):
            kind = gguf_type(name, tensor.shape, dtype)
            found[kind] = found.get(kind, 0) + 1
    return found


def quantize(tensor: torch.Tensor, dtype: GGUFType) -> Any:
    """Round a tensor once to a type; return the array that a GGUF file holds.

    Numpy's, of bytes but for float32 and float16. Rows are along the last dimension; of a type of blocks a multiple of 32 long.
    """
    from gguf import GGMLQuantizationType, quants

    values = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
    if dtype == "float32":
        return values.numpy()
    if dtype == "float16":
        return values.to(torch.float16).numpy()
    if dtype == "bfloat16":
        return values.to(torch.bfloat16).view(torch.uint8).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what cannot be held, which `unheld` finds
        return quants.quantize(values.numpy(), GGMLQuantizationType[ggml_name(dtype)])


def unheld(tensor: torch.Tensor, written: Any, dtype: GGUFType) -> str:
    """Return why a type cannot hold a tensor; empty where it can.

    A number is NaN or infinite; or so large that float16, of which the scale and the offset of a block are, overflows.

    Args:
        tensor: what was rounded.
        written: what `quantize` made of it.
        dtype: the type.
    """
    largest = tensor.abs().max().item() if tensor.numel() else 0.0
    if not math.isfinite(largest):
        return f"has a number that is {'NaN' if math.isnan(largest) else 'infinite'}: the model computes nothing"
    if dtype in ("float32", "bfloat16", "mxfp4"):
        return ""
    scales = torch.from_numpy(written)
    if in_blocks(dtype):
        blocks = scales.reshape(-1, stored_bytes((BLOCK,), dtype))
        scales = blocks[:, : 4 if dtype.endswith("_1") else 2].contiguous().view(torch.float16)
    if scales.isfinite().all():
        return ""
    return f"has a number of {largest:g}, which {dtype} cannot hold: take dtype=bfloat16"


def gguf_rounded(tensor: torch.Tensor, dtype: GGUFType) -> torch.Tensor:
    """Return the values that readers of a file find in place of a tensor.

    float32, in its shape. Rounds to the type and back by the gguf library's own arithmetic; ggml's makes the same bytes of
    q8_0 and mxfp4, and other ones of q5 and q4 (tests/peers).
    """
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[ggml_name(dtype)]
    return torch.tensor(quants.dequantize(quantize(tensor, dtype), kind)).reshape(tensor.shape)


def ggml_name(dtype: GGUFType) -> str:
    """Return ggml's name of a type, such as Q8_0."""
    return _GGML_NAMES.get(dtype, dtype.upper())


def stored_bytes(shape: Iterable[int], dtype: GGUFType) -> int:
    """Return how many bytes a tensor of a shape takes in a file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[ggml_name(dtype)]]
    return math.prod(shape) // block * size

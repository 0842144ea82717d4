"""Weights in MXFP4 (gpt-oss): read dequantized, where the machine has the memory.

A block of 32 numbers is 16 bytes of two e2m1 numbers each (NAME_blocks) and a power of two (NAME_scales, e8m0). Source: OCP
Microscaling Formats (MX) 1.0.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_dist._errors import ModelError
from forge_dist._safetensors import read_directory
from forge_dist.loading._model_path import is_mxfp4

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a tensor's codes and of its scales."""


def dequantizing(path: str, config: "PreTrainedConfig", dtype: torch.dtype, *, whole: bool, quantized: bool) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that dequantize MXFP4; none for other weights.

    Args:
        path: directory or hub name.
        config: its configuration.
        dtype: that the weights become.
        whole: whether this process reads the whole model, and not a shard of it.
        quantized: whether the weights are to be quantized in another way.

    Raises:
        ModelError: the dequantized weights are larger than the machine's memory, or are to be quantized again.
    """
    if not is_mxfp4(getattr(config, "quantization_config", None)):
        return {}
    if quantized:
        raise ModelError(
            f"model_path {path}: its weights are in MXFP4, which is read dequantized, and are not quantized again: use "
            "adapter=lora"
        )
    needed, present = _dequantized_bytes(Path(path), dtype), _memory()
    if whole and needed > present > 0:
        raise ModelError(
            f"model_path {path}: its MXFP4 weights take {needed / 2**30:.1f} GiB dequantized to {dtype}, and this machine has "
            f"{present / 2**30:.1f} GiB of memory: divide it over "
            "ranks (strategy=fsdp2), or train an adapter with dtype=bfloat16"
        )
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _dequantized_bytes(directory: Path, dtype: torch.dtype) -> int:
    """Return the size of a directory's weights as `dtype`; 0 where its files are not here."""
    if not directory.is_dir():
        return 0
    numbers = 0
    for name, tensor in read_directory(directory).items():
        if name.endswith(BLOCKS):
            numbers += 2 * tensor.size
        elif not name.endswith(SCALES):
            numbers += math.prod(tensor.shape)
    return numbers * dtype.itemsize


def _memory() -> int:
    """Return the bytes of the machine's memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0

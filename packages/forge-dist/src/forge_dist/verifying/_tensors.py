"""Bitwise comparison of files and of a reloaded model with the model in memory.

Losses alone prove little (an expert that the samples did not reach may be wrong); bits prove the export, and cost one reading.
"""

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open

from forge_dist._errors import ExportError
from forge_dist._safetensors import read_directory
from forge_dist.exporting._layout import Layout, WholeTensors, in_file_layout
from forge_dist.loading._task import HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_UNUSED_HEAD = f".{HEAD}.original_module."
"""The head that PEFT keeps beside the trained one: where the base is a causal model, each loading draws another."""


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes.

    So NaN equals itself, and 0.0 is not -0.0.
    """
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(first.element_size(), torch.uint8)
    first, second = (tensor.detach().to("cpu").contiguous().reshape(-1).view(bits) for tensor in (first, second))
    return torch.equal(first, second)


def prove_model(
    files: "Files", model: "PreTrainedModel", layout: Layout, tensors: WholeTensors, names: Collection[str]
) -> None:
    """Raise ExportError unless `files` hold these `names` as they are among `tensors`.

    Each is cast to its stored dtype.
    """
    left = set(names)
    for name, tensor in in_file_layout(model, layout, tensors):
        if name in left:
            files.prove(name, tensor)
            left.discard(name)
    if left:
        raise ValueError(f"the tensor {min(left)} never came ({len(left)} such)")


class Files:
    """Safetensors files of a directory, to be compared tensor by tensor. A context manager.

    Raises:
        ExportError: a file is missing or broken.
    """

    def __init__(self, directory: Path, stem: str) -> None:
        self._directory = directory
        try:
            self._stored = read_directory(directory, stem)
        except (ValueError, OSError) as error:
            raise ExportError(f"{directory} does not hold what was exported: {error}") from error
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self.dtypes: set[torch.dtype] = set()
        """Float dtypes of the tensors that were compared."""

    @property
    def places(self) -> dict[str, str]:
        """Name of each stored tensor → name of its file."""
        return {name: entry.file.name for name, entry in self._stored.items()}

    def prove_names(self, expected: Collection[str]) -> None:
        """Raise ExportError, with the first name, unless files have the `expected` names alone."""
        wanted, stored = set(expected), set(self._stored)
        for what, names in (("lacks", wanted - stored), ("has the unknown", stored - wanted)):
            if names:
                raise ExportError(f"{self._directory} {what} tensor {min(names)} ({len(names)} such)")

    def prove(self, name: str, wanted: torch.Tensor) -> None:
        """Raise ExportError unless the stored tensor is `wanted`, cast to its stored dtype."""
        file = self._stored[name].file
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        found = self._open[file].get_tensor(name)
        if not same_bits(wanted.to(device="cpu", dtype=found.dtype), found):
            raise ExportError(f"{file}: the tensor {name} is not the one in memory{_difference(wanted, found)}")
        if found.is_floating_point():
            self.dtypes.add(found.dtype)
        elif wanted.is_floating_point():
            raise ExportError(f"{file}: the tensor {name} is stored as {found.dtype}, which no float can be")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()


def prove_reloaded_names(ours: Collection[str], theirs: Collection[str], where: Path) -> None:
    """Raise ExportError, with the first name, unless both models have tensors of the same names."""
    for what, names in (("without", set(ours) - set(theirs)), ("with the unknown", set(theirs) - set(ours))):
        if names:
            raise ExportError(f"{where} loads {what} tensor {min(names)} ({len(names)} such)")


def prove_reloaded_tensor(name: str, wanted: torch.Tensor, found: torch.Tensor, dtypes: set[torch.dtype], where: Path) -> bool:
    """Return whether a reloaded tensor was rounded.

    False if `found` is `wanted` to the bit, True if it is that cast through one of the stored float `dtypes`.

    Raises:
        ExportError: it is neither.
    """
    if same_bits(wanted.to(found.dtype), found) or _UNUSED_HEAD in name:
        return False
    casts = dtypes if wanted.is_floating_point() else ()
    if not any(same_bits(wanted.to(dtype).to(found.dtype), found) for dtype in casts):
        raise ExportError(f"{where} loads a tensor {name} that is not the one in memory{_difference(wanted, found)}")
    return True


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> str:
    if wanted.shape != found.shape:
        return f": shape {list(found.shape)} instead of {list(wanted.shape)}"
    if not wanted.is_floating_point():
        return ""
    largest = (wanted.detach().cpu().double() - found.detach().cpu().double()).abs().max().item()
    return f": the largest difference is {largest:.3g}"

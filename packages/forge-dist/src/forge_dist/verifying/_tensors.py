"""Files and a reloaded model against the model in memory: every tensor, every bit, names that are missing or too many.

Losses alone prove little (an expert that the samples did not reach may be wrong); bits prove the export, and cost one reading.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open

from forge_dist._errors import ExportError
from forge_dist._safetensors import read_directory
from forge_dist.exporting._layout import Layout, Whole, in_file_layout
from forge_dist.exporting._plain import left
from forge_dist.exporting._plain_from_plain import Plain, made_plain
from forge_dist.loading._task import HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_UNUSED_HEAD = f".{HEAD}.original_module."
"""What PEFT puts aside for the trained head: where the base is a causal model, each loading draws another."""


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (so NaN equals itself, and 0.0 is not -0.0)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(first.element_size(), torch.uint8)
    first, second = (tensor.detach().to("cpu").contiguous().reshape(-1).view(bits) for tensor in (first, second))
    return torch.equal(first, second)


def adapter_tensors(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Name in adapter_model.safetensors → tensor in memory."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def prove_model(files: "Files", model: "PreTrainedModel", layout: Layout, tensors: Whole) -> None:
    """Raise ExportError unless the `files`, whose names are proved, hold the whole `tensors` of `model`, each cast to the type it is stored in."""
    for name, tensor in in_file_layout(model, layout, tensors):
        files.prove(name, tensor)


def prove_files(expected: Mapping[str, torch.Tensor], directory: Path, stem: str) -> set[torch.dtype]:
    """Return the float types found if the files of `directory` hold `expected` and nothing else, each cast to the type it is stored in.

    Raises:
        ExportError: a file is missing or broken, or a tensor is missing, too many, or differs; the first one is named.
    """
    with Files(directory, stem) as files:
        files.prove_names(expected)
        for name in sorted(expected):
            files.prove(name, expected[name])
        return files.floats


class Files:
    """The safetensors files of a directory, to be compared tensor by tensor. A context manager.

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
        self.floats: set[torch.dtype] = set()
        """The float types of the tensors that were compared."""

    def prove_names(self, expected: Collection[str]) -> None:
        """Raise ExportError unless the files hold tensors of the `expected` names and no others; the first one is named."""
        wanted, stored = set(expected), set(self._stored)
        for what, names in (("lacks", wanted - stored), ("has the unknown", stored - wanted)):
            if names:
                raise ExportError(f"{self._directory} {what} tensor {min(names)} ({len(names)} such)")

    def prove(self, name: str, wanted: torch.Tensor) -> None:
        """Raise ExportError unless the stored tensor is `wanted`, cast to the type in which it is stored."""
        file = self._stored[name].file
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        found = self._open[file].get_tensor(name)
        if not same_bits(wanted.to(device="cpu", dtype=found.dtype), found):
            raise ExportError(f"{file}: the tensor {name} is not the one in memory{_difference(wanted, found)}")
        if found.is_floating_point():
            self.floats.add(found.dtype)
        elif wanted.is_floating_point():
            raise ExportError(f"{file}: the tensor {name} is stored as {found.dtype}, which no float can be")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()


def prove_reloaded(
    model: torch.nn.Module,
    reloaded: torch.nn.Module,
    types: set[torch.dtype],
    where: Path,
    without: Sequence[str] = (),
    plain: Plain | None = None,
) -> bool:
    """Whether a tensor was rounded, if every tensor of `reloaded` is that of `model`, plain, unchanged or through one of the stored float `types`.

    The modules `without` are not looked for.

    Raises:
        ExportError: a tensor is missing, too many, or differs; the first one is named.
    """
    ours, theirs = left(model.state_dict(), without), left(reloaded.state_dict(), without)
    prove_reloaded_names(ours, theirs, where)
    rounded = [
        prove_reloaded_tensor(name, made_plain(plain, name, wanted), theirs[name], types, where)
        for name, wanted in ours.items()
    ]
    return any(rounded)


def prove_reloaded_names(ours: Collection[str], theirs: Collection[str], where: Path) -> None:
    """Raise ExportError unless both models have tensors of the same names; the first one that differs is named."""
    for what, names in (("without", set(ours) - set(theirs)), ("with the unknown", set(theirs) - set(ours))):
        if names:
            raise ExportError(f"{where} loads {what} tensor {min(names)} ({len(names)} such)")


def prove_reloaded_tensor(name: str, wanted: torch.Tensor, found: torch.Tensor, types: set[torch.dtype], where: Path) -> bool:
    """Whether a tensor was rounded: False if `found` is `wanted` to the bit, True if it is that through one of the stored float `types`.

    Raises:
        ExportError: it is neither.
    """
    if same_bits(wanted.to(found.dtype), found) or _UNUSED_HEAD in name:
        return False
    ways = types if wanted.is_floating_point() else ()
    if not any(same_bits(wanted.to(dtype).to(found.dtype), found) for dtype in ways):
        raise ExportError(f"{where} loads a tensor {name} that is not the one in memory{_difference(wanted, found)}")
    return True


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> str:
    if wanted.shape != found.shape:
        return f": shape {list(found.shape)} instead of {list(wanted.shape)}"
    if not wanted.is_floating_point():
        return ""
    largest = (wanted.detach().double().cpu() - found.detach().double().cpu()).abs().max().item()
    return f": the largest difference is {largest:.3g}"

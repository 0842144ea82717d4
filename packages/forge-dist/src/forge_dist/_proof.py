"""Files and a reloaded model against the model in memory: every tensor, every bit, names that are missing or too many.

Losses alone prove little (an expert that the samples did not reach may be wrong); bits prove the export, and cost one reading.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from forge_dist._errors import ExportError
from forge_dist._safetensors import read_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (so NaN equals itself, and 0.0 is not -0.0)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(first.element_size(), torch.uint8)
    first, second = (tensor.detach().to("cpu").contiguous().reshape(-1).view(bits) for tensor in (first, second))
    return torch.equal(first, second)


def model_tensors(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """Name in a checkpoint → tensor in memory: tied weights once, and an architecture's internal layout turned back."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def adapter_tensors(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Name in adapter_model.safetensors → tensor in memory."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def prove_files(expected: Mapping[str, torch.Tensor], directory: Path, stem: str) -> set[torch.dtype]:
    """Return the float types found if the files of `directory` hold `expected` and nothing else, each cast to the type it is stored in.

    Raises:
        ExportError: a file is missing or broken, or a tensor is missing, too many, or differs; the first one is named.
    """
    try:
        stored = read_directory(directory, stem)
    except (ValueError, OSError) as error:
        raise ExportError(f"{directory} does not hold what was exported: {error}") from error
    for what, names in (("lacks", expected.keys() - stored.keys()), ("has the unknown", stored.keys() - expected.keys())):
        if names:
            raise ExportError(f"{directory} {what} tensor {min(names)} ({len(names)} such)")
    floats: set[torch.dtype] = set()
    with ExitStack() as stack:
        open_files: dict[Path, Any] = {}
        for name, place in sorted(stored.items()):
            if place.file not in open_files:
                open_files[place.file] = stack.enter_context(safe_open(place.file, framework="pt"))
            found, wanted = open_files[place.file].get_tensor(name), expected[name]
            if not same_bits(wanted.to(device="cpu", dtype=found.dtype), found):
                raise ExportError(f"{place.file}: the tensor {name} is not the one in memory{_difference(wanted, found)}")
            if found.is_floating_point():
                floats.add(found.dtype)
            elif wanted.is_floating_point():
                raise ExportError(f"{place.file}: the tensor {name} is stored as {found.dtype}, which no float can be")
    return floats


def prove_reloaded(model: torch.nn.Module, reloaded: torch.nn.Module, types: set[torch.dtype], where: Path) -> bool:
    """Whether a tensor was rounded, if every tensor of `reloaded` is that of `model`, unchanged or through one of the stored float `types`.

    Raises:
        ExportError: a tensor is missing, too many, or differs; the first one is named.
    """
    ours, theirs = model.state_dict(), reloaded.state_dict()
    for what, names in (("without", ours.keys() - theirs.keys()), ("with the unknown", theirs.keys() - ours.keys())):
        if names:
            raise ExportError(f"{where} loads {what} tensor {min(names)} ({len(names)} such)")
    rounded = False
    for name, wanted in ours.items():
        found = theirs[name]
        if same_bits(wanted.to(found.dtype), found):
            continue
        rounded = True
        ways = types if wanted.is_floating_point() else ()
        if not any(same_bits(wanted.to(dtype).to(found.dtype), found) for dtype in ways):
            raise ExportError(f"{where} loads a tensor {name} that is not the one in memory{_difference(wanted, found)}")
    return rounded


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> str:
    if wanted.shape != found.shape:
        return f": shape {list(found.shape)} instead of {list(wanted.shape)}"
    if not wanted.is_floating_point():
        return ""
    largest = (wanted.detach().double().cpu() - found.detach().double().cpu()).abs().max().item()
    return f": the largest difference is {largest:.3g}"

"""A stored adapter of PiSSA or OLoRA → the same one beside the base as it is.

PEFT stores A₁ and B₁, and takes the first product s B₀ A₀ out of the base again when it reads them. Here it is the second half
of an adapter of twice the rank, as in `_lora_init`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_algos._errors import AdapterError
from forge_algos.adaptations.base._adaptation import Context
from forge_algos.adaptations.peft._lora_init import check_init
from forge_algos.settings._adapter import AdapterSettings

if TYPE_CHECKING:
    from peft import PeftConfig

Shapes = Mapping[str, tuple[int, ...]]

_DOUBLED = {".lora_A.weight": 0, ".lora_B.weight": 1}
"""End of a tensor's name in the file → dimension of its rank."""


def check_subtracted(
    model: nn.Module, settings: AdapterSettings, config: "PeftConfig", ranks: Mapping[str, int], holders: Sequence[str]
) -> None:
    """Raise AdapterError where the first product of a layer cannot be known again.

    Args:
        model: the base, before PEFT.
        settings: of the adapter, with what its file decides.
        config: PEFT's configuration.
        ranks: rank of each linear layer among the targets by its full name.
        holders: full names of all modules that the adapter has tensors of.
    """
    others = [name for name in holders if name not in ranks]
    if others:
        raise AdapterError(
            f"adapter_path {settings.adapter_path}: init_lora_weights={settings.init_lora_weights} of {others[0]}, which is no "
            "linear layer: write it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) first"
        )
    parameters: Any = getattr(config, "target_parameters", None)
    check_init(model, settings, ranks, list(parameters or ()), Context())


def double(config: Any) -> None:
    """Give PEFT's configuration twice the rank at the same scale."""
    scale = scale_of_double(config)
    config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * scale
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: alpha * scale for name, alpha in config.alpha_pattern.items()}


def scale_of_double(config: Any) -> float:
    """Return by what lora_alpha grows where the rank doubles."""
    return 2**0.5 if config.use_rslora else 2


def doubled_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the tensors in a file, of twice the rank."""
    found = {}
    for name, shape in shapes.items():
        dim = _dim(name)
        found[name] = shape if dim is None else tuple(size * (1 + (dim == at)) for at, size in enumerate(shape))
    return found


def with_second_halves(tensors: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, followed by the second halves of those that were attached."""
    found = {}
    for name, tensor in tensors.items():
        dim = _dim(name)
        if dim is not None:
            second = now[name].detach().narrow(dim, tensor.shape[dim], tensor.shape[dim])
            tensor = torch.cat([tensor.to(second), second], dim=dim)  # noqa: PLW2901 - the same one, whole
        found[name] = tensor
    return found


def _dim(name: str) -> int | None:
    return next((dim for end, dim in _DOUBLED.items() if name.endswith(end)), None)

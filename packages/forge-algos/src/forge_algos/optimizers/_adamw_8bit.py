"""bitsandbytes' AdamW with its state in 8 bits, where it works on the parameters' device."""

from importlib import import_module
from typing import Any

import torch
from torch import nn

from forge_algos._errors import MissingPackageError, OptimizerError


def adamw_8bit(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Make bitsandbytes' AdamW8bit over `groups`, after a trial step on their devices.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
        OptimizerError: it cannot take a step on a device that holds parameters.
    """
    try:
        made = import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise MissingPackageError(
            f"optimizer=adamw_8bit needs bitsandbytes ({error}): `pip install 'forge-algos[bitsandbytes]'`, or use "
            "optimizer=adamw"
        ) from error
    kinds = {(p.device, p.dtype) for group in groups for p in group["params"]}
    for device, dtype in sorted(kinds, key=str):
        # Enough numbers for the state to be in 8 bits.
        made_up = nn.Parameter(torch.zeros(64, 64, device=device, dtype=dtype))
        made_up.grad = torch.ones_like(made_up)
        try:
            made([made_up], lr=1.0).step()
            moved = bool((made_up != 0).all())
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise OptimizerError(f"{_refusal(device, dtype)}: {error}. {_REMEDY}") from error
        if not moved:
            raise OptimizerError(f"{_refusal(device, dtype)}: a step moves nothing. {_REMEDY}")
    return made(groups, **options)


_REMEDY = "Use optimizer=adamw, or optimizer=adafactor where memory is short"


def _refusal(device: torch.device, dtype: torch.dtype) -> str:
    return f"optimizer=adamw_8bit: bitsandbytes does not serve {device} with weights in {str(dtype).removeprefix('torch.')}"

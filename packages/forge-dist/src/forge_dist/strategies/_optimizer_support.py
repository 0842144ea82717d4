"""Which optimizers can move weights that are divided over ranks; found out by running each.

An optimizer's kind is its class, or `algorithm` in each of its groups for one that is made of several.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from forge_dist._errors import StrategyError

_ELEMENTWISE = (
    torch.optim.Adam,  # AdamW too
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""Optimizers that move each element by its own history alone, and keep nothing else."""

_WHOLE = "or a strategy that keeps weights whole (ddp)"
_NOT_SHARDED = {
    "adafactor": "torch's Adafactor cannot take the mean of a column that is divided over ranks",
    "bitsandbytes": "bitsandbytes' own optimizers take no weights that are divided over ranks",
}


def moves_shards(optimizer: str) -> bool:
    """Return whether an optimizer of this name can move sharded weights.

    Names as in `check_optimizer_name`.
    """
    return optimizer not in _NOT_SHARDED


def check_optimizer_name(
    strategy: str, optimizer_gets: Literal["tensors", "shards", "flat"], optimizer: str, *, adapter: bool
) -> None:
    """Refuse, before there is a model, what `check_flat` and `check_sharded` would refuse.

    Args:
        strategy: the name of the strategy.
        optimizer_gets: what its optimizer moves (`StrategySpec.optimizer_gets`).
        optimizer: adamw, adafactor, muon, schedule_free, adamw_8bit, apollo or apollo_mini, as forge_algos calls them.
        adapter: whether only an adapter is trained.

    Raises:
        StrategyError: they do not work together.
    """
    if optimizer_gets == "flat" and optimizer != "adamw":
        raise StrategyError(_flat(strategy, f"optimizer={optimizer}"))
    # Adapters are whole on every rank.
    if optimizer_gets == "shards" and not moves_shards(optimizer) and not adapter:
        raise StrategyError(_sharded(strategy, optimizer, f"optimizer={optimizer}"))


def check_flat(strategy: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs the shape of a weight or keeps a count of its own.

    Raises:
        StrategyError: it is none of those that move each element by itself.
    """
    if not isinstance(optimizer, _ELEMENTWISE):
        raise StrategyError(_flat(strategy, type(optimizer).__name__))


def check_sharded(strategy: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds DTensors and cannot move them.

    Raises:
        StrategyError: it is such a one.
    """
    for algorithm, parameter in _parameters(optimizer):
        # A vector has no rows and columns: Adafactor keeps its variance as it is.
        if algorithm in _NOT_SHARDED and isinstance(parameter, DTensor) and (parameter.dim() > 1 or algorithm != "adafactor"):
            raise StrategyError(_sharded(strategy, algorithm, type(optimizer).__name__))


def move_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer move each weight by itself where weights lie on different meshes.

    torch cannot move those together.
    """
    meshes = {getattr(parameter, "device_mesh", None) for _, parameter in _parameters(optimizer)}
    for group in optimizer.param_groups if len(meshes) > 1 else ():
        group.update({name: False for name in ("foreach", "fused") if name in group})


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    own = "bitsandbytes" if type(optimizer).__module__.startswith("bitsandbytes") else type(optimizer).__name__.lower()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group.get("algorithm", own), parameter


def _flat(strategy: str, found: str) -> str:
    return (
        f"strategy={strategy} gives the optimizer flat pieces of many weights at once, so it must move each number by "
        f"itself, as torch.optim.AdamW does; found {found}: use optimizer=adamw, strategy=fsdp2 (for adamw, muon, "
        f"schedule_free, adamw_8bit, apollo, apollo_mini), {_WHOLE}"
    )


def _sharded(strategy: str, algorithm: str, found: str) -> str:
    return (
        f"strategy={strategy} divides the weights, and {_NOT_SHARDED[algorithm]}; found {found}: use optimizer=adamw, muon, "
        f"schedule_free, adamw_8bit, apollo or apollo_mini, an adapter (adapters are whole on every rank), {_WHOLE}"
    )

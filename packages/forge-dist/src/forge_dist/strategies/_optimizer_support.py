"""An optimizer and how its weights are divided → nothing, or why the two do not work together. Found out by running each.

An optimizer says what it is by its class; one that is made of several says it by `algorithm` in each of its groups.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge_dist._errors import StrategyError

_BY_NUMBER = (
    torch.optim.Adam,  # AdamW too
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""What moves each number by that number's own past alone, and keeps nothing else."""

_WHOLE = "or a strategy that keeps weights whole (ddp)"
_NOT_DIVIDED = {
    "adafactor": "torch's Adafactor cannot take the mean of a column that is divided over ranks",
    "adamw_8bit": "bitsandbytes takes no weights that are divided over ranks",
}


def holds_shards(optimizer: str) -> bool:
    """Whether an optimizer of this name (as `check_optimizer_name` has them) can move weights that are divided over ranks."""
    return optimizer not in _NOT_DIVIDED


def check_optimizer_name(strategy: str, optimizer: str, *, adapter: bool) -> None:
    """Refuse what `check_optimizer` would refuse, before there is a model.

    Args:
        strategy: the name of the strategy.
        optimizer: adamw, adafactor, muon, schedule_free or adamw_8bit, as forge_algos calls them.
        adapter: whether only an adapter is trained.

    Raises:
        StrategyError: they do not work together.
    """
    if strategy.startswith("zero") and optimizer != "adamw":
        raise StrategyError(_flat(strategy, f"optimizer={optimizer}"))
    # Adapters are whole on every rank.
    if strategy in ("fsdp2", "hsdp") and not holds_shards(optimizer) and not adapter:
        raise StrategyError(_divided(strategy, optimizer, f"optimizer={optimizer}"))


def check_flat(strategy: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse, for ZeRO, what needs the shape of a weight or keeps count for itself.

    Raises:
        StrategyError: it is none of those that move each number by itself.
    """
    if not isinstance(optimizer, _BY_NUMBER):
        raise StrategyError(_flat(strategy, type(optimizer).__name__))


def check_divided(strategy: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse, for FSDP, what cannot move a DTensor.

    Raises:
        StrategyError: it is one of those and holds one.
    """
    for algorithm, parameter in _held(optimizer):
        # A vector has no rows and columns: Adafactor keeps its variance as it is.
        if algorithm in _NOT_DIVIDED and isinstance(parameter, DTensor) and (parameter.dim() > 1 or algorithm != "adafactor"):
            raise StrategyError(_divided(strategy, algorithm, type(optimizer).__name__))


def _held(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    own = "adamw_8bit" if type(optimizer).__module__.startswith("bitsandbytes") else type(optimizer).__name__.lower()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group.get("algorithm", own), parameter


def _flat(strategy: str, found: str) -> str:
    return (
        f"strategy={strategy} gives the optimizer flat pieces of many weights at once, so it must move each number by itself, as "
        f"torch.optim.AdamW does; found {found}: use optimizer=adamw, strategy=fsdp2 (for adamw, muon, schedule_free), {_WHOLE}"
    )


def _divided(strategy: str, algorithm: str, found: str) -> str:
    return (
        f"strategy={strategy} divides the weights, and {_NOT_DIVIDED[algorithm]}; found {found}: use optimizer=adamw, muon or "
        f"schedule_free, an adapter (adapters are whole on every rank), {_WHOLE}"
    )

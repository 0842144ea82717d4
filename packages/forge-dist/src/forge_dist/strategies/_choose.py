"""Choice of a strategy, with the reason; what cannot work is refused before a model is read."""

import math
from typing import TYPE_CHECKING

import attrs
import torch

from forge_dist._errors import StrategyError
from forge_dist._settings import STRATEGY_OPTIONS, StrategySettings
from forge_dist._strategy_table import AUTO, StrategySpec, spec_of
from forge_dist.strategies._optimizer_support import check_optimizer_name, moves_shards
from forge_dist.strategies._strategy import Strategy

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks


def make_strategy(
    settings: StrategySettings,
    ranks: "Ranks",
    *,
    device: torch.device,
    adapter: bool,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32,
) -> Strategy:
    """Choose how `ranks` share a model. Reads no model, so it can be called before there is one.

    "auto" is single on one rank, ddp for an adapter or an optimizer that cannot move shards, else fsdp2. One rank has nothing
    to
    divide: there ddp, fsdp2 and hsdp are what single is, and their options are refused.

    Args:
        settings: the requested settings.
        ranks: joined; connected before `load`.
        device: device that this rank computes on.
        adapter: whether only an adapter is trained.
        optimizer: name of what will move the weights, as `check_optimizer_name` takes it; `wrap` looks at the optimizer itself.
        dtype: of the computation. Trained weights are float32 all the same; see `Strategy.autocasts`.

    Raises:
        StrategyError: the number of ranks does not fit, an option has nothing to act on, a package is missing, the device is
            not the one that sharding uses, or the optimizer cannot move weights that are divided so.
    """
    name, reason = _choose(settings, ranks.world_size, adapter=adapter, optimizer=optimizer)
    spec = spec_of(name)
    if ranks.world_size > 1 or spec.on_one_rank:
        check_optimizer_name(name, spec.optimizer_gets, optimizer, adapter=adapter)
    else:
        spec = spec_of("single")
    _refuse_idle_options(settings, spec, name, ranks.world_size)
    _check_groups(settings, ranks.world_size, adapter=adapter, optimizer=optimizer)
    kind: type[Strategy] = spec.load(name)
    strategy = kind(settings, ranks, device=torch.device(device), name=name, reason=reason, adapter=adapter)
    strategy.compute_in(dtype)
    return strategy


def _choose(settings: StrategySettings, world_size: int, *, adapter: bool, optimizer: str) -> tuple[str, str]:
    name = settings.strategy
    if name != AUTO:
        idle = world_size == 1 and not spec_of(name).on_one_rank
        return name, f"strategy={name}{' (one rank: nothing is divided)' if idle else ''}"
    if world_size == 1:
        return "single", "auto: one rank"
    if adapter and not _chosen_options(settings):
        return "ddp", f"auto: an adapter is trained, so {world_size} ranks exchange little, and each holds the frozen model"
    if not _chosen_options(settings) and not moves_shards(optimizer):
        return "ddp", f"auto: optimizer={optimizer} cannot move shards, so each of {world_size} ranks holds the whole model"
    return "fsdp2", f"auto: {world_size} ranks share the weights and the optimizer's state"


def _chosen_options(settings: StrategySettings) -> list[str]:
    """Return the strategies' options that are not at their defaults."""
    fields = attrs.fields_dict(StrategySettings)
    return [name for name in STRATEGY_OPTIONS if getattr(settings, name) != fields[name].default]


def _refuse_idle_options(settings: StrategySettings, spec: StrategySpec, name: str, world_size: int) -> None:
    idle = [option for option in _chosen_options(settings) if option not in spec.options]
    if idle:
        ranks = "one rank" if world_size == 1 else f"{world_size} ranks under strategy={name}"
        raise StrategyError(f"{idle[0]}={getattr(settings, idle[0])!r} has no effect with {ranks}: leave it out")


def _check_groups(settings: StrategySettings, world_size: int, *, adapter: bool, optimizer: str) -> None:
    """Refuse groups that do not fit the ranks, and what cannot train layers that they divide."""
    sizes = {name: getattr(settings, name) for name in ("tp_size", "cp_size") if getattr(settings, name) > 1}
    said = " and ".join(f"{name}={size}" for name, size in sizes.items())
    if world_size % math.prod(sizes.values()):
        raise StrategyError(
            f"{said} {'do' if len(sizes) > 1 else 'does'} not divide {world_size} ranks: use divisors of them, or start "
            "another number"
        )
    if settings.ep_size % settings.tp_size and settings.ep_size > 1:
        raise StrategyError(
            f"ep_size={settings.ep_size} is no multiple of tp_size={settings.tp_size}, whose ranks share their tokens: use one"
        )
    if settings.tp_size > 1 and adapter:
        raise StrategyError(
            f"tp_size={settings.tp_size} divides the layers that an adapter would be put into: leave tp_size out (fsdp2 "
            "divides the weights beside an adapter too), or train all weights"
        )
    divided = next((name for name in ("tp_size", "ep_size") if getattr(settings, name) > 1), None)
    if divided and optimizer in ("muon", "apollo", "apollo_mini"):
        raise StrategyError(
            f"{divided}={getattr(settings, divided)} divides matrices, which {optimizer} needs whole: use optimizer=adamw or "
            f"schedule_free, or leave {divided} out"
        )
    if world_size == settings.tp_size > 1 and optimizer == "schedule_free":
        raise StrategyError(
            f"tp_size={world_size} on {world_size} ranks leaves some weights whole, and schedule_free counts those apart: its "
            "states could go on nowhere else. Use optimizer=adamw, or more ranks"
        )

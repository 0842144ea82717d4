"""Settings, ranks and what is trained → the strategy, chosen once, with the reason; what cannot work is refused before a model is read.

`forge_dist.strategies.zero._strategy.make_zero(settings, ranks, device=..., name=..., reason=...)` makes the three that DeepSpeed carries.
"""

from typing import TYPE_CHECKING

import attrs
import torch

from forge_dist._errors import StrategyError
from forge_dist._settings import StrategySettings
from forge_dist.strategies._optimizer_support import check_optimizer_name, holds_shards
from forge_dist.strategies._strategy import Strategy

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks

_ZERO = ("zero1", "zero2", "zero3")


def make_strategy(
    settings: StrategySettings, ranks: "Ranks", *, device: torch.device, adapter: bool, optimizer: str = "adamw"
) -> Strategy:
    """Choose how `ranks` share a model. Reads no model, so it can be called before there is one.

    "auto" is single on one rank, ddp for an adapter or an optimizer that cannot move shards, else fsdp2. A world of one has nothing to divide: ddp, fsdp2 and hsdp are then what
    single is, and their options are refused.

    Args:
        settings: the wish.
        ranks: joined; connected before `load`.
        device: where this rank computes.
        adapter: whether only an adapter is trained.
        optimizer: what will move the weights (adamw, adafactor, muon, schedule_free, adamw_8bit); `wrap` looks at the optimizer itself.

    Raises:
        StrategyError: the number of ranks does not fit, an option has nothing to act on, an extra is missing, the device is not the
            one that sharding uses, or the optimizer cannot move weights that are divided so.
    """
    name, reason = _choose(settings, ranks.world_size, adapter=adapter, optimizer=optimizer)
    if ranks.world_size > 1 or name in _ZERO:
        check_optimizer_name(name, optimizer, adapter=adapter)
    if name in _ZERO:
        from forge_dist.strategies.zero._strategy import make_zero

        return make_zero(settings, ranks, device=device, name=name, reason=reason)
    _refuse_idle_options(settings, name, ranks.world_size)
    if ranks.world_size == 1:
        from forge_dist.strategies._torch_from_single import Single

        return Single(settings, ranks, device=device, name=name, reason=reason)
    if name == "ddp":
        from forge_dist.strategies._ddp import DDP

        return DDP(settings, ranks, device=device, name=name, reason=reason)
    from forge_dist.strategies.fsdp._strategy import FSDP

    shard_size = _shard_size(settings, ranks) if name == "hsdp" else ranks.world_size
    _check_device(settings, device, name)
    return FSDP(settings, ranks, device=device, name=name, reason=reason, shard_size=shard_size, adapter=adapter)


def _choose(settings: StrategySettings, world_size: int, *, adapter: bool, optimizer: str) -> tuple[str, str]:
    wish = settings.strategy
    if wish == "single" and world_size > 1:
        raise StrategyError(f"strategy=single is for one process, and there are {world_size} ranks: use ddp, fsdp2 or auto")
    if wish != "auto":
        alone = " (one rank: nothing is divided)" if world_size == 1 and wish != "single" and wish not in _ZERO else ""
        return wish, f"strategy={wish}{alone}"
    if world_size == 1:
        return "single", "auto: one rank"
    if adapter and not _sharding_options(settings):
        return "ddp", f"auto: an adapter is trained, so {world_size} ranks exchange little, and each holds the frozen model"
    if not _sharding_options(settings) and not holds_shards(optimizer):
        return "ddp", f"auto: optimizer={optimizer} cannot move shards, so each of {world_size} ranks holds the whole model"
    return "fsdp2", f"auto: {world_size} ranks share the weights and the optimizer's state"


def _sharding_options(settings: StrategySettings) -> list[str]:
    """The options of sharding that are not at their defaults."""
    fields = attrs.fields_dict(StrategySettings)
    names = ("shard_size", "gather_dtype", "reshard_after_forward", "cpu_offload")
    return [name for name in names if getattr(settings, name) != fields[name].default]


def _refuse_idle_options(settings: StrategySettings, name: str, world_size: int) -> None:
    idle = _sharding_options(settings) if world_size == 1 or name in ("single", "ddp") else []
    if idle:
        ranks = "one rank" if world_size == 1 else f"{world_size} ranks under strategy={name}"
        raise StrategyError(f"{idle[0]}={getattr(settings, idle[0])!r} has no effect with {ranks}: leave it out")


def _shard_size(settings: StrategySettings, ranks: "Ranks") -> int:
    size = ranks.local_world_size if settings.shard_size is None else settings.shard_size
    if ranks.world_size % size:
        raise StrategyError(
            f"shard_size={size} does not divide {ranks.world_size} ranks: use a divisor of them, or strategy=fsdp2"
        )
    if size == 1:
        raise StrategyError(
            f"strategy=hsdp with shards over one rank is {ranks.world_size} whole copies: use strategy=ddp, or a shard_size"
        )
    return size


def _check_device(settings: StrategySettings, device: torch.device, name: str) -> None:
    accelerator = torch.accelerator.current_accelerator()
    found = "cpu" if accelerator is None else accelerator.type
    if device.type != found:
        raise StrategyError(f"strategy={name} shards onto the machine's {found}, not onto {device.type}: use strategy=ddp")
    if settings.cpu_offload and device.type == "cpu":
        raise StrategyError(
            f"cpu_offload has no effect with strategy={name} on the cpu, where the weights are already: leave it out"
        )

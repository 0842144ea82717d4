"""FSDP2's own code on one device: a process group of one rank, and a model that is divided over it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _here import Here


@contextmanager
def one_rank(here: Here) -> Iterator[Any]:
    """Open a process group of this process alone; gives its ranks."""
    import torch.distributed as dist

    from forge_dist import LaunchSettings, Ranks, topology

    dist.init_process_group(here.machine.collective_backend.value, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(topology(LaunchSettings(), environ={}))
    finally:
        dist.destroy_process_group()


def sharded(
    here: Here, model: Any, settings: Any, ranks: Any, *, gathered: bool, recomputed: str = "none"
) -> tuple[Any, Any, Any]:
    """Divide a model over one rank by `fsdp2`; return it, its optimizer and the strategy.

    Args:
        here: The device.
        model: Of float32 weights.
        settings: Of the optimizer.
        ranks: As of `one_rank`.
        gathered: Whether weights are gathered in bfloat16, so that it computes without autocast.
        recomputed: Activation checkpointing.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from forge_algos import make_optimizer
    from forge_dist import StrategySettings
    from forge_dist.strategies.fsdp._strategy import FSDP

    how = StrategySettings(strategy="fsdp2", activation_checkpointing=recomputed)
    strategy = FSDP(how, ranks, device=here.device, name="fsdp2", reason="one device", adapter=False)
    # transformers leaves a mesh of one undivided: the groups are made here as it makes them for more.
    policy = MixedPrecisionPolicy(param_dtype=here.dtype, reduce_dtype=torch.float32)
    more = {"mesh": init_device_mesh(here.device.type, (1,)), **({"mp_policy": policy} if gathered else {})}
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True, **more)
    fully_shard(model, **more)
    strategy._configure_groups(model)
    model, optimizer = strategy.wrap(model, lambda m: make_optimizer(m, settings, fused=here.machine.fused_optimizer.value))
    return model, optimizer, strategy

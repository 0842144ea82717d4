"""The strategy is chosen once, with a reason; what cannot work is refused before any model is read."""

import pytest
import torch

import forge_dist
from forge_dist import StrategyError, StrategySettings

CPU = torch.device("cpu")


class Some:
    """As many ranks as asked for, on one node or several."""

    rank, is_first, group = 0, True, None

    def __init__(self, world_size, local_world_size=None):
        self.world_size = world_size
        self.local_world_size = local_world_size or world_size


def make(world_size=2, adapter=False, device=CPU, local=None, **settings):
    return forge_dist.make_strategy(StrategySettings(**settings), Some(world_size, local), device=device, adapter=adapter)


@pytest.mark.parametrize(
    ("world_size", "adapter", "settings", "name"),
    [
        (1, False, {}, "single"),
        (1, True, {}, "single"),
        (2, False, {}, "fsdp2"),
        (2, True, {}, "ddp"),
        (2, True, {"gather_dtype": "bfloat16"}, "fsdp2"),
        (2, True, {"strategy": "fsdp2"}, "fsdp2"),
        (4, False, {"strategy": "hsdp", "shard_size": 2}, "hsdp"),
        (1, False, {"strategy": "ddp"}, "ddp"),
        (1, False, {"strategy": "fsdp2"}, "fsdp2"),
    ],
)
def test_choice(world_size, adapter, settings, name):
    """ "auto" is single, fsdp2 or, for an adapter that asks for no sharding, ddp; what is asked for by name is kept."""
    strategy = make(world_size, adapter, device="cpu", **settings)
    assert (strategy.name, strategy.device) == (name, CPU)
    assert strategy.reason
    assert strategy.world_size == world_size


def test_shard_size():
    """hsdp shards within a node unless a size is given."""
    assert make(8, local=4, strategy="hsdp").shard_size == 4
    assert make(8, local=4, strategy="hsdp", shard_size=2).shard_size == 2


@pytest.mark.parametrize(
    ("world_size", "settings", "message"),
    [
        (2, {"strategy": "single"}, "2 ranks: use ddp, fsdp2 or auto"),
        (4, {"strategy": "hsdp", "shard_size": 3}, "shard_size=3 does not divide 4 ranks"),
        (4, {"strategy": "hsdp", "shard_size": 1}, "4 whole copies: use strategy=ddp"),
        (1, {"strategy": "hsdp", "shard_size": 2}, "shard_size=2 has no effect with one rank"),
        (1, {"gather_dtype": "bfloat16"}, "gather_dtype='bfloat16' has no effect with one rank"),
        (2, {"strategy": "fsdp2", "cpu_offload": True}, "cpu_offload has no effect .* on the cpu"),
    ],
)
def test_refusals(world_size, settings, message):
    """Each message names what does not fit and what to do."""
    with pytest.raises(StrategyError, match=message):
        make(world_size, **settings)


def test_other_device():
    """Sharding goes onto the machine's own accelerator: another device is refused, ddp takes it."""
    other = torch.device("meta")
    with pytest.raises(StrategyError, match="not onto meta: use strategy=ddp"):
        make(device=other, strategy="fsdp2")
    assert make(device=other, strategy="ddp").device == other


def test_zero(monkeypatch):
    """The three ZeROs come from one class, which gets the settings as they are, on one rank too."""
    from forge_dist.strategies.zero import _strategy as zero

    # Whether DeepSpeed is installed or not: nothing of it is used here.
    monkeypatch.setattr("forge_dist._strategy_table.importlib.util.find_spec", lambda _name: object())
    made = []

    class Zero:
        def __init__(self, settings, ranks, **how):
            made.append((settings.strategy, how))

        def compute_in(self, dtype):
            pass

    monkeypatch.setattr(zero, "ZeroStrategy", Zero)
    for world_size in (1, 2):
        make(world_size, strategy="zero2")
    assert made == 2 * [("zero2", {"device": CPU, "name": "zero2", "reason": "strategy=zero2", "adapter": False})]

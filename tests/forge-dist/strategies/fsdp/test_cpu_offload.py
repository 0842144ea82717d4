"""fsdp2 with cpu_offload: shards, gradients and the optimizer in the host's memory."""

import pytest

from ....ranks import run_on_ranks
from ...training import report


def beside(ranks, path):
    """What training shows with shards that stay on the device, and with offloaded ones.

    There is no accelerator: FSDP gathers from the host to the host, by the same code. What only an accelerator has is taken
    away: pinned memory, and the refusal of an option that has no effect on a CPU.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy
    from transformers.distributed import fsdp

    from forge_dist.strategies.fsdp._strategy import FSDP

    made = []

    def policy():
        made.append(1)
        return CPUOffloadPolicy(pin_memory=False)

    FSDP._check_device = lambda _self: None
    fsdp.CPUOffloadPolicy = policy
    found = {}
    for lora in (False, True):
        for offload in (False, True):
            options = {"strategy": "fsdp2", "cpu_offload": offload}
            found[lora, offload] = report(ranks, path, options, lora=lora)
            assert bool(made) is offload
            made.clear()
    return found


@pytest.mark.slow
def test_offloaded_shards_train_the_same(save_base):
    """The same gradients, losses, norms, weights and names in the state, to the bit, for a full model and for an adapter."""
    for rank, found in enumerate(run_on_ranks(beside, 2, save_base("llama-untied"))):
        for lora in (False, True):
            kept, offloaded = found[lora, False], found[lora, True]
            assert offloaded["steps"] == kept["steps"]
            assert offloaded["norm"] == kept["norm"]
            assert offloaded["state"] == kept["state"]
            for what in ("gradients", "weights"):
                assert offloaded[what].keys() == kept[what].keys()
                if rank == 0:
                    assert all(offloaded[what][name].equal(tensor) for name, tensor in kept[what].items())

"""Weights of a run in bfloat16 are gathered in it: forwards need no autocast, and no rank keeps a second copy for backward."""

import pytest

from ....ranks import run_on_ranks
from ...training import Absent, nll, row


def made(name, world_size, adapter, dtype, **options):
    import torch

    import forge_dist

    settings = forge_dist.StrategySettings(strategy=name, **options)
    kinds = {"device": torch.device("cpu"), "adapter": adapter, "dtype": getattr(torch, dtype)}
    strategy = forge_dist.make_strategy(settings, Absent(world_size), **kinds)
    return strategy.settings.gather_dtype, strategy.autocasts


@pytest.mark.parametrize(
    ("name", "adapter", "dtype", "options", "expected"),
    [
        ("fsdp2", False, "bfloat16", {}, ("bfloat16", False)),
        ("hsdp", False, "bfloat16", {"shard_size": 2}, ("bfloat16", False)),
        ("fsdp2", False, "float32", {}, ("auto", True)),
        ("fsdp2", True, "bfloat16", {}, ("auto", True)),
        ("fsdp2", False, "bfloat16", {"gather_dtype": "float32"}, ("float32", True)),
        ("fsdp2", False, "bfloat16", {"gather_dtype": "bfloat16"}, ("bfloat16", False)),
        ("fsdp2", False, "bfloat16", {"tp_size": 4}, ("auto", True)),
        ("ddp", False, "bfloat16", {}, ("auto", True)),
    ],
)
def test_what_is_chosen(name, adapter, dtype, options, expected):
    """Only trained weights that are divided, in a run that computes in bfloat16, are gathered in it without being asked."""
    assert made(name, 4, adapter, dtype, **options) == expected


def step_in_bfloat16(ranks, path, gather_dtype):
    """What one micro-batch keeps for its backward pass, in bytes, and what becomes of its gradients."""
    from contextlib import nullcontext

    import torch

    import forge_dist

    settings = forge_dist.StrategySettings(strategy="fsdp2", gather_dtype=gather_dtype, reshard_after_forward="always")
    strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False, dtype=torch.bfloat16)
    model = strategy.load(path, dtype=torch.float32)
    layers = 2 * sum(parameter.numel() for parameter in model.model.layers.parameters())
    model, _ = strategy.wrap(model, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.train()
    context = torch.autocast("cpu", torch.bfloat16) if strategy.autocasts else nullcontext()
    held = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        held[storage._cdata] = storage
        return tensor

    with strategy.micro_batch(last=True):
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor), context:
            loss = nll(model, row(0, ranks.rank))
        # What FSDP has freed meanwhile counts nothing.
        kept = sum(storage.nbytes() for storage in held.values())
        held.clear()
        strategy.backward(loss)
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    finer = any(not torch.equal(grad, grad.bfloat16().float()) for grad in grads)
    return {"kept": kept, "layers": layers, "loss": loss.item(), "dtypes": {str(g.dtype) for g in grads}, "finer": finer}


def both(ranks, path):
    return {name: step_in_bfloat16(ranks, path, name) for name in ("auto", "float32")}


@pytest.mark.slow
def test_what_is_kept_for_backward(save_base):
    """Gathered in float32, autocast's bfloat16 copies of all layers live until the backward pass; by default none does.

    Gradients are float32, summed in float32 too: their sums have digits that no bfloat16 has.
    """
    for found in run_on_ranks(both, 2, save_base("llama-untied")):
        chosen, wide = found["auto"], found["float32"]
        assert wide["kept"] - chosen["kept"] >= chosen["layers"]
        assert chosen["kept"] < 60_000, "a ratchet: what one micro-batch of the tiny model keeps; lower it when it falls"
        assert chosen["loss"] == pytest.approx(wide["loss"], rel=1e-2)
        assert chosen["dtypes"] == {"torch.float32"}
        assert chosen["finer"]

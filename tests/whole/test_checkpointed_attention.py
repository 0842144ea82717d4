"""Selective activation checkpointing and the attention of packed rows, which is an operator of forge_accel on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_accel import document_attention
from forge_dist import LaunchSettings, StrategySettings, join, make_strategy, topology


class Calls(TorchDispatchMode):
    """Counts the calls of the operator."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += str(func) == "forge_accel.documents.default"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "again"), [("none", 0), ("full", 1), ("selective", 0)])
def test_attention_of_packed_rows_is_computed_again_by_full_alone(model_dir, kind, again):
    """In bfloat16, where a row of two samples is one call of the operator a layer."""
    device, ids = torch.device("cpu"), torch.arange(12)[None]
    with join(topology(LaunchSettings(), environ={})) as ranks:
        settings = StrategySettings(strategy="single", activation_checkpointing=kind)
        strategy = make_strategy(settings, ranks, device=device, adapter=False)
        model = strategy.load(str(model_dir), dtype=torch.float32, attention="documents", attention_function=document_attention)
        model, _ = strategy.wrap(model, lambda model: torch.optim.SGD(model.parameters()))
        model.train()
        ends = torch.tensor([0, 5, 12], dtype=torch.int32)
        with Calls() as forward, torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False, cu_seq_lens_q=ends).loss
        with Calls() as backward:
            strategy.backward(loss)
    layers = model.config.num_hidden_layers
    assert (forward.number, backward.number) == (layers, again * layers)

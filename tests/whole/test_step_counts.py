"""Ratchet by counting: kernels that a training step of 16 layers calls, whatever their width. Fewer are better."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import forge_accel
import forge_algos
import forge_packing
from forge_dist.loading._attention import register_attention

from . import tiny

MOST_CALLS = 1796
"""Kernels of a step of Llama-3.2-1B's 16 layers, one document, full training, torch 2.13."""
LAYERS = 16
_NO_KERNELS = {"detach", "empty", "empty_like", "_unsafe_view", "promote_types"}


class Calls(TorchDispatchMode):
    """Count calls of kernels, without those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.__name__.partition(".")[0] not in _NO_KERNELS:
            self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(micro_batches: int) -> Counter[str]:
    """The kernels that the second step calls."""
    machine = forge_accel.accelerator("cpu")
    register_attention("documents", machine.attention("auto", machine.dtype("float32").value).value.function)
    shape = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="documents")
    settings = forge_algos.OptimizerSettings(learning_rate=1e-3, lr_scheduler="constant")
    optimizer = forge_algos.make_optimizer(model, settings, fused=True)
    step = [forge_packing.collate([tiny.sample(40, k)]) for k in range(micro_batches)]
    loop = forge_algos.train(
        model,
        [step, step],
        objective=forge_algos.SFT(),
        optimizer=optimizer,
        scheduler=forge_algos.schedule(optimizer, settings, num_steps=2),
    )
    next(loop)
    with Calls() as calls:
        next(loop)
    loop.close()
    return calls.names


@pytest.mark.slow
def test_a_step_calls_no_more_kernels() -> None:
    """Calls of kernels in a step, which cost a GPU's host 5 to 10 microseconds each, are no more than they were."""
    calls = calls_of_a_step(1)
    assert sum(calls.values()) <= MOST_CALLS, calls.most_common(12)
    # One for the weights that decay, one for the others.
    assert calls["_fused_adamw_.default"] == 2
    # A further micro-batch adds its forward and backward, and neither an optimizer's step nor a clipping.
    more = calls_of_a_step(2)
    assert more["_fused_adamw_.default"] == 2
    assert more["_foreach_norm.Scalar"] == 1
    # Of its own it has a sum into each of the 146 gradients.
    assert sum(more.values()) <= 2 * sum(calls.values()) + 146


def test_the_counter_sees_a_wait_and_a_kernel() -> None:
    """A number read from a tensor is counted, and so is a product; a view is not."""
    values = torch.ones(3, 3)
    with Calls() as calls:
        float((values @ values.t())[0, 0])
    assert dict(calls.names) == {"mm.default": 1, "_local_scalar_dense.default": 1}

"""Ratchets by counting: a step of a 1B model without data, its kernels, the bytes that they move, what the host waits for.

A figure may fall; then lower its limit here. What raises one is found by comparing the line that the first test prints
(`pytest -s`) with that of the commit before: the operators with other counts. Operators of torch are counted, each of which is
a launch or a few on a GPU; views cost nothing and are not. Bytes are those of the tensors that each reads and writes, without
caches.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

import forge_algos
from forge_accel import document_attention
from forge_dist.loading._attention import register_attention

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip
"""Llama 3.2 1B."""
LENGTHS = (900, 300, 848)
KERNELS, BLOCK, GIGABYTES = 2410, 140, 132
"""Most kernels of a step of one row in bfloat16, those that one block more adds, and what they move."""
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "promote_types"}
"""Operators that compute nothing on a device."""


class Step(TorchDispatchMode):
    """Counts kernels by name, and the bytes of what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        read, written = (
            {id(t): t for t in tree_leaves(part) if isinstance(t, torch.Tensor)} for part in ((args, kwargs), made)
        )
        storages = {t.untyped_storage()._cdata for t in read.values()}
        aliases = all(t.untyped_storage()._cdata in storages for t in written.values())
        in_place = func._schema.is_mutable
        if func.namespace == "aten" and func.__name__.split(".")[0] not in NO_KERNEL and (in_place or not aliases):
            self.names[func.__name__] += 1
            moved = {**read, **written}.values()
            self.bytes += sum(t.numel() * t.element_size() for t in moved)
        return made


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scale: Any = None, **__: Any) -> torch.Tensor:
    """Stand in for torch's variable-length kernel by one call for the whole row: shapes are all that is looked at."""
    states = (state.transpose(0, 1)[None] for state in (query, key, value))
    return scaled_dot_product_attention(*states, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


class Row:
    """Packed row, every token but the first of each document learned."""

    def __init__(self) -> None:
        self.input_ids = np.arange(sum(LENGTHS)) % 1000
        self.position_ids = np.concatenate([np.arange(length) for length in LENGTHS])
        self.cu_seqlens = np.cumsum([0, *LENGTHS])
        self.labels = np.where(self.position_ids == 0, -100, self.input_ids)
        self.max_seqlen = max(LENGTHS)


def counted(layers: int, rows: int = 1) -> Step:
    """Take a step of the 1B shape with so many blocks on tensors without data."""
    register_attention("counted", partial(document_attention, varlen_kernel=kernel))
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    rehearsal = forge_algos.Rehearsal(device=CPU, autocast=autocast)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="counted")
    model = rehearsal.placed(rehearsal.model(model, None))
    optimizer = forge_algos.make_optimizer(model, forge_algos.OptimizerSettings(), fused=True)
    seen = Step()
    how: dict[str, Any] = {"objective": forge_algos.SFT, "keep_casts": True}
    rehearsal.step(model, optimizer, [Row()], first=True, **how)  # the optimizer's state is made
    with seen:
        rehearsal.step(model, optimizer, [Row()] * rows, **how)
    return seen


@pytest.mark.slow
def test_kernels_of_a_step() -> None:
    """The kernels of a step of a 1B model, the bytes that they move, and what is read back to the host do not grow."""
    found = {layers: counted(layers) for layers in (2, 3)}
    few, more = (sum(found[layers].names.values()) for layers in (2, 3))
    kernels, moved = few + 14 * (more - few), (found[2].bytes + 14 * (found[3].bytes - found[2].bytes)) / 1e9
    print(f"{kernels} kernels, {more - few} a block, {moved:.1f} GB; {found[2].names.most_common()}")
    assert more - few <= BLOCK
    assert kernels <= KERNELS
    assert moved <= GIGABYTES
    assert found[3].names["_local_scalar_dense.default"] == 0


@pytest.mark.slow
def test_a_further_micro_batch_casts_no_weights() -> None:
    """Casts of weights are made once a step, whatever its rows: a second row casts only what is computed."""
    one, two = (counted(2, rows).names for rows in (1, 2))
    assert two["mm.default"] == 2 * one["mm.default"]
    assert two["_to_copy.default"] <= 2 * one["_to_copy.default"] - 2 * 7
    assert two["_fused_adamw_.default"] == one["_fused_adamw_.default"] == 2, "weights with and without decay"


@pytest.mark.parametrize("number", [3, 300])
def test_norm_and_clip_take_a_handful_of_kernels(number: int) -> None:
    """The gradient norm and its clipping are as many kernels for 300 tensors as for 3, and read nothing back to the host."""
    parameters = [nn.Parameter(torch.ones(4, 3)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Step() as seen:
        norm = forge_algos.ALONE.grad_norm(parameters)
        forge_algos.ALONE.scale_grads(parameters, 0.5)
    assert float(norm) == pytest.approx((12 * number) ** 0.5)
    assert sum(seen.names.values()) <= 4, seen.names
    assert "_local_scalar_dense.default" not in seen.names

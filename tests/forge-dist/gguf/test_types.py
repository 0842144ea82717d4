"""Types of a GGUF file's tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from forge_dist import gguf_rounded, gguf_type
from forge_dist.gguf._types import quantize, stored_bytes

gguf = pytest.importorskip("gguf", reason="gguf is an extra of forge-dist: pip install 'forge-dist[gguf]'")

BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
LEVELS = {"q8_0": 127, "q5_1": 31, "q5_0": 16, "q4_1": 15, "q4_0": 8}
"""Steps of a type's grid between 0 and its scale (`_0`), or between the least and the largest number of a block (`_1`)."""


@given(
    strategies.sampled_from(sorted(LEVELS)),
    strategies.lists(strategies.floats(-100, 100, width=32), min_size=32, max_size=32),
)
def test_a_block_is_rounded_within_its_step(dtype, numbers):
    """No number moves by more than a step, nor by more than the scale's own rounding to float16."""
    values = torch.tensor([numbers])
    reach = (values.max() - values.min()) if dtype.endswith("_1") else values.abs().max()
    moved = (gguf_rounded(values, dtype) - values).abs().max()
    # Scale and offset are float16 (11 bits), and smaller than 6e-8 they are nothing.
    assert moved <= reach / LEVELS[dtype] + values.abs().max() * 2**-10 + 6e-8 * 130


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *BLOCKS])
def test_the_sizes_and_values_are_those_of_the_file(dtype):
    """What is written takes the bytes that were announced; and what was rounded once is left alone."""
    values = torch.randn(2, 3, 64)
    written = quantize(values, dtype)
    assert written.nbytes == stored_bytes(values.shape, dtype)
    rounded = gguf_rounded(values, dtype)
    assert rounded.shape == values.shape
    if dtype in ("float32", "float16", "bfloat16"):
        assert torch.equal(rounded, values.to(getattr(torch, dtype)).float())
    if dtype in ("q8_0", "mxfp4"):
        assert np.array_equal(quantize(rounded, dtype), written)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "found"),
    [
        ("blk.0.ffn_up.weight", (96, 64), "q4_0", "q4_0"),
        ("output.weight", (400, 64), "q4_1", "q8_0"),
        ("token_embd.weight", (400, 64), "q5_0", "q8_0"),
        ("token_embd.weight", (400, 64), "float16", "float16"),
        ("blk.0.attn_output.weight", (64, 48), "q5_1", "float16"),
        ("blk.0.attn_norm.weight", (64,), "q4_0", "float32"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "q8_0", "float32"),
        ("blk.0.ffn_gate_exps.bias", (4, 64), "float16", "float32"),
        ("blk.0.ffn_gate_exps.weight", (4, 96, 64), "mxfp4", "mxfp4"),
        ("blk.0.attn_q.weight", (64, 64), "mxfp4", "q8_0"),
    ],
)
def test_which_tensor_is_of_which_type(name, shape, dtype, found):
    """The rule of llama.cpp's converter and llama-quantize, but for the ends of a file of few bits."""
    assert gguf_type(name, shape, dtype) == found


def test_experts_of_mxfp4_stay_what_they_are():
    """Numbers that lie on the grid of mxfp4, as those of gpt-oss's experts, are rounded to themselves."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=draw) * torch.exp2(torch.randint(-12, 12, (64, 1), generator=draw))
    once = gguf_rounded(values, "mxfp4")
    assert not torch.equal(once, values)
    assert torch.equal(gguf_rounded(once, "mxfp4"), once)

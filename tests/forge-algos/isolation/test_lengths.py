"""Made-up documents cross what a model's layers see at once, and run in the kernel that trains."""

from functools import partial

import pytest
import torch
import transformers

from forge_algos import PackedBatchError, keep_documents_apart
from forge_algos.isolation._isolation import made_up_lengths, require_isolation

from ..oracle import CPU, SIZES, make


def configured(**numbers):
    """Return a model whose configuration has further numbers."""
    model = make("llama-tied")
    for name, value in numbers.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("numbers", "lengths"),
    [
        ({}, (5, 7)),
        ({"sliding_window": 16}, (21, 23)),
        ({"sliding_window": 16, "conv_L_cache": 3}, (21, 23)),
        ({"compress_rates": {"a": 4, "b": 20}}, (25, 27)),
        ({"sliding_window": None, "attention_chunk_size": 8}, (13, 15)),
        # Two such documents would have more tokens than the model has positions.
        ({"sliding_window": 60}, (5, 7)),
        ({"sliding_window": 128, "max_position_embeddings": 4096}, (133, 135)),
        ({"sliding_window": 4096, "conv_kernel": 4, "max_position_embeddings": 32768}, (9, 11)),
    ],
)
def test_documents_are_longer_than_what_a_layer_sees(numbers, lengths):
    """Windows, chunks and convolutions are crossed, up to a bound and to the model's positions."""
    assert made_up_lengths(configured(**numbers)) == lengths


def test_a_leak_beyond_short_documents_is_found():
    """DeepSeek-V4 compresses every 8 tokens: documents of 5 and 7 come out as alone, longer ones do not."""
    config = transformers.DeepseekV4Config(
        **{**SIZES, "max_position_embeddings": 256},
        head_dim=8,
        sliding_window=4,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        layer_types=["heavily_compressed_attention"] * 2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert made_up_lengths(model) == (13, 15)
    packed, why = keep_documents_apart(model, device=CPU)
    assert not packed
    assert "documents are run alone" in why


class Leak(torch.autograd.Function):
    """Add the row's mean, where the numbers are bfloat16: a kernel that is wrong in one dtype."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden + hidden.mean(dim=1, keepdim=True) if torch.is_autocast_enabled("cpu") else hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_the_kernel_that_trains_is_tried():
    """A leak under autocast alone is found where the test runs under it, and is said to be one."""
    model = make("llama-tied")
    model.model.layers[0].register_forward_hook(lambda _module, _args, output: Leak.apply(output))
    require_isolation(model, device=CPU)
    other = make("llama-tied")
    other.model.layers[0].register_forward_hook(lambda _module, _args, output: Leak.apply(output))
    with pytest.raises(PackedBatchError, match="does not keep packed documents apart"):
        require_isolation(other, device=CPU, autocast=partial(torch.autocast, "cpu", torch.bfloat16))


def test_rounding_under_autocast_is_no_leak():
    """A plain model passes under autocast."""
    require_isolation(make("qwen3"), device=CPU, autocast=partial(torch.autocast, "cpu", torch.bfloat16))

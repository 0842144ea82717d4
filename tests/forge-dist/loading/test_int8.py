"""Layers in 8 bits: their products are those of the numbers that the codes stand for, in every mode and dtype."""

import copy

import pytest
import torch
from torch import nn

from forge_dist import ModelError
from forge_dist.loading._quantization import multiply_exactly

bitsandbytes = pytest.importorskip("bitsandbytes")


def pair(bias=True):
    """A layer in 8 bits, and a plain one of the numbers that its codes stand for."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear8bitLt(48, 36, bias, has_fp16_weights=False, threshold=6.0)
    weight = torch.randn(36, 48)
    layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False).to("cpu")
    plain = nn.Linear(48, 36, bias)
    with torch.no_grad():
        plain.weight.copy_(bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB))
        if bias:
            plain.bias.copy_(layer.bias)
    assert 0.001 < (plain.weight - weight).abs().max() < 0.02
    multiply_exactly(layer)
    return layer, plain


ROWS = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
ROWS[0, 3, 5] = 9.0  # an outlier, whose column LLM.int8 would spare for every row


def check_close(found, expected):
    """Within rounding of the largest."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def learned(layer, x):
    """The product, and the gradients of its inputs and its bias."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *([] if layer.bias is None else [layer.bias.grad])]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_a_plain_layer(bias, mode):
    """In training and in evaluation: output and gradients of the dequantized weights, within rounding."""
    layer, plain = pair(bias)
    for found, expected in zip(learned(layer.train(mode), ROWS), learned(plain, ROWS), strict=True):
        check_close(found, expected)


@pytest.mark.parametrize("mode", [True, False])
def test_a_row_does_not_depend_on_its_neighbours(mode):
    """Rows together and alone, one of them with an outlier. bitsandbytes' own layer fails this in evaluation, and on a GPU."""
    layer, _ = pair()
    together = layer.train(mode)(ROWS)
    apart = torch.cat([layer(row[None, None]) for row in ROWS.flatten(0, 1)]).view_as(together)
    check_close(apart, together)


def test_bfloat16_is_that_of_a_plain_layer():
    """Under autocast and in bfloat16: each weight is rounded once, so every bit is that of a plain layer in bfloat16."""
    layer, plain = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for found, expected in zip(learned(layer, ROWS), learned(plain, ROWS), strict=True):
            assert torch.equal(found, expected)
    plain, x = plain.to(torch.bfloat16), ROWS.to(torch.bfloat16)
    for found, expected in zip(learned(layer, x)[:2], learned(plain, x)[:2], strict=True):
        assert torch.equal(found, expected)


def test_only_codes_are_kept_for_the_backward_pass():
    """One byte a weight: the floats are made again, and the inputs of a frozen layer are not needed."""
    layer, kept = pair(bias=False)[0], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        layer(ROWS.clone().requires_grad_())
    assert [(t.dtype, tuple(t.shape)) for t in kept] == [(torch.int8, (36, 48)), (torch.float32, (36,))]


def test_a_copy_computes_the_same():
    layer, _ = pair()
    again = copy.deepcopy(layer)
    assert torch.equal(again(ROWS), layer(ROWS))
    assert again.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("number", [7e4, float("nan")])
def test_numbers_beyond_float16_are_refused(number):
    """The layer is named, where all its products would be NaN."""
    model = nn.Sequential(bitsandbytes.nn.Linear8bitLt(8, 4, has_fp16_weights=False))
    weight = torch.ones(4, 8)
    weight[2, 3] = number
    model[0].weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False).to("cpu")
    with pytest.raises(ModelError, match=r"0\.weight has numbers beyond 65,504.*quant_type=nf4"):
        multiply_exactly(model)


def test_a_layer_without_codes_is_left():
    """As of a tied head, whose weight is the embedding's."""
    model = nn.Sequential(bitsandbytes.nn.Linear8bitLt(8, 4, has_fp16_weights=False))
    model[0].weight = nn.Parameter(torch.ones(4, 8))
    multiply_exactly(model)
    assert type(model[0]) is bitsandbytes.nn.Linear8bitLt

"""PEFT's casts of inputs are off while autocast is on, and only then."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_algos import AdapterSettings, adapt

from ...oracle import make

IDS = torch.arange(12)[None]


class Widenings(TorchDispatchMode):
    """Counts copies of activations [1, 12, ...] from bfloat16 to float32."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.shape[:2] == (1, 12) and out.dtype == torch.float32:
            self.count += args[0].dtype == torch.bfloat16
        return out


def adapted(**options):
    """A LoRA on a frozen base in bfloat16, with adapters that are not zero."""
    model = adapt(make("llama-tied").bfloat16(), AdapterSettings(adapter="lora", lora_r=4, **options)).model
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def step(model, autocast=True):
    """Widened activations of a forward, its loss, and the gradients."""
    model.zero_grad()
    with Widenings() as seen, torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return seen.count, loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_same_numbers_without_the_copies():
    """Under autocast no adapted layer widens its input, and loss and gradients are to the bit those of PEFT, which does."""
    ours = adapted()
    theirs = copy.deepcopy(ours)
    for module in theirs.modules():
        module._forward_pre_hooks.clear()
    (few, loss, grads), (many, expected, wanted) = step(ours), step(theirs)
    layers = sum("lora_A.default.weight" in name for name, _ in ours.named_parameters())
    assert many - few == layers > 10
    assert torch.equal(loss, expected)
    assert grads.keys() == wanted.keys()
    assert all(torch.equal(grads[name], wanted[name]) for name in grads)


@pytest.mark.parametrize("called", ["whole", "base", "generate"])
def test_without_autocast_peft_casts(called):
    """A forward without autocast, after one under it, has float32 adapters on a bfloat16 base, whichever module is called."""
    model = adapted()
    fresh = step(model, autocast=False)
    step(model)
    if called == "whole":
        assert torch.equal(step(model, autocast=False)[1], fresh[1])
    elif called == "base":
        assert model.get_base_model()(input_ids=IDS, use_cache=False).logits.isfinite().all()
    else:
        assert model.generate(input_ids=IDS, max_new_tokens=2, min_new_tokens=2, do_sample=False).shape == (1, 14)

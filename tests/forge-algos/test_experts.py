"""Stacks of experts, and transformers' ways to compute them: the same numbers by each of them."""

import pytest
import torch

from forge_algos import AdapterSettings, adapt
from forge_algos._experts import expert_stacks

from .experts import FAMILIES, E, mixture
from .oracle import VOCAB, distance, gradients, make

IDS = torch.randint(3, VOCAB, (1, 23), generator=torch.Generator().manual_seed(0))
# Llama 4 and JetMoE have one way of their own.
CHOICE = sorted(set(FAMILIES) - {"llama4_text", "jetmoe"})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_three_dimensions_is_a_stack(family):
    """Each family's expert matrices are found, with their full names and E first; a dense model has none."""
    model = mixture(family)
    stacks = expert_stacks(model)
    assert {stack.parameter for stack in stacks.values()} == {name for name, p in model.named_parameters() if p.ndim == 3}
    assert {stack.shape[0] for stack in stacks.values()} == {E}
    assert all(model.get_parameter(stack.parameter) is stack.weight for stack in stacks.values())
    assert expert_stacks(make()) == {}


def computed(model, way):
    """Return (loss, gradients) of a row computed in one of transformers' ways."""
    model.zero_grad(set_to_none=True)
    model.set_experts_implementation(way)
    # Phi-MoE's routers draw noise in training.
    torch.manual_seed(0)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("family", CHOICE)
def test_grouped_and_batched_products_are_the_loops(family):
    """transformers' default, grouped_mm, and batched_mm give eager's loss and gradients within rounding.
    Of full weights, and of LoRA's factors of the experts.
    """
    full = mixture(family)
    assert full.config._experts_implementation == "grouped_mm"
    lora = adapt(mixture(family), AdapterSettings(adapter="lora", lora_r=3, target_modules=("experts",))).model
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    for model in (full, lora.get_base_model()):
        loss, expected = computed(model, "eager")
        for way in ("grouped_mm", "batched_mm"):
            found, ours = computed(model, way)
            assert found == pytest.approx(loss, rel=1e-6)
            assert distance(ours, expected) < 1e-5


def test_grouped_products_are_not_rounded_by_autocast():
    """Under autocast to bfloat16 grouped_mm computes in the weights' float32, where the loop computes in bfloat16."""
    model = mixture()
    experts, x = model.model.layers[0].mlp.experts, torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    routed = (x, torch.tensor([[0], [3], [1]]), torch.ones(3, 1))
    exact = experts(*routed)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(experts(*routed), exact, rtol=1e-5, atol=1e-6)
        model.set_experts_implementation("eager")
        rounded = experts(*routed)
    assert (rounded - exact).norm() > 1e-4 * exact.norm()

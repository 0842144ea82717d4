"""LoRA under quantization-aware training: a naive straight-through model, PEFT's own merge, and the base switched off."""

import copy

import pytest
import torch
from torch.func import functional_call

from forge_algos import (
    SFT,
    AdapterSettings,
    OptimizerError,
    OptimizerSettings,
    QuantizedWeights,
    adapt,
    evaluate,
    fake_quantize,
    make_optimizer,
    schedule,
    train,
)
from forge_algos.adaptations import switched_off

from ..oracle import CPU, naive, pack, samples
from .test_quantized_weights import kinds_of, wide

RATE = OptimizerSettings(learning_rate=1e-2, eps=1e-3, warmup_steps=0, weight_decay=0.1)
ADAPTERS = {
    "lora": {},
    "rslora": {"lora_r": 4, "target_modules": ("q_proj", "down_proj"), "init_lora_weights": "orthogonal"},
    "dora": {"lora_r": 4},
}


def adapted(adapter, **more):
    """Return a model with an adapter that has moved, and the types of its weights in a file."""
    model = wide()
    kinds = kinds_of(model, "q4_0")
    torch.manual_seed(1)
    model = adapt(model, AdapterSettings(adapter=adapter, **more)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model, kinds


def merged(model, kinds):
    """Return what PEFT merges, rounded: the weights of the file."""
    found = copy.deepcopy(model).merge_and_unload(safe_merge=True).state_dict()
    found["lm_head.weight"] = found["model.embed_tokens.weight"]  # tied
    kinds = {**kinds, "lm_head.weight": ("q4_0", -1)}
    return {name: fake_quantize(weight, kinds[name][0]) if name in kinds else weight for name, weight in found.items()}


def straight_through(model, plain, kinds):
    """Return the plain model's weights, of which the gradient goes past their rounding to the adapter's."""
    found, layers = {}, dict(model.get_base_model().named_modules())
    for name, base in plain.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        weight = base.detach()
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            weight = weight + b @ a * layer.scaling["default"]
            if "default" in layer.lora_magnitude_vector:
                lengths = weight.detach().norm(dim=1)
                weight = (layer.lora_magnitude_vector["default"].weight / lengths)[:, None] * weight
        rounded = fake_quantize(weight.detach(), kinds[name][0]) if name in kinds else weight.detach()
        found[name] = weight + (rounded - weight.detach())
    return found


@pytest.mark.parametrize("adapter", list(ADAPTERS))
def test_steps_are_those_of_a_naive_straight_through_model(adapter):
    """Losses, gradients by what they move, and the weights that stay: A and B move, the base does not."""
    model, kinds = adapted(adapter, **ADAPTERS[adapter])
    reference, plain, data = copy.deepcopy(model), wide(), [samples((5, 9, 2, 7), seed=step) for step in range(3)]
    optimizers = [make_optimizer(each, RATE) for each in (model, reference)]
    schedulers = [schedule(each, RATE, len(data)) for each in optimizers]
    outputs = train(
        model, [[pack(rows[:2]), pack(rows[2:])] for rows in data], objective=SFT(), optimizer=optimizers[0],
        scheduler=schedulers[0], device=CPU, max_grad_norm=0.0, quantized=QuantizedWeights(model, kinds),
    )  # fmt: skip
    losses = [each.loss for each in outputs]
    for rows, loss in zip(data, losses, strict=True):
        total, count = naive(lambda **given: functional_call(plain, straight_through(reference, plain, kinds), (), given), rows)
        (total / count).backward()
        assert loss == pytest.approx(total.item() / count, rel=1e-6)
        optimizers[1].step()
        optimizers[1].zero_grad()
        schedulers[1].step()
    start = dict(adapted(adapter, **ADAPTERS[adapter])[0].named_parameters())
    assert all(torch.equal(p, start[name]) != p.requires_grad for name, p in model.named_parameters())
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("adapter", list(ADAPTERS))
def test_the_weights_in_place_are_those_of_the_merge(adapter):
    """To the bit; beside a head that trains whole. Afterwards base and forward are as they were."""
    more = {} if adapter == "dora" else {"modules_to_save": ("embed_tokens",)}
    model, kinds = adapted(adapter, **ADAPTERS[adapter], **more)
    wanted, before = merged(model, kinds), copy.deepcopy(model.state_dict())
    rows = [pack(samples((5, 9)))]
    plainly = evaluate(model, rows, objective=SFT(), device=CPU).loss
    with QuantizedWeights(model, kinds).in_place():
        inside = evaluate(model, rows, objective=SFT(), device=CPU).loss
        inner = dict(model.get_base_model().named_modules())
        for name in kinds:
            module = inner[name.removesuffix(".weight")]
            module = module.modules_to_save["default"] if hasattr(module, "modules_to_save") else module
            held = getattr(module, "base_layer", module).weight
            assert torch.equal(held, wanted[name]), name
    file = wide()
    file.load_state_dict(wanted)
    assert inside == evaluate(file, rows, objective=SFT(), device=CPU).loss
    assert inside != plainly == evaluate(model, rows, objective=SFT(), device=CPU).loss
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rows_of_new_tokens_are_rounded_as_the_file_has_them():
    """They lie beside the embedding, and each row is rounded by itself."""
    model = wide()
    kinds = kinds_of(model, "q4_0")
    model = adapt(model, AdapterSettings(adapter="lora"), new_tokens=[59, 60]).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(0.1)
    wanted, rows = wide(), [pack([(torch.tensor([59, 7, 60, 5]).numpy(),) * 2])]
    wanted.load_state_dict(merged(model, kinds))
    with QuantizedWeights(model, kinds).in_place():
        found = evaluate(model, rows, objective=SFT(), device=CPU).loss
    assert found == pytest.approx(evaluate(wanted, rows, objective=SFT(), device=CPU).loss, rel=1e-6)


def test_the_base_that_is_switched_off_to_is_unrounded():
    """A reference under the adapter computes as the base itself, and the rounded weights lie there again after it."""
    model, kinds = adapted("lora", modules_to_save=("embed_tokens",))
    rows = [pack(samples((5, 9)))]
    with QuantizedWeights(model, kinds).in_place():
        inside = evaluate(model, rows, objective=SFT(), device=CPU).loss
        with switched_off(model):
            reference = evaluate(model, rows, objective=SFT(), device=CPU).loss
        assert evaluate(model, rows, objective=SFT(), device=CPU).loss == inside
    assert reference == evaluate(wide(), rows, objective=SFT(), device=CPU).loss


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"adapter": "lora", "lora_dropout": 0.1}, "its adapter has dropout"),
        ({"adapter": "loha"}, "what adapts it is not LoRA on a linear layer"),
    ],
)
def test_other_adapters_are_refused(more, message):
    """Those of which a merge writes something else than a layer computes, by the name of the first weight."""
    model, kinds = adapted(**more)
    with pytest.raises(
        OptimizerError, match=f"model.layers.0.self_attn.q_proj cannot compute with its merged weight: {message}"
    ):
        QuantizedWeights(model, kinds)

"""NEFTune's noise: its bound for each document, its seed, and no trace outside of training."""

import math

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from forge_algos import SFT, AdapterSettings, LossError, SupervisedSettings, adapt, evaluate, train
from forge_algos._modules import embeddings

from ..oracle import CPU, gradients, make, pack, samples

ALPHA, LENGTHS, D = 3.0, (4, 25, 2), 16
NOISY = SFT(SupervisedSettings(neftune_alpha=ALPHA))
BATCH = pack(samples(LENGTHS))


def noise_of(model, seed, batch=BATCH):
    """Return what the first layer gets beyond the embeddings, float[T, D], and the loss."""
    seen = []
    body = model.get_base_model() if hasattr(model, "peft_config") else model
    bound = NOISY.bind(model, device=CPU)
    handle = body.model.layers[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()[0]))
    torch.manual_seed(seed)
    terms = bound(batch, [])
    handle.remove()
    return seen[-1] - embeddings(model)(torch.tensor(batch.input_ids)).detach(), terms


@pytest.mark.parametrize("adapter", [False, True])
def test_noise_is_as_large_as_the_document_says(adapter):
    """Noise is spread evenly within ±alpha / √(S·D), S the length of each token's document.
    Under an adapter too.
    """
    model = adapt(make(), AdapterSettings(adapter="lora")).model if adapter else make()
    model.train()
    noise = torch.stack([noise_of(model, seed)[0] for seed in range(40)])
    for part, length in zip(noise.split(LENGTHS, dim=1), LENGTHS, strict=True):
        most = ALPHA / math.sqrt(length * D)
        assert 0.95 * most < float(part.abs().max()) <= most * (1 + 1e-5)
        assert float(part.std()) == pytest.approx(most / math.sqrt(3), rel=0.05)
        assert abs(float(part.mean())) < 0.05 * most


def test_one_document_gets_transformers_noise():
    """A row of one document gets the noise of transformers' own hook at the same seed."""
    batch, model = pack(samples((13,))), make()
    ours, _ = noise_of(model, 7, batch)
    layer = embeddings(model)
    layer.neftune_noise_alpha = ALPHA
    given = layer(torch.tensor(batch.input_ids))[None]
    torch.manual_seed(7)
    torch.testing.assert_close(ours, (neftune_post_forward_hook(layer, (), given) - given)[0], rtol=1e-4, atol=1e-6)


def test_noise_follows_the_seed():
    """One seed gives the same noise and loss, to the bit; another seed gives another."""
    model = make()
    (first, loss), (second, again), (third, _) = (noise_of(model, seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert loss.sum == again.sum
    assert not torch.equal(first, third)


def test_gradients_run_through_the_noise():
    """Every parameter gets gradients, other than those without noise."""
    found = []
    for objective in (SFT(), NOISY):
        model = make()
        torch.manual_seed(0)
        objective.bind(model, device=CPU)(BATCH, []).sum.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(not torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_nothing_is_left_behind():
    """An evaluation has no noise and draws none.
    Between steps and after the loop the layer is as it was.
    """
    model = make()
    layer = embeddings(model)
    state = torch.get_rng_state()
    assert evaluate(model, [BATCH], objective=NOISY) == evaluate(model, [BATCH], objective=SFT())
    assert torch.equal(torch.get_rng_state(), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    for output in train(model, [[BATCH]] * 2, objective=NOISY, optimizer=optimizer, scheduler=scheduler):
        assert not layer._forward_hooks
        assert output.figures.keys() == {"accuracy"}
    assert not torch.equal(torch.get_rng_state(), state)
    model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        NOISY.bind(model.train(), device=CPU)(BATCH, [])
    assert not layer._forward_hooks


def test_a_model_without_embeddings_is_refused(monkeypatch):
    """A model without embeddings is refused: the setting would have no effect."""
    model = make()
    monkeypatch.setattr(type(model), "get_input_embeddings", lambda _self: None)
    with pytest.raises(LossError, match="neftune_alpha: LlamaForCausalLM names no input embeddings"):
        NOISY.bind(model, device=CPU)

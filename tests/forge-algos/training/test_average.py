"""The moving average of weights: when it moves, and that nothing computes with the former ones."""

import pytest
import torch

from forge_algos import OptimizerSettings, WeightAverage, adamw


def setup(rate, every=None):
    layer = torch.nn.Linear(3, 2)
    optimizer = adamw(layer, OptimizerSettings(learning_rate=0.1))
    return layer, optimizer, WeightAverage(optimizer, rate, every=every)


def step(layer, optimizer, average, number, *, moved=True):
    if moved:
        layer(torch.ones(1, 3)).sum().backward()
        average.before_step()
        optimizer.step()
        optimizer.zero_grad()
    average.after_step(number, moved=moved)


@pytest.mark.parametrize(("every", "after"), [(None, [1, 3]), (2, [2, 4])])
def test_when_it_moves(every, after):
    """After each step that moves the weights, or after those whose number is a multiple; steps 2 and 4 move nothing here."""
    layer, optimizer, average = setup(0.25, every)
    wanted = layer.weight.detach().clone()
    for number in (1, 2, 3, 4):
        step(layer, optimizer, average, number, moved=number in (1, 3))
        if number in after:
            wanted = 0.75 * wanted + 0.25 * layer.weight.detach()
        with average.exchanged(layer):
            torch.testing.assert_close(layer.weight.detach(), wanted)


def test_an_open_autocast_has_no_casts_of_former_weights():
    """Inside the exchange, and after it, a forward under autocast computes with the weights that are in place."""
    layer, optimizer, average = setup(1e-6)
    step(layer, optimizer, average, 1)
    x = torch.randn(4, 3)

    def bits(weight):
        return torch.nn.functional.linear(x.bfloat16(), weight.detach().bfloat16(), layer.bias.detach().bfloat16())

    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), bits(layer.weight), rtol=0, atol=0)
        with average.exchanged(layer), torch.no_grad():
            torch.testing.assert_close(layer(x), bits(layer.weight), rtol=0, atol=0)
        torch.testing.assert_close(layer(x), bits(layer.weight), rtol=0, atol=0)


def test_small_moves_of_an_average_in_bfloat16_arrive():
    """Each is less than half of bfloat16's spacing: rounded to the nearest, the average would stay where it began."""
    layer = torch.nn.Linear(48, 40, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    average = WeightAverage(optimizer, 0.02)
    layer.weight.grad = torch.ones_like(layer.weight)
    average.before_step()
    optimizer.step()
    average.after_step(1, moved=True)
    began = layer.weight.detach().float()
    with torch.no_grad():
        layer.weight.mul_(1.05)
    for number in range(2, 52):
        average.after_step(number, moved=True)
    way = (layer.weight.detach().float() - began).flatten()
    gone = (optimizer.state[layer.weight]["average"].float() - began).flatten()
    assert (gone @ way / (way @ way)).item() == pytest.approx(1 - 0.98**50, abs=0.05)

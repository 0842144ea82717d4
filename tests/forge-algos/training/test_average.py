"""The moving average of weights: when it moves, and that nothing computes with the former ones."""

import copy

import pytest
import torch

from forge_algos import OptimizerError, OptimizerSettings, WeightAverage, adamw

from ..oracle import make


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


class Two(torch.nn.Module):
    """Two layers, of which the second may be without a gradient."""

    def __init__(self, seed=0, outputs=2):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(3, outputs)


def averaged(model):
    optimizer = adamw(model, OptimizerSettings(learning_rate=0.1))
    return optimizer, WeightAverage(optimizer, 0.25, every=2)


def weights_under(average, model):
    with average.exchanged(model):
        return [p.detach().clone() for p in model.parameters()]


def test_it_begins_as_another_model():
    """Before the first step it is that one; a parameter without a gradient is followed too; a resume makes its moves again."""
    model, other = Two(), Two(seed=1)
    optimizer, average = averaged(model)
    average.begin_as(model, other)
    wanted = [p.detach().clone() for p in other.parameters()]
    for number in (1, 2, 3, 4, 5):
        for found, each in zip(weights_under(average, model), wanted, strict=True):
            torch.testing.assert_close(found, each)
        step(model.first, optimizer, average, number)
        if number % 2 == 0:
            wanted = [0.75 * each + 0.25 * p.detach() for each, p in zip(wanted, model.parameters(), strict=True)]
    resumed, state = copy.deepcopy(model), optimizer.state_dict()
    optimizer_of_resumed, average_of_resumed = averaged(resumed)
    optimizer_of_resumed.load_state_dict(state)
    average_of_resumed.begin_as(resumed, other, after=5)
    for which, here in ((average, model), (average_of_resumed, resumed)):
        step(here.first, which._optimizer, which, 6)
    pairs = zip(weights_under(average, model), weights_under(average_of_resumed, resumed), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert torch.equal(other.first.weight, Two(seed=1).first.weight)


def test_another_model_that_does_not_fit_is_refused():
    """Other weights, other shapes, or a frozen weight of another value."""
    model = Two()
    optimizer, average = averaged(model)
    with pytest.raises(OptimizerError, match=r"only one of both models has the weight bias"):
        average.begin_as(model, torch.nn.Linear(3, 2))
    with pytest.raises(OptimizerError, match=r"its weight second.weight is \(5, 3\), and that of the trained model \(2, 3\)"):
        average.begin_as(model, Two(outputs=5))
    with pytest.raises(OptimizerError, match="which steps moved the average is not known"):
        WeightAverage(optimizer, 0.5).begin_as(model, Two(), after=2)
    model.second.requires_grad_(requires_grad=False)
    frozen = averaged(model)[1]
    with pytest.raises(OptimizerError, match="its weight second.weight differs from the trained model's, where it is frozen"):
        frozen.begin_as(model, Two(seed=1))
    other, tuned = make(), make()
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 7.0}
    optimizer, average = averaged(tuned)
    with pytest.raises(OptimizerError, match=r"its configuration has rope_parameters=.*7.0.*, and that of the trained model"):
        average.begin_as(tuned, other)
    other, tuned = make(), make()
    other.config.another_librarys_version = "2026.1"
    average = averaged(tuned)[1]
    average.begin_as(tuned, other)
    other.config.rms_norm_eps = 7.0
    with pytest.raises(OptimizerError, match=r"its configuration has rms_norm_eps=7.0"):
        average.begin_as(tuned, other)

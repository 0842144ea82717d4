"""Gathering of partitioned weights around forwards, by a stand-in for DeepSpeed that refuses what it does."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from forge_dist.strategies.zero import _parameters
from forge_dist.strategies.zero._parameters import computing, gather_on_forward, give_inputs_gradients


@pytest.fixture
def gathered(monkeypatch):
    """Numbers of the weights that were gathered, in order; every weight counts as partitioned."""
    inside, found = [], []

    @contextmanager
    def gather(parameters):
        if any(id(each) in inside for each in parameters):
            raise RuntimeError("Nested GatheredParameters contexts cannot overlap parameters")
        found.append(len(parameters))
        inside.extend(map(id, parameters))
        yield
        inside.clear()

    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=gather)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(_parameters, "is_partitioned", lambda _: True)
    return found


def test_a_frozen_model_is_checked_as_it_gathers(gathered):
    """A model that gathers in every forward is asked within `computing`, as a reference is before a run: once a module."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    gather_on_forward(model)
    with computing(model):
        model(torch.ones(1, 2))
    assert gathered == [2, 1]
    model(torch.ones(1, 2))
    assert gathered == [2, 1, 2, 1], "it gathers after that too"


def test_another_model_gathers_within_the_block(gathered):
    """And not after it."""
    model = nn.Linear(2, 2)
    for _ in range(2):
        with computing(model):
            model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert gathered == [2, 2]


def test_an_input_gets_a_gradient_where_nothing_below_trains():
    """The module's backward ends at the gradient of its input, when its weights have theirs; elsewhere nothing changes."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in (model[0], model[2]):
        layer.requires_grad_(requires_grad=False)
    give_inputs_gradients(model)
    at_end = []
    model[1].register_full_backward_hook(lambda module, *_: at_end.append(module.weight.grad is not None))
    model(torch.randn(2, 3)).sum().backward()
    assert at_end == [True]
    with torch.no_grad():
        assert not model(torch.randn(2, 3)).requires_grad
    model[0].requires_grad_(requires_grad=True)
    model(torch.randn(2, 3)).sum().backward()
    assert model[0].weight.grad is not None

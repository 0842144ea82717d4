"""An objective whose terms need totals of the whole step, on a model of three numbers."""

import numpy as np
import torch

from forge_algos import LossTerms


class Measuring:
    """Log-sigmoid of each row's distance from the mean of all rows, in units of their spread.
    No gradient reaches mean and spread.
    """

    unit = "rows"
    stats = ("above", "outputs")

    def __init__(self):
        self.measured = []

    def count(self, batch):
        return len(batch)

    def samples(self, batch):
        return len(batch)

    def tokens(self, batch):
        return batch.size

    def idle(self):
        return np.full((1, 3), 100.0, np.float32)

    def figures(self, sums, count):
        return {"share_above": sums["above"] / count, "mean_output": sums["outputs"] / count}

    def bind(self, model, *, device):
        return BoundMeasuring(self, model)


class BoundMeasuring:
    needs = 3

    def __init__(self, objective, model):
        self.objective, self.model = objective, model

    def measure(self, batch):
        assert not torch.is_grad_enabled()
        out = self.model(torch.tensor(batch))
        self.objective.measured.append(len(batch))
        return [len(batch), out.sum(), out.square().sum()]

    def __call__(self, batch, totals):
        number, total, squares = totals
        mean = total / number
        out = self.model(torch.tensor(batch))[:, 0]
        spread = max(squares / number - mean**2, 1e-3) ** 0.5
        terms = -torch.nn.functional.logsigmoid((out - mean) / spread)
        stats = {"above": (out > mean).float().sum(), "outputs": out.detach().sum()}
        return LossTerms(terms.sum(), len(batch), stats)


def three_numbers():
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -1.0, 2.0]]))
        model.bias.fill_(0.25)
    return model


def rows_of_numbers(number, seed=0):
    return np.random.default_rng(seed).normal(size=(number, 3)).astype(np.float32)

"""What an objective measures and reports is of the whole step, for every cut."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from forge_algos import DivergedError, NoTargetsError, evaluate, train

from ..measuring import Measuring, rows_of_numbers, three_numbers
from ..oracle import distance, gradients
from ..threads import on_threads

ROWS = rows_of_numbers(9)


def still(batches, parallel=None, objective=None, autocast=None):
    """Return the output and gradients of one step that moves nothing."""
    model = three_numbers()
    common = {} if autocast is None else {"autocast": autocast}
    if parallel is not None:
        parallel.parameters = list(model.parameters())
        common["parallel"] = parallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    objective = objective or Measuring()
    (output,) = train(
        model, [batches], objective=objective, optimizer=optimizer, scheduler=scheduler, max_grad_norm=0, **common
    )
    return output, gradients(model)


def naive():
    """Return loss, figures and gradients of all rows at once, without the loop."""
    model = three_numbers()
    out = model(torch.tensor(ROWS))[:, 0]
    mean, spread = out.detach().mean(), out.detach().std(correction=0)
    loss = -torch.nn.functional.logsigmoid((out - mean) / spread).mean()
    loss.backward()
    figures = {"share_above": float((out > mean).float().mean()), "mean_output": float(mean)}
    return loss.item(), figures, gradients(model)


LOSS, FIGURES, GRADIENTS = naive()


@settings(max_examples=25)
@given(cut=st.lists(st.integers(0, 5), min_size=len(ROWS), max_size=len(ROWS)), world_size=st.integers(1, 3))
def test_totals_are_those_of_the_step(cut, world_size):
    """Any partition over ranks and micro-batches has one big batch's loss and gradients.
    Figures too; empty parts among them.
    """

    def run(rank):
        batches = [ROWS[[i for i, c in enumerate(cut) if c == k * world_size + rank.rank]] for k in range(6)]
        return (*still(batches, rank), rank.calls)

    results = on_threads(run, world_size)
    for output, grads, calls in results:
        assert output.loss == pytest.approx(LOSS, rel=1e-6)
        assert output.figures == pytest.approx(FIGURES, rel=1e-5)
        assert distance(grads, GRADIENTS) < 1e-5
        assert (output.loss_count, output.samples, output.tokens) == (9, 9, 27)
        assert calls == results[0][2]
        assert output.figures == results[0][0].figures


def test_a_mean_of_each_batch_differs():
    """Two micro-batches with means of their own are far off: the comparison can fail."""
    parts = [still([part]) for part in (ROWS[:2], ROWS[2:])]
    mixed = (2 * parts[0][0].loss + 7 * parts[1][0].loss) / 9
    assert abs(mixed / LOSS - 1) > 1e-3


def test_measure_costs_one_collective_and_one_pass_each():
    """A step has three collectives (counts, totals, sums), and one to find the end.
    Each batch is measured once, an idle rank's made-up one too.
    """
    objectives = [Measuring(), Measuring()]

    def run(rank):
        batches = [ROWS[:4], ROWS[:0], ROWS[4:]] if rank.rank == 0 else [ROWS[:0], ROWS[:0], ROWS[:0]]
        still(batches, rank, objectives[rank.rank])
        return rank.calls

    for calls in on_threads(run, 2):
        assert [call for call in calls if call[0] == "sum"] == [("sum", 69), ("sum", 3), ("sum", 4), ("sum", 69)]
    assert objectives[0].measured == [4, 5]
    assert objectives[1].measured == [1, 1]


def test_measure_runs_under_autocast():
    """Measuring has one autocast context a batch, as the terms have, and the choice of the head before them."""
    entered = []

    def autocast():
        entered.append(torch.is_grad_enabled())
        return torch.autocast("cpu", torch.bfloat16)

    still([ROWS[:4], ROWS[4:]], autocast=autocast)
    assert entered == [True, False, False, True, True]


def test_a_measure_of_another_length_is_named():
    """A measure whose length is not `needs` is an error."""

    class Wrong(Measuring):
        def bind(self, model, *, device):
            bound = super().bind(model, device=device)
            bound.needs = 2
            return bound

    with pytest.raises(ValueError, match="measure gave 3 numbers, and needs says 2"):
        still([ROWS], objective=Wrong())


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_measures_all_of_its_batches(world_size):
    """An evaluation's step is all of it: loss and figures of one big batch, on any ranks."""

    def run(rank):
        mine = ROWS[rank.rank :: world_size]
        return evaluate(three_numbers(), iter([mine[:2], mine[2:], ROWS[:0]]), objective=Measuring(), parallel=rank)

    for found in on_threads(run, world_size):
        assert found.loss == pytest.approx(LOSS, rel=1e-6)
        assert found.figures == pytest.approx(FIGURES, rel=1e-5)
        assert found.loss_count == 9


def test_an_evaluation_without_terms_names_the_unit():
    """An evaluation without terms names the objective's unit; a step without has no figures."""
    with pytest.raises(NoTargetsError, match="no rows"):
        evaluate(three_numbers(), [ROWS[:0]], objective=Measuring())
    output, _ = still([ROWS[:0]])
    assert (output.loss, output.loss_count, output.figures) == (0.0, 0, {})


class Gathered(torch.nn.Linear):
    """A layer as FSDP leaves it after a forward without a backward: it computes with a copy until it is resharded."""

    def __init__(self):
        super().__init__(3, 1, bias=False)
        self.copy = None

    def reshard(self):
        self.copy = None

    def forward(self, x):
        if self.copy is None:
            self.copy = self.weight.detach().clone()
        return torch.nn.functional.linear(x, self.weight + (self.copy - self.weight).detach())


class Modes(torch.optim.SGD):
    """An optimizer whose weights in training are twice those that it has found."""

    def train(self):
        self._times(2.0)

    def eval(self):
        self._times(0.5)

    def _times(self, factor):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(factor)


def test_a_step_computes_with_the_weights_of_training():
    """Also where FSDP holds the others, gathered for a measurement before it or for a probe."""
    model = Gathered()
    measured = model(torch.tensor(ROWS)).mean().item()
    optimizer = Modes(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    (output,) = train(model, [[ROWS]], objective=Measuring(), optimizer=optimizer, scheduler=scheduler)
    assert output.figures["mean_output"] == pytest.approx(2 * measured, rel=1e-5)


def test_a_weight_that_is_no_number_is_named():
    """Lower rates mend no file."""
    model = three_numbers()
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with pytest.raises(DivergedError, match="The weight weight holds numbers that are not finite"):
        list(train(model, [[ROWS]], objective=Measuring(), optimizer=optimizer, scheduler=scheduler))

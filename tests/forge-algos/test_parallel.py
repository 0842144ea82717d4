"""Any number of ranks takes the steps of one process; ranks here are threads.
They add up gradients by hand.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from forge_algos import (
    ALONE,
    SFT,
    DivergedError,
    NoTargetsError,
    OptimizerSettings,
    UnevenRanksError,
    adamw,
    evaluate,
    schedule,
    train,
)
from forge_algos.batches._packed import check_batch
from forge_algos.training._columns import columns

from ..lanes import quick_keeps
from .oracle import distance, gradients, make, pack, samples
from .threads import on_threads

LENGTHS = (5, 9, 2, 7, 13, 4, 6)
EXAMPLES = samples(LENGTHS, seed=3)
NOTHING = pack(samples([4, 3], learned=0.0))


def drive(rank, steps, *, still=False, model=None, dropout=False, **options):
    """Return one rank's outputs, gradients, weights and calls over `steps(rank number)`."""
    model = make() if model is None else model
    rank.parameters = list(model.parameters())
    # Adam's eps at 1e-3: a gradient of 1e-7 divided by its own root would turn rounding into a step.
    config = OptimizerSettings(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5)
    if still:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    else:
        optimizer = adamw(model, config)
        scheduler = schedule(optimizer, config, 10)
    mine = steps(getattr(rank, "rank", 0))
    outputs = list(
        train(
            model,
            mine,
            objective=SFT(),
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=0 if still else 0.5,
            parallel=rank,
            **options,
        )
    )
    return outputs, gradients(model), [p.detach().clone() for p in model.parameters()], getattr(rank, "calls", None)


class Solo:
    """ALONE, with a place for what `drive` records."""

    def __new__(cls):
        return type("Noted", (type(ALONE),), {})()


def facts(outputs):
    return [(o.step, o.loss_count, o.tokens, o.samples, o.learning_rate, o.skipped) for o in outputs]


WHOLE = drive(Solo(), lambda _rank: [[pack(EXAMPLES)]], still=True)


@settings(max_examples=15)
@given(
    cut=st.lists(st.integers(0, 5), min_size=len(LENGTHS), max_size=len(LENGTHS)),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_the_cut_changes_nothing(cut, world_size, seed):
    """Any partition of a step over ranks and micro-batches has the same loss and gradients.
    Empty ranks and columns among them.
    """
    order = np.random.default_rng(seed).permutation(len(LENGTHS))

    def steps(rank):
        return [[pack([EXAMPLES[i] for i in order if cut[i] == k * world_size + rank]) for k in range(6)]]

    for outputs, mine, _, _ in on_threads(lambda rank: drive(rank, steps, still=True), world_size):
        (output,), (expected,) = outputs, WHOLE[0]
        assert abs(output.loss / expected.loss - 1) < 1e-6
        assert abs(output.grad_norm / expected.grad_norm - 1) < 1e-5
        assert distance(mine, WHOLE[1]) < 1e-5
        assert facts(outputs) == facts(WHOLE[0])


@pytest.mark.parametrize("world_size", quick_keeps([3], [2, 3]))
def test_steps_equal_those_of_one_process(world_size):
    """Six steps of two ranks equal one process's, with clipping, decay and accumulation.
    With unequal counts, a rank and a step without anything to learn.
    """
    data = [samples(LENGTHS, seed=step) for step in range(6)]
    data[3] = samples(LENGTHS, seed=3, learned=0.0)

    def steps(ranks, rank):
        # The last rank has nothing in step 2; in step 5 a column is empty everywhere.
        found = []
        for number, step in enumerate(data, start=1):
            sharing = ranks - (number == 2 and ranks > 1)
            parts = [step[rank::sharing][k::2] for k in range(2)] if rank < sharing else [[], []]
            found.append([pack(part) for part in ([*parts, []] if number == 5 else parts)])
        return found

    expected, _, weights, _ = drive(Solo(), lambda rank: steps(1, rank))
    results = on_threads(lambda rank: drive(rank, lambda number: steps(world_size, number)), world_size)
    for outputs, _, moved, calls in results:
        assert facts(outputs) == facts(expected)
        for output, other in zip(outputs, expected, strict=True):
            assert output.loss == pytest.approx(other.loss, rel=1e-5)
            assert output.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        for mine, other in zip(moved, weights, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        assert calls == results[0][3]
        # Two columns a step, none in the one with nothing to learn, and not the one that is empty everywhere.
        assert calls.count(("backward",)) == 2 * 5
        assert calls.count(("micro_batch", True)) == calls.count(("step",)) == 5
        assert all(torch.equal(m, o) for m, o in zip(moved, results[0][2], strict=True))
    assert [o.loss_count == 0 for o in expected] == [False, False, False, True, False, False]


def test_a_rank_without_work_counts_for_nothing():
    """An idle rank's made-up row adds exactly zero to the gradients.
    They have the bits of the rank that works.
    """
    results = on_threads(lambda rank: drive(rank, lambda n: [[NOTHING if n else pack(EXAMPLES)]], still=True), 2)
    for outputs, mine, _, _ in results:
        assert outputs[0].loss == WHOLE[0][0].loss
        assert all(torch.equal(mine[name], WHOLE[1][name]) for name in WHOLE[1])


def test_the_made_up_row_is_a_row():
    """The made-up row is valid and has something to learn, in any vocabulary."""
    check_batch(SFT().idle(), 1)
    assert SFT().count(SFT().idle()) == 1


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_divergence_on_one_rank_is_that_of_all(where, on_nan):
    """NaN on one rank stops, or skips the step, on every rank.
    No optimizer moves; the schedule does.
    """

    def run(rank):
        model = make()
        moved = []
        if rank.rank == 1:
            broken = iter([False, True, False])
            if where == "gradient":
                parameter = model.model.layers[0].mlp.up_proj.weight
                parameter.register_hook(lambda grad: grad * float("inf") if next(broken) else grad)
            else:
                embed = model.model.embed_tokens
                # The isolation and head probes run without gradients.
                embed.register_forward_hook(
                    lambda _m, _a, out: out * float("nan") if torch.is_grad_enabled() and next(broken) else None
                )
        config = OptimizerSettings(learning_rate=1e-2, warmup_steps=4)
        rank.parameters = list(model.parameters())
        optimizer = adamw(model, config)
        scheduler = schedule(optimizer, config, 4)
        outputs = train(
            model,
            [[pack(EXAMPLES[rank.rank :: 2])]] * 3,
            objective=SFT(),
            optimizer=optimizer,
            scheduler=scheduler,
            parallel=rank,
            on_nan=on_nan,
        )
        error, found = None, []
        try:
            for output in outputs:
                found.append(output)
                moved.append([p.detach().clone() for p in model.parameters()])
        except DivergedError as caught:
            error = str(caught)
            moved.append([p.detach().clone() for p in model.parameters()])
        state = {float(s["step"]) for s in optimizer.state.values()}
        return found, moved, error, state

    for found, moved, error, state in on_threads(run, 2):
        assert all(torch.equal(a, b) for a, b in zip(moved[0], moved[1], strict=True))
        if on_nan == "stop":
            assert "step 2: the " + ("loss is nan" if where == "loss" else "gradient norm is") in error
            assert "did not move" in error
            assert len(found) == 1
            continue
        assert error is None
        assert [o.skipped for o in found] == [False, True, False]
        assert not math.isfinite(found[1].loss if where == "loss" else found[1].grad_norm)
        assert [o.learning_rate for o in found] == pytest.approx([0.0025, 0.005, 0.0075])
        assert state == {2.0}
        assert all(p.isfinite().all() for p in moved[2])
        assert not all(torch.equal(a, b) for a, b in zip(moved[1], moved[2], strict=True))


def test_a_norm_that_is_nan_on_one_rank_alone():
    """A gradient norm that is NaN on one rank alone stops all of them."""

    def run(rank):
        if rank.rank == 1:
            rank.grad_norm = lambda _parameters: torch.tensor(float("inf"))
        with pytest.raises(DivergedError, match="step 1: the gradient norm is " + ("inf" if rank.rank else "nan")):
            drive(rank, lambda _rank: [[pack(EXAMPLES)]])
        assert ("step",) not in rank.calls

    on_threads(run, 2)


def test_one_process_skips():
    """One process skips first steps that diverge, without a warning of the schedule."""
    model = make()
    bad = iter([True, True, False])
    model.model.norm.weight.register_hook(lambda grad: grad * float("nan") if next(bad) else grad)
    outputs, _, _, _ = drive(Solo(), lambda _rank: [[pack(EXAMPLES)]] * 3, model=model, on_nan="skip")
    assert [o.skipped for o in outputs] == [True, True, False]
    assert [o.loss_count > 0 for o in outputs] == [True] * 3
    assert math.isfinite(outputs[0].loss)


def test_steps_are_numbered_from_first_step():
    """`first_step` numbers outputs and messages."""
    model = make()
    outputs, _, _, _ = drive(Solo(), lambda _rank: [[pack(EXAMPLES)]] * 2, first_step=41)
    assert [o.step for o in outputs] == [41, 42]
    model.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(DivergedError, match="step 7: the gradient norm is nan"):
        drive(Solo(), lambda _rank: [[pack(EXAMPLES)]], model=model, first_step=7)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda rank: [[pack(EXAMPLES)]] * (1 + rank), "1 of 2 data shards have no batches left"),
        (lambda rank: [[pack(EXAMPLES)] * (1 + rank)], "given [12] micro-batches and the mean of 2 data shards is 1.5"),
    ],
)
def test_uneven_ranks_are_refused(steps, message):
    """More steps, or micro-batches, on one rank than on another are an error on all.
    They would wait for each other without end.
    """

    def run(rank):
        with pytest.raises(UnevenRanksError, match=message) as caught:
            drive(rank, steps)
        return caught.value.exit_status

    assert on_threads(run, 2) == [2, 2]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 130])
def test_many_micro_batches(count):
    """Beyond the width of the first collective each column is still counted by itself."""
    one, none = pack(samples([3], learned=1.0)), pack([])

    def run(rank):
        given = [one if (k + rank.rank) % 3 == 0 else none for k in range(count)]
        found = columns(given, SFT(), rank)
        return found.mine, found.everywhere, found.active, (found.count, found.tokens, found.samples)

    for number, (mine, everywhere, active, totals) in enumerate(on_threads(run, 2)):
        assert mine == [2 * ((k + number) % 3 == 0) for k in range(count)]
        assert everywhere == [2 * (k % 3 == 0) + 2 * ((k + 1) % 3 == 0) for k in range(count)]
        assert active == [k for k in range(count) if k % 3 != 1]
        ones = len([k for k in range(count) if k % 3 == 0]) + len([k for k in range(count) if k % 3 == 2])
        assert totals == (2 * ones, 3 * ones, ones)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_evaluation_is_the_same_on_any_number_of_ranks(world_size):
    """Every rank gets the mean over all learned tokens, for unequal counts and empty columns."""
    expected = evaluate(make(), [pack(EXAMPLES)], objective=SFT())

    def run(rank):
        batches = [pack(EXAMPLES[rank.rank :: world_size][k : k + 1]) for k in range(len(EXAMPLES))]
        found = evaluate(make(), iter([NOTHING, *batches]), objective=SFT(), parallel=rank)
        return found, rank.calls

    results = on_threads(run, world_size)
    for found, calls in results:
        assert found == results[0][0]
        assert found.loss_count == expected.loss_count
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert calls == results[0][1]


def test_an_evaluation_refuses_on_all_ranks():
    """Unequal numbers of batches, and nothing to learn anywhere, are errors on all ranks."""

    def uneven(rank):
        with pytest.raises(UnevenRanksError, match="1 of 2 data shards"):
            evaluate(make(), [pack(EXAMPLES)] * (2 - rank.rank), objective=SFT(), parallel=rank)

    def nothing(rank):
        with pytest.raises(NoTargetsError):
            evaluate(make(), [NOTHING], objective=SFT(), parallel=rank)

    on_threads(uneven, 2)
    on_threads(nothing, 2)


def test_forwards_go_through_the_outermost_module():
    """Probes, training and evaluation call the outermost wrapper, never the model inside."""

    class Outer(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.inside = 0
            self.calls = 0
            for part in (module, module.model, module.lm_head, module.model.layers[0]):
                part.register_forward_pre_hook(self.check)

        def check(self, *_args):
            assert self.inside == 1

        def forward(self, *args, **kwargs):
            self.inside += 1
            self.calls += 1
            try:
                return self.module(*args, **kwargs)
            finally:
                self.inside -= 1

    outer = Outer(make())
    outputs, mine, _, _ = drive(Solo(), lambda _rank: [[pack(EXAMPLES)]], model=outer, still=True)
    evaluate(outer, [pack(EXAMPLES)], objective=SFT())
    assert outer.calls > 2
    assert outputs[0].loss == WHOLE[0][0].loss
    assert all(torch.equal(mine[f"module.{name}"], WHOLE[1][name]) for name in WHOLE[1])

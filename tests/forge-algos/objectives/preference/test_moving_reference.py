"""A reference that follows the model (TR-DPO): any cut, any adapter, ranks, against a second model that is moved by hand."""

import copy

import attrs
import pytest
import torch

from forge_algos import (
    ALONE,
    DPO,
    KTO,
    AdapterSettings,
    DPOSettings,
    KTOSettings,
    LossError,
    OptimizerSettings,
    WeightAverage,
    adamw,
    adapt,
    check_reference,
    evaluate,
    schedule,
    train,
)

from ...oracle import CPU, make
from ...preferences import kto_batch, pair_batch, rotated, some_pairs
from ...threads import on_threads

PAIRS = some_pairs(8, seed=3)
OTHERS = rotated(PAIRS)
GOOD = [True, False, False, True, True, True, False, True]
STEPS, EVERY, SHARE = 5, 2, 0.6


def batches(verb, *cuts):
    """Return a micro-batch of each cut."""
    if verb == "dpo":
        return [pair_batch(PAIRS[cut]) for cut in cuts]
    return [kto_batch(PAIRS[cut], GOOD[cut], OTHERS[cut]) for cut in cuts]


def objective(verb, kind, reference, **more):
    """Return the objective of a verb with a reference of this kind."""
    moves = {"reference_sync_steps": EVERY, "reference_mixup": SHARE} if kind == "moving" else {}
    if verb == "dpo":
        return DPO(DPOSettings(beta=0.5, reference=kind, **moves, **more), reference=reference)
    return KTO(KTOSettings(beta=0.5, reference=kind, **moves, **more), reference=reference)


def a_model(adapter="none"):
    model = make()
    if adapter == "none":
        return model
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return adapt(
            model, AdapterSettings(adapter=adapter, **({"lora_r": 3, "lora_dropout": 0.5} if adapter == "lora" else {}))
        ).model


def optimizer_of(model):
    settings = OptimizerSettings(learning_rate=3e-2, lr_scheduler="constant")
    optimizer = adamw(model, settings)
    return optimizer, schedule(optimizer, settings, STEPS)


def by_hand(verb, adapter="none", start=None):
    """Losses where the reference is a second model in memory, and the held-out loss after the last step."""
    model = a_model(adapter)
    reference = copy.deepcopy(model if start is None else start).requires_grad_(requires_grad=False)
    optimizer, scheduler = optimizer_of(model)
    losses, live = [], objective(verb, "live", reference)
    torch.manual_seed(0)
    steps = [batches(verb, slice(0, 8))] * STEPS
    for output in train(model, steps, objective=live, optimizer=optimizer, scheduler=scheduler):
        losses.append(output.loss)
        if output.step % EVERY == 0:
            with torch.no_grad():
                for old, new in zip(reference.parameters(), model.parameters(), strict=True):
                    old.mul_(1 - SHARE).add_(new, alpha=SHARE)
    return [*losses, evaluate(model, batches(verb, slice(0, 8)), objective=live).loss]


def moved(verb, *cuts, adapter="none", parallel=ALONE, start=None):
    """The same with a reference that follows the model, and begins as `start`."""
    model = a_model(adapter)
    optimizer, scheduler = optimizer_of(model)
    average = WeightAverage(optimizer, SHARE, every=EVERY)
    if start is not None:
        average.begin_as(model, start)
    if parallel is not ALONE:
        parallel.parameters = list(model.parameters())
    own = objective(verb, "moving", average.exchanged)
    if start is None:
        assert check_reference(model, batches(verb, *cuts), objective=own, parallel=parallel) == pytest.approx(
            0.6931 if verb == "dpo" else 0.5, rel=1e-3
        )
    torch.manual_seed(0)
    steps = [batches(verb, *cuts)] * STEPS
    found = train(model, steps, objective=own, optimizer=optimizer, scheduler=scheduler, average=average, parallel=parallel)
    losses = [output.loss for output in found]
    return [*losses, evaluate(model, batches(verb, *cuts), objective=own, parallel=parallel).loss]


@pytest.mark.parametrize("verb", ["dpo", "kto"])
@pytest.mark.parametrize("cuts", [(slice(0, 8),), (slice(0, 3), slice(3, 3), slice(3, 8))], ids=["whole", "cut"])
def test_equals_a_second_model_that_is_moved(verb, cuts):
    """Losses of all steps and of an evaluation, however a step is cut."""
    wanted = by_hand(verb)
    found = moved(verb, *cuts)
    assert found == pytest.approx(wanted, rel=2e-4)
    assert abs(wanted[-1] - wanted[0]) > 1e-3


@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_it_may_begin_as_another_model(verb):
    """Its first loss is that beside this model, which stays as it is."""
    start = make(seed=1)
    wanted = by_hand(verb, start=start)
    assert moved(verb, slice(0, 8), start=start) == pytest.approx(wanted, rel=2e-4)
    assert abs(wanted[0] - by_hand(verb)[0]) > 1e-3


@pytest.mark.parametrize("adapter", ["lora", "osft"])
def test_of_an_adapter_its_own_weights_move(adapter):
    """The reference is a second set of the trained weights: at first the base, then what the mixture makes of it."""
    assert moved("dpo", slice(0, 8), adapter=adapter) == pytest.approx(by_hand("dpo", adapter), rel=2e-4)


@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_ranks_do_not_change_it(verb):
    """Two ranks, one of which has nothing in one micro-batch, make the losses of one."""
    cuts = [(slice(0, 3), slice(3, 6)), (slice(6, 8), slice(8, 8))]
    wanted = by_hand(verb)
    for found in on_threads(lambda parallel: moved(verb, *cuts[parallel.rank], parallel=parallel), 2):
        assert found == pytest.approx(wanted, rel=2e-4)


def test_what_does_not_fit_is_refused():
    """No weights to move, a model in their place, and a loop of one's own that does not begin its steps."""
    model = make()
    for given in (None, make(seed=2)):
        with pytest.raises(LossError, match="reference='moving': a function is wanted"):
            objective("dpo", "moving", given).bind(model, device=CPU)
    optimizer, _ = optimizer_of(model)
    own = objective("dpo", "moving", WeightAverage(optimizer, SHARE).exchanged)
    bound = own.bind(model, device=CPU)
    (batch,) = batches("dpo", slice(0, 8))
    with pytest.raises(LossError, match="call begin"):
        bound(batch, [])
    bound.begin([batch], ALONE)
    assert bound(batch, []).sum.item() == pytest.approx(8 * 0.6931, rel=1e-3)
    with pytest.raises(LossError, match="call begin"):
        bound(attrs.evolve(batch, groups=copy.copy(batch.groups)), [])
    with pytest.raises(LossError, match="reference='live': a model is wanted, not function"):
        objective("dpo", "live", lambda _: None).bind(model, device=CPU)

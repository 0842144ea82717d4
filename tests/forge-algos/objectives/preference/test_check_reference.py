"""References that are not the model's are found before the first step."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from forge_algos import DPO, KTO, DPOSettings, KTOSettings, LossError, ReferenceMismatchError, check_reference, reference_logps

from ...oracle import make
from ...preferences import kto_batch, pair_batch, rotated, some_pairs
from ...threads import on_threads

PAIRS = some_pairs(6, seed=31)


def stored(reference, pairs=PAIRS, order=slice(None), **kind):
    batch = pair_batch(pairs)
    (logps,) = reference_logps(reference, [batch.groups], **kind)
    order = np.arange(2 * len(pairs)).reshape(-1, 2)[order].reshape(-1)
    return pair_batch(pairs, ref_logps=logps[order])


def stored_kto(reference, *, mismatched_reference=None):
    batch = kto_batch(PAIRS, [True, False] * 3, rotated(PAIRS))
    (logps,) = reference_logps(reference, [batch.completions])
    (others,) = reference_logps(mismatched_reference or reference, [batch.mismatched])
    return kto_batch(PAIRS, [True, False] * 3, rotated(PAIRS), ref_logps=logps, ref_mismatched_logps=others)


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({}, math.log(2)),
        ({"loss_type": "ipo", "beta": 0.1}, 25.0),
        ({"loss_type": "hinge"}, 1.0),
        ({"loss_type": "sppo_hard", "beta": 0.01}, 5000.0),
    ],
)
def test_the_models_own_references_pass(settings, start):
    """The model's own references pass in any cut, with the loss at ratio 0 within 1e-4.
    With an empty row too.
    """
    model = make()
    batches = [stored(model, PAIRS[:4]), pair_batch([]), stored(model, PAIRS[4:])]
    found = check_reference(model, batches, objective=DPO(DPOSettings(**settings)))
    assert found == pytest.approx(start, rel=1e-4)
    assert all(module.training for module in model.modules())


def test_another_models_references_are_refused():
    """The error has the number of pairs that are off, the worst ones, and what to do."""
    with pytest.raises(
        ReferenceMismatchError, match=r"0\.693147 \(within 0\.0001\).*6 of 6 terms.*batch 0, pair \d by .* nats.*anew"
    ):
        check_reference(make(), [stored(make(seed=9))], objective=DPO())


def test_one_wrong_pair_is_named():
    """A single wrong pair is named by its batch and its place in it."""
    batches = [stored(make(), PAIRS[:3]), stored(make(), PAIRS[3:])]
    batches[1].ref_logps[2] += 0.5
    with pytest.raises(ReferenceMismatchError, match=r"1 of 6 terms are off: batch 1, pair 1 by 0\.5 nats"):
        check_reference(make(), batches, objective=DPO())


def test_references_in_another_order_are_refused():
    """References in another order are refused, although their sum is right."""
    with pytest.raises(ReferenceMismatchError, match="another order"):
        check_reference(make(), [stored(make(), order=slice(None, None, -1))], objective=DPO(DPOSettings(beta=0.01)))


def test_errors_that_cancel_are_refused():
    """Two pairs off in opposite directions are refused, although the mean loss is right."""
    batch = stored(make())
    batch.ref_logps[0] += 0.05
    batch.ref_logps[4] -= 0.05
    with pytest.raises(ReferenceMismatchError, match=r"is 0\.69314.*2 of 6 terms are off"):
        check_reference(make(), [batch], objective=DPO())


def test_a_reference_that_is_nan_is_refused():
    """A stored reference that is NaN is refused by its place."""
    batch = stored(make())
    batch.ref_logps[0] = np.nan
    with pytest.raises(LossError, match="ref_logps: number 0 of 12 is nan"):
        check_reference(make(), [batch], objective=DPO())


def test_ktos_references():
    """KTO's loss is ½ with the right references; those of mismatched completions count too."""
    assert check_reference(make(), [stored_kto(make())], objective=KTO()) == pytest.approx(0.5, abs=1e-5)
    weighted = KTO(KTOSettings(desirable_weight=2.0))
    assert check_reference(make(), [stored_kto(make())], objective=weighted) == pytest.approx(0.75, abs=1e-5)
    with pytest.raises(ReferenceMismatchError, match=r"6 of 12 terms.*completion \d"):
        check_reference(make(), [stored_kto(make(), mismatched_reference=make(seed=2))], objective=KTO())


def test_bfloat16_has_a_wider_tolerance():
    """Under autocast, references computed under it pass; another model's do not."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    check_reference(make(), [stored(make(), autocast=autocast)], objective=DPO(), autocast=autocast)
    with pytest.raises(ReferenceMismatchError, match=r"within 0\.05"):
        check_reference(
            make(), [stored(make(seed=9), autocast=autocast)], objective=DPO(DPOSettings(beta=1.0)), autocast=autocast
        )


def test_all_ranks_decide_alike():
    """One rank's wrong references stop both; a rank without work takes part."""

    def on(rank, wrong):
        batch = pair_batch([]) if rank.rank else stored(make(seed=9 if wrong else 0))
        try:
            return check_reference(make(), [batch], objective=DPO(), parallel=rank)
        except ReferenceMismatchError as error:
            return str(error)

    losses = on_threads(partial(on, wrong=False), 2)
    assert losses[0] == losses[1] == pytest.approx(math.log(2), abs=1e-4)
    errors = on_threads(partial(on, wrong=True), 2)
    assert all("6 of 6 terms are off" in error for error in errors)

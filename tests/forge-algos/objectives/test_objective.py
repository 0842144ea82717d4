"""What all objectives have in common: a device by its name, and batches of another objective."""

import numpy as np
import pytest
import torch

from forge_algos import (
    DPO,
    GRPO,
    KTO,
    SFT,
    AdapterError,
    AdapterSettings,
    DPOSettings,
    GRPOSettings,
    KTOSettings,
    LossError,
    OptimizerError,
    PackedBatchError,
    adapt,
    evaluate,
    make_optimizer,
    reference_logps,
)

from ..oracle import CPU, make, pack, samples
from ..preferences import pair_batch, some_pairs

PAIRS = some_pairs(3, seed=5)


def test_a_device_by_its_name():
    """`device="cpu"` is torch's device of that name: the same loss, in a bound objective and in an evaluation."""
    row, objective = pack(samples((5, 4, 7))), SFT()
    found = [objective.bind(make(), device=device)(row, []).sum.item() for device in (CPU, "cpu")]
    assert found[0] == found[1]
    count = objective.count(row)
    assert evaluate(make(), [row], objective=objective, device="cpu").loss == pytest.approx(found[0] / count)
    (logps,) = reference_logps(make(), [pair_batch(PAIRS).groups], device="cpu")
    bound = DPO(DPOSettings()).bind(make(), device="cpu")
    assert torch.isfinite(bound(pair_batch(PAIRS, ref_logps=logps), []).sum)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (SFT(), "a packed row is wanted, not PreferenceBatch, which has no input_ids"),
        (KTO(KTOSettings()), "a KTOBatch is wanted, not PreferenceBatch, which has no completions"),
    ],
)
def test_a_batch_of_another_objective(objective, said):
    """It is named with what is wanted, whether the loop counts it or it is given to the bound objective."""
    batch, model = pair_batch(PAIRS), make()
    with pytest.raises(PackedBatchError, match=said):
        evaluate(model, [batch], objective=objective)
    with pytest.raises(PackedBatchError, match="is wanted, not PreferenceBatch"):
        objective.bind(model, device=CPU)(batch, [0.0, 1.0])


@pytest.mark.parametrize("objective", [DPO(DPOSettings()), GRPO(GRPOSettings())])
def test_a_packed_row_for_pairs_or_completions(objective):
    """A row of documents is no batch of groups."""
    with pytest.raises(PackedBatchError, match=r"(a PreferenceBatch|an OnlineBatch) is wanted, not .*, which has no groups"):
        objective.count(pack(samples((5, 4))))
    with pytest.raises(PackedBatchError, match=r"such as batch\.groups, is wanted, not PreferenceBatch"):
        list(reference_logps(make(), [pair_batch(PAIRS)]))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_stored_references_that_are_not_finite(wrong):
    """They are named by their place: their loss would be NaN."""
    logps = np.zeros(6, np.float32)
    logps[3] = wrong
    bound = DPO(DPOSettings()).bind(make(), device=CPU)
    with pytest.raises(LossError, match=f"ref_logps: number 3 of 6 is {wrong}, and a finite one is wanted"):
        bound(pair_batch(PAIRS, ref_logps=logps), [])


def test_settings_are_settings():
    """The name of an adapter or an optimizer, or a dictionary, is answered with the class that is wanted."""
    with pytest.raises(AdapterError, match=r"AdapterSettings\(adapter='lora', \.\.\.\) are wanted, not \{'adapter': 'lora'\}"):
        adapt(make(), {"adapter": "lora"})
    with pytest.raises(OptimizerError, match=r"OptimizerSettings\(optimizer='adamw', \.\.\.\) are wanted, not 'adamw'"):
        make_optimizer(make(), "adamw")
    assert adapt(make(), AdapterSettings(adapter="lora")).model is not None


@pytest.mark.parametrize("given", [{}, {"beta": 0.1}])
@pytest.mark.parametrize(
    ("objective", "kind"),
    [(SFT, "SupervisedSettings"), (DPO, "DPOSettings"), (KTO, "KTOSettings"), (GRPO, "GRPOSettings")],
)
def test_settings_that_are_a_dict_are_refused(objective, kind, given):
    """When the objective is made, with the class that is wanted; an empty one too."""
    with pytest.raises(TypeError, match=rf"^settings must be {kind}, got .*\(dict\): write settings={kind}\("):
        objective(given) if objective is GRPO else objective(settings=given)

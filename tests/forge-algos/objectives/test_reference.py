"""Log-probabilities that are computed once and stored."""

import numpy as np
import pytest
import torch

from forge_algos import AdapterError, AdapterSettings, adapt, reference_logps

from ..oracle import make
from ..preferences import rows_of, some_pairs, token_logps

PAIRS = some_pairs(5, seed=21)


def groups(pairs=PAIRS):
    return rows_of([[(p, c), (p, r)] for p, c, r in pairs])


def test_they_are_the_naive_ones():
    """float32 sums of each completion, and of what lies beyond the shorter one of its pair, row after row."""
    model = make()
    found = list(reference_logps(model, [groups(PAIRS[:2]), groups(PAIRS[2:])]))
    logps, tails = (np.concatenate(parts) for parts in zip(*found, strict=True))
    assert logps.dtype == tails.dtype == np.float32
    tokens = [(token_logps(model, p, y).detach(), min(len(c), len(r))) for p, c, r in PAIRS for y in (c, r)]
    np.testing.assert_allclose(logps, [t.sum() for t, _ in tokens], rtol=1e-5)
    np.testing.assert_allclose(tails, [t[shorter:].sum() for t, shorter in tokens], rtol=1e-5)
    assert (tails == 0).any()
    assert (tails < 0).any()


def test_groups_of_one_have_no_tails():
    """As KTO's completions are."""
    ((logps, tails),) = reference_logps(make(), [rows_of([[(p, c)] for p, c, _ in PAIRS])])
    assert logps.shape == (5,)
    assert not tails.any()


def test_an_empty_row_gives_empty_arrays_in_its_place():
    """Where ranks have unequally many rows, each still makes as many forwards as the others."""
    model = make()
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    found = list(reference_logps(model, [groups(), groups([]), groups()]))
    handle.remove()
    assert [len(logps) for logps, _ in found] == [10, 0, 10]
    # Two tokens of a made-up row for the empty one; the others are for the probes.
    assert len(calls) >= 3
    np.testing.assert_array_equal(found[0][0], found[2][0])


def test_modes_gradients_and_adapters_are_left_alone():
    """Dropout is off while it runs; the adapter too where that is asked for, and only then."""
    model = adapt(make(), AdapterSettings(adapter="lora", lora_r=3, lora_dropout=0.5)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    ((on, _),) = reference_logps(model, [groups()])
    ((again, _),) = reference_logps(model, [groups()])
    ((off, _),) = reference_logps(model, [groups()], adapter_off=True)
    ((base, _),) = reference_logps(make(), [groups()])
    np.testing.assert_array_equal(on, again)
    np.testing.assert_allclose(off, base, rtol=1e-6)
    assert np.abs(on - off).max() > 1e-2
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_an_adapter_that_is_not_there_cannot_be_switched_off():
    """Said by name, not by an attribute error."""
    with pytest.raises(AdapterError, match="carries no adapter"):
        list(reference_logps(make(), [groups()], adapter_off=True))

"""Reference log-probabilities, computed once and stored."""

import numpy as np
import pytest
import torch

from forge_algos import AdapterError, AdapterSettings, adapt, reference_logps

from ...oracle import make
from ...preferences import rows_of, some_pairs, token_logps

PAIRS = some_pairs(5, seed=21)


def groups(pairs=PAIRS):
    return rows_of([[(p, c), (p, r)] for p, c, r in pairs])


def test_they_are_the_naive_ones():
    """They are float32 sums of each completion, row after row."""
    model = make()
    logps = np.concatenate(list(reference_logps(model, [groups(PAIRS[:2]), groups(PAIRS[2:])])))
    assert logps.dtype == np.float32
    expected = [token_logps(model, p, y).detach().sum() for p, c, r in PAIRS for y in (c, r)]
    np.testing.assert_allclose(logps, expected, rtol=1e-5)


def test_groups_of_one():
    """Groups of one completion, KTO's, work."""
    (logps,) = reference_logps(make(), [rows_of([[(p, c)] for p, c, _ in PAIRS])])
    assert logps.shape == (5,)


def test_an_empty_row_gives_empty_arrays_in_its_place():
    """An empty row gives an empty array, so that ranks make equally many forwards."""
    model = make()
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    found = list(reference_logps(model, [groups(), groups([]), groups()]))
    handle.remove()
    assert [len(logps) for logps in found] == [10, 0, 10]
    # Two tokens of a made-up row for the empty one; the others are for the probes.
    assert len(calls) >= 3
    np.testing.assert_array_equal(found[0], found[2])


def test_modes_gradients_and_adapters_are_left_alone():
    """Dropout is off while it runs, and the adapter only where that is requested."""
    model = adapt(make(), AdapterSettings(adapter="lora", lora_r=3, lora_dropout=0.5)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    (on,) = reference_logps(model, [groups()])
    (again,) = reference_logps(model, [groups()])
    (off,) = reference_logps(model, [groups()], adapter_off=True)
    (base,) = reference_logps(make(), [groups()])
    np.testing.assert_array_equal(on, again)
    np.testing.assert_allclose(off, base, rtol=1e-6)
    assert np.abs(on - off).max() > 1e-2
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_missing_adapter_is_refused():
    """A missing adapter is refused by name, not by an attribute error."""
    with pytest.raises(AdapterError, match="carries no adapter"):
        list(reference_logps(make(), [groups()], adapter_off=True))

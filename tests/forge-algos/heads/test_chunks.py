"""The rows that a head scores at once are the machine's; the numbers stay the same."""

import pytest
import torch

from forge_algos import SFT, AdapterSettings, LossError, adapt, score_rows_at_once
from forge_algos.losses import _rows

from ..oracle import CPU, make, pack, samples


def loss_and_gradient(model):
    terms = SFT().bind(model, device=CPU)(pack(samples((5, 9, 14, 7, 13))), [])
    terms.sum.backward()
    return terms.sum, model.lm_head.weight.grad


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_rows_at_once(rows, monkeypatch):
    """No more rows than were set are scored at once, also under an adapter put around the model later."""
    chunks, cut = [], _rows.even_chunks
    monkeypatch.setattr(_rows, "even_chunks", lambda number, most: chunks.append(most) or cut(number, most))
    expected = loss_and_gradient(make("llama-untied"))
    assert set(chunks) == {512}
    chunks.clear()
    model = make("llama-untied")
    score_rows_at_once(model, rows)
    found = loss_and_gradient(model)
    assert set(chunks) == {rows}
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    chunks.clear()
    adapted = adapt(model, AdapterSettings(adapter="lora")).model
    SFT().bind(adapted, device=CPU)(pack(samples((5, 9))), [])
    assert set(chunks) == {rows}


@pytest.mark.parametrize("rows", [0, -1, True, 2.0, "many"])
def test_what_is_no_number_of_rows(rows):
    """Anything but a whole number from 1 is refused."""
    with pytest.raises(LossError, match="whole number from 1"):
        score_rows_at_once(make(), rows)

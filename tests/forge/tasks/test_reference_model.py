"""A moving reference that begins as another model: what one rank finds, every rank says."""

from types import SimpleNamespace

import pytest
import torch

from forge import SettingsError
from forge.tasks._reference_model import moving_reference


def run_of(elsewhere):
    """A run of two ranks, of which the other one found this."""
    model = torch.nn.Linear(2, 1)
    own = SimpleNamespace(reference="moving", reference_mixup=0.5, reference_sync_steps=2, reference_path="other")
    return SimpleNamespace(
        settings=SimpleNamespace(objective=own),
        optimizer=torch.optim.AdamW(model.parameters()),
        model=model,
        done=0,
        load_frozen=lambda _path, *, as_trained: torch.nn.Linear(2, 1),
        ranks=SimpleNamespace(gather=lambda mine: [mine, elsewhere]),
    )


def test_what_another_rank_finds_is_said_here():
    """A frozen weight differs in what that rank holds of it: this one does not go on, to wait for a rank that has left."""
    assert moving_reference(run_of(None)) is not None
    with pytest.raises(SettingsError, match=r"reference_path other with reference=moving: its weight differs\. Take a model"):
        moving_reference(run_of("its weight differs"))

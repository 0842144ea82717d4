"""A moving reference that begins as another model: what one rank finds, every rank says."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import forge_dist
from forge import SettingsError, dpo
from forge.tasks._reference_model import moving_reference
from forge.tasks._task import Task


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


def test_a_reference_that_is_an_adapter(tmp_path: Path) -> None:
    """It is to be merged; what goes on from an adapter is the trained model, and not the reference."""
    (tmp_path / "adapter_config.json").write_text("{}")
    settings = SimpleNamespace(objective=SimpleNamespace(reference_path=str(tmp_path)))
    with pytest.raises(
        forge_dist.ModelError,
        match="^reference_path .* is an adapter, not a model; make a plain model of it: .* give its base as model_path and it",
    ):
        Task.check_settings(dpo.task, settings)

"""Log-probabilities of a reference are stored where they are numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import forge
import forge_algos
from forge.tasks import _reference_logps

from .verbs import settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any


@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_a_row_without_a_finite_number_is_named(
    verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By file and row, and nothing is trained on it: the losses would be NaN."""
    own = forge_algos.reference_logps

    def overflowing(*given: Any, **more: Any) -> Iterator[Any]:
        for number, logps in enumerate(own(*given, **more)):
            yield np.where(np.arange(len(logps)) == 1, -np.inf, logps) if number == 0 else logps

    monkeypatch.setattr(_reference_logps.forge_algos, "reference_logps", overflowing)
    settings = settings_of(verb, model_dir, tmp_path)
    with pytest.raises(forge_algos.LossError, match=r"\.jsonl:\d+: the reference .*gives this row no finite log-probability"):
        getattr(forge, verb)(**settings, reference="stored", ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""What steps that were measured were planned to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

import forge_algos
from forge.memory import _measured_steps
from forge.memory._measured_steps import forecast_steps


@attrs.frozen
class Made:
    """Model of which every step takes these bytes."""

    bytes: int
    asked: list[str]

    def run_step(self, batches: list[Any], *, first: bool) -> Any:
        """Take a step."""
        self.asked.append(f"{self.bytes} {batches} {first}")
        return SimpleNamespace(bytes=self.bytes, parts={})


@pytest.mark.parametrize(("measured", "planned"), [(1009, 1000), (1011, 3000), (989, 3000)])
def test_few_blocks_stand_for_all_where_that_is_what_was_measured(
    measured: int, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1 percent; else all are rehearsed, as where a model's blocks are not alike."""
    asked: list[str] = []
    few: dict[str, Any] = {"of": lambda *_, **__: Made(1000, asked)}
    monkeypatch.setattr(_measured_steps, "Derived", SimpleNamespace(**few))
    monkeypatch.setattr(_measured_steps, "Rehearsed", SimpleNamespace(of=lambda *_, **__: Made(3000, asked)))
    nothing: Any = None
    phase = forecast_steps(nothing, nothing, [[1], [2]], measured=measured, first=True)
    assert phase is not None
    assert phase.planned == planned
    assert asked == ["1000 [1] True", "1000 [2] False", *(["3000 [1] True", "3000 [2] False"] if planned == 3000 else [])]

    phase = forecast_steps(nothing, nothing, [[1]], measured=700, compiled=True)
    assert phase is not None
    assert phase.planned == 1000  # compiled blocks keep less than either

    for error in (forge_algos.RehearsalError("not alike"), forge_algos.AdapterError("last:8: the model has 3 layers")):

        def unlike(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(_measured_steps, "Derived", SimpleNamespace(of=unlike))
        phase = forecast_steps(nothing, nothing, [[1]], measured=measured, first=False)
        assert phase is not None
        assert phase.planned == 3000
        assert asked[-1] == "3000 [1] False"

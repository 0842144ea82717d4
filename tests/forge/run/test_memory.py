"""What a run says of the memory of its first steps."""

from __future__ import annotations

import pytest

from forge.memory._memory_plan import Phase
from forge.run._memory import measured_line


@pytest.mark.parametrize(("planned", "difference"), [(9_999_999, "+0.0%"), (10_200_000, "+2.0%"), (9_700_000, "-3.0%")])
def test_a_difference_has_a_sign_that_it_has(planned: int, difference: str) -> None:
    """Less than a twentieth of a percent is 0 without a minus; the figures are of tensors, on a CPU beside the process."""
    phase = Phase(name="first steps", planned=planned, parts={}, measured=10_000_000)
    assert measured_line(phase, of_process=False).endswith(f"({difference})")
    assert "the tensors of the first steps took 9.5 MiB" in measured_line(phase, of_process=True)
    assert measured_line(phase, of_process=True).endswith(
        "; the process holds more, with Python and libraries: memory in metrics.jsonl"
    )

"""The loop with transformers in docs/packing.md: packed samples have the losses that they have alone."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "packing.md"


def test_the_check_passes_and_finds_a_row_whose_samples_see_each_other(model_dir: Path) -> None:
    """As it stands it runs; without what the page warns of, the check fails."""
    section = PAGE.read_text(encoding="utf-8").partition("### With transformers")[2]
    code = section.partition("```python\n")[2].partition("```")[0].replace("path/to/model", str(model_dir))
    exec(code, {})
    cached = code.replace(", use_cache=False", "")
    assert cached != code
    with pytest.raises(AssertionError, match="not close"):
        exec(cached, {})

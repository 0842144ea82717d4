"""What rows of groups have once, in the log."""

from types import SimpleNamespace
from typing import Any

import pytest

from forge.tasks._sharing import Sharing


@pytest.mark.parametrize(
    ("packing", "adapter", "said"),
    [
        ("auto", "none", ["prompts: computed once a pair, what pairs begin with alike once a micro-batch: they can"]),
        ("off", "none", []),
        ("auto", "prefix", []),
        ("on", "prompt", []),
    ],
)
def test_the_log_speaks_of_prompts_where_rows_have_several_samples(packing: str, adapter: str, said: list[str]) -> None:
    """Samples that are lines by themselves, behind virtual tokens or not, share nothing: nothing is said."""
    notes: list[str] = []
    settings = SimpleNamespace(packing=SimpleNamespace(packing=packing), adapter=SimpleNamespace(adapter=adapter))
    run: Any = SimpleNamespace(settings=settings, report=SimpleNamespace(note=notes.append))
    Sharing(prompt=True, prefix=True, why="they can").note(run, "a pair", "pairs")
    assert notes == said

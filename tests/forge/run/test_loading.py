"""Words of a model that cannot be trained as asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import forge_algos
from forge.run._loading import _no_packing


@pytest.mark.parametrize("end", ["", "."])
def test_a_refused_packing_ends_its_first_sentence_once(end: str) -> None:
    """The reason may be another library's sentence, with its full stop, or no sentence at all."""
    settings = SimpleNamespace(strategy=SimpleNamespace(cp_size=1))
    leak = forge_algos.PackedBatchError(f"FooModel cannot run a packed row: it needs a mask{end}")
    assert str(_no_packing(settings, leak)) == (
        "packing=on: FooModel cannot run a packed row: it needs a mask. With packing=auto its samples run alone."
    )

"""Words of a model that cannot be trained as asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import forge_algos
from forge.run._loading import _no_packing, keep_apart


@pytest.mark.parametrize("end", ["", "."])
def test_a_refused_packing_ends_its_first_sentence_once(end: str) -> None:
    """The reason may be another library's sentence, with its full stop, or no sentence at all."""
    settings = SimpleNamespace(strategy=SimpleNamespace(cp_size=1))
    leak = forge_algos.PackedBatchError(f"FooModel cannot run a packed row: it needs a mask{end}")
    assert str(_no_packing(settings, leak)) == (
        "packing=on: FooModel cannot run a packed row: it needs a mask. With packing=auto its samples run alone."
    )


@pytest.mark.parametrize("divides", [False, True])
def test_ranks_decide_alike_how_samples_are_kept_apart(monkeypatch: pytest.MonkeyPatch, divides: bool) -> None:
    """Whether their weights are whole or divided; forwards are counted over ranks only where each is collective."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(forge_algos, "keep_documents_apart", lambda _, **how: given.update(how) or (True, ""))
    ranks = SimpleNamespace(largest=lambda number: number + 100)
    strategy: Any = SimpleNamespace(ranks=ranks, divides=divides, autocasts=False)
    machine: Any = SimpleNamespace(device=SimpleNamespace(value="cpu"))
    dtype: Any = SimpleNamespace(value=None)
    keep_apart(None, machine, dtype, strategy, "auto", 1)
    assert given["decide"](1) == 101
    assert given["agree"](1) == (101 if divides else 1)

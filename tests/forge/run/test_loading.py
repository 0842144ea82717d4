"""Words of a model that cannot be trained as asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import forge_algos
import forge_dist
from forge.run import _loading
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


@pytest.mark.parametrize(
    ("tp_size", "kind", "message"),
    [
        (2, forge_dist.StrategyError, r"tp_size=2: transformers' plan .* leave tp_size out. \(Doge alone\)"),
        (1, forge_algos.PackedBatchError, "Doge packed. Its samples cannot run alone either: Doge alone"),
    ],
)
def test_a_plan_that_does_not_compute_is_the_divisions(
    monkeypatch: pytest.MonkeyPatch, tp_size: int, kind: type[Exception], message: str
) -> None:
    """A model that runs whole and in no way once its layers are divided is refused for the division."""
    leaks = iter(forge_algos.PackedBatchError(f"Doge {way}") for way in ("packed", "alone"))
    monkeypatch.setattr(_loading, "_ways", lambda *_, **_options: (None, None))

    def refused(*_: object) -> None:
        raise next(leaks)

    monkeypatch.setattr(_loading, "_loaded", refused)
    s = SimpleNamespace(strategy=SimpleNamespace(tp_size=tp_size, cp_size=1), packing=SimpleNamespace(packing="auto"))
    given: Any = (None, s, "model", None, None, None, 1, ())
    with pytest.raises(kind, match=message):
        _loading._load_in_some_way(_loading._Asked(*given))

"""Losses of tokens before and after a run → figures by source, and the page of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from forge._counted import counted
from forge.reports._page import page

WORST = 12
"""Rows that the page shows token by token."""
_SHOWN = 400
"""Tokens of a row that are shown, those before the first learned one included."""
_BOUNDS = (0.1, 0.5, 1.5, 3.0)
"""Changes of a token's loss, in nats, from which it is marked the more strongly."""
_NOISE = 2.0
"""Standard errors up to which a change counts as none."""


@attrs.frozen(kw_only=True)
class Row:
    """One sample, measured token by token."""

    source: str
    row: str
    ids: Any
    """int[S]: its tokens."""
    places: Any
    """int[M]: which of them are learned."""
    before: Any
    """float64[M]: the base's losses on them, in nats."""
    after: Any
    """float64[M]: the model's."""
    kl: Any
    """float64[M]: KL(base ‖ model)."""

    @property
    def change(self) -> float:
        """Mean change of the loss, in nats per token."""
        return float(np.mean(self.after - self.before))


@attrs.frozen(kw_only=True)
class Source:
    """Figures of some rows: means over their learned tokens, in nats."""

    rows: int
    tokens: int
    before: float
    """The base's loss."""
    after: float
    """The model's loss."""
    change: float
    """How much the loss rose."""
    error: float
    """Standard error of `change`, over rows; NaN of a single one."""
    kl: float
    """KL(base ‖ model)."""

    @property
    def verdict(self) -> str:
        """Whether something was lost, gained, or neither beyond twice the standard error."""
        if not abs(self.change) > _NOISE * self.error:
            return "kept"
        return "lost" if self.change > 0 else "gained"


def row_of(source: str, row: str, example: Any, found: Any) -> Row:
    """Return a measured row from a sample and its `forge_algos.TokenChanges`."""
    places = np.flatnonzero(np.asarray(example.labels)[1:] != -100) + 1
    return Row(
        source=source,
        row=row,
        ids=np.asarray(example.input_ids),
        places=places,
        before=found.before,
        after=found.after,
        kl=found.kl,
    )


def total_of(rows: Sequence[Row]) -> Source:
    """Add up rows to means over their tokens.

    The standard error of the change is that of a ratio of sums over rows.
    """
    tokens = np.array([len(row.places) for row in rows], dtype=np.float64)
    sums = np.array([[row.before.sum(), row.after.sum(), row.kl.sum()] for row in rows])
    whole = tokens.sum()
    before, after, kl = (sums.sum(0) / whole).tolist()
    left = sums[:, 1] - sums[:, 0] - (after - before) * tokens
    n = len(rows)
    error = math.sqrt(n / (n - 1) * float((left**2).sum())) / whole if n > 1 else math.nan
    return Source(rows=n, tokens=int(whole), before=before, after=after, change=after - before, error=float(error), kl=kl)


def summary(sources: Mapping[str, Source], total: Source) -> list[str]:
    """Write a line for each source, and one of all."""
    named = {**sources, **({"all": total} if len(sources) > 1 else {})}
    width = max(map(len, named))
    return [
        f"{name:<{width}}  {each.verdict:<6}  loss {each.before:.4f} → {each.after:.4f} ({_change(each)})  kl_base "
        f"{each.kl:.4f}  {counted(each.rows, 'rows')}, {counted(each.tokens, 'tokens')}"
        for name, each in named.items()
    ]


def _change(each: Source) -> str:
    return f"{each.change:+.4f}" + ("" if math.isnan(each.error) else f" ± {each.error:.4f}")


def forgetting_page(
    *,
    name: str,
    verb: str,
    base: str,
    sources: Mapping[str, Source],
    total: Source,
    worst: Sequence[Row],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Render the page: sources before and after, and the rows that lost most, token by token."""
    most = max((abs(each.change) for each in sources.values()), default=0) or 1
    return page(
        "forgetting.html",
        styles=("forgetting.css",),
        name=name,
        verb=verb,
        base=base,
        sources={
            key: {"is": each, "change": _change(each), "share": 100 * abs(each.change) / most} for key, each in sources.items()
        },
        total=total,
        total_change=_change(total),
        lost=[key for key, each in sources.items() if each.verdict == "lost"],
        worst=[{"is": row, "tokens": shown_tokens(row, decode), "cut": max(0, len(row.ids) - _SHOWN)} for row in worst],
        bounds=_BOUNDS,
    )


def shown_tokens(row: Row, decode: Callable[[Sequence[int]], str]) -> list[dict[str, str]]:
    """Return the row's first tokens as text, each with its mark and its numbers.

    A sign of several tokens stands with the last of them.
    """
    at = {int(place): k for k, place in enumerate(row.places)}
    found, shown, waiting = [], "", 0
    ids = [int(token) for token in row.ids[:_SHOWN]]
    for end in range(1, len(ids) + 1):
        # From a few tokens back, so that spaces and marks are as in the whole text.
        text = decode(ids[max(0, waiting - 8) : end])
        before = decode(ids[max(0, waiting - 8) : waiting])
        if text.endswith("�") and end < len(ids) and end - waiting < 4:
            continue
        piece = text[len(before) :] if text.startswith(before) else decode(ids[waiting:end])
        k = next((at[place] for place in range(waiting, end) if place in at), None)
        mark, title = "", "not measured"
        if k is not None:
            change = float(row.after[k] - row.before[k])
            level = sum(abs(change) >= bound for bound in _BOUNDS)
            mark = "" if not level else f"{'up' if change > 0 else 'down'}{level}"
            title = f"loss {row.before[k]:.3f} → {row.after[k]:.3f}, kl {row.kl[k]:.3f}"
        found.append({"text": piece, "mark": mark, "title": title, "measured": "" if k is None else "m"})
        shown, waiting = shown + piece, end
    return found

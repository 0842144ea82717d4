"""Protocol of what a batch plan numbers: N samples, pairs, blocks or prompts of one store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import forge_packing

if TYPE_CHECKING:
    # `forge sft --help` would spend half of its time on importing numpy.
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"


class Items(Protocol):
    """N samples, pairs, blocks or prompts of a store."""

    store: Any
    lengths: Ints
    """int64[N]: tokens of each item, all that goes through the model."""
    longest: Ints
    """int64[N]: tokens of the longest sequence in each item."""
    lines: Ints | None
    """int64[N]: sequences of each item where each is computed in a line of its own; None: one."""
    loss_counts: Ints
    """int64[N]: tokens that are learned or scored in each item."""
    sources: Ints | None
    """int64[N]: index of the weighted source that each item is from; None without weights."""
    weights: list[float] | None
    """Weight of each source; None without weights."""

    def __len__(self) -> int: ...

    def __str__(self) -> str:
        """Return counts, such as `1,500 pairs, in which 30,000 tokens are scored`."""
        ...

    def source(self, index: int) -> str:
        """Return the file and row of an item, such as `train.jsonl:417`."""
        ...

    def size(self, index: int) -> str:
        """Return the length of an item in words, such as `train.jsonl:417 has 2,300 tokens`."""
        ...

    @property
    def shorter(self) -> str:
        """Setting that makes items shorter, and how."""
        ...

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Collate items into one micro-batch."""
        ...

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short samples (input_ids, labels) on which two models are compared."""
        ...


VIRTUAL = ("prefix", "prompt")
"""Adapters whose virtual tokens stand before each sequence, a line of a padded batch."""


def in_own_lines(s: Any) -> bool:
    """Return whether each sample is a line by itself, behind virtual tokens or not."""
    return s.packing.packing == "off" or s.adapter.adapter in VIRTUAL


def padding(s: Any, items: Items, rows: Ints | None = None) -> dict[str, Any]:
    """Return `widths` and `lines` of items, or of `rows`; {} where micro-batches are packed."""
    taken: Any = slice(None) if rows is None else rows
    kind = getattr(items, "media_rows", "packed")
    if kind == "single":
        return {"widths": forge_packing.one_a_row(items.lengths[taken], max_tokens=s.plan.max_tokens_per_gpu), "lines": None}
    if kind == "packed" and s.adapter.adapter not in VIRTUAL:
        return {}
    lines = None if items.lines is None else items.lines[taken]
    virtual = s.adapter.num_virtual_tokens if s.adapter.adapter in VIRTUAL else 0
    return {"widths": items.longest[taken] + virtual, "lines": lines}


def places(s: Any, items: Items) -> Ints:
    """Return the tokens that each item takes alone, with virtual ones and padding: int64[N]."""
    padded = padding(s, items)
    if not padded:
        return items.lengths
    return padded["widths"] if padded["lines"] is None else padded["widths"] * padded["lines"]


def longest_row(parts: Sequence[Items]) -> str:
    """Say which item has the longest sequence, such as `train.jsonl:417 with 2,300 tokens`."""
    items = max(parts, key=lambda items: int(items.longest.max()))
    row = int(items.longest.argmax())
    return f"{items.source(row)} with {int(items.longest[row]):,} tokens"

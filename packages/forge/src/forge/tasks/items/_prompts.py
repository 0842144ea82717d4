"""Stores of prompts → what a plan numbers when completions are drawn while training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import forge_data
from forge.tasks._task import Ints


class Prompts:
    """Prompts, each with room for a completion."""

    def __init__(self, store: forge_data.PromptStore, *, max_new_tokens: int) -> None:
        self.store = store
        self.lengths = self.longest = store.lengths + max_new_tokens
        self.loss_counts = np.full(len(store), max_new_tokens, dtype=np.int64)
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        return f"{len(self):,} prompts"

    def source(self, index: int) -> str:
        """Where the prompt came from."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Say what has how many tokens."""
        return f"{self.source(index)} may have {self.lengths[index]:,} tokens with its completion"

    shorter = "lower max_new_tokens or max_prompt_len"

    def batch(self, indices: Sequence[int] | Ints) -> list[forge_data.Prompt]:
        """Prompts as they are asked."""
        return [self.store[int(i)] for i in indices]

    def few(self) -> list[tuple[Any, Any]]:
        """Some short prompts, as if they were to be learned: enough to compare two models by."""
        rows = sorted(range(min(len(self), 64)), key=lambda row: int(self.store.lengths[row]))
        ids = [self.store[row].input_ids for row in rows if self.store.lengths[row] > 1][:4]
        return [(each, each) for each in ids]

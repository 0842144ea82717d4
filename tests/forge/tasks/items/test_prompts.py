"""Prompts as samples by which an export is compared with the model in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from forge.tasks.items._prompts import Prompts


class Store(list[Any]):
    """Prompts of these ids."""

    weights = None

    def __init__(self, *prompts: list[int]) -> None:
        super().__init__(SimpleNamespace(input_ids=np.array(each, np.int32)) for each in prompts)
        self.lengths = np.array([len(each) for each in prompts])


def samples_of(*prompts: list[int]) -> list[list[int]]:
    """Ids of the samples, each of which is learned whole."""
    store: Any = Store(*prompts)
    found = Prompts(store, max_new_tokens=4).short_samples()
    assert all(ids is labels for ids, labels in found)
    return [ids.tolist() for ids, _ in found]


def test_prompts_of_one_token_are_compared_too() -> None:
    """A run whose held-out prompts have one token each ended with an error once it was finished."""
    assert samples_of([5], [6, 7, 8], [1, 2]) == [[1, 2], [6, 7, 8]]
    assert samples_of([5], [6]) == [[5, 5], [6, 6]]

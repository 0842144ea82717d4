"""Packed rows of a rollout's completions."""

from types import SimpleNamespace

import numpy as np
import pytest

from forge_algos import RolloutError
from forge_algos.online.updates._updates import packed

PROMPTS = (np.array([3, 4, 5], np.int32), np.array([6], np.int32))
COMPLETIONS = (np.array([7, 8], np.int32), np.array([9], np.int32), np.array([7, 9, 8], np.int32))
INDICES, GROUPS = np.array([0, 1, 2]), np.array([0, 0, 1])
FIRST, SECOND = ([3, 4, 5, 7, 8], [-100] * 3 + [7, 8]), ([3, 4, 5, 9], [-100] * 3 + [9])


def test_rows_are_made_by_the_function_that_is_given():
    """It is given neighbours with the same prompt as a group of examples, in which completions are learned."""
    seen = []

    def collate(groups):
        seen.append([[(ids.tolist(), labels.tolist()) for ids, labels in group] for group in groups])
        return made

    made = SimpleNamespace(targets=np.array([7, 8, 9, 7, 9, 8]), lengths=np.array([2, 1, 3]))
    assert packed(INDICES, GROUPS, PROMPTS, COMPLETIONS, share_prompts=True, collate=collate) is made
    assert seen == [[[FIRST, SECOND], [([6, 7, 9, 8], [-100, 7, 9, 8])]]]
    made = SimpleNamespace(targets=np.array([9, 7, 8]), lengths=np.array([1, 2]))
    learned = tuple(np.array(mask) for mask in ([True, True], [True], [True, False, True]))
    packed(INDICES[1:], GROUPS, PROMPTS, COMPLETIONS, learned, share_prompts=True, collate=collate)
    assert seen[1] == [[SECOND], [([6, 7, 9, 8], [-100, 7, -100, 8])]]


@pytest.mark.parametrize(("targets", "lengths"), [([9, 7, 8], [1, 2]), ([7, 8, 9], [1, 2]), ([7, 8], [2])])
def test_a_row_in_another_order_is_refused(targets, lengths):
    """Advantages and recorded log-probabilities stand completion after completion."""
    made = SimpleNamespace(targets=np.array(targets), lengths=np.array(lengths))
    with pytest.raises(RolloutError, match="completion after completion"):
        packed(INDICES[:2], GROUPS, PROMPTS, COMPLETIONS, share_prompts=True, collate=lambda _: made)

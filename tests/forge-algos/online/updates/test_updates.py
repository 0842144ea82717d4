"""Packed rows of a rollout's completions."""

import numpy as np

from forge_algos import idle_groups
from forge_algos.online.updates._updates import packed

PROMPTS = (np.array([3, 4, 5], np.int32), np.array([6], np.int32))
COMPLETIONS = (np.array([7, 8], np.int32), np.array([9], np.int32), np.array([7, 9, 8], np.int32))


def test_rows_are_made_by_the_function_that_is_given():
    """It is given neighbours with the same prompt as a group of examples, in which completions are learned."""
    seen = []

    def collate(groups):
        seen.append([[(ids.tolist(), labels.tolist()) for ids, labels in group] for group in groups])
        return made

    made = idle_groups()
    indices, groups = np.array([0, 1, 2]), np.array([0, 0, 1])
    assert packed(indices, groups, PROMPTS, COMPLETIONS, share_prompts=True, collate=collate) is made
    first = [([3, 4, 5, 7, 8], [-100] * 3 + [7, 8]), ([3, 4, 5, 9], [-100] * 3 + [9])]
    assert seen == [[first, [([6, 7, 9, 8], [-100, 7, 9, 8])]]]
    learned = tuple(np.array(mask) for mask in ([True, True], [True], [True, False, True]))
    packed(indices[1:], groups, PROMPTS, COMPLETIONS, learned, share_prompts=True, collate=collate)
    assert seen[1] == [[first[1]], [([6, 7, 9, 8], [-100, 7, -100, 8])]]

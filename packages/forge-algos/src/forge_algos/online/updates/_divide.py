"""Division of a rollout's completions into steps and micro-batches, as indices.

It is the same on every rank. Which completions form a step follows from (seed, pass, how many steps a pass has) alone; data
shards and token budgets only divide it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import RolloutError

Indices = NDArray[np.int64]
_ORDER = 2
"""Number that keeps the random stream of an order apart from those of completions (`_draw`)."""


def divide_steps(groups_B: Indices, *, updates: int, seed: int, number: int) -> list[Indices]:
    """Divide completions into the optimizer steps of pass `number`; a group stays in one step.

    With several steps the groups are shuffled, in each pass anew; steps have equally many groups, or one more.
    """
    found = np.unique(groups_B)
    if updates > 1:
        np.random.default_rng([seed, number, 0, _ORDER]).shuffle(found)
    return [np.flatnonzero(np.isin(groups_B, part)) for part in np.array_split(found, updates)]


def divide_shards(
    completions: Indices,
    groups_B: Indices,
    prompt_tokens_B: Indices,
    tokens_B: Indices,
    *,
    max_tokens: int,
    data_parallel_size: int,
    share_prompts: bool,
) -> list[list[Indices]]:
    """Divide a step's completions: [data shard][micro-batch] → indices.

    Every shard gets equally many micro-batches, some of them empty.

    Args:
        completions: int[b], in the order of their groups.
        groups_B: int[B], the group of each of the rollout's completions.
        prompt_tokens_B: int[B].
        tokens_B: int[B], of the completions alone.
        max_tokens: tokens of a micro-batch, at most.
        data_parallel_size: number of data shards.
        share_prompts: whether a group's prompt stands once in a micro-batch.

    Raises:
        RolloutError: a prompt and its completion alone are more than `max_tokens`.
    """
    alone = (prompt_tokens_B + tokens_B)[completions]
    if len(alone) and alone.max() > max_tokens:
        raise RolloutError(
            f"a prompt and its completion have {alone.max()} tokens, but a micro-batch holds max_tokens={max_tokens}; raise "
            "it, or lower max_new_tokens or the longest prompt"
        )
    groups = groups_B[completions]
    begins = np.append(True, groups[1:] != groups[:-1]) if share_prompts else np.ones(len(groups), bool)
    costs = tokens_B[completions] + np.where(begins, prompt_tokens_B[completions], 0)
    # Even rows rather than full ones and a rest: all ranks wait for the longest.
    least = max(1, -(-int(costs.sum()) // (data_parallel_size * max_tokens)))
    target = min(max_tokens, -(-int(costs.sum()) // (data_parallel_size * least)))
    rows: list[list[int]] = []
    sizes: list[int] = []
    for at, cost in enumerate(costs):
        grown = sizes[-1] + cost if rows else 0
        if not rows or grown > max_tokens or sizes[-1] >= target:
            rows.append([])
            sizes.append(0)
        rows[-1].append(at)
        # A group that continues in a new row repeats its prompt there.
        sizes[-1] += int(alone[at] if len(rows[-1]) == 1 else cost)
    return _distribute([completions[row] for row in rows], sizes, data_parallel_size)


def _distribute(rows: Sequence[Indices], sizes: Sequence[int], data_parallel_size: int) -> list[list[Indices]]:
    """Distribute rows over data shards, the largest first to the shard with the fewest tokens.

    No shard gets more than its share of the rows; empty rows make their numbers equal.
    """
    share = -(-len(rows) // data_parallel_size)
    distributed: list[list[int]] = [[] for _ in range(data_parallel_size)]
    for row in sorted(range(len(rows)), key=lambda i: (-sizes[i], i)):
        free = [shard for shard in range(data_parallel_size) if len(distributed[shard]) < share]
        distributed[min(free, key=lambda shard: (sum(sizes[i] for i in distributed[shard]), shard))].append(row)
    nothing = np.zeros(0, np.int64)
    return [[*(rows[i] for i in sorted(mine)), *[nothing] * (share - len(mine))] for mine in distributed]

"""Division of a rollout's completions into steps and micro-batches, as indices.

It is the same on every rank. Which completions form a step follows from (seed, pass, how many steps a pass has) alone; data
shards and the most tokens and keys of a row only divide it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from forge_algos._errors import RolloutError
from forge_algos.online.updates._beginnings import Beginnings, Indices
from forge_algos.online.updates._together import Step, divide_alike

Layout = Literal["packed", "lines", "single"]
"""Whether completions of a micro-batch are a packed row, lines padded to the longest of them, or one alone."""
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
    max_keys: int | None = None,
    data_parallel_size: int,
    share_prompts: bool,
    beginnings: Sequence[Beginnings] = (),
    layout: Layout = "packed",
) -> list[list[Indices]]:
    """Divide a step's completions: [data shard][micro-batch] → indices.

    Every shard gets equally many micro-batches, some of them empty.

    Args:
        completions: int[b], in the order of their groups.
        groups_B: int[B], the group of each of the rollout's completions.
        prompt_tokens_B: int[B].
        tokens_B: int[B], of the completions alone.
        max_tokens: tokens of a micro-batch, at most.
        max_keys: keys that its completions attend to, at most: each has those of its prompt, which are gathered for it, and its
            own. One completion alone may have more. None is any number; without `share_prompts` they are the tokens.
        data_parallel_size: number of data shards.
        share_prompts: whether a group's prompt stands once in a micro-batch.
        beginnings: with `share_prompts`, what the groups' prompts begin with alike, where that stands once in a micro-batch
            too: completions of such prompts are then put together where that makes micro-batches fewer or shorter. Two where
            completions are computed behind two prompts, in a row of each; `prompt_tokens_B` are those of the longer one.
        layout: how the completions of a micro-batch lie; of "lines" `max_tokens` counts the padding too.

    Raises:
        RolloutError: a prompt and its completion alone are more than `max_tokens`.
    """
    alone = (prompt_tokens_B + tokens_B)[completions]
    if len(alone) and alone.max() > max_tokens:
        raise RolloutError(
            f"a prompt and its completion have {alone.max()} tokens, but a micro-batch holds max_tokens={max_tokens}; raise "
            "it, or lower max_new_tokens or the longest prompt"
        )
    if layout != "packed":
        rows = _lines(alone, max_tokens, data_parallel_size) if layout == "lines" else [[at] for at in range(len(alone))]
        places = [len(row) * int(alone[row].max()) for row in rows]
        dealt = _distribute([np.array(row) for row in rows], places, data_parallel_size)
        return [[completions[row] for row in mine] for mine in dealt]
    groups = groups_B[completions]
    begins = np.append(True, groups[1:] != groups[:-1]) if share_prompts else np.ones(len(groups), bool)
    costs = tokens_B[completions] + np.where(begins, prompt_tokens_B[completions], 0)
    keys, tokens = int(alone.sum()), int(costs.sum())
    most_keys = max(1, keys) if max_keys is None or not share_prompts else max_keys
    # Even rows rather than full ones and a rest, by what needs more of them: all ranks wait for the longest.
    by_tokens, by_keys = (
        max(1, -(-of // (data_parallel_size * most))) for of, most in ((tokens, max_tokens), (keys, most_keys))
    )
    target, target_keys = max_tokens, most_keys
    if by_keys > by_tokens:
        target_keys = -(-keys // (data_parallel_size * by_keys))
    else:
        target = min(max_tokens, -(-tokens // (data_parallel_size * by_tokens)))
    rows: list[list[int]] = []
    sizes: list[int] = []
    seen = 0
    for at, (cost, whole) in enumerate(zip(costs.tolist(), alone.tolist(), strict=True)):
        fits = bool(rows) and sizes[-1] + cost <= max_tokens and seen + whole <= most_keys
        if not fits or sizes[-1] >= target or seen >= target_keys:
            rows.append([])
            sizes.append(0)
            seen = 0
        rows[-1].append(at)
        # A group that continues in a new row repeats its prompt there.
        sizes[-1] += whole if len(rows[-1]) == 1 else cost
        seen += whole
    dealt = _distribute([np.array(row) for row in rows], sizes, data_parallel_size)
    if not rows or not share_prompts or not beginnings:
        return [[completions[row] for row in mine] for mine in dealt]
    step = Step(completions, groups, tokens_B[completions], beginnings, max_tokens, max_keys, data_parallel_size)
    return divide_alike(step, dealt, partial(_distribute, data_parallel_size=data_parallel_size))


def _lines(tokens: Indices, max_tokens: int, data_parallel_size: int) -> list[list[int]]:
    """Cut completions into rows of lines as long as the longest, in about even rows."""
    whole = int(tokens.sum())
    number = max(1, -(-whole // (data_parallel_size * max_tokens)))
    target = min(max_tokens, -(-whole // (data_parallel_size * number)))
    rows: list[list[int]] = []
    longest = 0
    for at, own in enumerate(tokens.tolist()):
        wider = max(longest, own)
        if not rows or (len(rows[-1]) + 1) * wider > max_tokens or len(rows[-1]) * longest >= target:
            rows.append([])
            wider = own
        rows[-1].append(at)
        longest = wider
    return rows


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

"""Batches of a rollout's updates, on each data shard."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import RolloutError
from forge_algos._parallel import ALONE, Parallel
from forge_algos.batches._groups import PackedGroups
from forge_algos.batches._online import OnlineBatch
from forge_algos.batches._packed import IGNORE
from forge_algos.online.rollout._rollout import Rollout
from forge_algos.online.sampling._media_rows import MediaOf
from forge_algos.online.updates._beginnings import Beginnings
from forge_algos.online.updates._collate import Collate, collate as with_known_prompts, examples
from forge_algos.online.updates._divide import Indices, Layout, divide_shards, divide_steps
from forge_algos.online.updates._media import JoinMedia, MediaRead, of_prompts, with_prompt_media

_LOTS = 3
"""Number that keeps the random stream of tokens apart from those of completions (`_draw`) and of an order (`_divide`)."""


class Update(NamedTuple):
    """One optimizer step on a rollout."""

    parts: list[list[Indices]]
    """[data shard][micro-batch] → int[b], the completions that have a term."""
    masked: int
    """Completions of the step that count in a mean over completions and have no term."""


def rollout_batches(
    rollout: Rollout,
    *,
    max_tokens: int,
    max_keys: int | None = None,
    updates: int = 1,
    passes: int = 1,
    share_prompts: bool = False,
    least_prefix: int | None = None,
    collate: Collate | None = None,
    parallel: Parallel = ALONE,
    rank: int | None = None,
    seed: int | None = None,
    media: MediaRead | None = None,
    join_media: JoinMedia = list,
    layout: Layout = "packed",
    lots: bool = False,
) -> list[list[OnlineBatch]]:
    """Divide a rollout into `passes` · `updates` optimizer steps, each as this rank's batches.

    What an update trains on follows from (rollout, seed, its number), on any number of ranks: a run that resumes after its k-th
    update takes the list from there. Every data shard gets equally many micro-batches a step, empty ones where it has nothing.

    Args:
        rollout: of all ranks.
        max_tokens: tokens of a micro-batch, at most.
        max_keys: keys that the completions of a micro-batch attend to together, at most, where they share prompts: those of its
            prompt are gathered for each. One completion alone may have more; None is any number.
        updates: optimizer steps in a pass (`updates_per_pass`); a group's completions stay in one.
        passes: how often the whole rollout is trained on (`num_iterations`).
        share_prompts: whether a group's prompt stands once in a micro-batch, for a model that can read it (`shares_prompts`).
        least_prefix: tokens from which on `collate` puts what different prompts begin with alike into a row once
            (`forge_packing.LEAST_PREFIX`): completions of such prompts are then put together. None where it does not.
        collate: function that puts the groups of a micro-batch into its row, in the place of this package's, for instance one
            that shares what different prompts begin with (`forge_packing.collate_groups`, with `share_prompts` as here).
        parallel: the ranks.
        rank: number of this rank's data shard; `parallel`'s own by default.
        seed: of the order of groups; the rollout's own by default.
        media: those of prompts, by their numbers in `rollout.prompt_rows`; prompts are not shared then.
        join_media: makes the arrays of a micro-batch's images alike in size.
        layout: how the completions of a micro-batch lie, as `pack_media` and the processor allow: "packed", in "lines", each
            padded to the longest, of which `max_tokens` counts the padding, or "single", one a micro-batch.
        lots: whether each token is given a number by lot, in each update anew, which `clip_cov` and `kl_cov` read.

    Raises:
        RolloutError: a completion with its prompt is longer than `max_tokens`, or `collate` made another row, or one of more.
    """
    seed = rollout.seed if seed is None else seed
    steps = update_indices(
        rollout.groups,
        np.array([len(ids) for ids in rollout.prompt_ids], np.int64),
        rollout.sizes,
        rollout.trained,
        rollout.masked,
        seed=seed,
        updates=updates,
        passes=passes,
        max_tokens=max_tokens,
        max_keys=max_keys,
        data_parallel_size=parallel.data_parallel_size,
        share_prompts=share_prompts,
        beginnings=beginnings_of(rollout.prompt_ids, least_prefix=least_prefix, collate=collate),
        layout=layout,
    )
    pictures = of_prompts(media, rollout.prompt_rows)
    mine = parallel.data_parallel_rank if rank is None else rank
    batches = []
    for number, step in enumerate(steps):
        drawn = np.random.default_rng([seed, number, 0, _LOTS]).random(rollout.starts[-1]) if lots else None
        # Counted once: in the step's first batch that trains on anything.
        first = next(((shard, k) for shard, parts in enumerate(step.parts) for k, part in enumerate(parts) if len(part)), None)
        batches.append(
            [
                _batch(
                    rollout,
                    indices,
                    share_prompts=share_prompts,
                    collate=collate,
                    max_tokens=max_tokens,
                    masked=step.masked if (mine, k) == first else 0,
                    media=pictures,
                    join_media=join_media,
                    lots=drawn,
                )
                for k, indices in enumerate(step.parts[mine])
            ]
        )
    return batches


def update_indices(
    groups: NDArray[np.int64],
    prompt_tokens: NDArray[np.int64],
    sizes: NDArray[np.int64],
    trained: NDArray[np.bool_],
    masked: NDArray[np.bool_],
    *,
    seed: int,
    updates: int,
    passes: int,
    max_tokens: int,
    max_keys: int | None = None,
    data_parallel_size: int,
    share_prompts: bool,
    beginnings: Sequence[Beginnings] = (),
    layout: Layout = "packed",
) -> list[Update]:
    """Divide the trained completions into updates; the masked ones count in their group's.
    `sizes` int64[B] are the tokens of completions, observations among them.
    """
    used = np.flatnonzero(trained | masked)
    found = []
    for number in range(passes):
        for step in divide_steps(groups[used], updates=updates, seed=seed, number=number):
            parts = divide_shards(
                used[step][trained[used[step]]],
                groups,
                prompt_tokens[groups],
                sizes,
                max_tokens=max_tokens,
                max_keys=max_keys,
                data_parallel_size=data_parallel_size,
                share_prompts=share_prompts,
                beginnings=beginnings,
                layout=layout,
            )
            found.append(Update(parts, int(masked[used[step]].sum())))
    return found


def beginnings_of(*prompts: Sequence[Any], least_prefix: int | None, collate: Collate | None) -> list[Beginnings]:
    """Return what prompts of each kind begin with alike, where `collate` has that once.

    Raises:
        RolloutError: a `least_prefix` without `collate`, or one below 1.
    """
    if least_prefix is None:
        return []
    if collate is None or least_prefix < 1:
        raise RolloutError(
            f"least_prefix={least_prefix!r}: the tokens, 1 or more, from which on collate shares what different prompts begin "
            "with; without such a collate leave it out"
        )
    return [Beginnings(each, least_prefix) for each in prompts]


def token_places(starts: NDArray[np.int64], indices: Indices) -> NDArray[np.int64]:
    """Return the positions int64[m] of completions' tokens among a rollout's M.
    They stand completion after completion.
    """
    nothing: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    return np.concatenate(nothing + [np.arange(starts[i], starts[i + 1], dtype=np.int64) for i in indices])


def packed(
    indices: Indices,
    groups: NDArray[np.int64],
    prompt_ids: tuple[NDArray[np.int32], ...],
    completion_ids: tuple[NDArray[np.int32], ...],
    learned: tuple[NDArray[np.bool_], ...] | None = None,
    *,
    share_prompts: bool,
    collate: Collate | None = None,
    max_tokens: int | None = None,
    media: Sequence[MediaOf] | None = None,
    join_media: JoinMedia = list,
) -> PackedGroups:
    """Make the packed row of these completions; neighbours with the same prompt are a group.

    With `images`, those of each group's prompt, which is not shared then.

    Raises:
        RolloutError: `collate` made another row, or one of more than `max_tokens`.
    """
    cuts = np.flatnonzero(np.diff(groups[indices])) + 1
    parts = [part for part in np.split(indices, cuts) if len(part)]
    found = [(prompt_ids[groups[part[0]]], [completion_ids[i] for i in part]) for part in parts]
    masks = None if learned is None else [learned[i] for i in indices]
    if collate is None:
        row = with_known_prompts(found, share_prompts=share_prompts, learned=masks)
        if media is None:
            return row
        return with_prompt_media(row, groups[indices], prompt_ids, [completion_ids[i] for i in indices], media, join_media)
    given = examples(found, masks)
    row = collate(given)
    targets = [labels[labels != IGNORE] for group in given for _, labels in group]
    if list(row.lengths) != list(map(len, targets)) or list(row.targets) != [token for each in targets for token in each]:
        raise RolloutError("collate made a row that does not learn the tokens it was given, completion after completion")
    if max_tokens is not None and len(row.input_ids) > max_tokens:
        raise RolloutError(
            f"collate made a row of {len(row.input_ids):,} tokens, where max_tokens is {max_tokens:,}: it shares less than "
            "share_prompts and least_prefix say, which are to be given as it has them"
        )
    return row


def _batch(
    rollout: Rollout,
    indices: Indices,
    *,
    share_prompts: bool,
    collate: Collate | None,
    max_tokens: int,
    masked: int,
    media: Sequence[MediaOf] | None,
    join_media: JoinMedia,
    lots: NDArray[np.float64] | None,
) -> OnlineBatch:
    places = token_places(rollout.starts, indices)
    row = packed(
        indices,
        rollout.groups,
        rollout.prompt_ids,
        rollout.completion_ids,
        rollout.learned,
        share_prompts=share_prompts,
        collate=collate,
        max_tokens=max_tokens,
        media=media,
        join_media=join_media,
    )
    return OnlineBatch(
        groups=row,
        masked=masked,
        old_logps=rollout.old_logps[places],
        advantages=rollout.advantages[places],
        rewards=rollout.rewards[indices],
        ref_logps=None if rollout.ref_logps is None else rollout.ref_logps[places],
        returns=None if rollout.returns is None else rollout.returns[places],
        old_values=None if rollout.values is None else rollout.values[places],
        kept=None if rollout.entropy is None else rollout.entropy[places].astype(np.float64) >= rollout.least_entropy,
        lots=None if lots is None else lots[places],
    )

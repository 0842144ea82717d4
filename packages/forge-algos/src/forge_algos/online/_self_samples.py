"""Prompts of a student and its teacher → the student's own completions, and batches of both."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import RolloutError
from forge_algos._gather import gather, share_of
from forge_algos._parallel import ALONE, Parallel
from forge_algos.batches._taught import TaughtBatch
from forge_algos.online._prompts import check_completions
from forge_algos.online.sampling._media_rows import MediaOf
from forge_algos.online.sampling._sampler import Sampler, draw_options
from forge_algos.online.updates._collate import Collate
from forge_algos.online.updates._divide import Layout
from forge_algos.online.updates._media import JoinMedia
from forge_algos.online.updates._updates import beginnings_of, packed, token_places, update_indices
from forge_algos.settings._self_distill import SDFTSettings

Ids = NDArray[np.int32]


@attrs.frozen(kw_only=True, eq=False)
class SelfSamples:
    """B completions of G prompts, of all ranks, and what student and teacher were asked."""

    prompt_ids: tuple[Ids, ...]
    """int32[S] of each prompt, as the student is asked."""
    teacher_ids: tuple[Ids, ...]
    """int32[S] of each prompt, as the teacher is: with the demonstration."""
    groups: NDArray[np.int64]
    """int64[B]: the prompt of each completion."""
    completion_ids: tuple[Ids, ...]
    """int32[S] each, S from 1."""
    finished: NDArray[np.bool_]
    """bool[B]: whether a completion ended by itself."""


def sample_self(
    sampler: Sampler,
    prompts: Sequence[Ids],
    teacher_prompts: Sequence[Ids],
    *,
    settings: SDFTSettings,
    seed: int,
    parallel: Parallel = ALONE,
    rank: int | None = None,
    media: Sequence[MediaOf] | None = None,
) -> SelfSamples:
    """Sample the student's completions; each data shard its share, and every rank gets all.

    Args:
        sampler: of the student.
        prompts: what the student is asked.
        teacher_prompts: what its teacher is asked, one for each prompt.
        settings: how completions are sampled.
        seed: where all random numbers come from.
        parallel: the ranks.
        rank: number of this rank's data shard; `parallel`'s own by default.
        media: of each prompt, as the sampler takes them.

    Raises:
        RolloutError: no prompt, prompts that are not two for each row, or a sampler that gives something else.
    """
    if not prompts or len(prompts) != len(teacher_prompts):
        raise RolloutError(f"{len(prompts)} prompts and {len(teacher_prompts)} of the teacher: one for each other is wanted")
    shard = parallel.data_parallel_rank if rank is None else rank
    each, share = settings.num_generations, share_of(len(prompts), shard, parallel.data_parallel_size)
    chosen = range(len(prompts))[share]
    # Of a sampler that has images; others need not know the argument.
    pictures: dict[str, Any] = {} if media is None else {"media": [media[i] for i in chosen]}
    made = sampler.sample(
        [prompts[i] for i in chosen],
        max_new_tokens=settings.max_new_tokens,
        **draw_options(settings),
        seed=seed,
        numbers=chosen,
        **pictures,
    )
    check_completions(made, len(chosen) * each, settings.max_new_tokens)
    lengths = gather([len(completion.ids) for completion in made], parallel, shard).astype(np.int64)
    ids = gather(np.concatenate([np.zeros(0), *(completion.ids for completion in made)]), parallel, shard).astype(np.int32)
    return SelfSamples(
        prompt_ids=tuple(np.asarray(prompt, np.int32) for prompt in prompts),
        teacher_ids=tuple(np.asarray(prompt, np.int32) for prompt in teacher_prompts),
        groups=np.repeat(np.arange(len(prompts)), each),
        completion_ids=tuple(np.split(ids, lengths.cumsum()[:-1])),
        finished=gather([completion.finished for completion in made], parallel, shard) > 0,
    )


def taught_batches(
    samples: SelfSamples,
    *,
    max_tokens: int,
    max_keys: int | None = None,
    skip_tokens: int = 0,
    share_prompts: bool = False,
    least_prefix: int | None = None,
    collate: Collate | None = None,
    parallel: Parallel = ALONE,
    rank: int | None = None,
    media: tuple[Sequence[MediaOf], Sequence[MediaOf]] | None = None,
    join_media: JoinMedia = list,
    layout: Layout = "packed",
) -> list[TaughtBatch]:
    """Divide samples into micro-batches of one step, equally many on every data shard.

    Args:
        samples: of all ranks.
        max_tokens: tokens of either row of a micro-batch, at most.
        max_keys: keys that the completions of either row attend to together, at most; as `rollout_batches` takes it.
        skip_tokens: first tokens of each completion that are not learned from.
        share_prompts: whether a prompt with several completions stands once in a row.
        least_prefix: as `rollout_batches` takes it.
        collate: as `rollout_batches` takes it.
        parallel: the ranks.
        rank: number of this rank's data shard; `parallel`'s own by default.
        media: those of each prompt, as the student is asked and as the teacher is; prompts are not shared then.
        join_media: as `rollout_batches` takes it.
        layout: as `rollout_batches` takes it.

    Raises:
        RolloutError: a completion with its longer prompt does not fit into `max_tokens`.
    """
    lengths = np.array([len(ids) for ids in samples.completion_ids], np.int64)
    prompt_tokens = np.array([max(map(len, both)) for both in zip(samples.prompt_ids, samples.teacher_ids, strict=True)])
    every = np.ones(len(lengths), bool)
    (step,) = update_indices(
        samples.groups,
        prompt_tokens,
        lengths,
        every,
        ~every,
        seed=0,
        updates=1,
        passes=1,
        max_tokens=max_tokens,
        max_keys=max_keys,
        data_parallel_size=parallel.data_parallel_size,
        share_prompts=share_prompts,
        beginnings=beginnings_of(samples.prompt_ids, samples.teacher_ids, least_prefix=least_prefix, collate=collate),
        layout=layout,
    )
    starts = np.append(0, lengths.cumsum())
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    found = []
    for indices in step.parts[parallel.data_parallel_rank if rank is None else rank]:
        rows = (
            packed(
                indices,
                samples.groups,
                prompts,
                samples.completion_ids,
                share_prompts=share_prompts,
                collate=collate,
                max_tokens=max_tokens,
                media=pictures,
                join_media=join_media,
            )
            for prompts, pictures in zip((samples.prompt_ids, samples.teacher_ids), media or (None, None), strict=True)
        )
        own, teacher = rows
        kept = np.flatnonzero(inside[token_places(starts, indices)] >= skip_tokens)
        found.append(TaughtBatch(groups=own, teacher=teacher, kept=kept, finished=samples.finished[indices]))
    return found

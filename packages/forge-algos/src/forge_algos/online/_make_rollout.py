"""Making a rollout: prompts are sampled, rewarded, measured, and credited."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import ForgeAlgosError, RewardError, RolloutError
from forge_algos._gather import gather, scatter, share_of
from forge_algos._parallel import ALONE, Parallel
from forge_algos.online._credit import advantages_of, pairs_of
from forge_algos.online._measure import Reference, measure
from forge_algos.online._prompts import Prompt, check_arguments, check_completions, columns_of
from forge_algos.online._sampler_gap import gap_weights
from forge_algos.online.environments._environment import ENVIRONMENT
from forge_algos.online.environments._episodes import Episodes
from forge_algos.online.rewards._foreign import PROMPT_TEXTS, QUERIES, SOLUTIONS, reads_of
from forge_algos.online.rewards._reward_sum import Parts, RewardSum
from forge_algos.online.rewards._rewards import Reward, RewardInputs, score
from forge_algos.online.rollout._rollout import Rollout, equal_groups
from forge_algos.online.sampling._draw import attempt_seed
from forge_algos.online.sampling._media_rows import MediaOf
from forge_algos.online.sampling._sampler import Completion, Sampler, draw_options, greedy_options
from forge_algos.online.updates._collate import Collate
from forge_algos.online.updates._divide import Layout
from forge_algos.online.updates._media import JoinMedia, MediaRead, of_prompts
from forge_algos.online.updates._updates import beginnings_of, packed, token_places, update_indices
from forge_algos.settings._grpo import GRPOSettings
from forge_algos.settings._online import GroupSettings, OnlineSettings


def make_rollout(
    model: nn.Module,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    *,
    settings: OnlineSettings,
    rewards: Sequence[Reward],
    decode: Callable[[list[int]], str],
    decode_whole: Callable[[list[int]], str] | None = None,
    max_tokens: int,
    max_keys: int | None = None,
    seed: int,
    rows: Sequence[int] | None = None,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    parallel: Parallel = ALONE,
    rank: int | None = None,
    reference: Reference | None = None,
    share_prompts: bool = False,
    least_prefix: int | None = None,
    collate: Collate | None = None,
    source: Callable[[int], str] = "row {}".format,
    episodes: Episodes | None = None,
    media: MediaRead | None = None,
    join_media: JoinMedia = list,
    layout: Layout = "packed",
    sampler_media: Mapping[int, Any] | None = None,
) -> Rollout:
    """Sample completions of each prompt, reward them, and compute what the updates read.

    Each data shard samples and rewards its share of the prompts; afterwards every rank has the whole rollout. Log-probabilities
    are those of the pass that trains: its packed rows, its head, its temperature. So the ratio of the first update is 1. They
    are the policy's own, whatever `top_p`, `top_k`, `min_p` and `repetition_penalty` did while sampling. `source` names a row
    in messages. With `episodes` a completion is an episode: turns of the model, and an environment's observations between them,
    which are read and not learned. Where a server sampled, its log-probabilities are compared with the model's: the gap is a
    figure of the rollout, and above the settings' limits it weighs the advantages, or is an error. `images` are those of
    prompts, by their numbers in `rows`; `sampler_media` are what the sampler is given of them in their place, such as
    `forge_data.Unexpanded` for a `RemoteSampler`. `decode_whole` decodes special tokens too, which OpenRLHF's reward functions
    read (`decode` by default). `max_keys`, `least_prefix`, `collate`, `images`,
    `join_media` and `layout` are as `rollout_batches` takes them, and must be the same there.
    """
    check_arguments(prompts, settings, rewards, reference, seed, max_tokens, episodic=episodes is not None)
    device = next(model.parameters()).device if device is None else device
    numbers = list(range(len(prompts))) if rows is None else [int(row) for row in rows]
    if len(numbers) != len(prompts):
        raise RolloutError(f"rows: {len(prompts)} numbers are wanted, one for each prompt, not {len(numbers)}")
    each = settings.num_generations
    shard = parallel.data_parallel_rank if rank is None else rank
    share = share_of(len(prompts), shard, parallel.data_parallel_size)
    columns = columns_of(prompts)
    pictures, shown = (of_prompts(each, numbers) for each in (media, media if sampler_media is None else sampler_media))

    def answer(
        chosen: Sequence[int], attempt: int, *, greedy: bool = False
    ) -> tuple[list[Completion], dict[str, NDArray[np.float32]]]:
        """Sample and score completions of these prompts, whose numbers are given."""
        options = greedy_options(settings) if greedy else draw_options(settings)
        mine, rows = [prompts[i] for i in chosen], [numbers[i] for i in chosen]
        drawn = attempt_seed(seed, attempt)
        given = _with_media(shown, chosen)
        if episodes is not None:
            made, failed = episodes.play(
                sampler,
                mine,
                settings=settings,
                seed=drawn,
                numbers=chosen,
                rows=rows,
                parallel=parallel,
                source=source,
                greedy=greedy,
                **given,
            )
        else:
            ids = [prompt.input_ids for prompt in mine]
            made, failed = _drawn(
                sampler, ids, {**options, **given}, max_new_tokens=settings.max_new_tokens, seed=drawn, numbers=chosen
            )
        raise_alike(failed, parallel, RolloutError("sampling failed on another rank; its message is in that rank's log"))
        check_completions(made, len(chosen) * options["num_generations"], settings.max_new_tokens)
        scores = _score(
            made,
            mine,
            rows,
            settings,
            rewards,
            columns,
            (decode, decode_whole or decode),
            parallel,
            source,
            episodic=episodes is not None,
        )
        return made, scores

    reward = RewardSum(settings, {ENVIRONMENT: 1.0} | {one.name: one.weight for one in rewards})
    chosen = range(len(prompts))[share]
    mine, scored = answer(chosen, 0)
    greedy_rewards = _greedy_rewards(settings, partial(answer, chosen, 0, greedy=True), reward, parallel, shard)
    resampled = 0
    for attempt in range(1, 1 + _resamples(settings)):
        ends = np.array([completion.finished for completion in mine], bool)
        lengths = np.array([len(completion.ids) for completion in mine], np.int64)
        found, parts = reward(scored, lengths, ends), reward.parts(scored, lengths, ends)
        again = np.flatnonzero(_left_out(settings, found, parts, np.repeat(np.arange(len(chosen)), each), len(chosen)))
        if not parallel.any(len(again) > 0):
            break
        made, scores = answer([chosen[i] for i in again], attempt)
        places = (again[:, None] * each + np.arange(each)).ravel()
        for place, completion in zip(places.tolist(), made, strict=True):
            mine[place] = completion
        for name, values in scores.items():
            scored[name][places] = values
        resampled += len(again)
    resampled = int(parallel.sum([resampled])[0])
    whole = _gathered(mine, parallel, shard)
    sizes, lengths, completion_ids, learned = whole.sizes, whole.lengths, whole.ids, whole.learned
    finished, sampler_logps = whole.finished, whole.sampler_logps
    scores = {name: gather(values, parallel, shard).astype(np.float32) for name, values in scored.items()}
    reward_B, reward_parts = reward(scores, sizes, finished), reward.parts(scores, sizes, finished)
    groups = np.repeat(np.arange(len(prompts)), each)
    compared = np.True_ if greedy_rewards is None else ~np.isnan(greedy_rewards)[groups]
    counted = compared & ~np.isnan(reward_B) & ~_left_out(settings, reward_B, reward_parts, groups, len(prompts))[groups]
    trained, masked = _trained(settings, counted, finished, reward_B, groups)

    prompt_ids = tuple(np.asarray(prompt.input_ids, np.int32) for prompt in prompts)
    # With the KL in the reward, or a baseline of each token, masked completions are measured too: they are part of the
    # baseline of the others.
    weighed = counted & ~trained & (_of_tokens(settings) or (_rewards_kl(settings) and settings.kl_weight > 0))
    nothing = np.zeros_like(masked)
    alike = beginnings_of(prompt_ids, least_prefix=least_prefix, collate=collate)
    steps = [
        update.parts
        for which, beside, updates in ((trained, masked, settings.updates_per_pass), (weighed, nothing, 1))
        if which.any()
        for update in update_indices(
            groups,
            np.array([len(prompt) for prompt in prompt_ids], np.int64),
            sizes,
            which,
            beside,
            seed=seed,
            updates=updates,
            passes=1,
            max_tokens=max_tokens,
            max_keys=max_keys,
            data_parallel_size=parallel.data_parallel_size,
            share_prompts=share_prompts,
            beginnings=alike,
            layout=layout,
        )
    ]
    parts = [indices for step in steps for indices in step[shard]]
    measured = measure(
        model,
        [
            packed(
                indices,
                groups,
                prompt_ids,
                completion_ids,
                learned,
                share_prompts=share_prompts,
                collate=collate,
                max_tokens=max_tokens,
                media=pictures,
                join_media=join_media,
            )
            for indices in parts
        ],
        temperature=settings.temperature,
        device=device,
        autocast=autocast,
        reference=reference,
        with_values=settings.credit == "gae",
        with_entropy=_share_kept(settings) < 1,
        with_collision=_of_tokens(settings),
    )
    starts = np.append(0, lengths.cumsum())
    places = np.concatenate([np.zeros(0, np.int64), *(token_places(starts, indices) for indices in parts)])
    unknown = np.repeat(~(trained | weighed), lengths)
    old_logps, ref_logps, values, entropy, collision = (
        None if found is None else _whole(found, places, unknown, parallel) for found in measured
    )
    assert old_logps is not None
    advantages, returns = advantages_of(
        settings,
        rewards=reward_B,
        parts=reward_parts,
        groups=groups,
        lengths=lengths,
        trained=trained,
        counted=counted,
        old_logps=old_logps,
        ref_logps=ref_logps,
        values=values,
        greedy=greedy_rewards,
        collision=collision,
    )
    weights = None if sampler_logps is None else gap_weights(settings, old_logps, sampler_logps, lengths)
    if weights is not None:
        advantages = advantages * weights
    return Rollout(
        seed=seed,
        prompt_rows=np.array(numbers, np.int64),
        prompt_ids=prompt_ids,
        prompt_texts=tuple(_media_named(one.prompt) + decode(one.input_ids.tolist()) for one in prompts),
        groups=groups,
        completion_ids=completion_ids,
        completion_texts=tuple(decode(completion.tolist()) for completion in completion_ids),
        finished=finished,
        scores=scores,
        rewards=reward_B,
        trained=trained,
        masked=masked,
        old_logps=old_logps,
        ref_logps=ref_logps,
        values=values,
        advantages=advantages,
        returns=returns,
        resampled=resampled,
        equal_rewards=_equal(settings, reward_B, reward_parts, groups, len(prompts)).sum().item()
        if settings.decoupled
        else None,
        learned=learned,
        sampler_logps=sampler_logps,
        entropy=entropy,
        least_entropy=_least_entropy(settings, entropy),
        greedy_rewards=greedy_rewards,
    )


_KINDS = ("image", "video", "audio")


def _media_named(messages: Any) -> str:
    """Return the names of the media of messages, whose tokens are no text.

    >>> _media_named([{"role": "user", "content": [{"type": "image", "image": "/data/plum.png"}]}])
    '[plum.png] '
    """
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = (part for content in contents if isinstance(content, list) for part in content)
    media = [(kind, part[kind]) for part in parts if isinstance(part, dict) for kind in _KINDS if kind in part]
    return "".join(f"[{os.path.basename(each) if isinstance(each, str) else kind}] " for kind, each in media)


def _with_media(media: Sequence[MediaOf] | None, chosen: Sequence[int]) -> dict[str, Any]:
    """Return the argument of a sampler for the images of prompts; {} where none has any."""
    return {} if media is None else {"media": [media[i] for i in chosen]}


def _drawn(
    sampler: Sampler, prompts: Sequence[NDArray[Any]], options: Mapping[str, Any], **further: Any
) -> tuple[list[Completion], ForgeAlgosError | None]:
    """Sample completions; return them, or the error that ended it.

    It is raised where other ranks wait within the sampler.
    """
    try:
        return sampler.sample(prompts, **options, **further), None
    except RolloutError as error:
        if getattr(sampler, "synced", False):
            raise
        return [], error


def _greedy_rewards(
    settings: OnlineSettings,
    answer: Callable[[], tuple[list[Completion], dict[str, NDArray[np.float32]]]],
    reward: RewardSum,
    parallel: Parallel,
    shard: int,
) -> NDArray[np.float32] | None:
    """Return rewards of greedy completions, float32[G]; None where they are no baseline."""
    if not isinstance(settings, GRPOSettings) or settings.baseline != "greedy":
        return None
    made, scores = answer()
    ends, lengths = np.array([one.finished for one in made], bool), np.array([len(one.ids) for one in made], np.int64)
    return gather(reward(scores, lengths, ends), parallel, shard).astype(np.float32)


def _score(
    completions: Sequence[Completion],
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    settings: OnlineSettings,
    rewards: Sequence[Reward],
    columns: set[str],
    decoders: tuple[Callable[[list[int]], str], Callable[[list[int]], str]],
    parallel: Parallel,
    source: Callable[[int], str],
    *,
    episodic: bool,
) -> dict[str, NDArray[np.float32]]:
    """Return each reward function's numbers for this rank's completions, by its name.
    An error on one rank is raised on all.
    """
    each = len(completions) // max(1, len(prompts))
    asked = [prompt for prompt in prompts for _ in range(each)]
    decode, decode_whole = decoders
    texts = [decode(completion.ids.tolist()) for completion in completions]
    inputs = RewardInputs(
        prompts=[prompt.prompt for prompt in asked],
        completions=[
            text if isinstance(prompt.prompt, str) else list(one.messages or ({"role": "assistant", "content": text},))
            for one, text, prompt in zip(completions, texts, asked, strict=True)
        ],
        columns={name: [prompt.columns.get(name) for prompt in asked] for name in sorted(columns)},
        rows=[row for row in rows for _ in range(each)],
        source=source,
        texts={SOLUTIONS: texts}
        | (
            {
                PROMPT_TEXTS: [decode_whole(prompt.input_ids.tolist()) for prompt in asked],
                QUERIES: [
                    decode_whole([*prompt.input_ids.tolist(), *one.ids.tolist()])
                    for one, prompt in zip(completions, asked, strict=True)
                ],
            }
            if any(QUERIES in reads.texts for reward in rewards if (reads := reads_of(reward.function)))
            else {}
        ),
    )
    failed: RewardError | None = None
    found: dict[str, NDArray[np.float32]] = {}
    if episodic:
        found[ENVIRONMENT] = np.array([np.nan if one.reward is None else one.reward for one in completions], np.float32)
    try:
        for reward in rewards:
            found[reward.name] = score(reward, inputs, on_error=settings.on_reward_error, timeout=settings.reward_timeout)
    except RewardError as error:
        failed = error
    raise_alike(failed, parallel, RewardError("a reward function failed on another rank; its message is in that rank's log"))
    return found


class _Completions(NamedTuple):
    """The completions of all data shards."""

    ids: tuple[NDArray[np.int32], ...]
    sizes: NDArray[np.int64]
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]
    learned: tuple[NDArray[np.bool_], ...] | None
    sampler_logps: NDArray[np.float32] | None


def _gathered(mine: Sequence[Completion], parallel: Parallel, shard: int) -> _Completions:
    """Gather the completions of all data shards, in the order of the prompts."""

    def together(parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
        return gather(np.concatenate([np.zeros(0), *parts]), parallel, shard)

    def cut(values: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        return tuple(np.split(values, sizes.cumsum()[:-1])) if len(sizes) else ()

    sizes = gather([len(one.ids) for one in mine], parallel, shard).astype(np.int64)
    ids = cut(together([one.ids for one in mine]).astype(np.int32))
    finished = gather([one.finished for one in mine], parallel, shard) > 0
    learned: tuple[NDArray[np.bool_], ...] | None = None
    if parallel.any(any(one.learned is not None for one in mine)):
        masks = [np.ones(len(one.ids), bool) if one.learned is None else one.learned for one in mine]
        learned = cut(together(masks) > 0)
    lengths = sizes if learned is None else np.array([mask.sum() for mask in learned], np.int64)
    sampler_logps: NDArray[np.float32] | None = None
    if parallel.any(any(one.logps is not None for one in mine)):
        drawn = [np.full(len(one.ids), np.nan) if one.logps is None else one.logps for one in mine]
        sampler_logps = together(drawn).astype(np.float32)
        sampler_logps = sampler_logps if learned is None else sampler_logps[np.concatenate(learned)]
    return _Completions(ids, sizes, lengths, finished, learned, sampler_logps)


def raise_alike(failed: ForgeAlgosError | None, parallel: Parallel, others: ForgeAlgosError) -> None:
    """Raise one rank's error there, and `others` on the other ranks."""
    elsewhere = parallel.any(failed is not None)
    if failed is not None:
        raise failed
    if elsewhere:
        raise others


def _resamples(settings: OnlineSettings) -> int:
    """Return how many times a group may be sampled anew."""
    return settings.max_resamples if isinstance(settings, GroupSettings) and settings.on_equal_rewards == "resample" else 0


def _left_out(
    settings: OnlineSettings, rewards: NDArray[np.float32], parts: Parts, groups: NDArray[np.int64], number: int
) -> NDArray[np.bool_]:
    """Find the groups that are not trained on: bool[G].
    Their rewards are equal, or their mean is too low or too high.
    """
    if not isinstance(settings, GroupSettings) or settings.on_equal_rewards == "keep":
        return np.zeros(number, bool)
    found = _equal(settings, rewards, parts, groups, number)
    scored = ~np.isnan(rewards)
    count = np.bincount(groups[scored], minlength=number)
    mean = np.bincount(groups[scored], rewards[scored].astype(np.float64), minlength=number) / np.maximum(count, 1)
    low, high = settings.min_group_reward, settings.max_group_reward
    outside = (mean < (-np.inf if low is None else low)) | (mean > (np.inf if high is None else high))
    return found | (outside & (count > 0))


def _equal(
    settings: OnlineSettings, rewards: NDArray[np.float32], parts: Parts, groups: NDArray[np.int64], number: int
) -> NDArray[np.bool_]:
    """Find the groups whose rewards are equal: bool[G].
    Each reward is compared by itself where each is normalised by itself.
    """
    compared = [values for _, values in parts.values()] if settings.decoupled else []
    return equal_groups(rewards, groups, number, *compared)


def _trained(
    settings: OnlineSettings,
    found: NDArray[np.bool_],
    finished: NDArray[np.bool_],
    rewards: NDArray[np.float32],
    groups: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which completions found are trained on, and which only count in a mean."""
    if settings.paired:
        both = np.zeros_like(found)
        both[pairs_of(rewards, groups, found & finished if settings.mask_truncated else found)] = True
        return both, np.zeros_like(found)
    if not settings.mask_truncated:
        return found, np.zeros_like(found)
    return found & finished, found & ~finished & (settings.policy.unit == "completions")


def _rewards_kl(settings: OnlineSettings) -> bool:
    """Whether a completion's KL is part of a reward that others are compared with."""
    return settings.kl_in_reward if isinstance(settings, GRPOSettings) else settings.credit == "leave_one_out"


def _of_tokens(settings: OnlineSettings) -> bool:
    """Whether each token has a baseline of its own."""
    return isinstance(settings, GRPOSettings) and settings.baseline == "optimal_token"


def _share_kept(settings: OnlineSettings) -> float:
    """Return the share of the tokens that the policy learns from."""
    return settings.top_entropy_quantile if isinstance(settings, GRPOSettings) else 1.0


def _least_entropy(settings: OnlineSettings, entropy: NDArray[np.float32] | None) -> float:
    """Return the entropy that `top_entropy_quantile` asks for; 0 where it asks for none."""
    if entropy is None:
        return 0.0
    known = entropy[~np.isnan(entropy)].astype(np.float64)
    return float(np.quantile(known, 1 - _share_kept(settings))) if len(known) else 0.0


def _whole(
    mine: NDArray[np.float32], places: NDArray[np.int64], unknown: NDArray[np.bool_], parallel: Parallel
) -> NDArray[np.float32]:
    found = scatter(mine, places, len(unknown), parallel).astype(np.float32)
    found[unknown] = np.nan
    return found
